"""The profile of a run, and how it is said: as lines for the log, as a page, as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunix_rt.engines.profile.parts import ATTENTION, HEAD_PRODUCTS, LAYER_PRODUCTS, Breakdown, Part
from tunix_rt.plan.timing import StepFlops
from tunix_rt.storage import to_plain

SCHEMA = "tunix-rt/profile/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseProduct:
    """A square product that was timed on the device of the run."""

    device: str
    size: int
    dtype: str
    tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Recorded steps: where their time went, and how fast they computed beside a plain product on the same device.

    All figures are of one step, on average.
    """

    first: int
    warmed: int
    """Steps that went by in this process before the first that was recorded."""
    breakdown: Breakdown
    flops: StepFlops
    tokens: float
    dense: DenseProduct | None
    unrecorded_milliseconds: float | None = None
    """Median of the steps after the recording; the recording itself takes time."""

    @property
    def last(self) -> int:
        return self.first + self.breakdown.steps - 1

    @property
    def tflops(self) -> float:
        return _rate(self.flops.model, self.breakdown.milliseconds)

    @property
    def share_of_dense(self) -> float | None:
        return self.tflops / self.dense.tflops if self.dense else None

    def rate_of(self, part: Part) -> float | None:
        """TFLOP/s of a part that consists of products; padding and layers computed again count, since they take its time."""
        done = {
            LAYER_PRODUCTS: self.flops.executed_layers,
            HEAD_PRODUCTS: self.flops.head,
            ATTENTION: self.flops.executed_attention,
        }.get(part.name)
        return _rate(done, part.milliseconds) if done and part.milliseconds else None

    def with_unrecorded(self, milliseconds: float) -> "Profile":
        return replace(self, unrecorded_milliseconds=milliseconds)


def _rate(flops: float, milliseconds: float) -> float:
    return flops / (milliseconds / 1e3) / 1e12


def profile_json(profile: Profile) -> dict[str, Any]:
    """What `profile.json` says. What is not known is left out."""
    parts = [
        to_plain(part) | _known(tflops=profile.rate_of(part)) | {"largest": to_plain(part.largest)}
        for part in profile.breakdown.parts
    ]
    return {
        "schema": SCHEMA,
        "first_step": profile.first,
        "steps": profile.breakdown.steps,
        "steps_before": profile.warmed,
        "measured_on": "kernels of the GPU" if profile.breakdown.on_gpu else "operations of the CPU",
        "step_milliseconds": profile.breakdown.milliseconds,
        "parts": parts,
        "tokens": profile.tokens,
        "flops": to_plain(profile.flops) | {"model": profile.flops.model, "executed": profile.flops.executed},
        "tflops": profile.tflops,
        "executed_tflops": _rate(profile.flops.executed, profile.breakdown.milliseconds),
        **_known(
            dense_product=to_plain(profile.dense) if profile.dense else None,
            share_of_dense_product=profile.share_of_dense,
            unrecorded_step_milliseconds=profile.unrecorded_milliseconds,
        ),
    }


def _known(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


# --- words ------------------------------------------------------------------------------------------------------------

_HEADS = ("part", "ms", "share", "calls")


def profile_lines(profile: Profile) -> list[str]:
    """The table for a log: a heading, a line per part, the sum, then what it comes to."""
    rows = [_heads(profile), *(_cells(profile, part) for part in profile.breakdown.parts), _together(profile)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table: list[str] = []
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        table.append(f"  {'  '.join([row[0].ljust(widths[0]), *cells])}".rstrip())
    rule = "  " + "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [heading(profile), *table[:-1], rule, table[-1], *sentences(profile)]


def profile_markdown(profile: Profile, *, trace: str) -> str:
    """The page `profile.md`: the table, what it comes to, the longest kernels of each part, how to open the trace."""
    heads = _heads(profile)
    lines = ["# Where the time went", "", f"{heading(profile)}.", ""]
    lines += [_row(heads), "|---|" + "---:|" * (len(heads) - 1)]
    lines += [_row(_cells(profile, part)) for part in profile.breakdown.parts]
    lines += [_row([f"**{cell}**" if cell else "" for cell in _together(profile)]), ""]
    lines += [f"{sentence}\n" for sentence in sentences(profile)]
    lines += ["## The longest of each part", "", _row(("part", "what", "ms", "calls")), "|---|---|---:|---:|"]
    for part in profile.breakdown.parts:
        for number, share in enumerate(part.largest):
            what = f"`{share.name}`" if part.calls else share.name  # waiting is said in words
            lines.append(_row((part.name if not number else "", what, figure(share.milliseconds), _count(share.calls))))
    return "\n".join([*lines, "", how_to_open(trace), ""])


def how_to_open(trace: str) -> str:
    return (
        f"Every kernel, in time: {trace}. Drop it on https://ui.perfetto.dev, which reads it in the browser and sends it "
        "nowhere; without a network, Chrome opens it at chrome://tracing."
    )


def heading(profile: Profile) -> str:
    steps = f"step {profile.first}" if profile.first == profile.last else f"steps {profile.first} to {profile.last}"
    where = f"{steps}, {profile.dense.device}" if profile.dense else steps
    whole = figure(profile.breakdown.milliseconds)
    return f"Where the time of a step went: {whole} ms for {profile.tokens:,.0f} tokens ({where})"


def sentences(profile: Profile) -> Iterator[str]:
    """What the table comes to, and what to know about it."""
    unit, scale = _unit(profile)
    said = f"The step computes at {figure(profile.tflops * scale)} {unit}"
    if profile.dense is not None and profile.share_of_dense is not None:
        dense = profile.dense
        said += (
            f": {100 * profile.share_of_dense:.0f} % of the {figure(dense.tflops * scale)} {unit} that this device reached in "
            f"this run with a plain product of {dense.size} x {dense.size} numbers in {dense.dtype}"
        )
    yield said + "."
    more = profile.flops.executed / profile.flops.model - 1
    if more >= 0.005:
        rate = _rate(profile.flops.executed, profile.breakdown.milliseconds)
        yield (
            f"It computed {100 * more:.0f} % more than the method needs (padding, layers computed again in the backward "
            f"pass): {figure(rate * scale)} {unit} with that."
        )
    if profile.warmed < 2:
        yield (
            f"Only {profile.warmed} step{'' if profile.warmed == 1 else 's'} went by before the recording, so it may hold "
            "what is done once (kernels chosen, memory taken): record fewer steps, or take more."
        )
    if profile.unrecorded_milliseconds is not None:
        yield f"Recording takes time too: the steps after it took {figure(profile.unrecorded_milliseconds)} ms (median)."


def _unit(profile: Profile) -> tuple[str, float]:
    """A CPU is counted in thousandths of what a GPU does."""
    fastest = profile.dense.tflops if profile.dense else profile.tflops
    return ("TFLOP/s", 1.0) if fastest >= 1 else ("GFLOP/s", 1e3)


def _heads(profile: Profile) -> tuple[str, ...]:
    return (*_HEADS, _unit(profile)[0], *(("of the product",) if profile.dense else ()))


def _cells(profile: Profile, part: Part) -> tuple[str, ...]:
    share = f"{100 * part.share:.1f} %"
    return (part.name, figure(part.milliseconds), share, _count(part.calls), *_rates(profile, profile.rate_of(part)))


def _together(profile: Profile) -> tuple[str, ...]:
    return ("together", figure(profile.breakdown.milliseconds), "100.0 %", "", *_rates(profile, profile.tflops))


def _rates(profile: Profile, tflops: float | None) -> tuple[str, ...]:
    """How fast, and what share that is of the plain product where there is one."""
    if tflops is None:
        return ("", "") if profile.dense else ("",)
    rate = figure(tflops * _unit(profile)[1])
    return (rate, f"{100 * tflops / profile.dense.tflops:.0f} %") if profile.dense else (rate,)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _count(calls: float) -> str:
    if not calls:
        return ""
    return f"{calls:,.0f}" if calls >= 1 else "< 1"


def figure(value: float) -> str:
    """Three digits that count, and no fewer than those before the point."""
    digits = next((digits for least, digits in ((999.95, 0), (99.995, 1), (0.9995, 2)) if value >= least), 3)
    return f"{value:,.{digits}f}"

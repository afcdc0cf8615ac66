"""A plan as the planner page shows it: sentences, bars and tables. Every figure is one of `Answer.value()`, formatted here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tunix_rt.dashboard.charts import Bar, bars
from tunix_rt.plan.answer import Answer, rate_range, rounded
from tunix_rt.plan.calibration import SeenError
from tunix_rt.plan.memory import SPARE
from tunix_rt.plan.phases import Phase
from tunix_rt.plan.report import Outlook
from tunix_rt.plan.solver import Proposal
from tunix_rt.plan.speed import StepTime
from tunix_rt.progress import duration

Address = Callable[..., str]
"""`Choice.address`."""
CONTEXT, POOL, MARGIN = "CUDA context", "CUDA graph pool", "safety margin"
WORDS = {"kv_cache": "KV cache", "allocator_slack": "allocator"}
MOST_SEEN = 20


def size(value: float) -> str:
    """`1.25 GiB`, below a tenth of it `12.3 MiB`."""
    return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**30 / 10 else f"{value / 2**20:.1f} MiB"


Change = tuple[str, str, str]
"""Where a link leads, the settings that it chooses, and what they bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device of the catalogue."""

    name: str
    href: str
    memory: str
    verdict: str
    good: bool
    needs: str
    spare: str
    speed: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    verdict: str
    good: bool
    detail: str
    facts: tuple[tuple[str, str], ...]
    bars: Markup
    spare: str
    """Parts that are dropped when memory is short."""
    phases: tuple[str, ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    """Rows of the table: a part, and its size in each phase."""
    proposals: tuple[Change, ...]
    faster: tuple[Change, ...]
    resorts: tuple[str, ...]
    band: str
    seen: tuple[tuple[str, str, str, str], ...]
    """Runs behind the band: model, predicted, measured, error."""
    devices: tuple[DeviceRow, ...]
    tally: str
    catalogue: str
    """Where a link leads to the same with every device."""
    command: str


def view_of(found: Answer, everywhere: Sequence[Outlook], address: Address, *, command: str) -> PlanView:
    seen = found.outlook
    sizes, held = _sizes(seen), _held(seen)
    rows = tuple(_device_row(one, address, chosen=one.target.name == seen.target.name) for one in everywhere)
    return PlanView(
        verdict=_verdict(seen), good=seen.runs, detail=_detail(seen), facts=tuple(_facts(found)),
        bars=_bars(sizes, held, seen.fit.available_bytes), phases=tuple(held), parts=tuple(_rows(sizes, held)),
        spare=" and ".join(word(name) for name in sizes if name in SPARE), resorts=seen.resorts,
        proposals=tuple(_changes(seen.proposals, address)), faster=tuple(_changes(seen.faster, address)),
        band=found.band.describe() if found.band else "", command=command,
        seen=tuple(map(_seen_row, found.similar[-MOST_SEEN:])) if found.band else (),
        devices=rows, tally=_tally(everywhere), catalogue=f"?{address(everywhere=True)}",
    )  # fmt: skip


def word(part: str) -> str:
    return WORDS.get(part, part.replace("_", " "))


# --- verdict ----------------------------------------------------------------------------------------------------------


def _verdict(seen: Outlook) -> str:
    """One sentence."""
    name, margin = seen.target.name, seen.fit.margin_bytes
    if seen.unable:
        return f"Does not run: {name} {seen.unable}."
    if not seen.fit.fits:
        changes = "; with one of the changes below it does" if seen.proposals else ""
        return f"Does not fit on {name} as written: {size(-margin)} too much{changes}."
    if seen.plan.lower_bound:
        return f"May fit on {name}, with at most {size(margin)} to spare: the compiler decides."
    return f"Fits on {name} with {size(margin)} to spare."


def _detail(seen: Outlook) -> str:
    plan, fit = seen.plan, seen.fit
    least = "at least " if plan.lower_bound else ""
    beside = {MARGIN: fit.safety_bytes, CONTEXT: plan.context_bytes, POOL: plan.pool_bytes}
    more = "".join(f" + {size(value)} {name}" for name, value in beside.items() if value)
    each = f" on each of {plan.devices} devices" if plan.devices > 1 and plan.device != "cpu" else ""
    return (
        f"{least}{size(fit.predicted_bytes)} predicted{more}, {size(fit.available_bytes)} free{each}; "
        f"peak in phase: {_peak(seen).name}"
    )


def _peak(seen: Outlook) -> Phase:
    """The phase that the verdict is about; without spare parts where the run drops them."""
    return seen.plan.least if seen.fit.predicted_bytes < seen.plan.peak_bytes else seen.plan.peak


def _facts(found: Answer) -> Iterator[tuple[str, str]]:
    plan, time, run = found.outlook.plan, found.outlook.time, found.run
    rows = f"{plan.rows:,} {'row' if plan.rows == 1 else 'rows'} of {plan.row_tokens:,} tokens"
    yield "model", f"{found.model}: {plan.parameters:,} parameters"
    yield (
        "micro-batch",
        f"{rows}, {plan.dtype}; evaluation batch size {plan.eval_rows:,}, generation {plan.generation_rows:,}",
    )
    yield "speed", f"{_speed(time)}, {duration(time.seconds)} a step of {time.tokens:,} tokens{_bound(found)}"
    if run is None:
        yield "time", "the number of steps is known with the data: choose a dataset, or max_steps"
    else:
        low, high = (duration(3600 * hours) for hours in (run.hours_low, run.hours_high))
        most = "" if found.steps_exact else "at most "
        yield "time", f"{low} to {high} of training: {most}{run.steps:,} steps, {run.tokens:,} tokens"
    yield "disk", _disk(found.disk_bytes, found.disk_free_bytes)
    for phase in (phase for phase in plan.phases if phase not in plan.judged):
        yield "reload check", f"{size(phase.total_bytes)}; not judged: skipped or moved to the CPU if it does not fit"
    if found.outlook.doubt:
        yield "compiler", found.outlook.doubt


def _speed(time: StepTime) -> str:
    return f"{rounded(time.tokens_per_second)} tokens/s ({rate_range(time)})"


def _bound(found: Answer) -> str:
    if found.measured:
        return "; from the rate of this CPU, measured now under its current load"
    return (
        "; bound by launching kernels: a larger batch gives more tokens/s" if found.outlook.time.waits_for_host else ""
    )


def _disk(needed: int, free: int | None) -> str:
    if free is None:
        return f"up to {size(needed)} needed"
    verdict = "fits" if needed <= free else "does not fit: a run would be refused"
    return f"up to {size(needed)} needed, {size(free)} free; {verdict}"


# --- memory -----------------------------------------------------------------------------------------------------------


def _sizes(seen: Outlook) -> dict[str, int]:
    """Every part of the judged phases, by its largest size, the largest first; then what lies beside the phases."""
    largest: dict[str, int] = {}
    for phase in seen.plan.judged:
        for name, value in phase.parts.items():
            largest[name] = max(value, largest.get(name, 0))
    ordered = {name: value for name, value in sorted(largest.items(), key=lambda one: -one[1]) if value}
    beside = {CONTEXT: seen.plan.context_bytes, POOL: seen.plan.pool_bytes, MARGIN: seen.fit.safety_bytes}
    return ordered | {name: value for name, value in beside.items() if value}


def _held(seen: Outlook) -> dict[str, dict[str, int]]:
    """The parts of each phase, with what lies beside them. The margin belongs to the phase that the verdict is about."""
    plan, peak = seen.plan, _peak(seen).name
    beside = {CONTEXT: plan.context_bytes, POOL: plan.pool_bytes}
    margin = {MARGIN: seen.fit.safety_bytes}
    return {one.name: one.parts | beside | (margin if one.name == peak else {}) for one in plan.judged}


def _rows(names: Iterable[str], held: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in names:
        yield word(name), tuple(size(parts[name]) if parts.get(name) else "" for parts in held.values())
    yield "total", tuple(size(sum(parts.values())) for parts in held.values())


def _bars(names: Iterable[str], held: Mapping[str, Mapping[str, int]], limit: int) -> Markup:
    """A bar for each phase, and a line at the free memory."""
    rows = [
        Bar(name=phase, parts={word(name): float(parts.get(name, 0)) for name in names})
        for phase, parts in held.items()
    ]
    return bars(rows, title="Memory by phase", limit=limit)


# --- what to change ---------------------------------------------------------------------------------------------------


def _changes(proposals: Iterable[Proposal], address: Address) -> Iterator[Change]:
    for one in proposals:
        least = "at least " if one.plan.lower_bound else ""
        brings = f"{least}{size(one.plan.least_bytes)}, {rounded(one.time.tokens_per_second)} tokens/s"
        costs = one.costs or ("the result stays the same",)
        settings = one.line.replace("--set ", "").replace(" ", ", ")
        yield f"?{address(settings=one.settings)}", settings, "; ".join([brings, *costs])


def _seen_row(seen: SeenError) -> tuple[str, str, str, str]:
    return seen.model, size(seen.predicted_bytes), size(seen.measured_bytes), f"{100 * seen.error:+.1f} %"


# --- the catalogue ----------------------------------------------------------------------------------------------------


def _device_row(seen: Outlook, address: Address, *, chosen: bool) -> DeviceRow:
    """The run as written; `with changes` where the page of that device has some."""
    target, fit = seen.target, seen.fit
    verdict = "may fit" if seen.plan.lower_bound else "fits"
    if not seen.runs:
        verdict = "with changes" if seen.proposals else "no bfloat16" if seen.unable else "no"
    return DeviceRow(
        name=target.name, href=f"?{address(on=target.name)}", memory=size(target.memory_bytes), verdict=verdict,
        good=seen.runs, needs=size(fit.predicted_bytes), spare=size(fit.margin_bytes), speed=_speed(seen.time),
        chosen=chosen,
    )  # fmt: skip


def _tally(seen: Sequence[Outlook]) -> str:
    as_written = sum(one.runs for one in seen)
    changed = sum(bool(one.proposals) and not one.runs for one in seen)
    return f"{as_written} of {len(seen)} devices run it as written, {changed} with changes"

"""`--profile`: which steps of a run are profiled, and the result as log lines, as a page and as JSON."""

import contextlib
import importlib
import logging
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from tunix_rt.config.settings import Training
from tunix_rt.data.mixture import MixedDataset
from tunix_rt.data.packing import Row, StepBatch, rows_of_step
from tunix_rt.engines.base import Engine, Step
from tunix_rt.engines.step_time import ATTENTION, HEAD_MATMULS, LAYER_MATMULS, Breakdown, DenseMatmul, Part, breakdown
from tunix_rt.engines.trace import read_trace
from tunix_rt.errors import ConfigError
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.timing import StepFlops, step_flops
from tunix_rt.plan.trace import shape_of_any
from tunix_rt.runs.folder import RunDir
from tunix_rt.storage import to_plain, write_json, write_text

SCHEMA = "tunix-rt/profile/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profiled steps: where their time went, and their speed compared with a dense matmul on the same device.

    All figures are of one step, on average.
    """

    first: int
    warmed: int
    """Steps of this process before the first profiled one."""
    breakdown: Breakdown
    flops: StepFlops
    tokens: float
    dense: DenseMatmul | None
    unrecorded_milliseconds: float | None = None
    """Median of the steps after the profiled ones: profiling itself takes time."""

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
        """TFLOP/s of a part that consists of matmuls; padding and recomputed layers count, since they take its time."""
        done = {
            LAYER_MATMULS: self.flops.executed_layers,
            HEAD_MATMULS: self.flops.head,
            ATTENTION: self.flops.executed_attention,
        }.get(part.name)
        return _rate(done, part.milliseconds) if done and part.milliseconds else None


def _rate(flops: float, milliseconds: float) -> float:
    return flops / (milliseconds / 1e3) / 1e12


def profile_json(profile: Profile) -> dict[str, Any]:
    """`profile.json`, without unknown figures."""
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


# --- text -------------------------------------------------------------------------------------------------------------


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
            what = f"`{share.name}`" if part.calls else share.name  # idle time has no kernel name
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
    line = f"The step computes at {figure(profile.tflops * scale)} {unit}"
    if profile.dense is not None and profile.share_of_dense is not None:
        dense = profile.dense
        line += (
            f": {100 * profile.share_of_dense:.0f} % of the {figure(dense.tflops * scale)} {unit} that this device reached in "
            f"this run with a dense {dense.size} x {dense.size} matmul in {dense.dtype}"
        )
    yield line + "."
    more = profile.flops.executed / profile.flops.model - 1
    if more >= 0.005:
        rate = _rate(profile.flops.executed, profile.breakdown.milliseconds)
        yield (
            f"It computed {100 * more:.0f} % more than the method needs (padding, layers recomputed in the backward "
            f"pass): {figure(rate * scale)} {unit} with that."
        )
    if profile.warmed < 2:
        yield (
            f"Only {profile.warmed} step{'' if profile.warmed == 1 else 's'} went by before the recording, so it may hold "
            "one-time work (choosing kernels, allocating memory): profile fewer steps, or train more."
        )
    if profile.unrecorded_milliseconds is not None:
        yield f"Profiling takes time too: the steps after it took {figure(profile.unrecorded_milliseconds)} ms (median)."


def _unit(profile: Profile) -> tuple[str, float]:
    """GFLOP/s on a CPU, TFLOP/s on a GPU."""
    fastest = profile.dense.tflops if profile.dense else profile.tflops
    return ("TFLOP/s", 1.0) if fastest >= 1 else ("GFLOP/s", 1e3)


def _heads(profile: Profile) -> tuple[str, ...]:
    return ("part", "ms", "share", "calls", _unit(profile)[0], *(("of dense",) if profile.dense else ()))


def _cells(profile: Profile, part: Part) -> tuple[str, ...]:
    share = f"{100 * part.share:.1f} %"
    return (part.name, figure(part.milliseconds), share, _count(part.calls), *_rates(profile, profile.rate_of(part)))


def _together(profile: Profile) -> tuple[str, ...]:
    return ("together", figure(profile.breakdown.milliseconds), "100.0 %", "", *_rates(profile, profile.tflops))


def _rates(profile: Profile, tflops: float | None) -> tuple[str, ...]:
    """Speed, and its fraction of the dense matmul where one was timed."""
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


logger = logging.getLogger(__name__)

PASSED_STEPS = 3
"""Warm-up: the first steps of a process compile and choose kernels and allocate memory."""


def refuse_too_many(count: int, *, done: int, total: int) -> None:
    """Called before the model is loaded."""
    if count > total - done:
        left = f"{total - done} of {total} steps are left" if done else f"the run has {total}"
        raise ConfigError(
            f"--profile {count}: more steps than are taken; {left}",
            fix=f"give --profile {total - done} or less" if total > done else "leave --profile out",
        )


def choose_first(count: int, *, done: int, total: int, is_busy: Callable[[int], bool]) -> int:
    """The first step to profile: after the warm-up, where no step but the last `is_busy` (saves or evaluates).

    Where the run is too short for either, as late as it can be.
    """
    earliest, latest = done + 1 + PASSED_STEPS, total - count + 1
    for first in range(earliest, min(latest, earliest + 2000) + 1):
        if not any(is_busy(step) for step in range(first - 1, first + count - 1)):
            return first
    return min(earliest, latest)


@dataclass(slots=True, kw_only=True)
class Recording:
    """`count` of the steps after `done`, profiled into the run folder."""

    run: RunDir
    engine: Engine
    training: Training
    rows: Sequence[Row]
    seed: int
    """Seed of the order of the rows."""
    batch_of: Callable[[int], StepBatch]
    lengths: Sequence[int] | None
    mixture: tuple[MixedDataset, ...]
    """Of the rows, where they are grouped by length."""
    count: int
    first: int
    done: int
    profile: Profile | None = field(default=None, init=False)

    def over(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """`steps` unchanged. The files are written after the last profiled step, the table is logged at the end."""
        profiler = importlib.import_module(f"tunix_rt.engines.{self.training.backend}.profile")
        passed = self.first - self.done - 1
        logger.info(
            "Profile: steps %d to %d%s", self.first, self.first + self.count - 1,
            "" if passed >= PASSED_STEPS else f", after only {passed} warm-up steps: the run is short",
        )  # fmt: skip
        done = partial(self._write, profiler)
        recorded = profiler.profiled(
            steps, self.engine, self.run.profile_trace, passed=passed, count=self.count, done=done
        )
        after: list[float] = []
        try:
            with contextlib.closing(recorded):
                for step in recorded:
                    if self.profile is not None and step.step > self.profile.last + 1:  # the next one begins anew
                        after.append(step.seconds)
                    yield step
        finally:
            self._log(after)

    def _write(self, profiler: Any) -> None:
        trace = self.run.profile_trace
        logger.info("Profile: reading the trace, %.1f MiB", trace.stat().st_size / 2**20)
        steps = range(self.first, self.first + self.count)
        shape = shape_of_any(self.engine.source, self.training)
        self.profile = Profile(
            first=self.first,
            warmed=self.first - self.done - 1,
            breakdown=breakdown(read_trace(trace)),
            flops=_mean([self._flops(shape, step) for step in steps]),
            tokens=sum(self.batch_of(step).tokens for step in steps) / self.count,
            dense=profiler.dense_product(self.engine),
        )
        self._write_table(self.profile)

    def _write_table(self, profile: Profile) -> None:
        write_json(self.run.profile, profile_json(profile))
        write_text(self.run.profile_page, profile_markdown(profile, trace=f"`{self.run.profile_trace.name}`"))

    def _flops(self, shape: ModelShape, step: int) -> StepFlops:
        batch = self.batch_of(step)
        taken = rows_of_step(
            step,
            row_count=len(self.rows),
            rows_per_step=self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps,
            seed=self.seed,
            lengths=self.lengths,
            mixture=self.mixture,
        )
        lengths = [length for row in taken for length in example_lengths(self.rows[row].positions)]
        return step_flops(
            shape,
            self.engine.recipe,
            lengths=lengths,
            positions=computed_positions(batch, self.engine.compiled_shape),
            targets=batch.target_tokens,
        )

    def _log(self, after: list[float]) -> None:
        """Log the table, however the steps ended."""
        if self.profile is None:
            logger.warning("Profile: the run ended before the steps to profile; nothing is written")
            return
        if len(after) >= PASSED_STEPS:
            self.profile = replace(self.profile, unrecorded_milliseconds=1e3 * statistics.median(after))
            self._write_table(self.profile)
        for line in profile_lines(self.profile):
            logger.info("%s", line)
        logger.info("%s", how_to_open(f"{self.run.profile_trace.relative_to(self.run.root)} in the run folder"))
        if self.engine.device_type == "cpu":
            logger.info("The measured memory of this run includes the profiler's")


def computed_positions(batch: StepBatch, compiled_shape: tuple[int, int] | None) -> int:
    """Positions computed in a step, with the padding of micro-batches that are compiled for a larger shape."""
    least = compiled_shape or (0, 0)
    return sum(math.prod(map(max, micro.ids.shape, least)) for micro in batch.micro_batches)


def example_lengths(positions: Any) -> list[int]:
    """Lengths of the examples in a row, from its positions, which restart at 0 with each."""
    starts = np.flatnonzero(positions == 0)
    return [int(length) for length in np.diff(np.append(starts, len(positions)))]


def _mean(counted: list[StepFlops]) -> StepFlops:
    names = [one.name for one in fields(StepFlops)]
    return StepFlops(**{name: statistics.fmean(getattr(one, name) for one in counted) for name in names})

"""Record some steps of a run: which ones, and what is written and said about them."""

import contextlib
import importlib
import logging
import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch, rows_of_step
from tunix_rt.engines.profile.parts import breakdown
from tunix_rt.engines.profile.table import Profile, how_to_open, profile_json, profile_lines, profile_markdown
from tunix_rt.engines.profile.trace import read_trace
from tunix_rt.errors import ConfigError
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.plan.timing import StepFlops, step_flops
from tunix_rt.runs.folder import RunDir
from tunix_rt.storage import write_json, write_text

logger = logging.getLogger(__name__)

PASSED_STEPS = 3
"""Kernels are compiled and chosen, and memory is taken, in the first steps of a process."""


def refuse_too_many(count: int, *, done: int, total: int) -> None:
    """Called before the model is loaded."""
    if count > total - done:
        left = f"{total - done} of {total} steps are left" if done else f"the run has {total}"
        raise ConfigError(
            f"--profile {count}: more steps than are taken; {left}",
            fix=f"give --profile {total - done} or less" if total > done else "leave --profile out",
        )


def choose_first(count: int, *, done: int, total: int, is_busy: Callable[[int], bool]) -> int:
    """The first step to record: late enough to be warm, where no step but the last `is_busy` (saves, or is measured after).

    Where the run is too short for either, as late as it can be.
    """
    earliest, latest = done + 1 + PASSED_STEPS, total - count + 1
    for first in range(earliest, min(latest, earliest + 2000) + 1):
        if not any(is_busy(step) for step in range(first - 1, first + count - 1)):
            return first
    return min(earliest, latest)


@dataclass(slots=True, kw_only=True)
class Recording:
    """`count` of the steps that follow `done`, recorded into the run folder."""

    run: RunDir
    engine: Any
    training: Training
    rows: Sequence[Row]
    seed: int
    """That of the order of the rows."""
    batch_of: Callable[[int], StepBatch]
    count: int
    first: int
    done: int
    profile: Profile | None = field(default=None, init=False)

    def over(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """`steps` as they are. The files are written once the last of ours was taken, the table is said when all are."""
        profiler = importlib.import_module(f"tunix_rt.engines.{self.training.backend}.profile")
        passed = self.first - self.done - 1
        logger.info(
            "Profile: steps %d to %d will be recorded%s", self.first, self.first + self.count - 1,
            "" if passed >= PASSED_STEPS else f"; only {passed} steps go by before them, since the run is short",
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
            self._say(after)

    def _write(self, profiler: Any) -> None:
        trace = self.run.profile_trace
        logger.info("Profile: recorded; reading the trace, %.1f MiB", trace.stat().st_size / 2**20)
        steps = range(self.first, self.first + self.count)
        shape = shape_of(self.engine.source.config)
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
        )
        lengths = [length for row in taken for length in example_lengths(self.rows[row].positions)]
        return step_flops(
            shape,
            self.engine.recipe,
            lengths=lengths,
            positions=computed_positions(batch, self.engine.compiled_shape),
            targets=batch.target_tokens,
        )

    def _say(self, after: list[float]) -> None:
        """Whatever ended the steps, what was recorded is told."""
        if self.profile is None:
            logger.warning("Profile: the run ended before the steps to be recorded were taken; nothing is written")
            return
        if len(after) >= PASSED_STEPS:
            self.profile = self.profile.with_unrecorded(1e3 * statistics.median(after))
            self._write_table(self.profile)
        for line in profile_lines(self.profile):
            logger.info("%s", line)
        logger.info("%s", how_to_open(f"{self.run.profile_trace.relative_to(self.run.root)} in the run folder"))
        if self.engine.device.type == "cpu":
            logger.info("The memory measured in this run has that of the recording in it")


def computed_positions(batch: StepBatch, compiled_shape: tuple[int, int] | None) -> int:
    """Of all rows of a step, with what they are filled up by where the layers are compiled for so many rows and tokens."""
    least = compiled_shape or (0, 0)
    return sum(math.prod(map(max, micro.ids.shape, least)) for micro in batch.micro_batches)


def example_lengths(positions: Any) -> list[int]:
    """Of the examples in a row, from its positions, which begin anew with each."""
    starts = np.flatnonzero(positions == 0)
    return [int(length) for length in np.diff(np.append(starts, len(positions)))]


def _mean(counted: list[StepFlops]) -> StepFlops:
    names = [one.name for one in fields(StepFlops)]
    return StepFlops(**{name: statistics.fmean(getattr(one, name) for one in counted) for name in names})

"""Batches of the JAX engine: every step in the compiled shape, sharded over the devices; on an accelerator the next batch is
prefetched while a step runs."""

import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tunix_rt.data.packing import MicroBatch, StepBatch, filled_up
from tunix_rt.engines.failures import REPORT_DEFECT
from tunix_rt.engines.jax.mesh import batch_sharding
from tunix_rt.engines.jax.model import Batch, batch_of
from tunix_rt.errors import TunixError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """The batch of one step, and its micro-batches on the devices, each [accumulation, rows, tokens]."""

    batch: StepBatch
    placed: Batch
    examples: int
    """The most that a row has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The shape of all steps, and their devices."""

    mesh: Any
    accumulation: int
    rows: int
    tokens: int

    def __call__(self, batch: StepBatch) -> PlacedStep:
        stacked = self.stacked(batch)
        placed = jax.device_put(stacked, batch_sharding(self.mesh))
        return PlacedStep(batch=batch, placed=placed, examples=most_examples(stacked))

    def stacked(self, batch: StepBatch) -> Batch:
        """The stacked micro-batches. The last step of an epoch may have fewer, and is padded with some without a target."""
        filled = [filled_batch(micro, rows=self.rows, tokens=self.tokens) for micro in batch.micro_batches]
        if len(filled) > self.accumulation:
            raise TunixError(
                f"a step of {len(filled)} micro-batches, compiled for {self.accumulation}",
                fix=REPORT_DEFECT,
            )
        padding = filled[0]._replace(weights=np.zeros_like(filled[0].weights))
        filled += [padding] * (self.accumulation - len(filled))
        return Batch(*(np.stack(parts) for parts in zip(*filled, strict=True)))


def most_examples(batch: Batch) -> int:
    """The most examples that a row of `batch` has, padding counted as attention counts it."""
    return int((batch.segments[..., -1] - batch.segments[..., 0]).max()) + 1


def filled_batch(micro: MicroBatch, *, rows: int, tokens: int) -> Batch:
    """`micro` padded to `rows` x `tokens`. Padding is no target, and no token attends to it."""
    there, width = micro.ids.shape
    if there > rows or width > tokens:
        raise TunixError(
            f"a micro-batch of {there} x {width} tokens, compiled for {rows} x {tokens}",
            fix=REPORT_DEFECT,
        )
    return batch_of(filled_up(micro, (rows, tokens)))


def placed_steps(
    batch_of_step: Callable[[int], StepBatch], placing: Placing, *, ahead: bool, first: int, total: int
) -> Generator[tuple[int, Callable[[], PlacedStep]], None, None]:
    """(step, a function that returns its batch) for steps `first` to `total`; with `ahead` a thread makes the next one."""
    if not ahead:
        for step in range(first, total + 1):
            yield step, lambda step=step: placing(batch_of_step(step))  # type: ignore[misc]
        return
    with contextlib.ExitStack() as ends:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        ends.callback(pool.shutdown, wait=True, cancel_futures=True)

        def make(step: int) -> PlacedStep:
            return placing(batch_of_step(step))

        coming = pool.submit(make, first)
        for step in range(first, total + 1):
            now = coming
            if step < total:
                coming = pool.submit(make, step + 1)
            yield step, now.result

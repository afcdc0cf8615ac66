"""Batches of the PyTorch engine: micro-batches on the device with their document boundaries; on a GPU the next batch is
prefetched while a step runs."""

import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tunix_rt.data.packing import IGNORED, MicroBatch, StepBatch, filled_up
from tunix_rt.engines.torch.attention import Attention, boundaries
from tunix_rt.engines.torch.varlen import on_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A micro-batch on the device."""

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    """Indices, over all rows, of the tokens that predict a target."""
    targets: torch.Tensor
    boundaries: dict[str, Any]
    """The document boundaries, as arguments of the attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How micro-batches are moved to the device."""

    device: torch.device
    attention: Attention
    windows: tuple[int, ...]
    least: tuple[int, int] = (0, 0)
    """Micro-batches are padded to so many rows and tokens: layers are compiled for one shape."""

    def __call__(self, micro: MicroBatch) -> Placed:
        """Does not synchronize."""
        micro = filled_up(micro, self.least)
        rows, tokens = (micro.labels[:, 1:] != IGNORED).nonzero()  # the hidden state at t predicts token t + 1
        places = rows * micro.ids.shape[1] + tokens
        arrays = (micro.ids, micro.positions, places, micro.labels[:, 1:][rows, tokens])
        ids, positions, places, targets = (on_device(self.device, array) for array in arrays)
        arguments = boundaries(micro.positions, self.device, self.attention, windows=self.windows)
        return Placed(ids=ids, positions=positions, places=places, targets=targets, boundaries=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """The batch of one step, and its micro-batches on the device."""

    batch: StepBatch
    micro_batches: tuple[Placed, ...]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Order the next kernels after the copies; the host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


def placed_steps(
    batch_of: Callable[[int], StepBatch], placing: Placing, *, first: int, total: int
) -> Generator[tuple[int, Callable[[], PlacedStep]], None, None]:
    """(step, a function that returns its batch) for steps `first` to `total`.

    On a GPU a thread makes and copies the next batch. A batch must be referenced until its step is computed: its memory belongs
    to another stream."""
    if placing.device.type != "cuda":
        for step in range(first, total + 1):
            yield step, lambda step=step: _placed(batch_of, placing, step, None)  # type: ignore[misc]
        return
    stream = torch.cuda.Stream(placing.device)
    with contextlib.ExitStack() as ends:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        ends.callback(pool.shutdown, wait=True, cancel_futures=True)
        ahead = pool.submit(_placed, batch_of, placing, first, stream)
        for step in range(first, total + 1):
            now = ahead
            if step < total:
                ahead = pool.submit(_placed, batch_of, placing, step + 1, stream)
            yield step, now.result


def _placed(
    batch_of: Callable[[int], StepBatch], placing: Placing, step: int, stream: torch.cuda.Stream | None
) -> PlacedStep:
    batch = batch_of(step)
    if stream is None:
        return PlacedStep(batch=batch, micro_batches=tuple(map(placing, batch.micro_batches)), copied=None)
    with torch.cuda.stream(stream):
        placed = tuple(map(placing, batch.micro_batches))
        return PlacedStep(batch=batch, micro_batches=placed, copied=stream.record_event())

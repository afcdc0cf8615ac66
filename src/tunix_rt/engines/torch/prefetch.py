"""Where packed examples begin, worked out on the host and told to the device without waiting for it.

Varlen attention wants the places where examples begin; FlexAttention wants a mask of blocks.
"""

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
    """Where, counted through all rows, a token stands that predicts a target."""
    targets: torch.Tensor
    borders: dict[str, Any]
    """What the attention has to be told of the borders between examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How micro-batches of an engine are laid out."""

    device: torch.device
    attention: Attention
    windows: tuple[int, ...]
    least: tuple[int, int] = (0, 0)
    """Micro-batches have at least so many rows of so many tokens: compiled code is made for one shape."""

    def __call__(self, micro: MicroBatch) -> Placed:
        """Nothing waits for the device, nor is it waited for."""
        micro = filled_up(micro, self.least)
        rows, tokens = (micro.labels[:, 1:] != IGNORED).nonzero()  # token t + 1 is predicted by the state at t
        places = rows * micro.ids.shape[1] + tokens
        arrays = (micro.ids, micro.positions, places, micro.labels[:, 1:][rows, tokens])
        ids, positions, places, targets = (on_device(self.device, array) for array in arrays)
        borders = boundaries(micro.positions, self.device, self.attention, windows=self.windows)
        return Placed(ids=ids, positions=positions, places=places, targets=targets, borders=borders)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """The batch of one step, and its micro-batches where they are needed."""

    batch: StepBatch
    micro_batches: tuple[Placed, ...]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Let what comes next on the device wait for the copies; the host does not."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


def placed_steps(
    batch_of: Callable[[int], StepBatch], placing: Placing, *, first: int, total: int
) -> Generator[tuple[int, Callable[[], PlacedStep]], None, None]:
    """(step, a function that gives its batch) for steps `first` to `total`.

    On a GPU the next batch is made and copied by a thread of its own. A batch must be kept until its step has been
    computed: its memory belongs to another stream."""
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

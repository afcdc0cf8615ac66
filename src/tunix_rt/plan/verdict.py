"""The verdict: a prediction held against what is free on a device."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from tunix_rt.config import RunConfig
from tunix_rt.plan.compiling import layers_planned
from tunix_rt.plan.memory import MemoryPlan, longest_row
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import ModelShape

GIB = 2**30

SAFETY_SHARE = 0.20
"""Asked for on top of the prediction on a CPU. A choice: above the largest shortfall in benchmarks/results/memory_cpu.json (a
test holds it there), with room for what that file does not cover."""
CUDA_SAFETY_SHARE, CUDA_SAFETY_BYTES = 0.04, 128 * 2**20
"""The same on a GPU, where the allocator gives out what was counted: for what it holds and cannot give out because it lies in
pieces. Chosen so that every case of benchmarks/results/memory_cuda.json runs in no more memory than the verdict asks for."""


class Device(Protocol):
    """What of a chosen device matters here (the doctor's DeviceChoice has it)."""

    @property
    def device(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The verdict. `margin_bytes` is what would stay free after the prediction and its safety share; below 0: refused."""

    fits: bool
    predicted_bytes: int
    safety_bytes: int
    available_bytes: int
    margin_bytes: int
    advice: list[str] = field(default_factory=list)


def verdict(plan: MemoryPlan, choice: Device) -> Fit:
    """Hold the prediction against what is free.

    Where there is no room for a copy of the state, checkpoints are written without one: the verdict is then over the rest.
    """
    room = choice.free_bytes - _besides(plan)
    predicted = plan.peak_bytes if plan.peak_bytes + _safety(plan, plan.peak_bytes) <= room else plan.least_bytes
    safety = _safety(plan, predicted)
    margin = room - predicted - safety
    return Fit(
        fits=margin >= 0,
        predicted_bytes=predicted,
        safety_bytes=safety,
        available_bytes=choice.free_bytes,
        margin_bytes=margin,
    )


def limited(free_bytes: int, limit_gib: float | None) -> int:
    """What of `free_bytes` a run may take that is held to `limit_gib`; all of it without a limit."""
    return free_bytes if limit_gib is None else min(free_bytes, round(limit_gib * GIB))


def least_room(plan: MemoryPlan) -> int:
    """The fewest free bytes of a device with which the verdict is that it fits."""
    return plan.least_bytes + _safety(plan, plan.least_bytes) + _besides(plan)


def _besides(plan: MemoryPlan) -> int:
    """Bytes that are taken and not predicted as given out by the allocator."""
    return plan.context_bytes + plan.pool_bytes


def _safety(plan: MemoryPlan, predicted: int) -> int:
    if plan.device == "cpu":
        return math.ceil(predicted * SAFETY_SHARE)
    return math.ceil(predicted * CUDA_SAFETY_SHARE) + CUDA_SAFETY_BYTES


# --- as a run will go -------------------------------------------------------------------------------------------------

TOLD_APART = {"torch": ((8, 0), (0, 0)), "jax": ((9, 0), (8, 0), (0, 0))}
"""CUDA compute capabilities from which on the prediction for an engine differs (but for what computes the layers)."""


def predict_as_run(
    shape: ModelShape,
    config: RunConfig,
    choice: Device,
    *,
    devices: int = 1,
    rows: int | None = None,
    row_tokens: int | None = None,
    target_share: float = 1.0,
    steps: int | None = None,
) -> MemoryPlan:
    """The prediction for what a run of `steps` steps makes of `training.compile` on `choice`: what is fastest, or where that
    does not fit, compiled layers, which need the least memory (`admission.layers_for_data` does so with the data). A run of
    an unknown number of steps is taken to be long.

    Devices that cannot be told apart share one prediction, which makes a search over a catalogue short."""
    known = choice.capability
    alike = known and next(one for one in TOLD_APART[config.training.backend] if known >= one)

    def planned(layers: str | None) -> MemoryPlan:
        return predict_run(
            shape, config, device=choice.device, devices=devices, rows=rows, row_tokens=row_tokens,
            target_share=target_share, capability=alike, device_name=choice.kind, layers=layers,
        )  # fmt: skip

    def rule(steps: int | None) -> str:
        tokens = longest_row(shape, config, row_tokens or config.data.max_length)
        return layers_planned(
            config, shape, device=choice.device, device_name=choice.kind, capability=known, row_tokens=tokens,
            steps=steps,
        )  # fmt: skip

    if config.training.backend == "jax":
        return planned(None)
    fastest = rule(steps)
    plan = planned(fastest)
    if fastest == "compiled" or verdict(plan, choice).fits or rule(None) == "plain":
        return plan
    compiled = planned("compiled")
    return compiled if verdict(compiled, choice).fits else plan

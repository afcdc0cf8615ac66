"""The prediction for the engine that a configuration names, and whether it fits a device with a safety margin."""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from tunix_rt.config.capabilities import capabilities_of
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.attention_kernels import capability_class
from tunix_rt.plan.compile_policy import layers_planned
from tunix_rt.plan.jax_floor import predict_jax
from tunix_rt.plan.memory import MemoryPlan, longest_row, predict
from tunix_rt.plan.sizes import ModelShape

GIB = 2**30
SAFETY_SHARE = 0.20
"""Margin on top of the prediction on a CPU. A choice: above the largest shortfall in benchmarks/results/memory_cpu.json (a
test checks it), with headroom for what that file does not cover."""
CUDA_SAFETY_SHARE, CUDA_SAFETY_BYTES = 0.04, 128 * 2**20
"""The same on a GPU, for fragmentation: memory that the allocator reserves and cannot use. Chosen so that every case of
benchmarks/results/memory_cuda.json runs in no more memory than the verdict requires."""
TRACED_SAFETY_SHARE = 0.10
"""Added to both for a traced plan, whose kernels are those of whatever class the model has. A choice: the band of such plans."""


class Device(Protocol):
    """The properties of a device that decide whether a run fits (the doctor's DeviceChoice has them)."""

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
    """The verdict. `margin_bytes` stay free beside the prediction and its safety margin; below 0 the run is refused."""

    fits: bool
    predicted_bytes: int
    safety_bytes: int
    available_bytes: int
    margin_bytes: int
    advice: list[str] = field(default_factory=list)


# --- prediction -------------------------------------------------------------------------------------------------------


def predict_run(
    shape: ModelShape,
    config: RunConfig,
    *,
    device: str,
    devices: int = 1,
    rows: int | None = None,
    row_tokens: int | None = None,
    target_share: float = 1.0,
    capability: tuple[int, int] | None = None,
    device_name: str | None = None,
    steps: int | None = None,
    layers: str | None = None,
) -> MemoryPlan:
    """The memory of the PyTorch engine on the fullest of `devices`, or a lower bound for the JAX engine on each of them, with
    micro-batches of `rows` on all together.

    Unless `layers` is given, the name of the GPU and the number of `steps` decide how the layers run. Results are cached: a
    search over many devices meets most settings several times."""
    rows_known: dict[str, Any] = {"row_tokens": row_tokens, "target_share": target_share}
    if capabilities_of(config.training).compiles_whole_step:
        return _predict_jax(shape, config, device=device, devices=devices, rows=rows, **rows_known)
    if layers is None:
        tokens = longest_row(shape, config, row_tokens or config.data.max_length)
        layers = layers_planned(
            config, shape, device=device, device_name=device_name, capability=capability, row_tokens=tokens, steps=steps
        )
    rows_known |= {"devices": devices, "rows": rows}
    return _predict(shape, config, device=device, capability=capability, layers=layers, **rows_known)


_predict, _predict_jax = lru_cache(maxsize=2048)(predict), lru_cache(maxsize=2048)(predict_jax)


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
    packed: bool | None = None,
) -> MemoryPlan:
    """The prediction for a run of `steps` steps with its `training.compile` on `choice`: layers run the fastest way, or if
    that does not fit, compiled, which needs the least memory. A run of an unknown number of steps is assumed to be long;
    `packed` rows have several examples, by default as `data.packing` requests.

    Devices of one capability class share a prediction, which makes a search over the catalogue fast."""
    known = choice.capability
    alike = known and capability_class(known, shape.head_dim)

    def planned(layers: str | None) -> MemoryPlan:
        return predict_run(
            shape, config, device=choice.device, devices=devices, rows=rows, row_tokens=row_tokens,
            target_share=target_share, capability=alike, device_name=choice.kind, layers=layers,
        )  # fmt: skip

    def rule(steps: int | None) -> str:
        tokens = longest_row(shape, config, row_tokens or config.data.max_length)
        return layers_planned(
            config, shape, device=choice.device, device_name=choice.kind, capability=known, row_tokens=tokens,
            packed=packed, steps=steps,
        )  # fmt: skip

    if capabilities_of(config.training).compiles_whole_step:
        return planned(None)
    fastest = rule(steps)
    plan = planned(fastest)
    if fastest == "compiled" or verdict(plan, choice).fits or rule(None) == "plain":
        return plan
    compiled = planned("compiled")
    return compiled if verdict(compiled, choice).fits else plan


# --- verdict ----------------------------------------------------------------------------------------------------------


def verdict(plan: MemoryPlan, choice: Device) -> Fit:
    """Compare the prediction with the free memory.

    If a copy of the state does not fit, checkpoints are written without one: the verdict is then about the rest."""
    available = choice.free_bytes // plan.sharing
    room = available - _outside_allocator(plan)
    predicted = plan.peak_bytes if plan.peak_bytes + safety_margin(plan, plan.peak_bytes) <= room else plan.least_bytes
    safety = safety_margin(plan, predicted)
    margin = room - predicted - safety
    return Fit(
        fits=margin >= 0,
        predicted_bytes=predicted,
        safety_bytes=safety,
        available_bytes=available,
        margin_bytes=margin,
    )


def limited(free_bytes: int, limit_gib: float | None) -> int:
    """The part of `free_bytes` that a run may use under `limit_gib`; all of it without a limit."""
    return free_bytes if limit_gib is None else min(free_bytes, round(limit_gib * GIB))


def least_room(plan: MemoryPlan) -> int:
    """The fewest free bytes of a device on which the plan fits."""
    return plan.sharing * (plan.least_bytes + safety_margin(plan, plan.least_bytes) + _outside_allocator(plan))


def _outside_allocator(plan: MemoryPlan) -> int:
    return plan.context_bytes + plan.pool_bytes


def safety_margin(plan: MemoryPlan, predicted: int) -> int:
    """Bytes kept free on top of the `predicted` ones; a run that uses more than both is a defect of the planner."""
    if plan.lower_bound:
        return 0
    on_cpu = plan.device == "cpu"
    share = (SAFETY_SHARE if on_cpu else CUDA_SAFETY_SHARE) + TRACED_SAFETY_SHARE * plan.traced
    return math.ceil(predicted * share) + (0 if on_cpu else CUDA_SAFETY_BYTES) + plan.streams_bytes

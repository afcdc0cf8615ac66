"""The device that a plan is made for: one of the catalogue, a size of memory, or the one that was chosen on a computer.

A device that is named is taken to be idle. What a file of facts says of a computer is read where the doctor is known
(`cli/plan_target.py`), and comes here as plain values.
"""

import difflib
import math
import re
from dataclasses import dataclass, field, replace
from typing import Protocol

from tunix_rt.accelerators import Accelerator, accelerators, find_accelerator
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError
from tunix_rt.plan.compile_policy import layers_planned
from tunix_rt.plan.memory import MemoryPlan, longest_row
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import ModelShape

GIB = 2**30
SEEN_SHARE = 0.97
"""Of the size in a card's name, what torch can use: 2 to 3 % less in the catalogue, where the name tells a size."""
SIZED_CAPABILITY = (8, 6)
"""Compute capability of a GPU of which only the memory is said: taken to be of a kind sold since 2020, with bfloat16."""
FLOAT16_TFLOPS = {"t4": 65.0, "p100-16": 19.05, "v100-16": 112.0, "v100-32": 112.0}
"""Rate of float16 products of cards without bfloat16, from the remarks of the catalogue; the slower where it has two."""
JAX_DEVICE = "= 1 jax device"
"""What the catalogue says of a TPU's row that is one device to jax. Others are halves of one, or pairs."""
TPU_SLICES = {
    "tpu-v2": ("tpu-v2-core", 1), "tpu-v3": ("tpu-v3-core", 1), "tpu-v4": ("tpu-v4-chip", 2), "tpu-v5e": ("tpu-v5e", 1),
    "tpu-v5p": ("tpu-v5p-chip", 2), "tpu-v6e": ("tpu-v6e", 1), "tpu-v7x": ("tpu-v7x-device", 1),
}  # fmt: skip
"""What a slice is called -> one jax device of it, and what its number counts for each: of v4 and v5p, cores, two of them."""
PLACES = {
    "kaggle-t4x2": "t4", "kaggle-p100": "p100-16", "kaggle-tpu-v5e8": "tpu-v5e-8", "colab-t4": "t4",
    "colab-tpu-v5e1": "tpu-v5e", "colab-tpu-v6e1": "tpu-v6e",
}  # fmt: skip
"""Rows of the catalogue that are a place where a device can be had -> the device."""
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
ARRANGEMENTS = {"tpu-v4": _DEEP, "tpu-v5e": _FLAT, "tpu-v5p": _DEEP, "tpu-v6e": _FLAT}
"""How so many chips of a kind are laid out, as the TPU's compiler names it; kinds whose device is a chip."""
_SIZE = re.compile(r"(\d{1,4}(?:\.\d{1,2})?) ?gi?b", re.IGNORECASE)


class Chosen(Protocol):
    """What of a chosen device matters here (the doctor's DeviceChoice has it)."""

    @property
    def device(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device with what decides memory and speed on it. A rate that is not published is None."""

    name: str
    id: str | None
    """Of one device in the catalogue; None where it is not known there."""
    kind: str
    """As torch or jax call one device; empty where only its memory is said."""
    device: str
    """cpu, cuda or tpu."""
    count: int
    """Devices that a run of the JAX engine is spread over; the PyTorch engine takes one."""
    memory_bytes: int
    """Of one device."""
    free_bytes: int
    """Of one device."""
    capability: tuple[int, int] | None
    """CUDA compute capability."""
    tflops: float | None
    """Published rate of dense products of 16 bits: bfloat16, or float16 where a GPU has no bfloat16."""
    fp32_tflops: float | None
    bandwidth_gb_s: float | None


def target_named(name: str) -> Target:
    """The device that `--on` names: by its id or its name in the catalogue, as a slice of TPUs (`tpu-v5e-8`), or by the
    memory of a GPU (`8gb`). An unknown name is a ConfigError with the nearest."""
    asked = PLACES.get(name.casefold(), name)
    if size := _SIZE.fullmatch(asked.strip()):
        return _of_size(size[1])
    if slice_ := _slice(asked):
        return slice_
    found = {device.id: device for device in accelerators() if _key(asked) in _keys(device)}
    if len(found) > 1:
        raise ConfigError(f"--on {name}: several devices are called so", fix=f"name one of: {', '.join(found)}")
    if not found:
        raise ConfigError(f"--on {name}: no such device in the catalogue", fix=_nearest(asked))
    (device,) = found.values()
    kind = _kind(device)
    if kind is None:
        raise ConfigError(
            f"--on {name}: tunix-rt does not train on {device.name}",
            fix="name an NVIDIA GPU or a TPU, or a size as 24gb",
        )
    if device.memory_gib is None:
        raise ConfigError(
            f"--on {name}: the catalogue has no memory for {device.name} that was seen on one",
            fix="name the size instead, as 24gb, or give the facts of such a computer (tunix-rt doctor --facts-only)",
        )
    return _of(device, kind)


def all_targets() -> tuple[Target, ...]:
    """The devices of the catalogue that tunix-rt trains on and whose memory is known, in its order; of TPUs also the
    slice of eight that one computer has."""
    found: list[Target] = []
    for device in accelerators():
        kind = _kind(device)
        if kind is None or device.memory_gib is None or (kind == "tpu" and JAX_DEVICE not in device.name):
            continue
        found.append(_of(device, kind))
        found.extend(
            eight for name, (id_, _) in TPU_SLICES.items() if id_ == device.id and (eight := _slice(f"{name}-8"))
        )
    return tuple(found)


def target_here(choice: Chosen, *, where: str = "here") -> Target:
    """The device that the doctor chose, with the memory that is free there; its rates where the catalogue knows it."""
    known = find_accelerator(choice.kind, choice.memory_bytes) if choice.device != "cpu" else None
    return Target(
        name=f"{choice.kind} ({where})",
        id=known.id if known else None,
        kind=choice.kind,
        device=choice.device,
        count=choice.count,
        memory_bytes=choice.memory_bytes,
        free_bytes=choice.free_bytes,
        capability=choice.capability,
        tflops=_narrow_tflops(known) if known else None,
        fp32_tflops=known.fp32_tflops if known else None,
        bandwidth_gb_s=known.bandwidth_gb_s if known else None,
    )


def topology_of(target: Target) -> str:
    """The chips of a slice of TPUs as the compiler names them: `v5e:2x4` for tpu-v5e-8. A ConfigError where it has no such
    arrangement, or where the target is no TPU."""
    name = next((name for name, (id_, _) in TPU_SLICES.items() if id_ == target.id), "")
    chips = ARRANGEMENTS.get(name, {}).get(target.count)
    if chips is None:
        raise ConfigError(
            f"--exact asks the TPU's compiler, which knows no arrangement of {target.count} x {target.name}",
            fix="name a slice of TPUs, as --on tpu-v5e-8, tpu-v6e-1 or tpu-v5p-8, or its chips, as --topology v5e:2x4",
        )
    return f"{name.removeprefix('tpu-')}:{chips}"


# --- from the catalogue ------------------------------------------------------------------------------------------------


def _of(device: Accelerator, kind: str) -> Target:
    memory = round((device.memory_gib or 0) * GIB)
    return Target(
        name=device.id,
        id=device.id,
        kind=device.names[0],
        device=kind,
        count=1,
        memory_bytes=memory,
        free_bytes=memory,
        capability=device.capability,
        tflops=_narrow_tflops(device),
        fp32_tflops=device.fp32_tflops,
        bandwidth_gb_s=device.bandwidth_gb_s,
    )


def _of_size(gigabytes: str) -> Target:
    memory = round(float(gigabytes) * SEEN_SHARE * GIB)
    if memory <= 0:
        raise ConfigError("--on 0gb: a device has memory", fix="name a size, as 8gb or 24gb")
    return Target(
        name=f"{gigabytes} GB",
        id=None,
        kind="",
        device="cuda",
        count=1,
        memory_bytes=memory,
        free_bytes=memory,
        capability=SIZED_CAPABILITY,
        tflops=None,
        fp32_tflops=None,
        bandwidth_gb_s=None,
    )


def _slice(name: str) -> Target | None:
    """`tpu-v5e-8`; None for what is not called like a slice."""
    found = re.fullmatch(r"(tpu-v\d+[a-z]?)(?:-(\d{1,4}))?", name.strip().casefold())
    if not found or found[1] not in TPU_SLICES:
        return None
    id_, counted = TPU_SLICES[found[1]]
    number = int(found[2] or counted)
    if number < counted or number % counted:
        raise ConfigError(
            f"--on {name}: of {found[1]} a slice is named by its cores, {counted} to a device",
            fix=f"name a slice that there is, as {found[1]}-8",
        )
    (device,) = [one for one in accelerators() if one.id == id_]
    return replace(_of(device, "tpu"), name=f"{found[1]}-{number}", count=number // counted)


def _kind(device: Accelerator) -> str | None:
    """What a run calls such a device; None for what tunix-rt does not train on."""
    return {"nvidia": "cuda", "google": "tpu"}.get(device.vendor)


def _narrow_tflops(device: Accelerator) -> float | None:
    return device.bf16_tflops or FLOAT16_TFLOPS.get(device.id)


def _key(name: str) -> str:
    """Letters and digits alone, without the maker: `NVIDIA RTX-5090` is `rtx5090`."""
    return re.sub(r"[^a-z0-9]", "", name.casefold()).removeprefix("nvidia").removeprefix("geforce")


def _keys(device: Accelerator) -> set[str]:
    return {_key(name) for name in (device.id, device.name, *device.names)}


def _nearest(name: str) -> str:
    """Ids that hold what was typed, or are spelled like it."""
    ids = {_key(target.name): target.name for target in all_targets()}
    typed = _key(name)
    close = [ids[key] for key in ids if typed and typed in key][:6]
    close = close or [ids[key] for key in difflib.get_close_matches(typed, ids, n=3, cutoff=0.5)]
    asked = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{asked}see docs/reference/accelerators.md, or give a size (24gb), a facts.json, or all"


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

"""The device of a plan: one of the catalogue, a size of memory, or the one that the doctor chose on a computer.

A named device is assumed to be idle. `cli/plan_targets.py` reads facts files.
"""

import difflib
import re
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tunix_rt.accelerators import Accelerator, accelerators, find_accelerator, nodes
from tunix_rt.config.capabilities import capabilities_of
from tunix_rt.config.settings import Training
from tunix_rt.errors import ConfigError
from tunix_rt.plan.fit import Device
from tunix_rt.plan.network import Links, links_of
from tunix_rt.ranks import world

GIB = 2**30
SEEN_SHARE = 0.97
"""Fraction of the size in a card's name that torch can use: 2 to 3 % less in the catalogue."""
SIZED_CAPABILITY = (8, 6)
"""Assumed compute capability of a GPU of which only the memory is known: sold since 2020, with bfloat16."""
FLOAT16_TFLOPS = {"t4": 65.0, "p100-16": 19.05, "v100-16": 112.0, "v100-32": 112.0}
"""Rate of float16 matmuls of cards without bfloat16, from the remarks of the catalogue; the slower of two."""
JAX_DEVICE = "= 1 jax device"
"""Marks the row of a TPU in the catalogue that is one jax device. Others are halves or pairs."""
TPU_SLICES = {
    "tpu-v2": ("tpu-v2-core", 1), "tpu-v3": ("tpu-v3-core", 1), "tpu-v4": ("tpu-v4-chip", 2), "tpu-v5e": ("tpu-v5e", 1),
    "tpu-v5p": ("tpu-v5p-chip", 2), "tpu-v6e": ("tpu-v6e", 1), "tpu-v7x": ("tpu-v7x-device", 1),
}  # fmt: skip
"""Name of a slice -> its jax device, and how many of the units in the name make one: v4 and v5p count cores, two each."""
PLACES = {
    "kaggle-t4x2": "t4", "kaggle-p100": "p100-16", "kaggle-tpu-v5e8": "tpu-v5e-8", "colab-t4": "t4",
    "colab-tpu-v5e1": "tpu-v5e", "colab-tpu-v6e1": "tpu-v6e",
}  # fmt: skip
"""Rows of the catalogue that name a service -> its device."""
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
ARRANGEMENTS = {"tpu-v4": _DEEP, "tpu-v5e": _FLAT, "tpu-v5p": _DEEP, "tpu-v6e": _FLAT}
"""Number of chips -> topology, as the TPU's compiler names it; kinds whose device is a chip."""
_SIZE = re.compile(r"(\d{1,4}(?:\.\d{1,2})?) ?gi?b", re.IGNORECASE)


class Chosen(Device, Protocol):
    """The properties of a chosen device that a plan needs (the doctor's DeviceChoice has them)."""

    @property
    def count(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device with its memory and published rates. A rate that is not published is None."""

    name: str
    id: str | None = None
    """Of one device in the catalogue; None if it is not listed."""
    kind: str = ""
    """Device name in torch or jax; empty if only the memory is known."""
    device: str
    """cpu, cuda or tpu."""
    count: int = 1
    """Devices that the JAX engine shards a run over; the PyTorch engine uses one."""
    memory_bytes: int
    """Of one device."""
    free_bytes: int
    """Of one device."""
    capability: tuple[int, int] | None
    """CUDA compute capability."""
    tflops: float | None = None
    """Published rate of dense 16-bit matmuls: bfloat16, or float16 for a GPU without bfloat16."""
    fp32_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    links: Links | None = None
    """Of several GPUs, on each of which torchrun starts a rank of the PyTorch engine."""


def devices_of(training: Training, target: Chosen) -> int:
    """Over how many devices the engine of `training` shards a run: those that `target` links, or the ranks of this launch; or
    every visible one."""
    if isinstance(target, Target) and target.links is not None:
        return target.links.ranks
    engine = capabilities_of(training)
    return world().size if engine.ranks else target.count if engine.multi_device else 1


def several(target: Target, *, gpus: int | None, nodes_: int | None, network_gbit: float | None) -> Target:
    """`nodes_` nodes with `gpus` GPUs like `target`, by default as many as a node that `target` already is."""
    of_node = target.links.gpus if target.links else 1
    links = links_of(target.id, gpus=gpus or of_node, nodes_=nodes_ or 1, network_gbit=network_gbit)
    if links.nodes > 1 and links.network_gbit is None:
        raise ConfigError(
            f"--nodes {links.nodes}: the catalogue has no bandwidth between nodes of {links.gpus} x {target.name}",
            fix="add the bandwidth of a node, all its adapters together, as --network 100gbit",
        )
    return replace(target, links=links if links.ranks > 1 else None)


def bandwidth_named(text: str) -> float:
    """Gbit/s of `--network`, as `400gbit`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(g|m|t)(?:bit|bps|b)?(?:/s)?", text.strip().casefold())
    gbit = float(found[1]) * {"m": 1e-3, "g": 1, "t": 1e3}[found[2]] if found else 0
    if gbit <= 0:
        raise ConfigError(
            f"--network {text}: not a bandwidth", fix="name the bandwidth of a node, as --network 400gbit"
        )
    return gbit


def target_named(name: str) -> Target:
    """The device that `--on` names: by its id or its name in the catalogue, as a node of GPUs (`8xh100`), as a slice of TPUs
    (`tpu-v5e-8`), or by the memory of a GPU (`8gb`). An unknown name is a ConfigError with the nearest."""
    known = PLACES.get(name.casefold(), name)
    if size := _SIZE.fullmatch(known.strip()):
        return _of_size(size[1])
    if slice_ := _slice(known):
        return slice_
    if node := next((one for one in nodes() if _key(one.id) == _key(known)), None):
        one = target_named(node.accelerator)
        return replace(one, name=node.id, links=links_of(one.id, gpus=node.gpus))
    found = {device.id: device for device in accelerators() if _key(known) in _keys(device)}
    if len(found) > 1:
        raise ConfigError(f"--on {name}: several devices have this name", fix=f"name one of: {', '.join(found)}")
    if not found:
        raise ConfigError(f"--on {name}: no such device in the catalogue", fix=_nearest(known))
    (device,) = found.values()
    kind = _kind(device)
    if kind is None:
        raise ConfigError(
            f"--on {name}: tunix-rt does not train on {device.name}",
            fix="name an NVIDIA GPU or a TPU, or a size as 24gb",
        )
    if device.memory_gib is None:
        raise ConfigError(
            f"--on {name}: the catalogue has no measured memory size for {device.name}",
            fix="name the size instead, as 24gb, or give the facts of such a computer (tunix-rt doctor --facts-only)",
        )
    return _of(device, kind)


def all_targets() -> tuple[Target, ...]:
    """The devices of the catalogue that tunix-rt trains on and whose memory is known, in its order; for TPUs also the slice of
    eight of one host."""
    found: list[Target] = []
    for device in accelerators():
        kind = _kind(device)
        if kind is None or device.memory_gib is None or (kind == "tpu" and JAX_DEVICE not in device.name):
            continue
        found.append(_of(device, kind))
        names = [f"{name}-8" for name, (id_, _) in TPU_SLICES.items() if id_ == device.id]
        found.extend(eight for name in names if (eight := _slice(name)))
    return tuple(found)


def target_here(choice: Chosen, *, where: str = "here") -> Target:
    """The device that the doctor chose, with its free memory, and its rates if it is in the catalogue."""
    known = find_accelerator(choice.kind, choice.memory_bytes) if choice.device != "cpu" else None
    return Target(
        name=f"{choice.kind} ({where})",
        kind=choice.kind,
        device=choice.device,
        count=choice.count,
        memory_bytes=choice.memory_bytes,
        free_bytes=choice.free_bytes,
        capability=choice.capability,
        **(_published(known) if known else {}),
    )


def topology_of(target: Target) -> str:
    """The topology of a TPU slice as the compiler names it: `v5e:2x4` for tpu-v5e-8. ConfigError if there is none."""
    name = next((name for name, (id_, _) in TPU_SLICES.items() if id_ == target.id), "")
    chips = ARRANGEMENTS.get(name, {}).get(target.count)
    if chips is None:
        raise ConfigError(
            f"--exact: the TPU's compiler has no topology for {target.count} x {target.name}",
            fix="name a slice of TPUs, as --on tpu-v5e-8, tpu-v6e-1 or tpu-v5p-8, or its chips, as --topology v5e:2x4",
        )
    return f"{name.removeprefix('tpu-')}:{chips}"


# --- from the catalogue ------------------------------------------------------------------------------------------------


def _of(device: Accelerator, kind: str) -> Target:
    memory = round((device.memory_gib or 0) * GIB)
    return Target(
        name=device.id,
        kind=device.names[0],
        device=kind,
        memory_bytes=memory,
        free_bytes=memory,
        capability=device.capability,
        **_published(device),
    )


def _of_size(gigabytes: str) -> Target:
    memory = round(float(gigabytes) * SEEN_SHARE * GIB)
    if memory <= 0:
        raise ConfigError("--on 0gb: a device has memory", fix="name a size, as 8gb or 24gb")
    name = f"{gigabytes} GB"
    return Target(name=name, device="cuda", memory_bytes=memory, free_bytes=memory, capability=SIZED_CAPABILITY)


def _slice(name: str) -> Target | None:
    """The slice `tpu-v5e-8`; None for another name."""
    found = re.fullmatch(r"(tpu-v\d+[a-z]?)(?:-(\d{1,4}))?", name.strip().casefold())
    if not found or found[1] not in TPU_SLICES:
        return None
    id_, counted = TPU_SLICES[found[1]]
    number = int(found[2] or counted)
    if number < counted or number % counted:
        raise ConfigError(
            f"--on {name}: a {found[1]} slice is named by its cores, {counted} to a device",
            fix=f"name a slice that exists, as {found[1]}-8",
        )
    (device,) = [one for one in accelerators() if one.id == id_]
    return replace(_of(device, "tpu"), name=f"{found[1]}-{number}", count=number // counted)


def _kind(device: Accelerator) -> str | None:
    """The value of `training.device`; None for what tunix-rt does not train on."""
    return {"nvidia": "cuda", "google": "tpu"}.get(device.vendor)


def _published(device: Accelerator) -> dict[str, Any]:
    """The fields of a target that come from the catalogue."""
    narrow = device.bf16_tflops or FLOAT16_TFLOPS.get(device.id)
    rates = {"fp32_tflops": device.fp32_tflops, "bandwidth_gb_s": device.bandwidth_gb_s}
    return {"id": device.id, "tflops": narrow, **rates}


def _key(name: str) -> str:
    """Letters and digits only, without the vendor: `NVIDIA RTX-5090` is `rtx5090`."""
    return re.sub(r"[^a-z0-9]", "", name.casefold()).removeprefix("nvidia").removeprefix("geforce")


def _keys(device: Accelerator) -> set[str]:
    return {_key(name) for name in (device.id, device.name, *device.names)}


def _nearest(name: str) -> str:
    """Ids that contain what was typed, or are spelled similarly."""
    ids = {_key(name): name for name in (*(one.name for one in all_targets()), *(one.id for one in nodes()))}
    typed = _key(name)
    close = [ids[key] for key in ids if typed and typed in key][:6]
    close = close or [ids[key] for key in difflib.get_close_matches(typed, ids, n=3, cutoff=0.5)]
    question = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{question}see docs/reference/accelerators.md, or give a size (24gb), a facts.json, or all"

"""accelerators: what is published of GPUs, TPUs (`accelerators.csv`) and nodes of GPUs (`nodes.csv`), with sources, and the
look-up in it.

Figures are peaks from data sheets; what a device really does is measured elsewhere.
"""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE, NODES = (Path(__file__).with_name(name) for name in ("accelerators.csv", "nodes.csv"))
MEMORY_TOLERANCE = 0.08
"""The driver, torch and the data sheet give up to 5 % different totals for one card; siblings are 25 % apart or more."""
_ENVIRONMENTS = ("kaggle", "colab")
"""Vendors whose rows describe a place where a card can be had, not a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device as torch or jax counts devices: for some TPUs half a chip. What is not published is None."""

    id: str
    vendor: str
    name: str
    names: tuple[str, ...]
    """As NVML, torch or jax (device kind) call it. Not unique: siblings with another memory share a name."""
    architecture: str
    capability: tuple[int, int] | None
    """CUDA compute capability; None for what is not an NVIDIA GPU."""
    memory_gib: float | None
    """What torch can see, which is a little below the data sheet."""
    bandwidth_gb_s: float | None
    bf16_tflops: float | None
    """Dense, with float32 accumulation; None without bfloat16 units."""
    fp32_tflops: float | None
    source: str


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Every device of the table, in its order; without the rows that describe a place."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    return tuple(_accelerator(row) for row in rows if row["vendor"] not in _ENVIRONMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A computer, or a rack, whose GPUs reach each other without the network."""

    id: str
    name: str
    accelerator: str
    """Id of its GPUs."""
    gpus: int
    link: str
    """Between them: `nvlink` or `pcie`."""
    link_gb_s: float
    """Of one GPU to the others, in one direction."""
    network_gbit: float | None
    """To other nodes, in one direction, all adapters together; None if there are none by default."""
    source: str


@cache
def nodes() -> tuple[Node, ...]:
    with NODES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    return tuple(
        Node(
            **{name: row[name] for name in ("id", "name", "accelerator", "link", "source")},
            gpus=int(row["gpus"]),
            link_gb_s=float(row["link_gb_s"]),
            network_gbit=_figure(row["network_gbit"]),
        )
        for row in rows
    )


@cache
def accelerators_named(name: str) -> tuple[Accelerator, ...]:
    """Every device that NVML, torch or jax calls so; several where siblings share a name, none for an unknown one."""
    return tuple(device for device in accelerators() if _plain(name) in map(_plain, device.names))


def find_accelerator(name: str, memory_bytes: int | None) -> Accelerator | None:
    """The device that NVML, torch or jax calls `name` and that has this memory; None when the table has no such one.

    None also when the name is known and the memory is not within 8 % of any: an RTX 3060 of 8 GB is not that of 12 GB, a
    slice of a GPU is not the GPU. Without memory (unified memory tells none) only a name that a single device bears.
    """
    named = accelerators_named(name)
    if memory_bytes is None:
        alone = len(named) == 1 and not re.search(r"\d ?GB", named[0].name)  # a size in the name: there are siblings
        return named[0] if alone else None
    if len(named) == 1 and named[0].memory_gib is None:
        return named[0]
    sizes = {device: abs(memory_bytes / 2**30 / device.memory_gib - 1) for device in named if device.memory_gib}
    nearest = min(sizes, key=sizes.__getitem__, default=None)
    return nearest if nearest and sizes[nearest] <= MEMORY_TOLERANCE else None


def peaks(accelerator: Accelerator, dtype: str) -> tuple[float | None, float | None]:
    """Published peaks for matmuls in `dtype` (TFLOPS) and for memory (GB/s); float16 is as fast as bfloat16.

    None for what is not in the table, such as float64.
    """
    tflops = {
        "bfloat16": accelerator.bf16_tflops,
        "float16": accelerator.bf16_tflops,
        "float32": accelerator.fp32_tflops,
    }
    return tflops.get(dtype), accelerator.bandwidth_gb_s


def _plain(name: str) -> str:
    """Old drivers leave the maker out of the name."""
    return " ".join(name.casefold().removeprefix("nvidia ").split())


def _accelerator(row: dict[str, str]) -> Accelerator:
    capability = re.fullmatch(r"(\d+)\.(\d+)", row["compute_capability"])
    return Accelerator(
        id=row["id"],
        vendor=row["vendor"],
        name=row["name"],
        names=tuple(re.sub(r" \(.*\)$", "", name) for name in row["aliases"].split("|")),  # remarks are in brackets
        architecture=row["arch"],
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        memory_gib=_figure(row["memory_gib"]),
        bandwidth_gb_s=_figure(row["memory_bw_gb_s"]),
        bf16_tflops=_figure(row["bf16_dense_tflops"]),
        fp32_tflops=_figure(row["fp32_tflops"]),
        source=row["source"],
    )


def _figure(cell: str) -> float | None:
    return float(cell) if cell else None

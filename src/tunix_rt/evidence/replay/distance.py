"""How far apart two sets of weights are, relative to how far the model has moved: read from safetensors files piece by piece."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tunix_rt.errors import EvidenceError

PIECE = 2**20
"""Numbers that are read at once."""
MOST_HEADER = 100 * 2**20
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Tensors = dict[str, tuple[Path, str, int, int]]
"""Name -> file, type, first byte and the byte after the last."""


def distance(first: Path, recorded: Path, here: Path) -> float:
    """Distance of `here` from `recorded`, over that of `here` from `first`; infinite where they contain other tensors.
    Each is a file or a folder of files."""
    sets = [_tensors(path) for path in (first, recorded, here)]
    sizes = [{name: (end - begin) // _width(kind) for name, (_, kind, begin, end) in one.items()} for one in sets]
    if not sizes[0] == sizes[1] == sizes[2]:
        return math.inf
    moved = apart = 0.0
    for name in sorted(sets[0]):
        for a, b, c in zip(*(_pieces(*one[name]) for one in sets), strict=True):
            moved += float(np.square(c - a).sum())
            apart += float(np.square(c - b).sum())
    if not moved:
        return 0.0 if not apart else math.inf
    return math.sqrt(apart / moved)


def _tensors(path: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MOST_HEADER:
                raise EvidenceError(f"{file.name}: a safetensors header of {length:,} bytes", fix="the file is corrupt")
            entries: dict[str, Any] = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            if entry["dtype"] not in TYPES:
                raise EvidenceError(
                    f"{file.name}: tensors of type {entry['dtype']}", fix="report it with the name of the model"
                )
            if name in found:
                raise EvidenceError(f"{file.name}: {name!r} is in two files", fix="")
            begin, end = entry["data_offsets"]
            found[name] = (file, entry["dtype"], 8 + length + begin, 8 + length + end)
    return found


def _pieces(file: Path, kind: str, begin: int, end: int) -> Iterator[npt.NDArray[np.float64]]:
    """The numbers of a tensor, as many at a time for each type."""
    width = _width(kind)
    with file.open("rb") as opened:
        opened.seek(begin)
        for at in range(begin, end, PIECE * width):
            yield _numbers(opened, min(PIECE * width, end - at), kind)


def _width(kind: str) -> int:
    return np.dtype(TYPES[kind]).itemsize


def _numbers(file: IO[bytes], size: int, kind: str) -> npt.NDArray[np.float64]:
    found = np.frombuffer(file.read(size), dtype=TYPES[kind])
    if kind == "BF16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float64)

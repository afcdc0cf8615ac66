"""How far apart two states of a model are, as a share of how far it has moved: read from safetensors files piece by piece."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.errors import EvidenceError

PIECE = 4 * 2**20
"""Bytes of a tensor that are read at once."""
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def distance(first: Path, recorded: Path, here: Path) -> float:
    """Distance of `here` from `recorded`, over that of `recorded` from `first`; infinite where they hold other tensors."""
    headers = [_header(path) for path in (first, recorded, here)]
    if not headers[0][0] == headers[1][0] == headers[2][0]:
        return math.inf
    moved = apart = 0.0
    files = [path.open("rb") for path in (first, recorded, here)]
    try:
        for name in sorted(headers[0][0]):
            kind, begin, end = headers[0][0][name]
            for file, (_, start) in zip(files, headers, strict=True):
                file.seek(start + begin)
            for at in range(begin, end, PIECE):
                a, b, c = (_numbers(file.read(min(PIECE, end - at)), kind) for file in files)
                moved += float(np.square(b - a).sum())
                apart += float(np.square(c - b).sum())
    finally:
        for file in files:
            file.close()
    if not moved:
        return 0.0 if not apart else math.inf
    return math.sqrt(apart / moved)


def _header(path: Path) -> tuple[dict[str, tuple[str, int, int]], int]:
    """(type, begin, end) of each tensor, and where the first begins."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries: dict[str, Any] = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    if strange := sorted({str(entry["dtype"]) for entry in entries.values()} - TYPES.keys()):
        raise EvidenceError(f"{path}: tensors of type {strange[0]}", fix="please report it with the name of the model")
    return {name: (entry["dtype"], *entry["data_offsets"]) for name, entry in entries.items()}, 8 + length


def _numbers(data: bytes, kind: str) -> npt.NDArray[np.float64]:
    found = np.frombuffer(data, dtype=TYPES[kind])
    if kind == "BF16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float64)

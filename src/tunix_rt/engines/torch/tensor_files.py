"""safetensors files of torch tensors: written in pieces and hashed meanwhile, read by rows.

The `safetensors` library does neither: it copies all tensors of a file to the host first, and maps a file into memory, where what
was read stays resident.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tunix_rt.engines.checkpoint import BLOCK_BYTES
from tunix_rt.models.safetensors import Stored, header_of
from tunix_rt.storage import WrittenFile, storage

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Tensors = Mapping[str, torch.Tensor]


def widest_first(tensors: Tensors) -> dict[str, torch.Tensor]:
    """In the order of a file: the widest dtypes first, so that each tensor is aligned to its width; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def header(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with `tensors` in this order."""
    return header_of(((name, NAMES[one.dtype], one.shape, one.nbytes) for name, one in tensors.items()), metadata)[0]


def pieces_of(tensor: torch.Tensor, lengths: Iterator[int]) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in pieces of at most the lengths that `lengths` yields."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    begin = 0
    while begin < flat.numel():
        end = min(flat.numel(), begin + next(lengths))
        yield flat[begin:end]
        begin = end


def blocks() -> Iterator[int]:
    """Lengths for `pieces_of`: one block of host memory after the other."""
    while True:
        yield BLOCK_BYTES


def write_file(path: Path, head: bytes, pieces: Iterable[torch.Tensor], *, sync: bool) -> WrittenFile:
    """Write a file of `pieces` in host memory. `sync` makes it durable, which another host cannot do."""
    digest = hashlib.sha256(head)
    with storage(path), path.open("wb") as file:
        file.write(head)
        for piece in pieces:
            file.write(piece.numpy())
            digest.update(piece.numpy())
        if sync:
            file.flush()
            os.fsync(file.fileno())
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}


def read_rows(stored: Stored, into: torch.Tensor, *, first: int = 0) -> None:
    """Fill the contiguous tensor `into` with rows of `stored` from `first` on, cast to its dtype, one block of host memory at a
    time. A ValueError where a file has fewer bytes than its header describes, or numbers that torch has no dtype for."""
    if (dtype := DTYPES.get(stored.dtype)) is None:
        raise ValueError(f"numbers of type {stored.dtype} cannot be read")
    flat, done = into.detach().view(-1), 0
    for path, begin, end in stored.ranges(first, into.shape[0] if into.dim() else 1):
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            for at in range(begin, end, BLOCK_BYTES):
                block = _read(file, min(BLOCK_BYTES, end - at)).view(dtype)
                flat[done : done + block.numel()].copy_(block)
                done += block.numel()
    if done != flat.numel():
        raise ValueError(f"{done:,} of {flat.numel():,} elements were read")


def _read(file: Any, size: int) -> torch.Tensor:
    block = torch.empty(size, dtype=torch.uint8)
    view, done = memoryview(block.numpy()), 0
    while done < size:  # the system may return less than was requested
        if not (count := file.readinto(view[done:])):
            raise ValueError(f"{file.name} is incomplete")
        done += count
    return block

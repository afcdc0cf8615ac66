"""safetensors files: headers, read and written, tensors over several files, and whether the weights of a folder are complete.

Only headers are read, so incomplete weights are refused before an engine is started.
"""

import contextlib
import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors format allows no more."""
COPY_BYTES = 16 * 2**20
LFS_POINTER = b"version https://git-lfs"

# Why a file with weights is not read.
NOT_READ = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "a pickle, which can run code"),
    ".msgpack": "Flax",
    ".h5": "TensorFlow",
    ".onnx": "ONNX",
    ".npz": "NumPy",
    ".gguf": "GGUF",
}


def no_safetensors(name: str, where: str, files: Iterable[str], *, fix: str) -> InputError:
    """The error for a folder or repository without safetensors: what it has instead, and why that is not read."""
    others = sorted(file for file in files if Path(file).suffix in NOT_READ)
    if not others:
        return InputError(f"{name}: no *.safetensors {where}", fix=fix)
    shown = ", ".join(f"{file} ({NOT_READ[Path(file).suffix]})" for file in others[:4])
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    if any(file.endswith(".gguf") for file in others):
        fix = f"fetch one .gguf file and give its path as the model; or {fix}"
    return InputError(
        f"{name}: no *.safetensors {where}, the only weights that are read; it has {shown}{more}", fix=fix
    )


def missing_weights(folder: Path) -> list[str]:
    """Names of the missing weight files of a folder; a dangling link counts as missing."""
    named = {path.name for path in folder.glob("*.safetensors")} | _named_by_index(folder)
    return sorted(name for name in named if not (folder / name).is_file())


def _named_by_index(folder: Path) -> set[str]:
    """The shards in the index of a sharded model."""
    if not (folder / INDEX).is_file():
        return set()
    try:
        return {str(name) for name in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / INDEX} cannot be read: {error!r}", fix="fetch the model again") from error


def model_files(folder: Path) -> list[Path]:
    """The weight files of a model as transformers chooses them: `model.safetensors`, else those in the index."""
    names = {"model.safetensors"} if (folder / "model.safetensors").is_file() else _named_by_index(folder)
    return [folder / name for name in sorted(names)]


def refuse_incomplete(name: str, folder: Path) -> None:
    """Raise an InputError for the first weight file that is missing, unreadable, truncated, or a Git LFS pointer."""
    with readable(name, folder):
        missing = missing_weights(folder)
    if missing:
        raise InputError(
            f"{name}: {len(missing)} weight file(s) are missing in {folder}, first {missing[0]}",
            fix="fetch the model again (an interrupted download is resumed)",
        )
    for path in sorted(folder.glob("*.safetensors")):
        with readable(name, path):
            problem = _what_is_wrong(path)
        if problem:
            # In the hub cache that is the blob: if only the link were deleted, the next download would link it again.
            raise InputError(
                f"{name}: {path.name} {problem}",
                fix=f"delete {path.resolve()} and fetch it again (for a hub model: run again)",
            )


@contextlib.contextmanager
def readable(name: str, where: Path) -> Iterator[None]:
    """Raise an OSError of the block (permissions, a failing disk) as an InputError that names the file."""
    try:
        yield
    except OSError as error:
        place = error.filename or where  # a failed read does not name its file
        raise InputError(
            f"{name}: {place} cannot be read: {error.strerror or error}",
            fix=f"let this user read it (chmod u+r {place}), fetch it again, or give another model",
        ) from error


def _what_is_wrong(path: Path) -> str | None:
    """None for a complete safetensors file; else what is wrong with it."""
    try:
        tensors, header_bytes = read_header(path)
    except ValueError as error:
        return str(error)
    size, end = path.stat().st_size, max((tensor.end for tensor in tensors.values()), default=header_bytes)
    if size < end:
        return f"is incomplete: {size:,} of {end:,} bytes"
    return None if size == end else f"is corrupt: {size:,} bytes, its header describes {end:,}"


# --- the header ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as a header describes it. `begin` and `end` count from the first byte of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, Tensor], int]:
    """The tensors of a file, and the bytes of its header. A ValueError explains why the file has no valid header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise ValueError(f"is incomplete: a Git LFS pointer of {size} bytes instead of the weights")
        if len(start) < 8:
            raise ValueError(f"is incomplete: {size} bytes")
        (length,) = struct.unpack("<Q", start[:8])
        if length > LONGEST_HEADER:
            raise ValueError("is not a safetensors file: its first bytes are not the length of a header")
        file.seek(8)
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"is incomplete: {size:,} bytes, its header alone has {length:,}")
    first = 8 + length
    try:
        tensors = {
            name: Tensor(
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                begin=first + int(entry["data_offsets"][0]),
                end=first + int(entry["data_offsets"][1]),
            )
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError("is not a safetensors file: its header is not JSON that describes tensors") from error
    return tensors, first


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """First bytes of a file with `tensors` (name, dtype, shape, bytes) in this order, and the offset of each in the file."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name, dtype, shape, size in tensors:
        offsets[name], end = end, end + size
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


# --- tensors over several files --------------------------------------------------------------------------------------


_NUMBERED = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.safetensors$")


def part_name(name: str, number: int, count: int) -> str:
    """The name of file `number` of `count`, from 1 on, that `name` is split into: `model-00001-of-00008.safetensors`."""
    return name if count == 1 else f"{name.removesuffix('.safetensors')}-{number:05d}-of-{count:05d}.safetensors"


def whole_name(part: str) -> str:
    """The name that `part_name` was called with."""
    return _NUMBERED.sub(".safetensors", part)


def parts_of(name: str, present: Collection[str]) -> list[str]:
    """The files among `present` that `name` is split into, in their order, or `name` itself; empty where one is missing, or
    where there is more than one split."""
    found = [part for part in present if whole_name(part) == name]
    counts = {int(match[1]) if (match := _NUMBERED.search(part)) else 1 for part in found}
    wanted = [part_name(name, number, count) for count in counts for number in range(1, count + 1)]
    return wanted if len(counts) == 1 and set(wanted) == set(found) else []


def part_files(folder: Path, name: str) -> list[Path]:
    """The files of `folder` that `name` is split into, or it alone; empty where one is missing."""
    return [folder / part for part in parts_of(name, [one.name for one in folder.iterdir()])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor whose rows are in one file, or in several, one after the other."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Path, Tensor], ...]

    @property
    def size(self) -> int:
        return sum(piece.end - piece.begin for _, piece in self.pieces)

    def read(self) -> bytes:
        """The whole tensor."""
        found = []
        for path, piece in self.pieces:
            with path.open("rb") as file:
                file.seek(piece.begin)
                found.append(file.read(piece.end - piece.begin))
        return b"".join(found)

    def ranges(self, first: int, rows: int) -> Iterator[tuple[Path, int, int]]:
        """File, first byte and end of the rows from `first` on. A tensor without dimensions is one row."""
        for path, piece in self.pieces:
            count = piece.shape[0] if piece.shape else 1
            begin, end = max(first, 0), min(first + rows, count)
            if begin < end:
                row_bytes = (piece.end - piece.begin) // count
                yield path, piece.begin + begin * row_bytes, piece.begin + end * row_bytes
            first -= count


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of `files`, by name. Files that have the same tensor have its rows, in the order of the files. A ValueError
    explains why a file has no valid header, or another shape than the files before it."""
    found: dict[str, list[tuple[Path, Tensor]]] = {}
    for path in files:
        for name, tensor in read_header(path)[0].items():
            found.setdefault(name, []).append((path, tensor))
    return {name: _joined(name, pieces) for name, pieces in found.items()}


def join_files(files: Sequence[Path], to: Path) -> None:
    """Write one file of the tensors of `files`, which have the rows of each in their order."""
    stored = stored_tensors(files)
    with to.open("wb") as out:
        out.write(header_of((name, one.dtype, one.shape, one.size) for name, one in stored.items())[0])
        for path, piece in (piece for one in stored.values() for piece in one.pieces):
            with path.open("rb") as file:
                file.seek(piece.begin)
                for at in range(piece.begin, piece.end, COPY_BYTES):
                    out.write(file.read(min(COPY_BYTES, piece.end - at)))


def _joined(name: str, pieces: list[tuple[Path, Tensor]]) -> Stored:
    (_, first), *others = pieces
    for path, piece in others:
        if not piece.shape or (piece.dtype, piece.shape[1:]) != (first.dtype, first.shape[1:]):
            raise ValueError(f"{path.name} has {name} as {list(piece.shape)} {piece.dtype}, the file before it differs")
    shape = first.shape if not others else (sum(piece.shape[0] for _, piece in pieces), *first.shape[1:])
    return Stored(dtype=first.dtype, shape=shape, pieces=tuple(pieces))

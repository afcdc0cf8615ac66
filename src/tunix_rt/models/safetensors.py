"""Are the weights of a folder there and whole? Asked of their headers alone, before an engine is started."""

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from tunix_rt.errors import InputError

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors format allows no more."""
LFS_POINTER = b"version https://git-lfs"

# Why a file that holds weights is not read.
NOT_READ = {
    ".bin": "a pickle, which can run code",
    ".pt": "a pickle, which can run code",
    ".pth": "a pickle, which can run code",
    ".ckpt": "a pickle, which can run code",
    ".msgpack": "Flax",
    ".h5": "TensorFlow",
    ".onnx": "ONNX",
    ".npz": "NumPy",
    ".gguf": "GGUF",
}


def no_safetensors(name: str, where: str, files: Iterable[str], *, fix: str) -> InputError:
    """The refusal of a folder or repository without safetensors: what it has instead, why that is not read."""
    others = sorted(file for file in files if Path(file).suffix in NOT_READ)
    if not others:
        return InputError(f"{name}: no *.safetensors {where}", fix=fix)
    shown = ", ".join(f"{file} ({NOT_READ[Path(file).suffix]})" for file in others[:4])
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    if any(file.endswith(".gguf") for file in others):
        fix = f"fetch one .gguf file and give its path as the model; or {fix}"
    return InputError(f"{name}: no *.safetensors {where}, which are all that is read; found {shown}{more}", fix=fix)


def missing_weights(folder: Path) -> list[str]:
    """Names of weight files that should be in the folder and are not; a link that leads nowhere counts as missing."""
    named = {path.name for path in folder.glob("*.safetensors")} | _named_by_index(folder)
    return sorted(name for name in named if not (folder / name).is_file())


def _named_by_index(folder: Path) -> set[str]:
    """The shards that the index of a sharded model names."""
    if not (folder / INDEX).is_file():
        return set()
    try:
        return {str(name) for name in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / INDEX} cannot be read: {error!r}", fix="fetch the model again") from error


def refuse_incomplete(name: str, folder: Path) -> None:
    """Raise an InputError for the first weight file that is absent, unreadable, cut off, or a pointer instead of weights."""
    with readable(name, folder):
        missing = missing_weights(folder)
    if missing:
        raise InputError(
            f"{name}: {len(missing)} weight file(s) are missing in {folder}, first {missing[0]}",
            fix="fetch the model again (a download that was broken off goes on where it stopped)",
        )
    for path in sorted(folder.glob("*.safetensors")):
        with readable(name, path):
            problem = _what_is_wrong(path)
        if problem:
            # In the hub's cache that is the blob: were only the link to it deleted, the next download would link it again.
            raise InputError(
                f"{name}: {path.name} {problem}",
                fix=f"delete {path.resolve()}, and fetch it again (of a hub model: run again)",
            )


@contextlib.contextmanager
def readable(name: str, where: Path) -> Iterator[None]:
    """What cannot be read there, because it may not or its disk fails, is an InputError that names it."""
    try:
        yield
    except OSError as error:
        place = error.filename or where  # a read that fails does not say of which file
        raise InputError(
            f"{name}: {place} cannot be read: {error.strerror or error}",
            fix=f"let this user read it (chmod u+r {place}), fetch it again, or give another model",
        ) from error


def _what_is_wrong(path: Path) -> str | None:
    """None for a whole safetensors file: a length, a header of that length, and the bytes the header speaks of."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return f"is incomplete: a Git LFS pointer of {size} bytes instead of the weights"
        if len(start) < 8:
            return f"is incomplete: {size} bytes"
        (length,) = struct.unpack("<Q", start[:8])
        if length > LONGEST_HEADER:
            return "is no safetensors file: its first bytes are not the length of a header"
        file.seek(8)
        header = file.read(length)
    if len(header) < length:
        return f"is incomplete: {size:,} bytes, and its header alone has {length:,}"
    try:
        tensors = {key: value for key, value in json.loads(header).items() if key != "__metadata__"}
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "is no safetensors file: its header is not JSON that describes tensors"
    if size < end:
        return f"is incomplete: {size:,} of {end:,} bytes"
    return None if size == end else f"is damaged: {size:,} bytes, and its header speaks of {end:,}"

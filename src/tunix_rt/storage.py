"""Files written so that a crash cannot halve them, read back with errors that name them. Knows nothing of what they contain."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tunix_rt.errors import StorageError, TunixError

_UMASK = os.umask(0o077)  # there is no way to ask that does not set; asked once, before there are threads
os.umask(_UMASK)


@contextlib.contextmanager
def storage(
    where: Path, *, fix: str = "free space or permissions on that volume, or another --output"
) -> Iterator[None]:
    """Turn what a disk can do to us into one clear error with its own exit code."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TunixError):
            raise
        named = error.filename or where
        raise StorageError(f"{named}: {error.strerror or error}", fix=fix) from error


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, paths as text; everything else as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def write_text(path: Path, text: str) -> None:
    """Replace `path` whole: a reader sees the old text or the new one, also after a power cut."""
    write_lines(path, (text,))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """The same for a text that is longer than one wants to hold; each line brings its newline."""
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.staged")
        with staged.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
        sync_folder(path.parent)


def json_text(value: Any) -> str:
    """Canonical enough to hash: sorted keys, no NaN, a newline at the end."""
    return json.dumps(to_plain(value), indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def write_jsonl(path: Path, values: list[Any]) -> None:
    write_text(path, "".join(json_line(value) for value in values))


def append_jsonl(path: Path, values: list[Any]) -> None:
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(json_line(to_plain(value)) for value in values))


def json_line(value: Any) -> str:
    return json.dumps(to_plain(value), sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """The value in `path`; a missing or torn file is a TunixError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TunixError(f"{path} is missing", fix="is this the folder of a run?") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TunixError(f"{path} cannot be read: {error}", fix="the file is damaged; run again") from error


def sha256_file(path: Path) -> str:
    with storage(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable. Windows has no such call and needs none."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle_files(folder: Path) -> None:
    """Make all files below `folder` durable, readable by whom the umask lets read (safetensors writes them 0600)."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        path.chmod(0o666 & ~_UMASK)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def require_space(folder: Path, needed_bytes: int, *, what: str, keep: int = 2) -> None:
    """Refuse with the numbers when the volume of `folder`, which need not exist yet, has less room than `what` takes.

    `keep` is how many checkpoints are kept: only above two, the least, can it be lowered.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    with storage(existing):
        free = shutil.disk_usage(existing).free  # what this user may take, not what is reserved for others
    if free < needed_bytes:
        fewer = f"lower training.save_total_limit (now {keep}), " if keep > 2 else ""
        raise StorageError(
            f"{existing}: {what} needs {needed_bytes / 2**20:,.0f} MiB on disk, {free / 2**20:,.0f} MiB are free",
            fix=f"free space on that volume, {fewer}or choose another --output",
        )


def bytes_below(folder: Path) -> int:
    """Bytes of all files below `folder`; 0 when it does not exist."""
    with storage(folder):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def merkle_root(leaves: Iterable[bytes]) -> str:
    """Root over `leaves` as hex. Memory is the height of the tree; leaves and nodes are hashed apart."""
    whole: list[tuple[int, bytes]] = []  # (leaves below, hash) of the complete subtrees so far, largest first
    for leaf in leaves:
        size, node = 1, hashlib.sha256(b"\x00" + leaf).digest()
        while whole and whole[-1][0] == size:
            _, left = whole.pop()
            size, node = 2 * size, _above(left, node)
        whole.append((size, node))
    if not whole:
        return hashlib.sha256(b"").hexdigest()
    _, root = whole.pop()
    while whole:
        root = _above(whole.pop()[1], root)
    return root.hex()


def _above(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def row_leaf(ids: npt.NDArray[Any], trained: npt.NDArray[Any], positions: npt.NDArray[Any]) -> bytes:
    """Identity of a row or of one example: its tokens, what is trained, where examples begin."""
    return hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in (ids, trained, positions))).digest()

"""Files and folders that a crash leaves either old or new, never torn, and errors that name the file. Knows no formats."""

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy.typing as npt
import psutil

from tunix_rt.errors import StorageError, TunixError

logger = logging.getLogger(__name__)

OTHER_OUTPUT = "free space or permissions on that volume, or another --output"
LARGER_FILES = "raise the limit of file sizes (ulimit -f), or choose a file system without one"
CHECK_VOLUME = "check the volume and the permissions, then run it again; the file need not be corrupt"
_UMASK = os.umask(0o077)  # reading the umask means setting it: done once, before there are threads
os.umask(_UMASK)


class WrittenFile(TypedDict):
    """A file that was hashed while it was written, as MANIFEST.json of a checkpoint has it."""

    sha256: str
    bytes: int


@contextlib.contextmanager
def storage(where: Path, *, fix: str = OTHER_OUTPUT) -> Iterator[None]:
    """Raise every OSError of the block as a StorageError, which names the file and has an exit code of its own."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TunixError):
            raise
        named = str(error.filename or where)
        if os.sep not in named and named != str(where):  # relative to a folder that only the system knew
            named = f"{where}: {named}"
        fix = LARGER_FILES if error.errno == errno.EFBIG else fix
        raise StorageError(f"{named}: {error.strerror or error}", fix=fix) from error


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, paths as strings; everything else unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically: a reader sees the old text or the new one, even after a power failure."""
    write_lines(path, (text,))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """`write_text` for a text that does not fit into memory; each line ends with its newline."""
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


def read_json(path: Path, kind: type[TunixError] = TunixError, fix: str = "the file is corrupt; run again") -> Any:
    """The value in `path`; a missing or torn file is an error of `kind` that names it, one that the disk does not give a
    StorageError: it may be as good as ever."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise kind(f"{path} is missing", fix="is this the folder of a run?") from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}", fix=CHECK_VOLUME) from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} cannot be read: {error}", fix=fix) from error


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


def sync_files(*paths: Path) -> None:
    """fsync those of `paths` that exist, and their folders."""
    for path in paths:
        with storage(path), contextlib.suppress(FileNotFoundError):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            sync_folder(path.parent)


def discard(path: Path) -> None:
    """Delete a leftover, file or folder. One that cannot be deleted is logged and stays: it is no reason to end a run."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be deleted (%s); it is not needed, delete it by hand", path, error.strerror or error)


def unused(path: Path) -> Path:
    """`path`, or the first of `path.2`, `path.3`, ... that does not exist."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


@contextlib.contextmanager
def removed_on_error(path: Path) -> Iterator[None]:
    """Delete `path`, such as the lock of something that could not be made, when the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder. Those with the same prefix that killed processes left are removed."""
    temporary = Path(tempfile.gettempdir())
    with storage(temporary):
        for leftover in temporary.glob(f"{prefix}[0-9]*-*"):
            process = leftover.name.removeprefix(prefix).partition("-")[0]
            if process.isdecimal() and not psutil.pid_exists(int(process)):
                shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-") as scratch:
            yield Path(scratch)


def settle_files(folder: Path) -> None:
    """fsync all files below `folder` and give them the permissions of the umask (safetensors writes 0600)."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            settle_file(path)
    sync_folder(folder)


def settle_file(path: Path) -> None:
    path.chmod(0o666 & ~_UMASK)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def fresh_folder(folder: Path) -> Iterator[None]:
    """Create the new folder `folder` for the block to fill, and make it durable afterwards. An error removes it."""
    folder.mkdir()
    try:
        yield
        settle_files(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def publish_folder(staged: Path, path: Path, *, replace: bool = True) -> None:
    """Rename the durable folder `staged` to `path`. A folder to be replaced is moved aside first and deleted last.

    Without `replace`, an OSError is raised where `path` contains anything.
    """
    aside = unused(staged.with_name(f"{staged.name}-replaced"))
    replaces = replace and os.path.lexists(path)
    if replaces:
        path.rename(aside)
    elif os.path.lexists(path):
        path.rmdir()
    try:
        staged.rename(path)
    except OSError:
        if replaces:
            aside.rename(path)
        raise
    sync_folder(path.parent)
    if replaces:
        discard(aside)


@contextlib.contextmanager
def staged_folder(
    path: Path, *, replace: bool = False, concurrent: bool = False, fix: str = OTHER_OUTPUT
) -> Iterator[Path]:
    """Yield an empty folder beside `path` that becomes `path`, durable, when the block ends without an error.

    An error removes the staged folder and leaves `path` as it was; the next call removes what a killed process left.
    Without a lock around it, `concurrent` must be set: processes that stage the same path then use folders of their own.
    """
    name = f".staged-{path.name}"
    staged = path.with_name(f"{name}-{os.getpid()}" if concurrent else name)
    pattern = re.compile(
        re.escape(name) + (r"-(?P<process>\d+)" if concurrent else "") + r"(\.\d+)?(?P<aside>-replaced)?"
    )
    with storage(path, fix=fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in [*path.parent.iterdir()]:
            match = pattern.fullmatch(leftover.name)
            if match is None or (concurrent and leftover != staged and psutil.pid_exists(int(match["process"]))):
                continue
            if match["aside"] and not os.path.lexists(path):
                leftover.rename(path)  # its process was killed between the two renames
            else:
                discard(leftover)
        staged = unused(staged)
        with fresh_folder(staged):
            yield staged
        try:
            publish_folder(staged, path, replace=replace)
        except OSError:
            shutil.rmtree(staged, ignore_errors=True)
            raise


def require_space(folder: Path, needed_bytes: int, *, what: str, keep: int = 2) -> None:
    """Raise StorageError when the volume of `folder`, which need not exist yet, has fewer free bytes than `what` needs.

    `keep` is the number of checkpoints kept; the error proposes a lower one only above the minimum of two.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    with storage(existing):
        free = shutil.disk_usage(existing).free  # without the share reserved for root
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
    """Merkle root of `leaves` as hex, in memory of the tree's height. Leaves and inner nodes have different prefixes."""
    whole: list[tuple[int, bytes]] = []  # (number of leaves, hash) of the complete subtrees so far, largest first
    for leaf in leaves:
        size, node = 1, hashlib.sha256(b"\x00" + leaf).digest()
        while whole and whole[-1][0] == size:
            _, left = whole.pop()
            size, node = 2 * size, _parent(left, node)
        whole.append((size, node))
    if not whole:
        return hashlib.sha256(b"").hexdigest()
    _, root = whole.pop()
    while whole:
        root = _parent(whole.pop()[1], root)
    return root.hex()


def _parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def row_leaf(ids: npt.NDArray[Any], trained: npt.NDArray[Any], positions: npt.NDArray[Any]) -> bytes:
    """Hash of a row or of one example: token ids, loss mask, positions."""
    return hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in (ids, trained, positions))).digest()

"""Reading a folder that a stranger may have made: names and sizes before content, no links, no pipes, no file without an end.

The content of a file never raises here. A problem is one printable line.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.runs.folder import NOT_OURS, RunDir, list_checkpoints
from tunix_rt.storage import CHECK_VOLUME, read_json, sha256_file, sha256_text, storage, write_text

MOST_FILES = 20_000
DEEPEST = 4
UNLISTED, UNREAD = "cannot be listed", "cannot be read"
FEW = 50
"""Findings of one check that are listed; the others are counted."""
LONGEST_LINE = 4 * 2**20
"""Bytes of one object in a file that has one a line."""
_LEFTOVER = re.compile(r"\.lock|(?:.*/)?(?:\.staged-[^/]*|\.[^/]*\.staged(?:\.\d+)?)(?:/.*)?")
"""The lock, and what a crash left half-written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The regular files of a folder by relative POSIX name, each with its size; what is not part of the run; what is wrong."""

    files: dict[str, int]
    outside: tuple[str, ...]
    problems: tuple[str, ...]


def list_folder(root: Path, *, unlisted: bool = True) -> Listing:
    """Every file below `root`. Links and special files are problems and are not opened. A folder that cannot be listed is a
    problem too; unless `unlisted`, it is an OSError."""
    files: dict[str, int] = {}
    outside: list[str] = []
    problems: list[str] = []
    pending, count = [(root, "", 0)], 0
    while pending:
        folder, prefix, depth = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            if not unlisted:
                raise
            problems.append(f"{shown(prefix or '.')} {UNLISTED}: {error.strerror}")
            continue
        count += len(entries)
        if count > MOST_FILES or depth > DEEPEST:
            problems.append(f"more than {MOST_FILES:,} files, or folders deeper than {DEEPEST}")
            break
        for entry in entries:
            name = prefix + entry.name
            if NOT_OURS.fullmatch(name) or _LEFTOVER.fullmatch(name):
                outside.append(plain(name))
            elif fault := _fault(name, entry):
                problems.append(fault)
            elif entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), f"{name}/", depth + 1))
            else:
                files[name] = entry.stat(follow_symlinks=False).st_size
    return Listing(files=dict(sorted(files.items())), outside=tuple(outside), problems=tuple(problems))


def _fault(name: str, entry: "os.DirEntry[str]") -> str:
    if "\\" in name or not name.isprintable():
        return f"{shown(name)}: a file name with control characters or a backslash"
    if entry.is_symlink():
        return f"{plain(name)}: a symbolic link"
    if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
        return f"{plain(name)}: not a regular file"
    return ""


def is_leftover(name: str) -> bool:
    """Whether `name` is the lock or a half-written file: neither is hashed."""
    return _LEFTOVER.fullmatch(name) is not None


def open_regular(root: Path, name: str) -> int:
    """A descriptor of the regular file `name` below `root`; an OSError for a link on the way, a pipe, a device."""
    *folders, last = name.split("/")
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = inner
        found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(0, "not a regular file", name)
    return found


def copy_regular(root: Path, name: str, target: Path) -> None:
    """Copy the regular file `name` below `root` to the new file `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(open_regular(root, name), "rb") as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy, 2**20)


def read_file(root: Path, name: str, most_bytes: int) -> tuple[bytes | None, str]:
    """The content of `name`, or None and why not."""
    try:
        with open(open_regular(root, name), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                return None, f"{plain(name)}: {size:,} bytes, at most {most_bytes:,} are read"
            data = file.read(size + 1)  # it may grow meanwhile
    except FileNotFoundError:
        return None, f"{plain(name)}: missing"
    except OSError as error:
        return None, f"{plain(name)}: {UNREAD}: {error.strerror or error}"
    return (data, "") if len(data) <= size else (None, f"{plain(name)}: grows while it is read")


def read_lines(root: Path, name: str, most_bytes: int, problem: Callable[[str], None]) -> Iterator[bytes]:
    """The lines of `name` with their newlines, up to one that is too long, of which only the beginning; `problem` is called with
    why they cannot be read."""
    try:
        with open(open_regular(root, name), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                problem(f"{plain(name)}: {size:,} bytes, at most {most_bytes:,} are read")
                return
            while file.tell() < size and (line := file.readline(min(LONGEST_LINE + 1, size - file.tell()))):
                yield line
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    return
    except FileNotFoundError:
        problem(f"{plain(name)}: missing")
    except OSError as error:
        problem(f"{plain(name)}: {UNREAD}: {error.strerror or error}")


def parse_object(data: bytes) -> dict[str, Any] | str:
    """The JSON object in `data`, or what is wrong with it. A duplicate key would hide one of its values."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_number, parse_int=_number)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg}"
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {str(error)[:100]}"
    return value if isinstance(value, dict) else "not a JSON object"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(keys := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return keys


def _number(text: str) -> int:
    """Of at most 19 digits: a longer one becomes no float, and takes long to print."""
    if len(text) > 20 or not text[-1].isdigit():
        raise ValueError(f"{text[:30]} is not a number")
    return int(text)


def few(problems: Iterable[str], most: int = FEW) -> Iterator[str]:
    """The first `most` problems, then a line that there are more."""
    for number, problem in enumerate(problems):
        if number == most:
            yield f"more than {most} problems of this kind"
            return
        yield problem


def shown(value: Any) -> str:
    """`value` in one short printable line; of a list or an object only that it is one."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def plain(name: str) -> str:
    """A file name that is safe to print."""
    return name if name.isprintable() and name.isascii() and len(name) <= 200 else shown(name)


SUMS = "SHA256SUMS"
RUN_SUMS = "run-SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00-\x1f\x7f\\]{1,400})")


def write_sums(run: RunDir, *, pending: Mapping[Path, str] | None = None, verified: Collection[Path] = ()) -> Path:
    """Write `SHA256SUMS` over every file of the folder. A link, a special file or an odd name is an EvidenceError.

    `pending` are files whose text is settled but which are written after their hash. `verified` are checkpoints that the
    caller has hashed itself, so that their manifests are trusted; all other files are read.
    """
    with storage(run.root, fix=CHECK_VOLUME):
        listing = list_folder(run.root, unlisted=False)
    if listing.problems:
        raise EvidenceError(
            f"{run.root} cannot be hashed\n" + "\n".join(f"  {problem}" for problem in few(listing.problems)),
            fix="a run folder contains plain files with plain names; move what is listed to another folder",
        )
    coming = {path.relative_to(run.root).as_posix(): sha256_text(text) for path, text in (pending or {}).items()}
    known = _hashes_at_commit(run, verified) | coming
    names = [name for name in listing.files if name not in (SUMS, SIGNATURE)]
    digests = {name: known.get(name) or sha256_file(run.root / name) for name in names} | coming
    write_text(run.hashes, sums_text(digests))
    return run.hashes


def sums_text(digests: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def _hashes_at_commit(run: RunDir, verified: Collection[Path]) -> dict[str, str]:
    """Hashes in the manifests of `verified` checkpoints: tens of gigabytes, too much to read for a process that has to stop."""
    found: dict[str, str] = {}
    for checkpoint in (path for path in list_checkpoints(run.checkpoints) if path in verified):
        try:
            claimed = read_json(checkpoint / "MANIFEST.json")["files"]
            for name, facts in claimed.items():
                fits = (checkpoint / name).stat().st_size == facts["bytes"]
                if fits and re.fullmatch("[0-9a-f]{64}", facts["sha256"]):
                    found[(checkpoint / name).relative_to(run.root).as_posix()] = facts["sha256"]
        except (TunixError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # corrupt: its files are read
    return found


def parse_sums(data: bytes, file: str = SUMS) -> tuple[dict[str, str], list[str]]:
    """Name -> hash, and every line that is not in the form that `write_sums` writes: sorted by name, each once."""
    claimed: dict[str, str] = {}
    problems: list[str] = []
    *lines, rest = data.split(b"\n")
    if rest:
        problems.append(f"{file} does not end with a newline")
    before = ""
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.decode("utf-8", "surrogateescape"))
        name = match[2] if match else ""
        if match is None or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
            problems.append(f"{file}:{number}: malformed line")
        elif name <= before or is_leftover(name) or name == SUMS or "\udc80" <= max(name) <= "\udfff":
            problems.append(f"{file}:{number}: {shown(name)} is not in order, or not a file of the run")
        else:
            claimed[name] = match[1]
            before = name
        if len(problems) > 50:
            break
    return claimed, problems


def sha256_below(root: Path, name: str) -> str:
    """The hash of the regular file `name` below `root`; an OSError where there is none."""
    with open(open_regular(root, name), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_problems(
    root: Path, present: Collection[str], claimed: Mapping[str, str], *, may_lack: Collection[str]
) -> list[str]:
    """How the files differ from the hashes. `may_lack` may be absent; present, they must fit."""
    problems = [f"{plain(name)}: missing" for name in sorted(claimed.keys() - set(present) - set(may_lack))]
    problems += [f"{plain(name)}: not in {SUMS}" for name in sorted(set(present) - claimed.keys() - {SUMS, SIGNATURE})]
    for name in sorted(claimed.keys() & set(present)):
        try:
            if sha256_below(root, name) != claimed[name]:
                problems.append(f"{plain(name)}: changed, its hash is not the one in {SUMS}")
        except OSError as error:
            problems.append(f"{plain(name)}: cannot be read: {error.strerror or os.strerror(error.errno or 0)}")
    return problems


def is_weights(name: str) -> bool:
    """Whether the file of a run by that name contains weights or optimizer states: too big to travel with its facts."""
    return name.startswith(("checkpoints/", "final_model/")) and name.endswith(".safetensors")

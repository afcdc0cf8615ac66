"""Reading a folder that a stranger may have made: names and sizes before content, no links, no pipes, no file without an end.

What a file contains never raises here. A problem is one printable sentence.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_FILES = 20_000
DEEPEST = 4
FEW = 50
"""Findings of one check that are listed; the others are counted."""
LONGEST_LINE = 4 * 2**20
"""Bytes of one object in a file that has one a line."""
_NOT_OURS = re.compile(
    r"(?:tensorboard|wandb|mlruns|aim|\.aim)(?:/.*)?|(?:.*/)?(?:\.DS_Store|Thumbs\.db|desktop\.ini|\._[^/]*)"
)
"""Folders of experiment trackers, and what file managers leave behind."""
_LEFTOVER = re.compile(r"\.lock|(?:.*/)?(?:\.staged-[^/]*|\.[^/]*\.staged)(?:/.*)?")
"""The lock, and what a crash left half-written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The regular files of a folder by relative POSIX name, each with its size; what is not part of the run; what is wrong."""

    files: dict[str, int]
    outside: tuple[str, ...]
    problems: tuple[str, ...]


def list_folder(root: Path) -> Listing:
    """Every file below `root`. Links and special files are problems and are not opened."""
    files: dict[str, int] = {}
    outside: list[str] = []
    problems: list[str] = []
    pending, count = [(root, "", 0)], 0
    while pending:
        folder, prefix, depth = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            problems.append(f"{shown(prefix or '.')} cannot be listed: {error.strerror}")
            continue
        count += len(entries)
        if count > MOST_FILES or depth > DEEPEST:
            problems.append(f"more than {MOST_FILES:,} files, or folders deeper than {DEEPEST}")
            break
        for entry in entries:
            name = prefix + entry.name
            if _NOT_OURS.fullmatch(name) or _LEFTOVER.fullmatch(name):
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
        return None, f"{plain(name)}: cannot be read: {error.strerror or error}"
    return (data, "") if len(data) <= size else (None, f"{plain(name)}: grows while it is read")


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
    """The first `most` problems; the next one only says that there are more."""
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

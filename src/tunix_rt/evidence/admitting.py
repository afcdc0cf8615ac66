"""Whether a folder may be read at all: whoever made it may want to fill the reader's memory, disk or terminal. Only names
and sizes are looked at, and the lengths of lines; a link is never followed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import few

MOST_FILES = 20_000
DEEPEST = 8
MIB = 2**20
MOST_BYTES = {".json": 16 * MIB, ".jsonl": 256 * MIB, ".txt": 64 * MIB, ".md": 64 * MIB, ".yaml": MIB}
"""Of one file, by its ending; others of a run's facts are small too. Weights may have any size: they are hashed, not read."""
MOST_OTHER = 64 * MIB
LONGEST_LINE = 64 * 1024
LONGEST_ANSWER = 512 * 1024
"""A line of predictions holds a whole output."""
WEIGHTS = ("checkpoints/", "final_model/", "tensorboard/", "profile/")
CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")
"""What steers a terminal or turns its text around, in UTF-8."""


def unreadable(folder: Path) -> list[str]:
    """Why the folder is not read any further; empty where nothing speaks against it."""
    found: list[str] = []
    count = 0
    pending = [(folder, 0)]
    while pending:
        here, depth = pending.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            found.append(f"cannot be listed: {shown(here.name)}: {error.strerror}")
            continue
        count += len(entries)
        if count > MOST_FILES or depth > DEEPEST:
            return [*found, f"more than {MOST_FILES:,} files, or folders deeper than {DEEPEST}: no run leaves that"]
        for entry in entries:
            name = Path(entry.path).relative_to(folder).as_posix()
            if entry.is_symlink():
                found.append(f"a symbolic link: {_printable(name)}")
            elif entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), depth + 1))
            elif not entry.is_file(follow_symlinks=False):
                found.append(f"not a regular file: {_printable(name)}")
            elif fault := _size_fault(name, entry.stat(follow_symlinks=False).st_size):
                found.append(fault)
    return sorted(found)


def _printable(name: str) -> str:
    return name if name.isprintable() and name.isascii() else shown(name)


def _size_fault(name: str, size: int) -> str | None:
    if name.startswith(WEIGHTS) and not name.endswith("/config.json"):
        return None
    most = MOST_BYTES.get(os.path.splitext(name)[1], MOST_OTHER)
    return f"{_printable(name)} has {size:,} bytes, {most:,} are the most" if size > most else None


def text_problems(folder: Path) -> Iterator[str]:
    """Lines that are too long for what they are, and control characters in what people read in a terminal."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(WEIGHTS) or path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if (at := _not_utf8(data)) is not None:
            yield f"{name}:{data.count(10, 0, at) + 1}: not UTF-8 text"
        if path.suffix == ".jsonl":
            longest = LONGEST_ANSWER if name.startswith("eval/") else LONGEST_LINE
            over = (number for number, line in enumerate(data.split(b"\n"), start=1) if len(line) > longest)
            yield from few((f"{name}:{number}: a line of more than {longest:,} bytes" for number in over), name)
        elif path.suffix != ".json" and name != "samples.md" and (found := CONTROL.search(data)):
            # samples.md shows what a model wrote, which may be anything
            yield f"{name}:{data.count(10, 0, found.start()) + 1}: a control character"


def _not_utf8(data: bytes) -> int | None:
    """Where `data` ceases to be text; None where it does not."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None

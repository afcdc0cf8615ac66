"""Folders from before there were hashes: they are read, and it is said what they are and what in them is no fact. Nothing
in them can be checked."""

from collections.abc import Iterator
from pathlib import Path

from tunix_rt.evidence.doubtful import parse_object, placeholders, read_bytes, shown
from tunix_rt.evidence.gathered import few

MOST_READ = 50


def unhashed_problems(folder: Path) -> Iterator[str]:
    """That there are no hashes, and what its JSON files leave open."""
    yield "SHA256SUMS is missing: a folder without hashes, in which nothing can be checked"
    for path in sorted(folder.rglob("*.json"))[:MOST_READ]:
        name = shown(path.relative_to(folder).as_posix()).strip("'")
        told = parse_object(read_bytes(path)[0] or b"")
        if isinstance(told, str):
            yield f"{name}: {told}"
        else:
            yield from few(
                (f"{name}: {shown(one)} is null, empty or a placeholder" for one in placeholders(told)), name
            )

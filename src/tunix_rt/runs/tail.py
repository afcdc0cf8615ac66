"""Parts of a file that may be huge, live or hostile: its end, or a sample of its lines, without reading the rest."""

import os
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tunix_rt.runs import checksums

WINDOW = 64 * 1024
"""Bytes read at one place; a longer line is left out."""


def last_objects(root: Path, name: str, most: int = WINDOW) -> list[dict[str, Any]]:
    """The JSON objects in the last `most` bytes of a line file; empty where there is no such file."""
    return _objects(_end(root, name, most)[0])


def last_text(root: Path, name: str, most: int) -> tuple[str, bool]:
    """The last `most` bytes of a text, from the beginning of a line, and whether anything lies before them."""
    data, is_whole = _end(root, name, most)
    return data.decode("utf-8", "replace"), not is_whole


def sample_objects(root: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Objects of a line file: all of a short one; of a longer one the first, the last, and `count` between them that are
    spread evenly over its bytes."""
    try:
        with open(checksums.open_regular(root, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WINDOW:
                return _objects(file.read(size))
            found = [_objects(file.readline(WINDOW))]
            for number in range(1, count + 1):
                file.seek(size * number // (count + 1))
                file.readline(WINDOW)
                found.append(_objects(file.readline(WINDOW)))
    except OSError:
        return []
    found.append(_objects(b"\n".join(_end(root, name, WINDOW)[0].rsplit(b"\n", 2)[-2:])))
    return [one for objects in found for one in objects]


def _end(root: Path, name: str, most: int) -> tuple[bytes, bool]:
    """At most the last `most` bytes, from the beginning of a line, and whether they are the whole file."""
    try:
        with open(checksums.open_regular(root, name), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - most)
            file.seek(start)
            data = file.read(most)
    except OSError:
        return b"", True
    return (data.partition(b"\n")[2], False) if start else (data, True)


def _objects(data: bytes) -> list[dict[str, Any]]:
    """The whole lines in `data` that are JSON objects; what follows the last newline is still being written."""
    found = []
    for line in data.split(b"\n")[:-1]:
        try:
            value = from_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found

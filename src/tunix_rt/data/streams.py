"""The bytes of a data file: unpacked, and still those that were hashed."""

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from tunix_rt.errors import InputError

MAX_DOCUMENT_BYTES = 512_000_000
"""The most that is held of a file which cannot be read piece by piece."""
GZIP = b"\x1f\x8b"
Version = tuple[int, int, int]
"""Size, time of the last change and number of a file: another one of them is another content."""


def printable(name: str) -> str:
    """A name out of a file, safe to print: what is no printable character is escaped."""
    return name if name.isprintable() else repr(name)[1:-1]


def refuse_bytes(path: Path, error: Exception, line: int = 0) -> NoReturn:
    """Say what reading the bytes of a file ended with."""
    where = f"{path}:{line}" if line else f"{path}"
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        words = "the gzip data end too early" if isinstance(error, EOFError) else f"damaged gzip data ({error})"
        raise InputError(f"{where}: {words}", fix="copy or fetch the file again") from error
    said = error.strerror if isinstance(error, OSError) else None
    raise InputError(f"{path}: {said or error}", fix="check the path and its permissions") from error


def version_of(file: IO[bytes]) -> Version:
    """What tells that an open file was changed, or that another one was put in its place."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


def refuse_changed(path: Path, file: IO[bytes], version: Version | None) -> None:
    """Half of an old file and half of a new one is no dataset, and no hash is true of it."""
    if version is not None and version_of(file) != version:
        raise InputError(f"{path} changed while it was read", fix="wait until it is written, then run it again")


@contextlib.contextmanager
def unpacked_bytes(path: Path, version: Version | None = None) -> Iterator[tuple[io.BufferedIOBase, bool]]:
    """The bytes of a file as a stream, out of gzip if they are packed, and whether they were.

    A `version` is that of the file when it was opened and when all is read, or it is refused.
    """
    with path.open("rb") as file:
        refuse_changed(path, file, version)
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        try:
            if packed:
                # Not buffered again: that would lose the lines before a tear.
                with gzip.GzipFile(fileobj=file) as stream:
                    yield stream, True
            else:
                yield file, False
        except Exception:
            refuse_changed(path, file, version)  # then that is why
            raise
        refuse_changed(path, file, version)

"""What a data file is packed in: gzip, read as a stream of bytes; Parquet, read a few rows at a time."""

import contextlib
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from tunix_rt.errors import InputError, StorageError

MAX_DOCUMENT_BYTES = 512_000_000
"""Limit of a file that is held in memory (a JSON document) or unpacked (Parquet in gzip)."""
GZIP = b"\x1f\x8b"
Version = tuple[int, int, int]
"""Size, modification time and inode of a file: it has changed when one of them has."""


def printable(name: str) -> str:
    """A name out of a file, with characters that are not printable escaped."""
    return name if name.isprintable() else repr(name)[1:-1]


def refuse_bytes(path: Path, error: Exception, line: int = 0) -> NoReturn:
    """Raise the error of reading a file as an InputError."""
    where = f"{path}:{line}" if line else f"{path}"
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        problem = "the gzip data is truncated" if isinstance(error, EOFError) else f"corrupt gzip data ({error})"
        raise InputError(f"{where}: {problem}", fix="copy or fetch the file again") from error
    reason = error.strerror if isinstance(error, OSError) else None
    raise InputError(f"{path}: {reason or error}", fix="check the path and its permissions") from error


def version_of(file: IO[bytes]) -> Version:
    """The version of an open file: another one means that the file was changed or replaced."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino


def refuse_changed(path: Path, file: IO[bytes], version: Version | None) -> None:
    """Refuse a file that is no longer `version`: its hash is not that of the records."""
    if version is not None and version_of(file) != version:
        raise InputError(f"{path} changed while it was read", fix="wait until it is written, then run it again")


@contextlib.contextmanager
def unpacked_bytes(path: Path, version: Version | None = None) -> Iterator[tuple[io.BufferedIOBase, bool]]:
    """The bytes of a file as a stream, decompressed if they are gzip, and whether they were.

    With `version`, the file must have it when it is opened and when all of it was read.
    """
    with path.open("rb") as file:
        refuse_changed(path, file, version)
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        try:
            if packed:
                # Without another buffer, which would lose the lines before a truncation.
                with gzip.GzipFile(fileobj=file) as stream:
                    yield stream, True
            else:
                yield file, False
        except Exception:
            refuse_changed(path, file, version)  # the reason of the error
            raise
        refuse_changed(path, file, version)


def read_whole(path: Path, version: Version, what: str, instead: str) -> bytes:
    """All bytes of a file, decompressed. `what` and `instead` are for a file over the limit."""
    try:
        with unpacked_bytes(path, version) as (stream, _):
            content = stream.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        refuse_bytes(path, error)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{path}: {what} of over {MAX_DOCUMENT_BYTES:,} bytes, which would be held in memory", fix=instead
        )
    return content


# --- Parquet --------------------------------------------------------------------------------------------------------

BATCH_ROWS = 8
"""Rows of Parquet in memory at a time: a few kilobytes on disk can be gigabytes of one repeated text."""
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A Parquet value that JSON cannot represent: it is not decoded, only its type is kept."""

    type: str


def read_parquet(path: Path, version: Version) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a Parquet file, batch by batch. Parquet has every column in every row, so nulls are left out of a record."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path} is a Parquet file, and pyarrow is not installed", fix="pip install pyarrow"
        ) from error
    row = 0
    try:
        with (
            _seekable(path, version) as source,
            parquet.ParquetFile(source, buffer_size=PIECE_BYTES, page_checksum_verification=True) as file,
        ):
            names = file.schema_arrow.names
            if len(set(names)) != len(names) or not names:
                problem = "has a column twice" if names else "has no columns"
                raise InputError(f"{path} {problem}", fix="write the file again with every column once")
            # One thread: the caller uses the other cores, and a thread pool does not survive a fork.
            for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                columns = [_values(column, path, row) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    row += 1
                    yield row, {key: value for key, value in zip(names, values, strict=True) if value is not None}
            if row != file.metadata.num_rows:
                raise InputError(
                    f"{path}: corrupt Parquet data ({row:,} rows read, {file.metadata.num_rows:,} in its metadata)",
                    fix="copy or fetch the file again",
                )
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        reason = printable(" ".join(str(error).split())[:200])
        raise InputError(f"{path}: corrupt Parquet data ({reason})", fix="copy or fetch the file again") from error


@contextlib.contextmanager
def _seekable(path: Path, version: Version) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file for a reader that seeks; gzip is unpacked into a temporary file."""
    with unpacked_bytes(path, version) as (stream, packed):
        if not packed:
            yield stream
            return
        with _scratch_disk():
            unpacked = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed below, where errors mean something else
        with unpacked:
            while piece := stream.read(PIECE_BYTES):
                with _scratch_disk():
                    while piece := piece[unpacked.write(piece) :]:
                        pass
                if unpacked.tell() > MAX_DOCUMENT_BYTES:
                    raise InputError(
                        f"{path}: Parquet inside gzip, over {MAX_DOCUMENT_BYTES:,} bytes", fix="unpack it with gunzip"
                    )
            unpacked.seek(0)
            yield io.BufferedReader(unpacked)


@contextlib.contextmanager
def _scratch_disk() -> Iterator[None]:
    """Errors of the temporary folder are errors of that volume, not of the data."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR") or "the temporary folder"
        raise StorageError(
            f"{folder}: {error.strerror or error}, while Parquet inside gzip was unpacked there",
            fix="free space there, set TMPDIR to a folder on another volume, or unpack the file with gunzip",
        ) from error


def _values(column: Any, path: Path, rows_before: int) -> list[Any]:
    """A column of one batch as Python values; types that JSON cannot represent stay opaque."""
    if not _is_plain(column.type):
        unread = Opaque(type=str(column.type))
        return [unread if valid else None for valid in column.is_valid().to_pylist()]
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        for row, scalar in enumerate(column, start=rows_before + 1):
            try:
                scalar.as_py()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} row {row}: not UTF-8 text", fix="write the file again from its source"
                ) from error
        raise
    return values


def _is_plain(kind: Any) -> bool:
    """Whether values of this Arrow type are strings, numbers, booleans, or lists and structs of them."""
    from pyarrow import types

    wraps = (types.is_dictionary, types.is_list, types.is_large_list, types.is_fixed_size_list)
    if any(is_kind(kind) for is_kind in wraps):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(place).type) for place in range(kind.num_fields))
    texts, numbers = (types.is_string, types.is_large_string), (types.is_integer, types.is_floating)
    return any(is_kind(kind) for is_kind in (*texts, *numbers, types.is_boolean, types.is_null))

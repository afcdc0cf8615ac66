"""Rows of a Parquet file, a few at a time."""

import contextlib
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.data.streams import MAX_DOCUMENT_BYTES, Version, printable, unpacked_bytes
from tunix_rt.errors import InputError, StorageError

BATCH_ROWS = 8
"""Rows of Parquet that are held at a time. A few kilobytes of it can hold gigabytes of one text that is repeated."""
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A Parquet value that is neither text, number, truth value nor made of them: not decoded, only named."""

    type: str


def read_parquet(path: Path, version: Version) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a Parquet file, batch by batch. Parquet cannot leave a column out: what is null in a row is not in its record."""
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
                words = "has a column twice" if names else "has no columns"
                raise InputError(f"{path} {words}", fix="write the file again with every column once")
            # One thread: the caller may use the other cores, and a pool of threads does not survive a fork.
            for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                columns = [_values(column, path, row) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    row += 1
                    yield row, {key: value for key, value in zip(names, values, strict=True) if value is not None}
            if row != file.metadata.num_rows:
                raise InputError(
                    f"{path}: damaged Parquet data ({row:,} rows read, {file.metadata.num_rows:,} promised)",
                    fix="copy or fetch the file again",
                )
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        words = printable(" ".join(str(error).split())[:200])
        raise InputError(f"{path}: damaged Parquet data ({words})", fix="copy or fetch the file again") from error


@contextlib.contextmanager
def _seekable(path: Path, version: Version) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file for a reader that jumps about in it; what is packed is unpacked into a temporary file."""
    with unpacked_bytes(path, version) as (stream, packed):
        if not packed:
            yield stream
            return
        with _scratch_disk():
            unpacked = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed below, where its errors are others
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
    """What the disk of the temporary folder does to us is no fault of the data."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR") or "the temporary folder"
        raise StorageError(
            f"{folder}: {error.strerror or error}, while Parquet inside gzip was unpacked there",
            fix="free space there, set TMPDIR to a folder on another volume, or unpack the file with gunzip",
        ) from error


def _values(column: Any, path: Path, rows_before: int) -> list[Any]:
    """A column of one batch as Python values; what JSON could not hold is named, not decoded."""
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
    """Whether values of this Arrow type are texts, numbers, truth values, or lists and structures of them."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(place).type) for place in range(kind.num_fields))
    simple = (
        types.is_string,
        types.is_large_string,
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
    )
    return any(is_kind(kind) for is_kind in simple)

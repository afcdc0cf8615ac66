"""Raw records out of data files: JSONL, JSON and Parquet, plain or gzip, told apart by what is in them, not by their names.

JSONL, gzip and Parquet are read piece by piece; a JSON document is held as text, so its size is limited.
"""

import contextlib
import gzip
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tunix_rt.data.json_document import DECODER, is_document, records_of
from tunix_rt.errors import InputError

if TYPE_CHECKING:
    from tunix_rt.data.registry import Dataset

MAX_LINE_BYTES = 1_000_000
MAX_BLANK_LINES = 1_000
"""At the end of a file; a few kilobytes of gzip can hold more of them than anyone wants to wait for."""
MAX_DOCUMENT_BYTES = 512_000_000
BATCH_ROWS = 512
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"

NOT_READ = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"ARROW1": "an Arrow file",
}

Records = Iterator[tuple[int, Any]]
"""Line (in Parquet: row), counted from 1, and the record there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """One record as it lies in file number `file`. A line of JSONL is not decoded: whoever wants it parses it."""

    file: int
    line: int
    data: bytes | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A Parquet value that is neither text, number, truth value nor made of them: not decoded, only named."""

    type: str


def recognise(path: Path) -> tuple[str, bool]:
    """Container of the file (jsonl, json or parquet), and whether it is packed with gzip. What is none of them is JSONL."""
    head, packed = _head(path)
    for magic, words in NOT_READ.items():
        if head.startswith(magic):
            raise InputError(
                f"{path} is {words}", fix="unpack or convert it: JSONL, JSON and Parquet are read, also in gzip"
            )
    if head.startswith(b"PAR1"):
        return "parquet", packed
    text = head.removeprefix(BOM).lstrip(b" \t\r\n")
    return "json" if text.startswith(b"[") or (text.startswith(b"{") and is_document(text)) else "jsonl", packed


def read_raw(dataset: "Dataset") -> Generator[Raw]:
    """Every record of every file, in order. What cannot be read is an InputError with the file, and the line if there is one."""
    for number, file in enumerate(dataset.files):
        line = 0
        for line, data in _READERS[file.container](file.path):
            yield Raw(file=number, line=line, data=data)
        if not line:
            raise InputError(f"{file.path} holds no rows", fix="give a file with at least one record")


def parse(raw: Raw, where: str) -> dict[str, Any]:
    """The record as a mapping; `where` names it in an error."""
    return raw.data if isinstance(raw.data, dict) else parse_line(raw.data, where)


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """One line of JSONL as a mapping."""
    fix = "correct the line: every line is one JSON object"
    try:
        value = DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text", fix="save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg}, at character {error.pos + 1})", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})", fix=fix) from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: {kind_of(value)}, not an object", fix=fix)
    return value


def kind_of(value: Any) -> str:
    """What kind of value it is, in the words of JSON."""
    if isinstance(value, Opaque):
        return f"a Parquet value of type {value.type}"
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


def printable(name: str) -> str:
    """A name out of a file, safe to print: what is no printable character is escaped."""
    return name if name.isprintable() else repr(name)[1:-1]


# --- bytes -----------------------------------------------------------------------------------------------------------


def _refuse(path: Path, error: Exception, line: int = 0) -> NoReturn:
    """Say what reading the bytes of a file ended with."""
    where = f"{path}:{line}" if line else f"{path}"
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        words = "the gzip data end too early" if isinstance(error, EOFError) else f"damaged gzip data ({error})"
        raise InputError(f"{where}: {words}", fix="copy or fetch the file again") from error
    said = error.strerror if isinstance(error, OSError) else None
    raise InputError(f"{path}: {said or error}", fix="check the path and its permissions") from error


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[tuple[io.BufferedIOBase, bool]]:
    """The bytes of a file as a stream, out of gzip if they are packed, and whether they were."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        if not packed:
            yield file, False
            return
        with gzip.GzipFile(fileobj=file) as stream:  # not buffered again: that would lose the lines before a tear
            yield stream, True


def _head(path: Path) -> tuple[bytes, bool]:
    """The first unpacked bytes, enough for a whole line, and whether they were packed. Damage is left to the reader."""
    head = bytearray()
    packed = True
    try:
        with _unpacked(path) as (stream, packed):
            while len(head) <= MAX_LINE_BYTES and (piece := stream.read1(MAX_LINE_BYTES)):
                head += piece
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return bytes(head), packed
    except OSError as error:
        _refuse(path, error)
    return bytes(head), packed


# --- JSONL -----------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its number. Blank lines are allowed at the end only; of a line that is too long, one part is read."""
    blank_at = number = 0
    try:
        with _unpacked(path) as (stream, _):
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{path}:{number}: over {MAX_LINE_BYTES:,} bytes in one line", fix="is it JSONL?")
                if number == 1:
                    line = line.removeprefix(BOM)
                blank = not line.strip()
                blank_at = blank_at or (number if blank else 0)
                if blank and number - blank_at < MAX_BLANK_LINES:
                    continue
                if blank_at:
                    raise InputError(f"{path}:{blank_at}: a blank line", fix="remove it; every line is one record")
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        _refuse(path, error, number + 1)


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read_document(path: Path) -> Records:
    """Records of a JSON document: a list of objects, or an object with exactly one list of objects."""
    try:
        for line, value in records_of(_document(path)):
            if not isinstance(value, dict):
                raise InputError(f"{path}:{line}: {kind_of(value)}, not an object", fix="every item is one record")
            yield line, value
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not JSON ({error.msg}, at character {error.colno} of the line)",
            fix="correct it; a JSON file is a list of objects, or an object with exactly one list of objects",
        ) from error


def _document(path: Path) -> str:
    try:
        with _unpacked(path) as (stream, _):
            content = stream.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        _refuse(path, error)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{path}: a JSON document of over {MAX_DOCUMENT_BYTES:,} bytes, which would be held in memory whole",
            fix="write it as JSONL, one record per line: that is read piece by piece",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text", fix="save the file as UTF-8") from error


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Records:
    """Rows of a Parquet file, batch by batch. Parquet cannot leave a column out: what is null in a row is not in its record."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path} is a Parquet file, and pyarrow is not installed", fix='pip install "tunix-rt[parquet]"'
        ) from error
    row = 0
    try:
        with _seekable(path) as source, parquet.ParquetFile(source, page_checksum_verification=True) as file:
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
def _seekable(path: Path) -> Iterator[Any]:
    """The bytes of a file for a reader that jumps about in it; what is packed is unpacked into a temporary file."""
    with _unpacked(path) as (stream, packed):
        if not packed:
            yield stream
            return
        with tempfile.TemporaryFile() as unpacked:
            while piece := stream.read(1 << 20):
                unpacked.write(piece)
                if unpacked.tell() > MAX_DOCUMENT_BYTES:
                    raise InputError(
                        f"{path}: Parquet inside gzip, over {MAX_DOCUMENT_BYTES:,} bytes", fix="unpack it with gunzip"
                    )
            unpacked.seek(0)
            yield unpacked


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


_READERS: dict[str, Callable[[Path], Records]] = {
    "jsonl": read_lines,
    "json": _read_document,
    "parquet": _read_parquet,
}

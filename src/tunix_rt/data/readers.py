"""Raw records out of data files: JSONL, JSON and Parquet, plain or gzip, told apart by what is in them, not by their names.

JSONL, gzip and Parquet are read piece by piece; a JSON document is held as text, so its size is limited.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_rt.data.json_document import DECODER, is_document, records_of
from tunix_rt.data.parquet import Opaque, read_parquet
from tunix_rt.data.streams import MAX_DOCUMENT_BYTES, Version, refuse_bytes, unpacked_bytes
from tunix_rt.errors import InputError

if TYPE_CHECKING:
    from tunix_rt.data.sources import Dataset

MAX_LINE_BYTES = 1_000_000
"""Of one record, whatever it lies in: outside of JSONL its texts are counted."""
MAX_BLANK_LINES = 1_000
"""At the end of a file; a few kilobytes of gzip can hold more of them than anyone wants to wait for."""
BOM = b"\xef\xbb\xbf"

NOT_READ = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"ARROW1": "an Arrow file",
}

Records = Iterator[tuple[int, Any]]
"""Line (in Parquet: row), counted from 1, and the record there. In JSON: line and record, packed by `pack_line`."""
LINE_BITS = 34
"""Line and record of the largest JSON document fit into 63 bits: no record has less than two bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """One record as it lies in file number `file`. A line of JSONL is not decoded: whoever wants it parses it.

    `line` is one number to keep and to give to `Dataset.place`; out of a JSON document it holds the record too.
    """

    file: int
    line: int
    data: bytes | dict[str, Any]


def pack_line(line: int, record: int) -> int:
    """Where a record of a JSON document stands, in one number: the line where it begins, and which record it is."""
    return line | record << LINE_BITS


def unpack_line(packed: int) -> tuple[int, int]:
    """Line and record, both from 1; the record is 0 where the line alone tells it (JSONL, and rows of Parquet)."""
    return packed & (1 << LINE_BITS) - 1, packed >> LINE_BITS


def line_words(packed: int) -> str:
    """`12`, or `12 (record 3)` out of a JSON document."""
    line, record = unpack_line(packed)
    return f"{line} (record {record})" if record else f"{line}"


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
    _refuse_csv(path, text)
    return "json" if text.startswith(b"[") or (text.startswith(b"{") and is_document(text)) else "jsonl", packed


_COLUMN = re.compile(r"[^\W\d][\w .:/#()-]{0,60}")


def _refuse_csv(path: Path, head: bytes) -> None:
    """Refuse a file whose first line is names of columns, and no JSON."""
    line = re.split(rb"[\r\n]", head[:10_000], maxsplit=1)[0].decode("utf-8", "replace")
    for name, mark, told in (("TSV", "\t", ", delimiter='\\t'"), ("CSV", ",", ""), ("CSV", ";", ", delimiter=';'")):
        columns = [column.strip().strip('"') for column in line.split(mark)]
        if len(columns) > 1 and all(map(_COLUMN.fullmatch, columns)):
            source = f"open(0, newline='', encoding='utf-8-sig'){told}"
            code = f"import csv, json; [print(json.dumps(row)) for row in csv.DictReader({source})]"
            raise InputError(
                f"{path}:1: not JSON: it looks like {name}, which is not read",
                fix=f'write it as JSONL, with the names of a format as columns: python -c "{code}" < FILE > FILE.jsonl',
            )


def read_raw(dataset: "Dataset") -> Generator[Raw]:
    """Every record of every file, in order. What cannot be read is an InputError with the file, and the line if there is one.

    The last record of a file comes when the file was read to its end and is still the one that was hashed.
    """
    for number, file in enumerate(dataset.files):
        held = None
        for line, data in _READERS[file.container](file.path, file.version):
            if held is not None:
                yield held
            if not isinstance(data, bytes) and _text_bytes(data) > MAX_LINE_BYTES:
                raise InputError(
                    f"{dataset.place(number, line)}: the record is longer than {MAX_LINE_BYTES:,} bytes",
                    fix="divide it, or leave it out",
                )
            held = Raw(file=number, line=line, data=data)
        if held is None:
            raise InputError(f"{file.path} holds no rows", fix="give a file with at least one record")
        yield held


def _text_bytes(record: dict[str, Any]) -> int:
    """UTF-8 bytes of all texts of a record: never more than the line of JSONL that it would be."""
    total = 0
    left: list[Any] = [record]
    while left:
        value = left.pop()
        if type(value) is str:
            total += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif type(value) is list:
            left += value
        elif type(value) is dict:
            left += value
            left += value.values()
    return total


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


# --- bytes -----------------------------------------------------------------------------------------------------------


def _head(path: Path) -> tuple[bytes, bool]:
    """The first unpacked bytes, enough for a whole line, and whether they were packed. Damage is left to the reader."""
    head = bytearray()
    packed = True
    try:
        with unpacked_bytes(path) as (stream, packed):
            while len(head) <= MAX_LINE_BYTES and (piece := stream.read1(MAX_LINE_BYTES)):
                head += piece
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return bytes(head), packed
    except OSError as error:
        refuse_bytes(path, error)
    return bytes(head), packed


# --- JSONL -----------------------------------------------------------------------------------------------------------


def read_lines(path: Path, version: Version | None = None) -> Iterator[tuple[int, bytes]]:
    """Every line with its number. Blank lines are allowed at the end only; of a line that is too long, one part is read."""
    blank_at = number = 0
    try:
        with unpacked_bytes(path, version) as (stream, _):
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
        refuse_bytes(path, error, number + 1)


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read_document(path: Path, version: Version) -> Records:
    """Records of a JSON document: a list of objects, or an object with exactly one list of objects."""
    try:
        for record, (line, value) in enumerate(records_of(_document(path, version)), start=1):
            place = pack_line(line, record)
            if not isinstance(value, dict):
                where = f"{path}:{line_words(place)}"
                raise InputError(f"{where}: {kind_of(value)}, not an object", fix="every item is one record")
            yield place, value
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not JSON ({error.msg}, at character {error.colno} of the line)",
            fix="correct it; a JSON file is a list of objects, or an object with exactly one list of objects",
        ) from error


def _document(path: Path, version: Version) -> str:
    try:
        with unpacked_bytes(path, version) as (stream, _):
            content = stream.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        refuse_bytes(path, error)
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


_READERS: dict[str, Callable[[Path, Version], Records]] = {
    "jsonl": read_lines,
    "json": _read_document,
    "parquet": read_parquet,
}

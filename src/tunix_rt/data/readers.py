"""Raw records of data files, plain or gzip, recognized by content; only plain text and a table of one column by name.

JSONL, gzip and Parquet are streamed; a JSON document, a table and a text are held in memory, so their size is limited.
"""

import contextlib
import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tunix_rt.data.containers import (
    Opaque,
    Version,
    read_parquet,
    read_whole,
    refuse_bytes,
    refuse_changed,
    unpacked_bytes,
)
from tunix_rt.data.tables import Unreadable, read_table, read_text
from tunix_rt.errors import InputError

if TYPE_CHECKING:
    from tunix_rt.data.sources import Dataset

MAX_LINE_BYTES = 1_000_000
"""Limit of one record in every container: in JSON and Parquet its strings are counted."""
MAX_BLANK_LINES = 1_000
"""Limit at the end of a file: a few kilobytes of gzip can contain gigabytes of them."""
BOM = b"\xef\xbb\xbf"

Records = Iterator[tuple[int, Any]]
"""Line (in Parquet: row), counted from 1, and its record. In JSON: line and record number, packed by `pack_line`."""
LINE_BITS = 34
"""Line and record number of the largest JSON document fit into 63 bits: no record has less than two bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """One record of file number `file`, before decoding: a line of JSONL is bytes, which `parse` decodes.

    `line` is the number that `Dataset.place` takes; in a JSON document it contains the record number too.
    """

    file: int
    line: int
    data: Any
    """Bytes of a line, a mapping, `Unreadable`, or another JSON value, which is no record."""


def pack_line(line: int, record: int) -> int:
    """The place of a record of a JSON document in one number: the line where it begins, and its record number."""
    return line | record << LINE_BITS


def unpack_line(packed: int) -> tuple[int, int]:
    """Line and record number, both from 1; the second is 0 where the line suffices (JSONL, and rows of Parquet)."""
    return packed & (1 << LINE_BITS) - 1, packed >> LINE_BITS


def describe_line(packed: int) -> str:
    """`12`, or `12 (record 3)` in a JSON document."""
    line, record = unpack_line(packed)
    return f"{line} (record {record})" if record else f"{line}"


class BadRecord(InputError):
    """One record that breaks the rule of that name in `validation`: others of its file can be read."""

    def __init__(self, where: str, problem: str, *, fix: str, rule: str = "unreadable") -> None:
        super().__init__(f"{where}: {problem}", fix=fix)
        self.seen = problem
        self.rule = rule


def read_raw(dataset: "Dataset") -> Generator[Raw]:
    """Every record of every file, in order. What cannot be read is an InputError with the file, and its line if known.

    The last record of a file is yielded after the file was read to its end and is still the one that was hashed.
    """
    counted = 0
    for number, file in enumerate(dataset.files):
        held = None
        for line, data in _READERS[file.container](file.path, file.version):
            if held is not None:
                yield held
                counted += 1
            if counted == dataset.limit:
                with file.path.open("rb") as opened:
                    refuse_changed(file.path, opened, file.version)
                return
            if not isinstance(data, bytes) and _text_bytes(data) > MAX_LINE_BYTES:
                raise InputError(
                    f"{dataset.place(number, line)}: the record is longer than {MAX_LINE_BYTES:,} bytes",
                    fix="split it, or leave it out",
                )
            held = Raw(file=number, line=line, data=data)
        if held is None:
            raise InputError(f"{file.path} has no rows", fix="give a file with at least one record")
        yield held
        counted += 1
        if counted == dataset.limit:
            return


def _text_bytes(record: Any) -> int:
    """UTF-8 bytes of all strings of a record: never more than its line of JSONL has."""
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a value")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:60]!r} is given twice")
    return record


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_no_key_twice)
"""Strict JSON: a repeated key and NaN are errors."""


def parse(raw: Raw, where: str) -> dict[str, Any]:
    """The record as a mapping; `where` names it in an error."""
    if isinstance(raw.data, bytes):
        return parse_line(raw.data, where)
    if isinstance(raw.data, Unreadable):
        raise BadRecord(where, raw.data.problem, fix="correct the row: every row has as many cells as the header")
    if not isinstance(raw.data, dict):
        raise BadRecord(where, f"{kind_of(raw.data)}, not an object", fix="every item is one record")
    return raw.data


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """One line of JSONL as a mapping."""
    fix = "correct the line: every line is one JSON object"
    if not line.strip():
        raise BadRecord(where, "a blank line", fix="remove it; every line is one record")
    try:
        value = DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(where, "not UTF-8 text", fix="save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        python = "; keys in single quotes are Python, not JSON" if line.lstrip().startswith(b"{'") else ""
        raise BadRecord(where, f"not JSON ({error.msg}, at character {error.pos + 1}{python})", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise BadRecord(where, f"not JSON ({error})", fix=fix) from error
    if not isinstance(value, dict):
        raise BadRecord(where, f"{kind_of(value)}, not an object", fix=fix)
    return value


def kind_of(value: Any) -> str:
    """The type of a value, as JSON names it."""
    if isinstance(value, Opaque):
        return f"a Parquet value of type {value.type}"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# --- JSONL -----------------------------------------------------------------------------------------------------------


def read_lines(path: Path, version: Version | None = None) -> Iterator[tuple[int, bytes]]:
    """Every line with its number, without blank lines at the end; a line over the limit is not read whole."""
    blank = number = 0
    try:
        with unpacked_bytes(path, version) as (stream, _):
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"{path}:{number}: a line of over {MAX_LINE_BYTES:,} bytes",
                        fix="if it is one record, split it or leave it out; if it is many, write one per line, "
                        "or all of them as one JSON list",
                    )
                if number == 1:
                    line = line.removeprefix(BOM)
                if not line.strip():
                    blank += 1
                    if blank > MAX_BLANK_LINES:
                        raise InputError(
                            f"{path}:{number - blank + 1}: over {MAX_BLANK_LINES:,} blank lines",
                            fix="remove them; every line is one record",
                        )
                    continue
                yield from ((number - back, b"") for back in range(blank, 0, -1))
                blank = 0
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        refuse_bytes(path, error, number + 1)


# --- JSON ------------------------------------------------------------------------------------------------------------

RECORD_KEYS = frozenset(
    ("messages", "conversations", "steps", "prompt", "completion", "response", "input", "output", "question", "answer")
)
"""Keys whose list of objects is part of one record. A list of objects under any other key is a list of records."""
_SPACE = re.compile(r"[ \t\n\r]*")
_LIST_OF_OBJECTS = re.compile(r"\[[ \t\n\r]*\{")


class _SeveralLists(Exception):
    """A JSON document has records under each of these two keys."""


class _Cursor:
    """A position in a JSON text, moving forward. Every problem of the text is a JSONDecodeError with its position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches anywhere
        return self.text[self.at : self.at + 1]

    def take(self, wanted: str) -> str:
        """The next character, which must be one of `wanted`."""
        character = self.peek()
        if not character or character not in wanted:
            raise self.error(f"expected {' or '.join(wanted)}")
        self.at += 1
        return character

    def value(self) -> Any:
        self.peek()
        try:
            value, self.at = DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise self.error(str(error)) from error
        return value

    def items(self) -> Iterator[tuple[int, Any]]:
        """The items of a list, each with the position of its first character."""
        mark = self.take("[")
        if self.peek() == "]":
            mark = self.take("]")
        while mark != "]":
            self.peek()
            start = self.at
            yield start, self.value()
            mark = self.take(",]")

    def members(self) -> Iterator[str]:
        """The keys of an object. After each, the cursor is at its value, which the caller takes."""
        mark = self.take("{")
        keys: set[str] = set()
        while mark != "}":
            if self.peek() != '"':
                raise self.error("expected a key in double quotes")
            key = str(self.value())
            if key in keys:
                raise self.error(f"the key {key[:60]!r} is given twice")
            keys.add(key)
            self.take(":")
            self.peek()
            yield key
            mark = self.take(",}")

    def error(self, problem: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(problem, self.text, self.at)


def is_document(head: bytes) -> bool:
    """Whether a file that begins with `{` is one object around a list of records, and not JSONL."""
    line, _, rest = head.partition(b"\n")
    if rest.strip():
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            return False  # a complete value in the first line, and more lines
    cursor = _Cursor(head.decode("utf-8", "ignore"))
    with contextlib.suppress(json.JSONDecodeError):  # the head ends anywhere
        for key in cursor.members():
            if _LIST_OF_OBJECTS.match(cursor.text, cursor.at):
                return key not in RECORD_KEYS
            cursor.value()
    return False


def _listed(cursor: _Cursor) -> Iterator[tuple[int, Any]]:
    """Items of a list, or of the only list of objects in an object, each with the position where it begins."""
    if cursor.peek() == "{":
        yield from _listed_in_object(cursor)
    else:
        yield from cursor.items()
    if cursor.peek():
        raise cursor.error("more after the end of the document; JSONL begins with a whole object in its first line")


def _listed_in_object(cursor: _Cursor) -> Iterator[tuple[int, Any]]:
    records_in = None
    for key in cursor.members():
        if records_in is None and _LIST_OF_OBJECTS.match(cursor.text, cursor.at):
            records_in = key
            yield from cursor.items()
            continue
        start = cursor.at
        value = cursor.value()
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            if records_in is not None:
                raise _SeveralLists(records_in, key, cursor.text.count("\n", 0, start) + 1)
            raise cursor.error(f"an object in the list under {key[:60]!r}, but it begins with no object")


def _read_document(path: Path, version: Version) -> Records:
    """Records of a JSON document: a list of objects, or an object with exactly one list of objects."""
    text, line, counted = _document(path, version), 1, 0
    try:
        for record, (start, value) in enumerate(_listed(_Cursor(text)), start=1):
            line, counted = line + text.count("\n", counted, start), start
            yield pack_line(line, record), value
    except _SeveralLists as several:
        first, second, line = several.args
        code = "import json, sys; a = sys.argv; json.dump(json.load(open(a[1], encoding='utf-8-sig'))[a[2]], open(a[3], 'w'))"
        names = [shlex.quote(str(name)) for name in (path, first, f"{path}.{first[:60]}.json")]
        raise InputError(
            f"{path}:{line}: a JSON document with records under {first[:60]!r} and under {second[:60]!r}",
            fix=f'write the list to train on into a file of its own: python -c "{code}" {" ".join(names)}',
        ) from several
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not JSON ({error.msg}, at character {error.colno} of the line)",
            fix="correct it; a JSON file is a list of objects, or an object with exactly one list of objects",
        ) from error


def _document(path: Path, version: Version) -> str:
    content = read_whole(path, version, "a JSON document", "write it as JSONL, one record per line, which is streamed")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text", fix="save the file as UTF-8") from error


_READERS: dict[str, Callable[[Path, Version], Records]] = {
    "jsonl": read_lines,
    "json": _read_document,
    "parquet": read_parquet,
    "csv": read_table,
    "text": read_text,
}

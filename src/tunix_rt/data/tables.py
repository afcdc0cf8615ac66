"""CSV, TSV and plain text, held in memory: their encoding, delimiter and header are detected."""

import contextlib
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tunix_rt.data.containers import MAX_DOCUMENT_BYTES, Version, printable, read_whole
from tunix_rt.errors import InputError

DELIMITERS = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}
TABLE_ENDINGS = (".csv", ".tsv")
TEXT_ENDING = ".txt"
SNIFFED_ROWS, SNIFFED_CHARACTERS = 50, 200_000
MAX_COLUMN_CHARACTERS = 100
_NUMBER = re.compile(r"[-+]?[\d.,]*\d[\d.,]*%?")
_COLUMN = re.compile(r"[^\W\d][\w .:/#()&'*%-]{0,60}")
_BINARY = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f]")
_JSON_LIST = re.compile(r'\[\s*[{"]|\[\W*\w+["\']\s*:|\[[\[\]{}\s\d,.]*\Z')
"""A list, whole or torn. `[1] Introduction` and `[draft] ...` are prose."""
_JSON_LINE = re.compile(r'^\s*(\{\s*["\']|\[\s*\{)', re.MULTILINE)


def decode(content: bytes) -> tuple[str, str]:
    """The text and its encoding: by its byte order mark, else UTF-8 if it is valid, else that of Windows (or Latin-1)."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16"), "utf-16"
    if content[1:200:2].count(0) > 0.8 * len(content[1:200:2]) and content[:200:2].count(0) < 0.2 * len(
        content[:200:2]
    ):
        return content.decode("utf-16-le"), "utf-16"
    name = "utf-8 with BOM" if content.startswith(b"\xef\xbb\xbf") else "utf-8"
    for codec, shown in (("utf-8-sig", name), ("cp1252", "cp1252")):
        with contextlib.suppress(UnicodeDecodeError):
            return content.decode(codec), shown
    return content.decode("latin-1"), "latin-1"


def recognise_text(path: Path, head: bytes) -> str | None:
    """`csv` or `text` for a file that begins with `head` and is neither JSON nor binary; None for any other."""
    name = path.name.lower().removesuffix(".gz")
    try:
        text, _ = decode(head[: len(head) // 2 * 2])
    except UnicodeDecodeError:
        return None
    text = text.lstrip(" \t\r\n\ufeff")
    if not text or _BINARY.search(text[:SNIFFED_CHARACTERS]) or text.startswith("{") or _JSON_LIST.match(text):
        return None
    if name.endswith(TABLE_ENDINGS):
        return "csv"
    delimiter, columns, same = _sniff(text)
    is_header = len(columns) > 1 and all(map(_COLUMN.fullmatch, columns))
    if name.endswith(TEXT_ENDING):
        is_table = is_header and delimiter == "\t" and same == 1
        return "csv" if is_table else None if _JSON_LINE.search(text) else "text"
    return "csv" if is_header and same > 0.5 else None


def _sniff(text: str) -> tuple[str, list[str], float]:
    """The delimiter with which most rows have as many cells as the first, its cells, and the share of such rows."""
    found: list[tuple[float, int, str, list[str]]] = []
    for mark in DELIMITERS:
        lines = io.StringIO(text[:SNIFFED_CHARACTERS], newline="")
        try:
            rows = [row for row in islice(csv.reader(lines, delimiter=mark), SNIFFED_ROWS) if row]
        except csv.Error:
            continue
        if rows and len(rows[0]) > 1:
            same = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
            found.append((same, len(rows[0]), mark, [cell.strip() for cell in rows[0]]))
    if not found:
        return ",", [text.partition("\n")[0].strip().strip('"')], 1.0
    same, _, mark, columns = max(found, key=lambda one: one[:2])
    return mark, columns, same


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that its reader could not read, for `parse` to refuse."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A CSV file in memory."""

    text: str
    encoding: str
    delimiter: str
    columns: tuple[str, ...]

    def describe(self) -> str:
        name = "TSV" if self.delimiter == "\t" else "CSV"
        columns = ", ".join(printable(column) for column in self.columns[:12]) + " ..." * (len(self.columns) > 12)
        count = f"{len(self.columns)} column{'s' * (len(self.columns) > 1)}"
        return f"{name}, {DELIMITERS[self.delimiter]}, {self.encoding}, {count}: {columns}"


def open_table(path: Path, version: Version) -> Table:
    text, encoding = _decoded(path, version)
    text = text.lstrip("\ufeff")
    delimiter, first, _ = _sniff(text.lstrip("\r\n"))
    columns = [name or f"column {number}" for number, name in enumerate(first, start=1)]  # pandas names no index
    if not _is_header(first):
        shown = printable(delimiter.join(first))[:80]
        names = f"of up to {MAX_COLUMN_CHARACTERS} characters, each of its own, none a number"
        raise InputError(
            f"{path}:1: the first line is not a header: {shown}",
            fix=f"add a first line with the names of the columns ({names}), such as question{delimiter}answer",
        )
    return Table(text=text, encoding=encoding, delimiter=delimiter, columns=tuple(columns))


def _is_header(cells: list[str]) -> bool:
    """Whether every cell may be a name. pandas leaves the first one empty, a spreadsheet the last ones."""
    last = max((at for at, cell in enumerate(cells) if cell), default=len(cells))
    return all(
        cell.isprintable() and len(cell) <= MAX_COLUMN_CHARACTERS and not _NUMBER.fullmatch(cell)
        and (cell not in cells[:at] if cell else at in (0, *range(last, len(cells))))
        for at, cell in enumerate(cells)
    )  # fmt: skip


def read_table(path: Path, version: Version) -> Iterator[tuple[int, dict[str, str] | Unreadable]]:
    """Rows of a CSV file below its header. Rows without a text in any cell are no records, as in a spreadsheet."""
    table = open_table(path, version)
    csv.field_size_limit(MAX_DOCUMENT_BYTES)  # the limit of a record applies, with its line
    rows = csv.reader(io.StringIO(table.text, newline=""), delimiter=table.delimiter, strict=True)
    header = False
    while True:
        line = rows.line_num + 1
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            # What follows a quote that is not closed belongs to its cell, up to the next quote: how many records is unknown.
            if rows.line_num > line or "unexpected end" in str(error):
                opened = _open_quote(table, line, rows.line_num)
                raise InputError(
                    f"{path}:{opened}: a quote opens here and is not closed ({error}, in line {rows.line_num:,})",
                    fix='close it, or write a quote inside a quoted cell twice: ""',
                ) from error
            yield line, Unreadable(problem=f"not a row of CSV ({error})")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = True
        elif len(cells) != len(table.columns):
            yield line, Unreadable(problem=f"{len(cells)} cells, and the header has {len(table.columns)} columns")
        else:
            yield line, dict(zip(table.columns, cells, strict=True))


def _open_quote(table: Table, first: int, last: int) -> int:
    """The line where the quoted cell begins that ends the record of these lines."""
    mark = re.escape(table.delimiter)
    record = "".join(islice(io.StringIO(table.text, newline=""), first - 1, last))
    whole = re.match(rf'(?:(?:"[^"]*+(?:""[^"]*+)*+"|[^"{mark}][^{mark}]*+)?{mark})*+', record)
    assert whole is not None, "it matches nothing too"
    return first + sum(1 for _ in io.StringIO(record[: whole.end() + 1], newline="")) - 1


def read_text(path: Path, version: Version) -> Iterator[tuple[int, dict[str, str]]]:
    """Documents of a text file: blocks of lines with blank lines between them."""
    text, _ = _decoded(path, version)
    block: list[str] = []
    for number, line in enumerate([*text.replace("\r\n", "\n").split("\n"), ""], start=1):
        if line.strip():
            block.append(line)
        elif block:
            yield number - len(block), {"text": "\n".join(block)}
            block = []


def describe_container(container: str, path: Path, version: Version) -> str:
    """The name of the container; of a table and a text with what was detected."""
    if container == "csv":
        return open_table(path, version).describe()
    return container if container != "text" else f"text, {_decoded(path, version)[1]}, a document per block of lines"


def _decoded(path: Path, version: Version) -> tuple[str, str]:
    content = read_whole(path, version, "a table or text", "split it into several files")
    try:
        text, encoding = decode(content)
        if encoding in ("cp1252", "latin-1") and _is_damaged_utf8(content):
            content.decode("utf-8")
        return text, encoding
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, f"0x{content[error.start]:02x}"
        problem = f"{path}:{line}: not {error.encoding} text ({byte}, at byte {error.start:,} of the file)"
        raise InputError(problem, fix="correct it, or save the file as UTF-8 from its source") from error


def _is_damaged_utf8(content: bytes) -> bool:
    """Whether bytes that are not UTF-8 are most likely damage: read as Windows text, every other letter would be wrong.

    In Windows text, two letters that happen to be one of UTF-8 are rarer than 1 in 20."""
    kept = content.decode("utf-8", "ignore")
    return (len(kept) - len(kept.encode("ascii", "ignore"))) * 20 > len(content) - len(kept.encode())

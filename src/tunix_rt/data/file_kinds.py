"""What a data file is, by its first bytes: a container that `readers` reads, or a kind that is refused by its name."""

import contextlib
import gzip
import shlex
import zlib
from pathlib import Path

from tunix_rt.data.containers import refuse_bytes, unpacked_bytes
from tunix_rt.data.readers import BOM, MAX_LINE_BYTES, is_document
from tunix_rt.data.tables import decode, recognise_text
from tunix_rt.errors import InputError

READ = "JSONL, JSON, CSV and Parquet are read, also in gzip"
_CSV = "open it and save it as CSV UTF-8 (File > Save As), then give that file"
_PAGE = "download the file itself: on the hub, its address has /resolve/ in place of /blob/"
NOT_READ = {
    b"\xd0\xcf\x11\xe0": ("an old Excel or Word file", _CSV),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", f"unpack it: {READ}"),
    b"BZh": ("compressed with bzip2", f"unpack it: {READ}"),
    b"\xfd7zXZ\x00": ("compressed with xz", f"unpack it: {READ}"),
    b"ARROW1": ("an Arrow file", f"convert it to Parquet: {READ}"),
    b"%PDF": ("a PDF file", f"extract its text: {READ}"),
    b"<!doctype html": ("an HTML page", _PAGE),
    b"<html": ("an HTML page", _PAGE),
    b"<?xml": ("an XML file", f"convert it: {READ}"),
    b"xl/": ("an Excel workbook", _CSV),
    b"word/": ("a Word document", f"save it as text: {READ}"),
    b"PK\x03\x04": ("a zip archive", f"unpack it and give the file inside: {READ}"),
}
"""Beginning of a file -> what it is, and the way out. `xl/` and `word/` are folders in a zip archive."""


def recognise(path: Path) -> tuple[str, bool]:
    """Container of the file (jsonl, json, parquet, csv or text), and whether it is gzip. Unknown content is JSONL."""
    head, packed = _head(path)
    text = head.removeprefix(BOM).lstrip(b" \t\r\n")
    kind = next((magic for magic in NOT_READ if text[:20].lower().startswith(magic.lower())), None)
    if kind == b"PK\x03\x04":
        kind = next((inside for inside in (b"xl/", b"word/") if inside in head), kind)
    if kind is not None:
        what, way_out = NOT_READ[kind]
        raise InputError(f"{path} is {what}", fix=way_out)
    if head.startswith(b"PAR1"):
        return "parquet", packed
    _refuse_utf16(path, head)
    if table := recognise_text(path, head):
        return table, packed
    return "json" if text.startswith(b"[") or (text.startswith(b"{") and is_document(text)) else "jsonl", packed


def _refuse_utf16(path: Path, head: bytes) -> None:
    """Refuse JSON in UTF-16, which has a zero byte beside every letter. A table may be in UTF-16."""
    if b"\0" not in head[:4]:
        return
    with contextlib.suppress(UnicodeDecodeError):
        text, encoding = decode(head[: len(head) // 2 * 2])
        if encoding == "utf-16" and text.lstrip(" \t\r\n\ufeff").startswith(("{", "[")):
            code = "import sys; open(sys.argv[2], 'wb').write(open(sys.argv[1], encoding='utf-16', newline='').read().encode())"
            name = shlex.quote(str(path))
            fix = f'save it as UTF-8: python -c "{code}" {name} {name}.utf8'
            raise InputError(f"{path}:1: UTF-16 text, and JSON is UTF-8", fix=fix)


def _head(path: Path) -> tuple[bytes, bool]:
    """The first decompressed bytes, enough for a line, and whether they were gzip. Corrupt data is left to the reader."""
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

"""What every generated page is made of: the note that it is generated, tables, and blocks between markers."""

from collections.abc import Iterable
from pathlib import Path

from tunix_rt.errors import TunixError

WRITTEN = "<!-- Written by `python -m docs.generate`; edit the code it is read from. -->"


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


LABELS = {
    "matrix products of the layers": "matmuls of the layers",
    "loss head: products": "loss head: matmuls",
    "token table lookup": "embedding lookup",
    "the device waited": "idle device",
    "products in bfloat16": "bfloat16 compute",
    "bfloat16 products": "bfloat16 compute",
}
"""Labels in recorded results -> those of today. The raw files are not edited."""


def relabelled(text: str) -> str:
    for recorded, today in LABELS.items():
        text = text.replace(recorded, today)
    return text


def with_block(root: Path, page: Path, name: str, block: str) -> str:
    """The text of `page` with what stands between its markers `name` replaced."""
    return replaced((root / page).read_text(encoding="utf-8"), name, block, page)


def replaced(text: str, name: str, block: str, page: Path) -> str:
    """`text`, which is that of `page`, with what stands between its markers `name` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise TunixError(f"{page} needs one {begin} and one {end}", fix="put the markers back")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n\n{block}\n\n{end}{rest.partition(end)[2]}"

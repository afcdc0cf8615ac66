"""The tokens of a row in a terminal: trained ones are visible with and without colour."""

import re
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_rt.cli.views import text
from tunix_rt.cli.views.text import encoding, printable
from tunix_rt.progress import duration

if TYPE_CHECKING:
    from rich.text import Text

    from tunix_rt.config.settings import RunConfig
    from tunix_rt.data.prepare import Inspected
    from tunix_rt.data.preview import RowView, Span, TokenView
    from tunix_rt.data.tokenizer import Tokenizer

WIDTH_OF_A_PIPE = 110
SAMPLE_HEAD, SAMPLE_TAIL = 360, 240
"""Characters of a long text that a sample shows, from its beginning and from its end."""

GREEN, GREY, FAINT = "bold green", "grey62", "dim"
_LABELS = {True: "trained", False: "masked"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Signs for invisible characters; `encoding` is that of the terminal."""

    encoding: str
    space: str = "·"
    line: str = "⏎"
    tab: str = "⇥"
    more: str = "…"
    masked: str = "│"
    trained: str = "┃"
    under: str = "━"
    rule: str = "─"


def marks_of(encoding: str) -> Marks:
    if encoding.startswith("utf"):
        return Marks(encoding=encoding)
    return Marks(
        encoding=encoding, space="_", line="\\n", tab="\\t", more="~", masked=":", trained="|", under="^", rule="-"
    )


def show_row(view: "RowView", *, header: Sequence[str], places: Sequence[str]) -> None:
    """Print one row: its origin, the legend, then its tokens. `places` are those of the examples of a packed row."""
    marks = marks_of(encoding())
    lines = [_plain(line) for line in header]
    _print([*lines, legend(marks), _plain(""), *row_lines(view, places=places, width=_width(), marks=marks)])


def show_sample(view: "RowView", *, title: str) -> None:
    """Print one example as text, trained and masked spans apart; a long text is shortened."""
    marks = marks_of(encoding())
    _print([_plain(title), *text_lines(view, width=_width(), marks=marks), _plain("")])


def legend(marks: Marks) -> "Text":
    from rich.text import Text

    return Text.assemble(
        ("trained", GREEN),
        (f" {marks.under * 3}", GREEN),
        "   ",
        ("masked", GREY),
        (f"   below each token its id   {marks.space} space   {marks.line} line break   ", FAINT),
        ("control token", f"{GREY} reverse"),
    )


# --- tokens ----------------------------------------------------------------------------------------------------------


def row_lines(view: "RowView", *, places: Sequence[str], width: int, marks: Marks) -> Iterator["Text"]:
    """The tokens from left to right: text, a line below trained ones, id. Each span begins on a line of its own."""
    gutter = max(len(f"{len(span.tokens):,} tokens") for span in view.spans)
    for example, spans in groupby(view.spans, key=lambda span: span.example):
        if len(view.lengths) > 1:
            title = f"example {example}: {places[example - 1]}, {view.lengths[example - 1]:,} tokens"
            yield _rule(title, width, marks)
        for span in spans:
            yield from _span_lines(span, gutter, width, marks)


def _span_lines(span: "Span", gutter: int, width: int, marks: Marks) -> Iterator["Text"]:
    from rich.cells import cell_len
    from rich.text import Text

    style = GREEN if span.trained else GREY
    bar = f" {marks.trained if span.trained else marks.masked} "
    room = max(8, width - gutter - len(bar))
    count = len(span.tokens)
    label, below = _LABELS[span.trained], f"{count:,} token{'s' * (count > 1)}"
    for cells in _flow(span.tokens, room, marks):
        shown = Text.assemble((f"{label:>{gutter}}{bar}", style))
        under = Text.assemble((f"{below:>{gutter}}{bar}", style))
        ids = Text.assemble((f"{'' if span.trained else below:>{gutter}}{bar}", style))
        for token, cell, wide in cells:
            shown.append(cell, _token_style(token)).append(" " * (wide + 1 - cell_len(cell)))
            under.append((marks.under * cell_len(cell)).ljust(wide + 1), style)
            ids.append(f"{token.id:<{wide}} ", FAINT)
        yield from (shown, under, ids) if span.trained else (shown, ids)
        label = below = ""


def _token_style(token: "TokenView") -> str:
    if token.control:
        return f"{GREEN} reverse" if token.trained else f"{GREY} reverse"
    return GREEN if token.trained else GREY


def _flow(tokens: "Sequence[TokenView]", room: int, marks: Marks) -> "Iterator[list[tuple[TokenView, str, int]]]":
    """Lines of (token, its text, its width in cells). A line break in the text breaks the line."""
    from rich.cells import cell_len, set_cell_size

    line: list[tuple[TokenView, str, int]] = []
    used = 0
    for token in tokens:
        text = token_text(token, marks)
        if cell_len(text) > room:
            text = set_cell_size(text, room - len(marks.more)) + marks.more
        wide = max(cell_len(text), len(str(token.id)))
        if line and used + wide > room:
            yield line
            line, used = [], 0
        line.append((token, text, wide))
        used += wide + 1
        if not token.control and b"\n" in token.raw:
            yield line
            line, used = [], 0
    if line:
        yield line


_JOINS = re.compile("[\ufe00-\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]")
"""Characters that change the width of their neighbour: variation selectors, skin tones, the halves of flags."""


def token_text(token: "TokenView", marks: Marks) -> str:
    """The token in characters of a known width, without control characters."""
    text = token.text
    shown = "".join(f"<U+{ord(letter):04X}>" if _JOINS.match(letter) else _letter(letter, marks) for letter in text)
    lone_accent = bool(text) and bool(unicodedata.combining(text[0])) and shown[0] == text[0]
    return f"◌{shown}" if lone_accent else shown or '""'


def _letter(letter: str, marks: Marks) -> str:
    if letter in (named := {" ": marks.space, "\n": marks.line, "\t": marks.tab, "\r": "\\r"}):
        return named[letter]
    return letter if letter.isprintable() and _can_show(letter, marks.encoding) else f"<U+{ord(letter):04X}>"


def _can_show(letter: str, encoding: str) -> bool:
    try:
        letter.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


# --- text ------------------------------------------------------------------------------------------------------------


def text_lines(view: "RowView", *, width: int, marks: Marks) -> Iterator["Text"]:
    """The spans of a row as running text, trained and masked ones apart."""
    from rich.console import Console
    from rich.text import Text

    gutter = max(map(len, _LABELS.values()))
    for span in view.spans:
        style = GREEN if span.trained else GREY
        bar = f" {marks.trained if span.trained else marks.masked} "
        label = _LABELS[span.trained]
        shown = span.text if span.text.strip() else span.text.replace("\n", marks.line)  # else it would be invisible
        for paragraph in _shortened(shown, marks).removesuffix("\n").split("\n"):
            clean = Text("".join(" " if letter == " " else _letter(letter, marks) for letter in paragraph))
            for line in clean.wrap(Console(), max(8, width - gutter - len(bar)), overflow="fold"):
                yield Text(f"{label:>{gutter}}{bar}{line.plain}", style)
                label = ""


def _shortened(text: str, marks: Marks) -> str:
    left_out = len(text) - SAMPLE_HEAD - SAMPLE_TAIL
    if left_out < SAMPLE_TAIL:  # a gap that saves less is not worth it
        return text
    return f"{text[:SAMPLE_HEAD]} [{marks.more} {left_out:,} characters left out {marks.more}] {text[-SAMPLE_TAIL:]}"


# --- the terminal ----------------------------------------------------------------------------------------------------


def _rule(title: str, width: int, marks: Marks) -> "Text":
    from rich.cells import cell_len
    from rich.text import Text

    begun = f"{marks.rule * 2} {printable(title)} "
    return Text(begun + marks.rule * max(2, width - cell_len(begun)), "bold")


def _plain(line: str) -> "Text":
    from rich.text import Text

    return Text(printable(line))


def _width() -> int:
    """Width of the terminal, or COLUMNS."""
    return shutil.get_terminal_size((WIDTH_OF_A_PIPE, 24)).columns


def _print(lines: "Sequence[Text]") -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False, width=_width())
    for line in lines:
        console.print(line, soft_wrap=True)


def figures(seen: "Inspected", config: "RunConfig") -> dict[str, Any]:
    """Lengths, and the fill of the rows: tokens over `max_length`, mean of all rows but the last."""
    import numpy as np

    from tunix_rt.data.prepare import fill_of, pack_parts, row_lengths

    limit = config.data.max_length
    lengths = seen.store.examples.entries["length"]
    lengths = lengths[lengths > 0]
    fits = (seen.lengths > 0) & (seen.lengths <= limit)
    facts: dict[str, Any] = {"max_length": limit, "dropped": seen.dropped, "truncated": seen.truncated}
    if len(lengths):
        median, p95 = np.quantile(lengths, (0.5, 0.95), method="higher").tolist()
        facts["lengths"] = {"median": int(median), "p95": int(p95), "max": int(lengths.max())}
    if fits.any():
        packing, mixture = pack_parts(seen, fits, config.data)
        of_row = row_lengths(seen.lengths, packing)
        facts |= {"rows": len(of_row), "fill": fill_of(of_row, limit), "left_out": int((~fits).sum())}
        facts |= {"mixture": mixture} if mixture else {}
    return facts


def findings(seen: "Inspected") -> list[dict[str, Any]]:
    from tunix_rt.data.validation import RULES

    names = ("rule", "refuses", "count", "first", "seen", "places")
    return [
        {name: getattr(finding, name) for name in names} | {"finds": RULES[finding.rule].finds, "fix": finding.way_out}
        for finding in seen.findings
    ]


def check_json(seen: "Inspected", config: "RunConfig", tokenizer: "Tokenizer", figures: dict[str, Any]) -> Any:
    from tunix_rt.data.validation import RULES
    from tunix_rt.storage import to_plain

    return to_plain({
        "schema": "tunix-rt/data-check/1",
        "skipped": seen.skipped,
        "dataset": {"key": seen.dataset.key, "sha256": seen.dataset.sha256, "format": seen.format, "files": seen.dataset.files},
        "model": config.model.model_name_or_path,
        "tokenizer": {"folder": tokenizer.folder, "sha256": tokenizer.sha256},
        "template": seen.style.template.name,
        "style_sha256": seen.style.sha256,
        **seen.store.summary,
        **figures,
        "seconds": seen.store.seconds,
        "from_cache": seen.store.seconds == 0,
        "rules": len(RULES),
        "findings": findings(seen),
        "refused": any(finding.refuses for finding in seen.findings),
    })  # fmt: skip


# --- for people ------------------------------------------------------------------------------------------------------

Facts = list[tuple[str, str | None]]


def check_facts(seen: "Inspected", config: "RunConfig", whose: str, figures: dict[str, Any]) -> Facts:
    from tunix_rt.data.mixture import describe_mixture

    files = [f"{near(str(file.path))}: {file.describe()} ({file.bytes:,} bytes)" for file in seen.dataset.files[:5]]
    more = len(seen.dataset.files) - len(files)
    store, out = seen.store, seen.heldout_from
    speed = "from the cache"
    if store.seconds:
        speed = f"{store.tokens / store.seconds:,.0f} tokens/s, {duration(store.seconds)}"
    return [
        ("dataset", f"{seen.dataset.key}, sha256 {seen.dataset.sha256[:12]}"),
        ("files", "\n".join(files + [f"and {more:,} more"] * (more > 0))),
        ("format", seen.format),
        (
            "held out",
            f"{out.dataset.key}: {len(out.kept):,} examples" if out else None,
        ),
        ("skipped", ", ".join(f"{one.rule} {one.count:,}" for one in seen.bad) or None),
        *token_facts(seen, whose),
        ("length", describe_lengths(figures)),
        ("packing", _describe_rows(figures, packing=config.data.packing)),
        ("mixture", describe_mixture(figures["mixture"]) if "mixture" in figures else None),
        ("root", store.merkle_root),
        ("time", speed),
    ]


def token_facts(seen: "Inspected", whose: str) -> Facts:
    from tunix_rt.data.prepare import TEXTS

    store = seen.store
    share = text.percent(store.trained_tokens / store.tokens) if store.tokens else "none"
    return [
        (
            "rendered",
            f"{TEXTS if seen.format == 'text' else 'with ' + describe_template(seen.style.template.name)}, {whose}",
        ),
        ("examples", f"{len(store.examples):,}"),
        ("tokens", f"{store.tokens:,}, of which {store.trained_tokens:,} are trained ({share})"),
    ]


def describe_lengths(figures: dict[str, Any]) -> str | None:
    if "lengths" not in figures:
        return None
    lengths, limit = figures["lengths"], figures["max_length"]
    line = f"median {lengths['median']:,}, p95 {lengths['p95']:,}, longest {lengths['max']:,}; max_length {limit:,}"
    return "; ".join([line, *(f"{figures[what]:,} {what}" for what in ("dropped", "truncated") if figures[what])])


def _describe_rows(figures: dict[str, Any], *, packing: bool) -> str | None:
    if "rows" not in figures:
        return None
    rows, limit = figures["rows"], figures["max_length"]
    line = f"{rows:,} row{'s' * (rows > 1)} of {limit:,} tokens, {text.percent(figures['fill'])} full"
    line += " (without the last)" if rows > 1 else ""
    line += "" if packing else "; data.packing is off: one example per row"
    return line + (f"; {figures['left_out']:,} examples are in none" if figures["left_out"] else "")


def show_findings(seen: "Inspected") -> None:
    """The finding of each broken rule, the number of others, and the verdict."""
    from tunix_rt.data.validation import RULES, listed

    rows = [
        (
            f"{found['rule']}\n{'refuses' if found['refuses'] else 'warns'}",
            f"{found['count']:,}",
            near(found["first"]),
            f"{found['finds']}: {near(found['seen'])}\nfix: {found['fix']}",
        )
        for found in findings(seen)
    ]
    if rows:
        text.show_table(("rule", "count", "first", "finding"), rows, numbers=("count",))
    text.show_lines(near(line) for line in listed([finding for finding in seen.findings if finding.refuses]))
    refusing = [finding.rule for finding in seen.findings if finding.refuses]
    warnings = len(seen.findings) - len(refusing)
    verdict = f"refused: {', '.join(refusing)}" if refusing else "ready to train on"
    verdict += f"; {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    text.show_lines([f"{len(RULES) - len(rows)} of {len(RULES)} rules have no findings", verdict])


def describe_template(name: str) -> str:
    return "the tokenizer's own chat template" if name == "tokenizer" else f"template {name}"


def near(place: str) -> str:
    """`place` relative to the working folder, if it is below it."""
    return place.replace(f"{Path.cwd()}/", "")

"""How results look in a terminal; the tokens of a row are in tokens.py. rich is imported when something is shown."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tunix_rt.progress import duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from tunix_rt.cli.runs import RunDetail
    from tunix_rt.cli.views.progress import Parts
    from tunix_rt.evaluate.report import Row
    from tunix_rt.runs.index import RunSummary

CURVE_COLUMNS = 60
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"  # for a terminal that is not UTF-8
WIDTH_OF_A_PIPE = 200
WIDE = 100
"""Columns of a terminal that has room for everything."""
SHORT_STATUS = {"running or interrupted": "unfinished"}
BY_KIND = ("section ", "category ", "difficulty ")


def gib(size_bytes: float) -> str:
    """`1.25 GiB`; four digits below a tenth."""
    size = size_bytes / 2**30
    return f"{size:.2f} GiB" if size >= 0.1 or size == 0 else f"{size:.4f} GiB"


def percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def printable(value: object) -> str:
    """`value` as text that cannot steer the terminal: names and outputs in a run folder may come from a stranger."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def encoding() -> str:
    """The encoding of stdout, in lower case."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower()


def show_json(value: Any) -> None:
    """`value` on stdout. Unknown facts are left out, never null."""
    print(json.dumps(_without_none(value), indent=2, allow_nan=False, ensure_ascii=True))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def show_lines(lines: Iterable[str]) -> None:
    """Lines on stdout; on a terminal, longer ones are folded."""
    for line in map(printable, lines):
        print(folded(line) if sys.stdout.isatty() else line)


def folded(line: str) -> str:
    """`line` broken between words for this terminal, with its indent. A command stays one line, which can be copied."""
    width, indent = shutil.get_terminal_size().columns, line[: len(line) - len(line.lstrip())]
    if len(line) <= width or "tunix-rt " in line or "--set " in line:
        return line
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def program() -> str:
    """The command that started this, as a shell finds it: a new environment is not on the PATH."""
    named = os.path.relpath(sys.argv[0])
    return named if shutil.which("tunix-rt") is None and os.path.basename(named) == "tunix-rt" else "tunix-rt"


def show_note(line: str) -> None:
    """One line on stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = (), whole: Sequence[str] = (),
    tight: bool = False,
) -> None:  # fmt: skip
    """A table on stdout; the columns named in `numbers` are set to the right, and nearer to one another when `tight`. Neither
    they nor those named in `whole` are folded."""
    show(_table(columns, rows, numbers, whole=whole, padding=(0, 1, 0, 0) if tight else (0, 1, 0, 1)))


def show(what: "RenderableType") -> None:
    """A rich renderable on stdout."""
    _console().print(what)


def show_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Names and values; what has no value is left out."""
    show(_table(("", ""), [(name, value) for name, value in facts if value], header=False))


def show_before_after(rows: "Sequence[Row]", names: Sequence[str] = ("before", "after")) -> None:
    """Scores of one side, or of both side by side, and a legend."""
    from tunix_rt.evaluate.report import headings

    both = any(row.after is not None for row in rows)
    columns, legend = headings(names[: 1 + both])
    width = 5 if both else 3
    show(_table(columns[:width], [row.cells[:width] for row in rows], columns[1:width], padding=(0, 1, 0, 0)))
    if any(row.measure.startswith(BY_KIND) for row in rows):
        legend.append("Sections, categories, difficulties: strict, unless named lenient.")
    show_lines(legend)


def show_side_by_side(generations: "Sequence[tuple[str, str]]", parts: "Parts") -> None:
    """Generations of several models in columns, in the styles of a stream."""
    from rich.text import Text

    from tunix_rt.cli.views.progress import STYLES, printable

    cells = []
    for _, output in generations:
        pieces = [(kind, piece) for kind, piece in replace(parts).more(output, whole=True) if piece.strip()]
        cells.append(Text.assemble(*((f"{printable(piece).strip()}\n", STYLES[kind]) for kind, piece in pieces)))
    drawn = _table([name for name, _ in generations], [])
    drawn.add_row(*cells)
    show(drawn)


def show_runs(runs: "Sequence[RunSummary]", below: str) -> None:
    """Names below the folder `below`. A narrow terminal has no column of lenient scores."""
    columns = ["status", "steps", "loss", "strict %", "lenient %", "device", "finished"]
    wide = _console().width >= WIDE
    cells = [
        (
            os.path.relpath(run.folder, below),
            SHORT_STATUS.get(run.status, run.status),
            _of(run.steps_completed, run.steps_planned).replace(" of ", "/"),
            "" if run.final_loss is None else f"{run.final_loss:.3f}",
            _from_to(run.accuracy_before, run.accuracy_after),
            *([_from_to(run.lenient_before, run.lenient_after)] if wide else []),
            run.device or "",
            short_date(run.when),
        )
        for run in runs
    ]
    shown = columns if wide else [name for name in columns if name != "lenient %"]
    show_table((f"in {below}", *shown), cells, numbers=columns[1:3], whole=shown, tight=True)
    show_lines(f"{run.folder}: corrupt: {', '.join(run.damaged)}" for run in runs if run.damaged)


def short_date(when: str | None) -> str:
    """`11-16 08:45`, with the year where it is another one; local time."""
    if not when:
        return ""
    moment = datetime.fromisoformat(when).astimezone()
    return f"{moment:%m-%d %H:%M}" if moment.year == datetime.now().astimezone().year else f"{moment:%Y-%m-%d}"


def show_run(run: "RunDetail") -> None:
    """One run: its settings, loss, scores, memory and files."""
    summary = run.summary
    facts = [
        ("run", summary.folder),
        ("status", summary.status if run.reason is None else f"{summary.status}: {run.reason}"),
        ("corrupt", ", ".join(summary.damaged)),
        ("model", run.model),
        ("parameters", None if run.parameters is None else f"{run.parameters:,}"),
        ("data", run.dataset),
        ("device", summary.device),
        ("steps", _of(summary.steps_completed, summary.steps_planned)),
        ("resumed", None if run.resumed_from is None else f"after step {run.resumed_from}"),
        ("extended", ", then ".join(f"from {after} to {to} steps" for after, to in run.extended)),
        ("skipped checkpoints", "\n".join(run.skipped_checkpoints)),
        ("time", None if run.seconds is None else duration(run.seconds)),
        ("when", summary.when),
        ("loss", _curve_text(run.losses)),
        ("held-out loss", _curve_text(run.heldout)),
        ("best checkpoint", _best_text(run.best_step, run.best_heldout_loss)),
        ("memory", _memory_text(run.predicted_bytes, run.measured_bytes)),
    ]
    show_facts(facts)
    if run.table:
        show_before_after(run.table)
    if run.paths:
        show_facts(run.paths.items())
    show_lines(f"note: {note}" for note in run.notes)


def sparkline(values: Sequence[float], *, columns: int = CURVE_COLUMNS, blocks: str = _BLOCKS) -> str:
    """`values` as at most `columns` blocks, lowest to highest; each block is the mean of its share of the values."""
    if not values:
        return ""
    columns = min(columns, len(values))
    cuts = [index * len(values) // columns for index in range(columns + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(cuts)]
    lowest, height = min(means), max(means) - min(means)
    if height == 0:
        return blocks[0] * columns
    return "".join(blocks[round((mean - lowest) / height * (len(blocks) - 1))] for mean in means)


def _curve_text(points: Sequence[tuple[int, float]]) -> str | None:
    if not points:
        return None
    curve = sparkline([loss for _, loss in points], blocks=_BLOCKS if encoding().startswith("utf") else _ASCII_BLOCKS)
    (first_step, first), (last_step, last) = points[0], points[-1]
    lowest_step, lowest = min(points, key=lambda point: point[1])
    return (
        f"{curve}\n{first:.4f} at step {first_step}, {last:.4f} at step {last_step}, "
        f"lowest {lowest:.4f} at step {lowest_step}"
    )


def _best_text(step: int | None, loss: float | None) -> str | None:
    if step is None:
        return None
    return f"step {step}" if loss is None else f"step {step}, held-out loss {loss:.4f}"


def _memory_text(predicted: int | None, measured: int | None) -> str | None:
    sizes = {"predicted": predicted, "measured": measured}
    parts = [f"{word} {gib(size)}" for word, size in sizes.items() if size is not None]
    if predicted is not None and measured:
        from tunix_rt.plan.calibration import describe_error

        parts.append(f"prediction {describe_error(predicted, measured)}")
    return ", ".join(parts) or None


def _of(done: int | None, planned: int | None) -> str:
    if done is None:
        return ""
    return f"{done}" if planned is None else f"{done} of {planned}"


def _from_to(before: float | None, after: float | None) -> str:
    if before is None and after is None:
        return ""
    return "->".join("?" if rate is None else f"{100 * rate:.0f}" for rate in (before, after))


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Sequence[str] = (),
    *,
    whole: Sequence[str] = (),
    header: bool = True,
    padding: tuple[int, int, int, int] = (0, 1, 0, 1),
) -> "Table":
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False, padding=padding)
    for name in columns:
        is_number = name in numbers
        # In a narrow terminal words are folded: a number on two lines would be two numbers.
        fixed = is_number or name in whole
        drawn.add_column(printable(name), justify="right" if is_number else "left", overflow="fold", no_wrap=fixed)
    for row in rows:
        drawn.add_row(*("\n".join(printable(line) for line in str(cell).split("\n")) for cell in row))
    return drawn


def _console() -> "Console":
    """Plain text in, plain text out: no markup, emoji or highlighting in the content of a run folder."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_OF_A_PIPE
    return Console(markup=False, emoji=False, highlight=False, width=width)

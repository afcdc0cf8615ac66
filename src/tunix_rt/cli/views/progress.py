"""Progress on stderr: a bar on a terminal, plain lines elsewhere. Generations on stdout as they stream."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tunix_rt.models.secrets import redacted
from tunix_rt.runs.journal import WithoutSecrets

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int, str], None]
PLAIN_EVERY = 4
"""Progress lines per task without a terminal."""


@contextmanager
def watching() -> Iterator[Progress]:
    """A function that reports progress. Log lines of tunix-rt are shown until the block ends."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    package = logging.getLogger("tunix_rt")
    level = package.level
    package.setLevel(logging.INFO)
    shown = _bar(console) if console.is_terminal else _plain()
    with shown as (handler, progress):
        package.addHandler(handler)
        try:
            yield progress
        finally:
            package.removeHandler(handler)
            package.setLevel(level)


@contextmanager
def _bar(console: "Console") -> Iterator[tuple[logging.Handler, Progress]]:
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[note]}"),
        rich_progress.TimeRemainingColumn(),
    )
    tasks: dict[str, rich_progress.TaskID] = {}

    class Above(logging.Handler):
        """Log lines above the bar. Step lines are left to the bar; they are in training_log.txt."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:  # printed by the program as it exits
                return
            if not record.getMessage().startswith("step ") or record.levelno > logging.INFO:
                line = redacted(record.getMessage())
                console.print(line, style="bold red" if record.levelno > logging.INFO else None, markup=False)

    with rich_progress.Progress(*columns, console=console) as bar:

        def progress(what: str, done: int, total: int, note: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total, note="")
            bar.update(tasks[what], completed=done, note=note)

        yield Above(), progress


@contextmanager
def _plain() -> Iterator[tuple[logging.Handler, Progress]]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WithoutSecrets("%(message)s"))
    handler.addFilter(lambda record: record.levelno < logging.ERROR)  # an error is printed by the program as it exits

    quarters: dict[str, int] = {}  # how far each task was at its last line

    def progress(what: str, done: int, total: int, note: str) -> None:
        # Training has its own log lines; other tasks get a few, however large their strides.
        quarter = PLAIN_EVERY * done // max(1, total)
        if what != "train" and quarter > quarters.get(what, 0):
            after = f", {note}" if note else ""
            logging.getLogger("tunix_rt.cli").info("%s: %s of %s%s", what, f"{done:,}", f"{total:,}", after)
        quarters[what] = quarter

    yield handler, progress


REASONING, ANSWER, OTHER = "reasoning", "answer", "other"
STYLES = {REASONING: "dim", ANSWER: "bold", OTHER: ""}


@dataclass(slots=True, kw_only=True)
class Parts:
    """Splits a growing text into reasoning, answer and the rest. What could be the beginning of a tag is held back."""

    reasoning_tag: str
    answer_tag: str
    kind: str = OTHER
    _shown: int = field(default=0, init=False)

    def more(self, text: str, *, whole: bool = False) -> Iterator[tuple[str, str]]:
        """(kind, piece) of what is new in `text`, which begins with all earlier text; `whole` when it is complete.

        An incomplete character is the replacement character, and is held back too."""
        marks = {
            f"<{self.reasoning_tag}>": REASONING, f"</{self.reasoning_tag}>": OTHER,
            f"<{self.answer_tag}>": ANSWER, f"</{self.answer_tag}>": OTHER,
        }  # fmt: skip
        if not whole:
            text = text.rstrip("\ufffd")
        start = self._shown
        while (start := text.find("<", start)) >= 0:
            mark = next((mark for mark in marks if text.startswith(mark, start)), None)
            if mark is not None:
                if start > self._shown:
                    yield self.kind, text[self._shown : start]
                self.kind, self._shown = marks[mark], start + len(mark)
                start = self._shown
            elif not whole and any(mark.startswith(text[start:]) for mark in marks):
                break
            else:
                start += 1
        end = len(text) if start < 0 else start
        if end > self._shown:
            yield self.kind, text[self._shown : end]
            self._shown = end


class StreamPrinter:
    """Prints a generation as it grows; without a terminal, without styles."""

    def __init__(self, parts: Parts) -> None:
        from rich.console import Console

        self._parts = parts
        self._console = Console(highlight=False, soft_wrap=True)
        self._errors = Console(highlight=False, soft_wrap=True, stderr=True)
        self._last = ""

    def update(self, text: str, *, whole: bool = False) -> None:
        """The text so far; `whole` when it is complete."""
        from rich.segment import Segment, Segments

        for kind, piece in self._parts.more(text, whole=whole):
            if self._last not in ("", kind):
                self._console.print("")
            self._last = kind
            # As a segment: in a Text, rich would turn tabs into spaces and :names: into emoji.
            self._console.print(Segments([Segment(shown(piece))]), style=STYLES[kind] or None, end="")

    def end(self, reason: str) -> None:
        """Close the line. `reason`, why the generation is incomplete, is no part of it: it goes to stderr."""
        self._console.print("")
        if reason:
            self._errors.print(f"({reason})", style="yellow", markup=False)


def shown(text: str) -> str:
    """`text` with line breaks, and no other control characters."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)

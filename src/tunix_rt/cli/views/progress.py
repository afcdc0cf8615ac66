"""What a person sees while a run goes on: its words on stderr, with a progress bar on a terminal and plain lines elsewhere."""

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
"""Plain progress lines per piece of work where there is no terminal."""


@contextmanager
def watching() -> Iterator[Progress]:
    """A function to be told progress with. Log lines of tunix-rt are shown until the block ends."""
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
        """Log lines go above the bar. Step lines are left to the bar; they are in training_log.txt."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:  # said by the program as it ends
                return
            if not record.getMessage().startswith("step ") or record.levelno > logging.INFO:
                words = redacted(record.getMessage())
                console.print(words, style="bold red" if record.levelno > logging.INFO else None, markup=False)

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
    handler.addFilter(lambda record: record.levelno < logging.ERROR)  # an error is said by the program as it ends

    quarters: dict[str, int] = {}  # how far each piece of work was when it last spoke

    def progress(what: str, done: int, total: int, note: str) -> None:
        # Training has its own log lines; other long work says where it is a few times, however large its strides.
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
    """Cuts a growing text into reasoning, answer and the rest. What could be the beginning of a tag waits for more."""

    reasoning_tag: str
    answer_tag: str
    kind: str = OTHER
    _shown: int = field(default=0, init=False)

    def more(self, text: str, *, whole: bool = False) -> Iterator[tuple[str, str]]:
        """(kind, piece) of what is new in `text`, which begins with all that was given before; `whole` when it is over.

        A letter whose bytes are not all there yet is the replacement character, and waits too."""
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


class Speaker:
    """Prints an answer to the terminal as it comes. Where there is none, the styles are left out."""

    def __init__(self, parts: Parts) -> None:
        from rich.console import Console

        self._parts = parts
        self._console = Console(highlight=False, soft_wrap=True)
        self._aside = Console(highlight=False, soft_wrap=True, stderr=True)
        self._last = ""

    def hear(self, text: str, *, whole: bool = False) -> None:
        """The text so far; `whole` when nothing more comes."""
        from rich.segment import Segment, Segments

        for kind, piece in self._parts.more(text, whole=whole):
            if self._last not in ("", kind):
                self._console.print("")
            self._last = kind
            # As a segment, because in a text rich would turn tabs into spaces and :names: into pictures.
            self._console.print(Segments([Segment(shown(piece))]), style=STYLES[kind] or None, end="")

    def end(self, words: str) -> None:
        """Close the line; `words` say why the answer is not whole. They are no part of it, so they go to stderr."""
        self._console.print("")
        if words:
            self._aside.print(f"({words})", style="yellow", markup=False)


def shown(text: str) -> str:
    """`text` with line breaks, and nothing that could steer a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)

"""Phases on stderr: bars on a terminal, plain lines elsewhere. Generations on stdout as they stream."""

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tunix_rt.models.secrets import redacted
from tunix_rt.progress import Display, displayed, duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PLAIN_EVERY = 4
"""Lines per count without a terminal, beside those of time."""
SILENT_SECONDS = 30.0
"""Longest silence of a phase without a terminal."""
REPEATED_SECONDS = 2.0
"""A phase that was announced before is announced again when it takes longer than this."""
REFRESH_SECONDS = 0.25
CLOSING_SECONDS = 1.0
STEP_LINE = re.compile(r"step \d+/\d+  loss ")
"""The bar shows it; it is in training_log.txt."""
SHOW_CURSOR = b"\x1b[?25h"
GONE = (OSError, ValueError, SystemExit)
"""Raised by writing to a terminal or pipe that was closed; the last by rich. No run ends because nobody watches it."""


@contextlib.contextmanager
def watching() -> Iterator[Display]:
    """Show phases and log lines of tunix-rt until the block ends. The display also reports progress by itself."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    package = logging.getLogger("tunix_rt")
    level = package.level
    package.setLevel(logging.INFO)
    shown = _Bars(console) if console.is_terminal else _Lines()
    package.addHandler(shown)
    try:
        with displayed(shown):
            yield shown
    finally:
        shown.close()
        package.removeHandler(shown)
        package.setLevel(level)


@dataclass(slots=True, kw_only=True)
class _Task:
    """A phase, or a count that is reported without one."""

    total: int | None
    first: int
    done: int
    note: str = ""
    quarter: int = 0
    began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> str:
        """The time left at the pace so far; the time taken where there is no pace."""
        taken, now = self.done - self.first, self.seconds()
        if not self.total or taken <= 0:
            return duration(now)
        return f"{duration(now / taken * (self.total - self.done))} left" if self.done < self.total else duration(now)

    def describe(self, what: str) -> str:
        count = f"{self.done:,} of {self.total:,}" if self.total else ""
        return f"{what}: {', '.join(part for part in (count, self.note, self.left()) if part)}"


class _Watched(logging.Handler):
    """The tasks of a display, the innermost last, and a thread that shows them while the main one computes."""

    def __init__(self, every: float) -> None:
        super().__init__()
        self._tasks: dict[str, _Task] = {}
        self._guard = threading.RLock()
        self._over = threading.Event()
        self._timer = threading.Thread(target=self._tick, args=(every,), name="tunix-rt-progress", daemon=True)
        self._timer.start()

    def _tick(self, every: float) -> None:
        while not self._over.wait(every):
            self.refresh()

    def refresh(self) -> None:
        """By the bars and by the lines, each in its way. Called without the guard: writing takes the locks of handlers and of the
        terminal, whose owner may wait for it."""
        raise NotImplementedError

    def begin(self, what: str, total: int | None, done: int) -> None:
        with self._guard:
            self._tasks[what] = _Task(total=total, first=done, done=done)

    def end(self, what: str) -> None:
        """Ends the counts that began within it, too."""
        with self._guard:
            names = list(self._tasks)
            for name in names[names.index(what) if what in names else len(names) :]:
                del self._tasks[name]

    def __call__(self, what: str, done: int, total: int, note: str, /) -> None:
        with self._guard:
            task = self._tasks.setdefault(what, _Task(total=total, first=0, done=0))
            task.done, task.total, task.note = done, total or task.total, note

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR  # an error is printed by the program as it exits

    def close(self) -> None:
        self._over.set()
        super().close()


class _Lines(_Watched):
    """A line when a phase begins, at each quarter of a count, and whenever nothing was written for half a minute."""

    def __init__(self) -> None:
        super().__init__(every=REPEATED_SECONDS)
        self._announced: set[str] = set()
        self._pending: list[str] = []
        self._written = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        self._written = time.monotonic()
        line = redacted(record.getMessage())
        with contextlib.suppress(*GONE):
            print(line, file=sys.stderr, flush=True)

    def begin(self, what: str, total: int | None, done: int) -> None:
        with self._guard:
            super().begin(what, total, done)
            if what in self._announced:
                self._pending.append(what)
                return
            self._announced.add(what)
        _log(f"{what}: {done:,} of {total:,}" if total else f"{what} ...")

    def end(self, what: str) -> None:
        with self._guard:
            super().end(what)
            self._pending = [name for name in self._pending if name in self._tasks]

    def __call__(self, what: str, done: int, total: int, note: str, /) -> None:
        super().__call__(what, done, total, note)
        task, quarter = self._tasks[what], PLAIN_EVERY * done // max(1, total)
        if what != "train" and quarter > task.quarter:  # training has its own log lines
            _log(task.describe(what))
        task.quarter = quarter

    def refresh(self) -> None:
        silent = time.monotonic() - self._written > SILENT_SECONDS - REPEATED_SECONDS
        with self._guard:
            late = [name for name in self._pending if self._tasks[name].seconds() > 1]
            names = list(self._tasks)[-1:] if silent else late
            lines = [self._tasks[name].describe(name) for name in names]
            self._pending = [name for name in self._pending if name not in names]
        for line in lines:
            _log(line)


def _log(line: str) -> None:
    logging.getLogger("tunix_rt.cli").info("%s", line)


class _Bars(_Watched):
    """A bar for each phase below the log lines; it disappears with the phase."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(
            self, console=console, auto_refresh=False, transient=True, vertical_overflow="crop",
            redirect_stdout=sys.stdout.isatty(),  # else it is a file or a pipe
        )  # fmt: skip
        self._live.start()
        super().__init__(every=REFRESH_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        line = redacted(record.getMessage())
        if record.levelno > logging.INFO or not STEP_LINE.match(line):
            with contextlib.suppress(*GONE):
                self._console.print(line, style="yellow" if record.levelno > logging.INFO else None, markup=False)

    def begin(self, what: str, total: int | None, done: int) -> None:
        super().begin(what, total, done)
        self.refresh()

    def refresh(self) -> None:
        if self._live.is_started and not self._over.is_set():
            with contextlib.suppress(*GONE):
                self._live.refresh()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table

        columns = [Column(no_wrap=True, overflow="ellipsis", ratio=ratio) for ratio in (None, None, None, None, 1)]
        table = Table.grid(*columns, padding=(0, 1), expand=True)
        with self._guard:
            tasks = {name: replace(task) for name, task in self._tasks.items()}
        for name, task in tasks.items():
            width = max(10, options.max_width // 6)
            bar = ProgressBar(task.total or 1, task.done, width, complete_style="cyan", finished_style="cyan")
            spinner = "-\\|/"[int(task.seconds() / REFRESH_SECONDS) % 4]
            count = f"{task.done:,}/{task.total:,}" if task.total else ""
            table.add_row(name, bar if task.total else spinner, count, task.left(), task.note)
        if table.row_count:
            yield table

    def _stop(self) -> None:
        with contextlib.suppress(*GONE):
            self._live.stop()

    def close(self) -> None:
        """Also while the main thread is in a call that does not return, or holds a lock: the cursor is shown at least."""
        super().close()
        if self._live.is_started:
            stopping = threading.Thread(target=self._stop, daemon=True)
            stopping.start()
            stopping.join(CLOSING_SECONDS)
            if stopping.is_alive():
                os.write(sys.stderr.fileno(), SHOW_CURSOR + b"\r\n")


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
            self._console.print(Segments([Segment(printable(piece))]), style=STYLES[kind] or None, end="")

    def end(self, reason: str) -> None:
        """Close the line. `reason`, why the generation is incomplete, is no part of it: it goes to stderr."""
        self._console.print("")
        if reason:
            self._errors.print(f"({reason})", style="yellow", markup=False)


def printable(text: str) -> str:
    """`text` with line breaks, and no other control characters."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)

"""What a person sees while a run goes on: its words on stderr, with a progress bar on a terminal and plain lines elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

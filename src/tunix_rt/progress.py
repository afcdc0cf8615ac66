"""Phases of long work. Each announces itself before it starts and reports how far it is; the command line displays them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Called as work proceeds: (what, done, total, a note such as "loss 0.41, 4,512 tokens/s")."""

    def __call__(self, what: str, done: int, total: int, note: str, /) -> None: ...


class Display(Progress, Protocol):
    """Shows phases to a person."""

    def begin(self, what: str, total: int | None, done: int) -> None: ...
    def end(self, what: str) -> None: ...
    def close(self) -> None:
        """Restore the terminal, from any thread; nothing is displayed afterwards."""
        ...


_displays: list[Display] = []


@contextmanager
def displayed(display: Display) -> Iterator[None]:
    """Phases of the block are shown on `display`."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)


@contextmanager
def phase(what: str, total: int | None = None, *, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A block that may take longer than a second: shown from its beginning to its end, also while a C call does not return.
    Yields a function that reports (done, note), for a phase of `total` pieces of which `done` were done before."""
    shown = _displays[-1:]

    def report(done: int, note: str = "") -> None:
        for display in shown:
            display(what, done, total or 0, note)

    for display in shown:
        display.begin(what, total, done)
    try:
        yield report
    finally:
        for display in shown:
            display.end(what)


def close_displays() -> None:
    """Restore the terminal: the last act of a process that is ended from another thread."""
    for display in reversed(_displays):
        display.close()


def duration(seconds: float) -> str:
    """`4.2 s`, `18 s`, `4 min 10 s`, `6 h 03 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"

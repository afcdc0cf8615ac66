"""Figures as the pages show them. Every number on a page is made here from a value of a file, or by a page function."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from tunix_rt.progress import duration

MISSING = "–"
GIB = 2**30


def count(value: int | None) -> str:
    """`1,234,567`."""
    return MISSING if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    """A rate 0..1 as `61.5 %`."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def gib(value: float | None) -> str:
    return MISSING if value is None else f"{value / GIB:.2f} GiB"


def figure(value: float | None) -> str:
    """Four significant digits: `0.04213`, `1,234`, `2.000e-05`."""
    if value is None:
        return MISSING
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e6:
        return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return f"{value:.3e}"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return MISSING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    return MISSING if value is None else duration(value)


def moment(value: str | None) -> str:
    """UTC to the minute."""
    return MISSING if value is None else f"{datetime.fromisoformat(value):%Y-%m-%d %H:%M}"


def visible(value: object) -> str:
    """A text from a file, with what cannot be seen or turns the line around shown by its number."""
    return "".join(one if one.isprintable() or one in "\n\t" else f"\\u{ord(one):04x}" for one in str(value))


FILTERS: Mapping[str, Callable[[Any], str]] = {
    function.__name__: function for function in (count, percent, gib, figure, rate, seconds, moment, visible)
}

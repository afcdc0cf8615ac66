"""Where the bytes go at the peak: a line for each part, drawn from where the part before it ends, up to what is free."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunix_rt.plan.step_phases import Phase
    from tunix_rt.plan.verdict import Fit

COLUMNS = 80
NAME_COLUMNS, FIGURE_COLUMNS = 17, 8
SMALLEST_SHARE = 0.004
"""Of the peak: smaller parts are drawn together, as `other`."""
_FILLS, _ASCII_FILLS = ("█", "░"), ("#", ".")
SPARE, EXCESS = "to spare", "too much"
_STYLES = {"margin": "yellow", SPARE: "green", EXCESS: "red"}
_WORDS = {
    "loss_head": "loss head",
    "in_flight": "in flight",
    "kv_cache": "keys and values",
    "allocator_slack": "allocator",
}

Piece = tuple[str, str]


def bars(
    phase: "Phase", fit: "Fit", *, context_bytes: int, utf8: bool = True, columns: int = COLUMNS
) -> Iterator[list[Piece]]:
    """The lines, as (text, style) pieces, none longer than `columns`. The last is what stays
    to spare, or is too much."""
    parts = _parts(phase.parts, phase.total_bytes)
    if context_bytes:
        parts["CUDA itself"] = context_bytes
    parts["margin"] = fit.safety_bytes
    whole = max(fit.available_bytes, sum(parts.values()))
    room = columns - NAME_COLUMNS - FIGURE_COLUMNS - 2
    edge = _place(fit.available_bytes, whole, room)
    begins = 0
    for name, size in parts.items():
        ends = begins + size
        yield _line(name, size, _place(begins, whole, room), _place(ends, whole, room), edge=edge, utf8=utf8)
        begins = ends
    left = fit.available_bytes - begins
    if left >= 0:
        yield _line(SPARE, left, _place(begins, whole, room), room, edge=edge, utf8=utf8)
    else:
        yield _line(EXCESS, -left, edge, room, edge=edge, utf8=utf8)


def _parts(parts: Mapping[str, int], total: int) -> dict[str, int]:
    """Those that can be seen, in their order, and the others as one."""
    shown = {
        _WORDS.get(name, name.replace("_", " ")): size for name, size in parts.items() if size >= SMALLEST_SHARE * total
    }
    other = total - sum(shown.values())
    return shown | ({"other": other} if other > 0 else {})


def _place(size: int, whole: int, room: int) -> int:
    return round(room * size / whole) if whole else 0


def _line(name: str, size: int, begins: int, ends: int, *, edge: int, utf8: bool) -> list[Piece]:
    """Name, GiB, and the bar; what lies beyond what is free is red. A part that is too small for a column has half of one."""
    full, light = _FILLS if utf8 else _ASCII_FILLS
    fill = light if name in _STYLES else full
    sliver = "▏" if utf8 else "|"
    head = (f"{name:<{NAME_COLUMNS}}{size / 2**30:>{FIGURE_COLUMNS}.2f} ", "")
    if ends == begins:
        return [head, (" " * begins + (sliver if size else ""), _style(name))]
    within = max(0, min(ends, edge) - begins)
    beyond = ends - begins - within
    return [head, (" " * begins, ""), (fill * within, _style(name)), (fill * beyond, "red")]


def _style(name: str) -> str:
    return _STYLES.get(name, "cyan")

"""`/`: all runs below the folder, live ones first; sorted, filtered and grouped by the address."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tunix_rt.dashboard.pages.evidence import verified_level
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.runs.index import RUNNING, UNFINISHED, Indexed, RunSummary

SORTS: dict[str, Callable[[RunSummary], Any]] = {
    "newest": lambda run: run.when,
    "name": lambda run: run.folder,
    "loss": lambda run: run.final_loss,
    "accuracy": lambda run: run.accuracy_after,
    "speed": lambda run: run.tokens_per_second,
    "memory": lambda run: run.measured_bytes,
}
DOWNWARDS = ("newest", "accuracy", "speed", "memory")
"""The largest first, unless turned around."""
GROUPS = ("none", "model", "status", "device")
HEADINGS = {
    "run": "name", "status": "", "model, device": "", "steps": "", "loss curve": "", "training loss": "loss",
    "accuracy, strict": "accuracy", "tokens/s": "speed", "memory": "memory", "evidence": "", "finished, UTC": "newest",
}  # fmt: skip
"""Heading -> the order that it sorts by."""
PAGE_RUNS = 200
MOVING_MS, IDLE_MS = 1000, 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading of the table; `link` sorts by it, empty where nothing can."""

    name: str
    link: str = ""
    order: str = ""
    """`ascending` or `descending` where the table is sorted by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsPage:
    """`groups` are (name, runs) in their order; one without a name where nothing is grouped."""

    folder: str
    total: int
    shown: int
    before: int | None
    """Where the page of the list before this one begins, from 0; None where this is the first."""
    after: int | None
    groups: list[tuple[str, list[Indexed]]]
    columns: list[Column]
    group: str
    choices: tuple[str, ...]
    """What the runs can be grouped by."""
    sort: str
    words: str
    statuses: dict[str, int]
    status: str
    levels: dict[str, str]
    """Id -> level of the runs that were verified since the dashboard was started, and have not changed since."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Of an export: where two runs are compared, and their names."""
    every: int
    """Milliseconds until the list is looked at again: a run may begin at any time."""


def page(site: Site, query: Query, run_id: str = "") -> Page:
    found = site.index.runs()
    levels = {one.id: level for one in found if (level := verified_level(site, one))}
    values = choose(found, query, folder=str(site.folder), levels=levels)
    return Page(template="runs.html", title="Runs", values=values, live=True, stamp=values)


def choose(found: list[Indexed], query: Query, *, folder: str, levels: dict[str, str]) -> RunsPage:
    """The runs that the address asks for, in its order."""
    sort, group, words = query.choice("sort", tuple(SORTS)), query.choice("group", GROUPS), query.get("q").strip()
    turned, status = query.get("turned") == "1", query.get("status")
    statuses: dict[str, int] = {}
    for one in found:
        statuses[one.summary.status] = statuses.get(one.summary.status, 0) + 1
    kept = [one for one in found if _matches(one, words) and status in ("", one.summary.status)]
    first = query.whole("first", 0, most=max(0, len(kept) - 1))
    ordered, last = _by_group(_ordered(kept, sort, turned=turned), group), first + PAGE_RUNS
    return RunsPage(
        folder=folder, total=len(found), shown=len(kept), before=max(0, first - PAGE_RUNS) if first else None,
        after=last if last < len(kept) else None, groups=_grouped(ordered[first:last], group), sort=sort,
        columns=[_column(name, key, query, sort, turned=turned) for name, key in HEADINGS.items()], group=group,
        choices=GROUPS, words=words, statuses=statuses, status=status, levels=levels,
        every=MOVING_MS if RUNNING in statuses else IDLE_MS,
    )  # fmt: skip


def _column(name: str, key: str, query: Query, sort: str, *, turned: bool) -> Column:
    if not key:
        return Column(name=name)
    link = query.with_(sort=key, turned=1 if key == sort and not turned else None, first=None)
    order = "descending" if (key in DOWNWARDS) != turned else "ascending"
    return Column(name=name, link=f"?{link}", order=order if key == sort else "")


def _matches(one: Indexed, words: str) -> bool:
    text = f"{one.name} {one.summary.model or ''} {one.summary.status} {one.summary.device or ''}".casefold()
    return all(word in text for word in words.casefold().split())


def _ordered(runs: list[Indexed], sort: str, *, turned: bool) -> list[Indexed]:
    """Running ones first, then those that have no result; unknown values last, whichever way."""
    key, downwards = SORTS[sort], (sort in DOWNWARDS) != turned
    known = sorted((one for one in runs if key(one.summary) is not None), key=lambda one: one.name)
    known.sort(key=lambda one: key(one.summary), reverse=downwards)
    rest = [one for one in runs if key(one.summary) is None]
    return sorted([*known, *rest], key=lambda one: {RUNNING: 0, UNFINISHED: 1}.get(one.summary.status, 2))


def _by_group(runs: list[Indexed], group: str) -> list[Indexed]:
    return runs if group == "none" else sorted(runs, key=lambda one: getattr(one.summary, group) or "")


def _grouped(runs: list[Indexed], group: str) -> list[tuple[str, list[Indexed]]]:
    if group == "none":
        return [("", runs)]
    members = groupby(runs, key=lambda one: getattr(one.summary, group) or "")
    return [(name or "unknown", list(found)) for name, found in members]

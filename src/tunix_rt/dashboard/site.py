"""What all pages share: the runs of one folder, and what a page function returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunix_rt.dashboard.chat import Chat
from tunix_rt.dashboard.query import Query
from tunix_rt.errors import NotFound
from tunix_rt.runs.index import Indexed, RunIndex, find_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A template and its values. `live` pages are fetched again while they are looked at: often while something runs."""

    template: str
    title: str
    values: Any
    live: bool = False
    """Something on the page is still moving."""
    status: int = 200
    stamp: Any = None
    """Pages of one address with equal stamps look the same: such a page is not rendered again."""


@dataclass(slots=True, kw_only=True)
class Site:
    """One folder of runs, and what was computed about them. Nothing of it is written down."""

    folder: Path
    index: RunIndex
    chat_run: Path | None = None
    """The run to chat with, named at the start."""
    chat: Chat | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    """By page: what took long to compute. A page bounds and locks its own."""

    @classmethod
    def of(cls, folder: Path, chat_run: str | None = None) -> "Site":
        index = RunIndex(folder)
        run = None if chat_run is None else find_run(Path(chat_run))
        chat = None if run is None else Chat(run, is_busy=lambda: any(one.running for one in index.runs()))
        return cls(folder=folder, index=index, chat_run=run, chat=chat)

    def run(self, run_id: str) -> Indexed:
        """The run with that id. Only ids of the index lead anywhere, so no path arrives from outside."""
        if (found := self.index.find(run_id)) is None:
            raise NotFound("no such run", fix="go back to the list of runs")
        return found


Handler = Callable[[Site, Query, str], Page]
"""A page function: the site, the address after `?`, and the id in the path, empty where it has none."""

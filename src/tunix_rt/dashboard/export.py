"""The pages as files: one folder that needs no server, no script and no network, to attach to a submission."""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from tunix_rt.dashboard.app import error_page, find_page, render, static_files
from tunix_rt.dashboard.pages import evidence
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.errors import InputError, TunixError
from tunix_rt.storage import storage

KEPT = re.compile(r"/|/compare|/runs/[0-9a-f]{12}(?:/(?:answers|evidence))?")
"""Pages that are facts of runs; plan, data and doctor answer questions about a computer."""
KEPT_QUERY = frozenset({"first", "show"})
"""Further pages of a list, and filters of the answers. Other views of the same facts are left out."""
MOST_PAGES, MOST_COMPARED = 20_000, 8
_ANCHOR = re.compile(r'<a ([^>]*)href="([^"]*)"([^>]*)>(.*?)</a>', re.DOTALL)
_ACTION = re.compile(r' action="[^"]*"')
_STATIC = re.compile(r'href="/static/([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The pages of all runs of a site, or of one: those below `start`, which becomes `index.html`."""

    site: Site
    start: str = "/"
    pairs: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Runs that are compared, each of the first eight with each: their ids, and a line with their names."""

    def write(self, target: Path, verifying: Callable[[str], None]) -> int:
        """Write every page that can be reached into the new folder `target`. Returns their number. Runs are verified first, at
        L1, so that the pages have their level and their claims."""
        for run in self.site.index.runs():
            if target.resolve().is_relative_to(run.root.resolve()):
                raise InputError(f"{target} lies in the run {run.name}", fix="choose a folder that is in no run")
        with storage(target):
            if target.exists() and any(target.iterdir()):
                raise InputError(f"{target} is not empty", fix="choose a folder that does not exist yet")
            target.mkdir(parents=True, exist_ok=True)
            (target / "style.css").write_bytes(static_files()["style.css"])
            (target / "icon.svg").write_bytes(static_files()["icon.svg"])
        runs = [one for one in self.site.index.runs() if self.start in ("/", f"/runs/{one.id}")]
        for run in runs:
            verifying(run.name)
            if (thread := evidence.start(self.site, run)) is not None:
                thread.join()
        pairs = combinations(runs[:MOST_COMPARED], 2)
        self.pairs.update({(one.id, other.id): f"{one.name} and {other.name}" for one, other in pairs})
        waiting, names = deque([self.start]), {self.file_name(self.start)}
        while waiting:
            text, links = self.page(address := waiting.popleft())
            with storage(target):
                (target / self.file_name(address)).write_text(text, encoding="utf-8")
            for link in links:
                if self.file_name(link) not in names and len(names) < MOST_PAGES:
                    names.add(self.file_name(link))
                    waiting.append(link)
        return len(names)

    def page(self, address: str) -> tuple[str, list[str]]:
        """The page at `address` with links to files, and the addresses that it leads to. Other links become their text."""
        path, query = urlsplit(address).path, Query.parse(urlsplit(address).query)
        handler, run_id = find_page(path)
        try:
            page = replace(handler(self.site, query, run_id), live=False)
        except TunixError as error:
            page = error_page(error)
        if path == "/":
            pairs = tuple((f"/compare?run={one}&run={other}", text) for (one, other), text in self.pairs.items())
            page = replace(page, values=replace(page.values, pairs=pairs))
        links: list[str] = []

        def relink(match: re.Match[str]) -> str:
            before, place, after, text = match.groups()
            if place.startswith("#"):
                return match[0]
            whole = (place if place.startswith("/") else path + place).replace("&amp;", "&")
            if not self.is_kept(whole):
                return text
            links.append(whole)
            return f'<a {before}href="{self.file_name(whole)}"{after}>{text}</a>'

        html = _ACTION.sub("", _STATIC.sub(r'href="\1"', render(page, path, query, is_file=True)))
        return _ANCHOR.sub(relink, html), links

    def is_kept(self, address: str) -> bool:
        """Whether that page is written."""
        parts = urlsplit(address)
        pairs = Query.parse(parts.query).pairs
        within = parts.path.startswith("/" if self.start == "/" else self.start)
        if parts.netloc or not within or not KEPT.fullmatch(parts.path):
            return False
        if parts.path == "/compare":
            return tuple(value for _, value in pairs) in self.pairs
        return {name for name, _ in pairs} <= KEPT_QUERY

    def file_name(self, address: str) -> str:
        """`index.html`, `runs-ID-answers-first-50.html`: in one folder, so that every link is a name."""
        if address == self.start:
            return "index.html"
        parts = urlsplit(address)
        words = [part for part in parts.path.split("/") if part]
        words += [f"{key}-{value}" for key, value in Query.parse(parts.query).pairs]
        return re.sub(r"[^A-Za-z0-9.-]", "_", "-".join(words)) + ".html"

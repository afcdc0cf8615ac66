"""The pages as files: one folder that needs no server, no script and no network, to attach to a submission."""

import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from tunix_rt.dashboard.app import error_page, find_page, render, static_files
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.errors import InputError, TunixError
from tunix_rt.storage import storage

KEPT = re.compile(r"/|/runs/[0-9a-f]{12}(?:/(?:answers|evidence))?")
"""Pages that are facts of runs; plan, data and doctor answer questions about a computer."""
KEPT_QUERY = ("first", "page")
"""Further pages of a list. Other views of the same facts are left out."""
MOST_PAGES = 20_000
_LINK = re.compile(r' (href|src|action)="([^"]*)"')


def export_pages(site: Site, target: Path) -> int:
    """Write every page that can be reached from the list of runs into the new folder `target`. Returns their number."""
    with storage(target):
        if target.exists() and any(target.iterdir()):
            raise InputError(f"{target} is not empty", fix="choose a folder that does not exist yet")
        target.mkdir(parents=True, exist_ok=True)
        for name, data in static_files().items():
            if not name.endswith(".js"):
                (target / name).write_bytes(data)
    waiting, names = deque(["/"]), {file_name("/")}
    while waiting:
        address = waiting.popleft()
        text, links = page_file(site, address)
        with storage(target):
            (target / file_name(address)).write_text(text, encoding="utf-8")
        for link in links:
            if file_name(link) not in names and len(names) < MOST_PAGES:
                names.add(file_name(link))
                waiting.append(link)
    return len(names)


def page_file(site: Site, address: str) -> tuple[str, list[str]]:
    """The page at `address` with links to files, and the addresses that it leads to."""
    path, query = urlsplit(address).path, Query.parse(urlsplit(address).query)
    handler, run_id = find_page(path)
    try:
        page = replace(handler(site, query, run_id), live=False)
    except TunixError as error:
        page = error_page(error)
    links: list[str] = []

    def relink(match: re.Match[str]) -> str:
        kind, place = match[1], match[2].replace("&amp;", "&")
        if place.startswith(("/static/", "#")):
            return f' {kind}="{place.removeprefix("/static/")}"'
        if kind != "href" or not is_kept(place, path):
            return ""
        whole = place if place.startswith("/") else path + place
        links.append(whole)
        return f' href="{file_name(whole)}"'

    return _LINK.sub(relink, render(page, path, query, is_file=True)), links


def is_kept(place: str, path: str) -> bool:
    """Whether a link of the page at `path` leads to a page that is written."""
    parts = urlsplit(place)
    names = [key for key, _ in Query.parse(parts.query).pairs]
    return bool(KEPT.fullmatch(parts.path or path)) and not parts.netloc and set(names) <= set(KEPT_QUERY)


def file_name(address: str) -> str:
    """`index.html`, `runs-ID-answers-page-2.html`: in one folder, so that every link is a name."""
    parts = urlsplit(address)
    words = [part for part in parts.path.split("/") if part]
    words += [f"{key}-{value}" for key, value in Query.parse(parts.query).pairs]
    return re.sub(r"[^A-Za-z0-9.-]", "_", "-".join(words) or "index") + ".html"

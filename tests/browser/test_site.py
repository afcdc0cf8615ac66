"""The documentation site: every link holds, a word is found, and nothing is fetched from another host."""

import contextlib
import functools
import http.server
import os
import re
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.program import ROOT

MKDOCS = ROOT / ".venv" / "bin" / "mkdocs"
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page links to, what a browser loads for it, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loaded += [given[name] for name in ("href", "src", "srcset") if given.get(name)]
        self.loaded += re.findall(r"url\(([^)]*)\)", given.get("style") or "")


@contextlib.contextmanager
def served(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not MKDOCS.is_file():
        pytest.skip("mkdocs-material is not installed (scripts/setup --dev installs it)")
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [MKDOCS, "build", "--strict", "--site-dir", folder]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_in_the_site(site, pages):
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    wanted = {page.with_name("index.html") if page.name == "README.html" else page for page in wanted}
    assert wanted == {path.relative_to(site) for path in pages} - {Path("404.html")}


def test_every_link_leads_to_a_page_and_an_anchor_of_the_site(site, pages):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []


def test_no_page_and_no_style_sheet_names_another_host_to_load_from(site, pages):
    loaded = {(path.name, one) for path, page in pages.items() for one in page.loaded}
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import )[\"']?([^)\"';]+)", sheet.read_text(encoding="utf-8"))
        loaded |= {(sheet.name, one) for one in found}
    assert len(loaded) > 100
    assert {one for one in loaded if urlsplit(one[1]).netloc} == set()
    assert [path.name for path in pages if 'class="mermaid"' in path.read_text(encoding="utf-8")] == []  # from a CDN


def test_a_word_is_found_without_a_request_to_another_host(chromium, site):
    with served(site) as address:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(f"{address}/index.html")
        page.get_by_role("textbox", name="Search").press_sequentially("stochastic rounding")  # it hears keys
        page.locator(".md-search-result__link").first.wait_for(timeout=15_000)
        page.locator(".md-search-result__link").first.click()
        page.wait_for_load_state()
        assert "stochastic" in page.locator("article").inner_text().lower()
        page.close()
    assert {urlsplit(url).hostname for url in requested if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}

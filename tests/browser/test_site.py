"""The documentation site: every link holds, a word is found, and nothing is fetched from another host."""

import contextlib
import functools
import http.server
import os
import subprocess
import threading
from urllib.parse import urlsplit

import pytest

from tests.program import ROOT

MKDOCS = ROOT / ".venv" / "bin" / "mkdocs"


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


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link_and_is_searched_without_another_host(chromium, tmp_path):
    if not MKDOCS.is_file():
        pytest.skip("mkdocs-material is not installed (scripts/setup --dev installs it)")
    words = [MKDOCS, "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {page.with_name("index.html") if page.name == "README.html" else page for page in pages}
    assert {page for page in pages if not (tmp_path / "site" / page).is_file()} == set()
    with served(tmp_path / "site") as address:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(f"{address}/index.html")
        page.get_by_role("textbox", name="Search").fill("stochastic rounding")
        page.locator(".md-search-result__link").first.wait_for(timeout=15_000)
        page.locator(".md-search-result__link").first.click()
        page.wait_for_load_state()
        assert "stochastic" in page.locator("article").inner_text().lower()
        page.screenshot(path=tmp_path / "site.png")
        page.close()
    assert {urlsplit(url).hostname for url in requested if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}

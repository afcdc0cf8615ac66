"""What a person sees: every page in a real browser, light and dark, by keyboard, without scripts, and with nothing sent out."""

import gzip
import re
import urllib.parse

import pytest

from tests.browser.conftest import RUNS
from tunix_rt.dashboard.site import Site

IDS = {one.name: one.id for one in Site.of(RUNS).index.runs()}
ONE, OTHER = IDS["m39_v1"], IDS["m40_v1"]
PAGES = [
    "/", "/?sort=loss&group=model", f"/runs/{ONE}", f"/runs/{ONE}?x=tokens&log=1", f"/runs/{ONE}/answers",
    f"/runs/{ONE}/answers?show=gained", f"/runs/{ONE}/evidence", f"/compare?run={ONE}&run={OTHER}", "/plan",
    "/plan?model=gemma-3-1b&on=rtx4090", "/data", "/doctor", "/nothing",
]  # fmt: skip
CORE = ("/", f"/runs/{ONE}", f"/runs/{ONE}/answers", "/plan?model=gemma-3-1b&on=rtx4090")
SERIES = [pytest.param(page, marks=[] if page in CORE else pytest.mark.slow) for page in PAGES]
MOST_PAGE, MOST_SCRIPT = 60_000, 15_000


def opened(chromium, address, path, **context):
    page = chromium.new_context(**context).new_page()
    page.goto(address)
    return go(page, address, path)


def go(page, address, path):
    parts = urllib.parse.urlsplit(address)
    page.goto(f"{parts.scheme}://{parts.netloc}{path}")
    return page


@pytest.mark.parametrize("path", SERIES)
def test_a_page_has_no_violation_of_accessibility_rules_in_light_and_dark(chromium, address, axe, path):
    for scheme in ("light", "dark"):
        page = opened(chromium, address, path, color_scheme=scheme, bypass_csp=True)
        page.add_script_tag(content=axe)
        found = page.evaluate(
            "async () => (await axe.run()).violations.map(v => [v.id, v.nodes.map(n => n.html).slice(0, 3)])"
        )
        assert found == [], (path, scheme)
        page.context.close()


@pytest.mark.parametrize("path", SERIES)
def test_a_page_is_whole_without_scripts_light_and_asks_no_other_host(chromium, address, path):
    asked, sizes = [], {}
    with_scripts = chromium.new_context().new_page()
    with_scripts.on("request", lambda request: asked.append(request.url))
    with_scripts.on("response", lambda answer: sizes.update({answer.url: answer}))
    with_scripts.goto(address)
    go(with_scripts, address, path)
    host = urllib.parse.urlsplit(address).netloc
    assert asked and {urllib.parse.urlsplit(url).netloc for url in asked} == {host}
    text = with_scripts.inner_text("main")
    body = sizes[with_scripts.url.partition("#")[0]].body()
    assert len(gzip.compress(body)) <= MOST_PAGE
    plain = opened(chromium, address, path, java_script_enabled=False)
    assert words(plain.inner_text("main")) == words(text)
    for page in (with_scripts, plain):
        page.context.close()


def words(text: str) -> list[str]:
    """Without times, which pass."""
    return [word for word in text.split() if not re.search(r"\d+:\d\d|^\d+(?:\.\d+)?$", word)]


@pytest.mark.parametrize("path", SERIES)
def test_nothing_is_cut_off_on_a_narrow_screen(chromium, address, path):
    page = opened(chromium, address, path, viewport={"width": 320, "height": 640})
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 320
    page.context.close()


def test_the_script_is_small(chromium, address):
    page = opened(chromium, address, "/")
    script = page.context.request.get(urllib.parse.urljoin(page.url, "/static/page.js")).body()
    assert len(script) <= MOST_SCRIPT
    page.context.close()


def test_a_foreign_name_for_this_computer_gets_nothing(chromium, address):
    parts = urllib.parse.urlsplit(address)
    page = chromium.new_context().new_page()
    answer = page.goto(f"http://evil.example:{parts.port}/?{parts.query}")
    assert answer.status == 403 and "m39" not in page.content()
    page.context.close()


def test_the_runs_are_reached_by_keyboard_alone(chromium, address):
    page = opened(chromium, address, "/")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('href')") == f"/runs/{ONE}":
            break
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{ONE}")
    assert "m39_v1" in page.inner_text("h1")
    page.context.close()

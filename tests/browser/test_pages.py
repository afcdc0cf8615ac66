"""What a person sees: every page in a real browser, light and dark, by keyboard, without scripts, and with nothing sent out."""

import contextlib
import functools
import gzip
import http.server
import json
import re
import shutil
import threading
import urllib.parse
from itertools import product

import pytest

from tests.browser.conftest import RUNS, dashboard
from tests.contract.test_dashboard_hostile import HTML, LINES, OBJECTS, html
from tests.tables import tables
from tunix_rt.dashboard.export import Export
from tunix_rt.dashboard.site import Site
from tunix_rt.runs.index import run_id

IDS = {one.name: one.id for one in Site.of(RUNS).index.runs()}
ONE, OTHER = IDS["m39_v1"], IDS["m40_v1"]
PLANNED = "/plan?model=gemma-3-1b&on=rtx4090&devices=all"
PAGES = [path.replace("ONE", ONE).replace("OTHER", OTHER) for path in tables(__file__)["pages"]]
CORE = ("/", f"/runs/{ONE}", f"/runs/{ONE}/answers", PLANNED)
SERIES = [pytest.param(page, marks=[] if page in CORE else pytest.mark.slow) for page in PAGES]
MOST_PAGE, MOST_SCRIPT = 60_000, 15_000
ODD = run_id("odd")
VIOLATIONS = "async () => (await axe.run()).violations.map(v => [v.id, v.nodes.map(n => n.html).slice(0, 3)])"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The address of a run with HTML in every text, generations during training, and what verification says of it."""
    run = shutil.copytree(RUNS / "m39_cpu_v1", tmp_path_factory.mktemp("odd") / "odd")
    lines = (run / "eval" / "predictions-after.jsonl").read_text().splitlines()[:5]
    samples = [{"step": step, **json.loads(line)} for step in (10, 20) for line in lines]
    (run / "eval" / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    for name in (*LINES, *OBJECTS, "eval/samples.jsonl", "training_log.txt"):
        html(run / name)
    shutil.copytree(run, run.parent / HTML.partition("/")[0])
    with dashboard(run.parent, "--no-key") as (found, _):
        yield found


@pytest.fixture
def browse(chromium, address):
    """Opens a page of the dashboard in a browser that knows its key."""
    with contextlib.ExitStack() as stack:

        def opened(path, **options):
            page = stack.enter_context(chromium.new_context(**options)).new_page()
            page.goto(address)
            return go(page, address, path)

        yield opened


def go(page, address, path):
    parts = urllib.parse.urlsplit(address)
    page.goto(f"{parts.scheme}://{parts.netloc}{path}")
    return page


def verify(page):
    with page.expect_navigation():  # the page is loaded again once the server has begun
        page.click("button:text-is('Verify')")
    page.wait_for_selector("[data-next='0']", state="attached", timeout=120_000)
    page.wait_for_selector("h2:text-matches('^Verdict')")


def require_readable(page, axe, place):
    """By the rules of axe, and with nothing cut off at 320 pixels."""
    page.add_script_tag(content=axe)
    assert page.evaluate(VIOLATIONS) == [], place
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320, place
    page.set_viewport_size({"width": 1280, "height": 720})


@pytest.mark.parametrize("path", SERIES)
def test_a_page_is_accessible_in_light_and_dark_and_whole_when_narrow_and_in_print(browse, axe, path):
    page = browse(path, bypass_csp=True)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        require_readable(page, axe, (path, scheme))
    shown = page.locator("table:visible, figure:visible").count()
    page.emulate_media(media="print")
    assert page.locator("table:visible, figure:visible").count() == shown and not page.locator("button:visible").count()


@pytest.mark.slow
def test_verified_evidence_generations_and_exported_pages_are_so_too(browse, odd, axe, tmp_path):
    Export(site=Site.of(RUNS), start=f"/runs/{ONE}").write(tmp_path / "pages", lambda name: None)
    exported = [(tmp_path / "pages" / name).as_uri() for name in ("index.html", f"runs-{ONE}-evidence.html")]
    for scheme in ("light", "dark"):
        page = browse(f"/runs/{ONE}/evidence", color_scheme=scheme, bypass_csp=True)
        verify(page)
        for place in ("", f"{odd}runs/{ODD}/answers?show=along", f"{odd}runs/{ODD}", *exported):
            page.goto(place) if place else None
            require_readable(page, axe, (place, scheme))


@pytest.mark.parametrize("path", SERIES)
def test_a_page_is_whole_without_scripts_light_and_asks_no_other_host(browse, chromium, address, path):
    asked, sizes = [], {}
    with_scripts = chromium.new_context().new_page()
    with_scripts.on("request", lambda request: asked.append(request.url))
    with_scripts.on("response", lambda answer: sizes.update({answer.url: answer}))
    with_scripts.goto(address)
    go(with_scripts, address, path)
    host = urllib.parse.urlsplit(address).netloc
    assert asked and {urllib.parse.urlsplit(url).netloc for url in asked} == {host}
    with_scripts.wait_for_selector("main:not(:has(progress))", timeout=200_000)  # the doctor looks in the background
    text = with_scripts.inner_text("main")
    body = sizes[with_scripts.url.partition("#")[0]].body()
    script = sizes[urllib.parse.urljoin(address, "/static/page.js")].body()
    assert len(gzip.compress(body)) <= MOST_PAGE and len(script) <= MOST_SCRIPT
    plain = browse(path, java_script_enabled=False)
    bare = plain.inner_text("main")
    for needs in plain.locator("noscript").all_inner_texts():
        bare = bare.replace(needs, "", 1)
    assert words(bare) == words(text)


def words(text: str) -> list[str]:
    """Without times, which pass."""
    return [word for word in text.split() if not re.search(r"\d+:\d\d|^\d+(?:\.\d+)?$", word)]


def test_a_foreign_name_for_this_computer_gets_nothing(chromium, address):
    parts = urllib.parse.urlsplit(address)
    page = chromium.new_context().new_page()
    answer = page.goto(f"http://evil.example:{parts.port}/?{parts.query}")
    assert answer.status == 403 and "m39" not in page.content()


def test_charts_zoom_by_dragging_and_are_read_by_arrows(browse):
    page = browse(f"/runs/{ONE}")
    chart, readout = page.locator("#chart-loss"), page.locator("figure:has(#chart-loss) output")
    box, whole = chart.bounding_box(), f"#chart-loss[data-low='{chart.get_attribute('data-low')}']"
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    assert re.match(r"Loss at .+: .+", readout.inner_text())
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile("from="))
    page.wait_for_selector(f"svg:not({whole}):is(#chart-loss)")
    low, high = (float(chart.get_attribute(f"data-{end}")) for end in ("low", "high"))
    last = json.loads((RUNS / "m39_v1" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert 0.15 * last < low < 0.35 * last < 0.45 * last < high < 0.7 * last
    chart.focus()
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End"):
        page.keyboard.press(key)
        seen.append(readout.inner_text())
    assert seen[1] == seen[3] and len(set(seen)) == 4 and all(text.startswith("Loss at ") for text in seen)
    page.keyboard.press("Escape")
    page.wait_for_url(re.compile(f"{ONE}$"))
    page.wait_for_selector(whole)
    page.go_back()
    page.wait_for_selector(f"svg:not({whole}):is(#chart-loss)")


def test_links_and_forms_do_the_same_without_scripts(browse, address):
    page = browse("/", java_script_enabled=False)
    page.select_option("select[name=group]", "model")
    page.click("main form button >> nth=0")
    page.locator("h2").nth(1).wait_for()
    assert "group=model" in page.url
    page.click("thead a:text-is('training loss') >> nth=0")
    page.wait_for_url("**sort=loss**")
    assert "group=model" in page.url
    page.check(f"input[value='{ONE}']")
    page.check(f"input[value='{OTHER}']")
    page.click("button:text-is('Compare the chosen runs')")
    page.locator("h1:has-text('2 runs compared')").wait_for()
    go(page, address, f"/runs/{ONE}")
    page.click("a:text-is('zoom in')")
    page.wait_for_url("**from=**")
    go(page, address, "/plan")
    page.select_option("select[name=model]", "gemma-2b")
    page.select_option("select[name=on]", "rtx4090")
    page.click("button:text-is('Plan')")
    page.locator("main h2:has-text('rtx4090')").first.wait_for()
    page.click("a:text-is('Plan for all of them')")
    page.locator("[aria-label=Devices] tbody tr").nth(20).wait_for()


def test_the_catalogue_follows_the_answer_by_itself_where_there_are_scripts(browse):
    page = browse("/plan?model=gemma-2b&on=rtx4090")
    page.wait_for_selector("[aria-label=Devices] tbody tr")


@pytest.mark.slow
def test_both_models_answer_side_by_side_with_the_reasoning_folded(browse):
    page = browse("/try", viewport={"width": 320, "height": 640})
    page.click("button:text-is('Ask both')")
    page.locator("#answers section").nth(1).wait_for(timeout=300_000)
    assert page.locator("#answers details:not([open])").count() == 1 and "68" in page.inner_text("#answers p")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_html_in_every_text_of_a_run_is_shown_and_never_runs(chromium, odd):
    page, wrong = chromium.new_context().new_page(), []
    page.add_init_script(
        "addEventListener('securitypolicyviolation', one => console.error('CSP', one.violatedDirective))"
    )
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "CSP" in message.text else None)
    other = run_id(HTML.partition("/")[0])
    for path in ("", f"runs/{ODD}", f"runs/{ODD}/answers", f"runs/{ODD}/answers?show=along", f"runs/{ODD}/evidence",
                 f"compare?run={ODD}&run={other}", f"data?data={ODD}", f"plan?model={ODD}&on=t4"):  # fmt: skip
        page.goto(odd + path)
        if path.endswith("evidence"):
            verify(page)
        assert page.locator("main img, main script, main [onerror]").count() == 0, path
        assert page.locator("h1").count() == 1
    page.goto(odd)
    assert "<img src=x onerror=alert(1)>" in page.inner_text("main") and wrong == []


def test_a_page_of_another_site_cannot_act_and_cannot_read(browse, address, tmp_path):
    (tmp_path / "index.html").write_text(
        "<form method=post enctype=text/plain><input name=x><button>go</button></form>"
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    ours = browse("/")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page, base = ours.context.new_page(), ours.url.rstrip("/")
        for host in ("evil.example", "127.0.0.1"):  # another site, and another port of the same one
            page.goto(f"http://{host}:{server.server_port}/")
            for method, mode in product(("GET", "POST"), ("cors", "no-cors")):
                read = """([address, method, mode]) => fetch(address, {method, mode, credentials: "include"})
                    .then(() => "read", () => "blocked")"""
                assert page.evaluate(read, [f"{base}/runs/{OTHER}/evidence", method, mode]) == "blocked"
            page.evaluate("address => { document.forms[0].action = address }", f"{base}/runs/{OTHER}/evidence")
            page.click("button")
            page.wait_for_url(f"{base}/**")
            assert "another site" in page.inner_text("body")
        server.shutdown()
    assert "Not checked since" in go(ours, address, f"/runs/{OTHER}/evidence").inner_text("main")


def test_the_runs_are_reached_by_keyboard_alone(browse):
    page = browse("/")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('href')") == f"/runs/{ONE}":
            break
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{ONE}")
    assert "m39_v1" in page.inner_text("h1")
    page.context.close()

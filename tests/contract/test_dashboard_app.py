"""The dashboard as an application: every page, every header, the key, parts and what an attacker sends."""

import random
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest

from tests.conftest import ROOT
from tunix_rt.dashboard.app import PAGES, make_app
from tunix_rt.dashboard.guard import HEADERS, LOOPBACK, Guard, new_key
from tunix_rt.dashboard.site import Site

starlette_testclient = pytest.importorskip("starlette.testclient")
RUNS = ROOT / "submission_runs"
KEY = new_key()


@pytest.fixture(scope="module")
def site():
    return Site.of(RUNS)


@pytest.fixture(scope="module")
def client(site):
    guard = Guard(hosts=LOOPBACK, key=None, port=80)
    return starlette_testclient.TestClient(make_app(site, guard), base_url="http://localhost", follow_redirects=False)


def addresses(site) -> list[str]:
    ids = [one.id for one in site.index.runs()]
    found = []
    for pattern in PAGES:
        found += [pattern.replace("{run_id}", one) for one in (ids if "{" in pattern else ids[:1])]
    compare = f"/compare?run={ids[0]}&run={ids[1]}"
    return [one for one in found if one not in ("/try", "/compare")] + [compare]


def test_every_page_of_real_runs_is_answered_with_every_header_and_no_inline_script_or_style(site, client):
    for address in addresses(site):
        answer = client.get(address)
        assert answer.status_code == 200, (address, answer.text[:500])
        for name, value in HEADERS.items():
            assert answer.headers.get_list(name) == [value], address
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        text = answer.text
        assert "<style" not in text and " style=" not in text, address
        assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="/static/page.js">'], address
        assert not re.search(r"\son\w+=", text), address
        assert re.findall(r'(?:href|src|action)="(?!/|\?|#)[^"]*"', text) == [], address
        assert text.count("<h1") == 1 and "<main" in text, address


def test_a_page_is_sent_once_and_then_only_when_it_changed(site, client):
    for address in ("/", f"/runs/{site.index.runs()[0].id}", "/static/style.css"):
        first = client.get(address)
        again = client.get(address, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get(address, headers={"if-none-match": '"other"'}).status_code == 200


def test_a_part_is_a_piece_of_its_page(site, client):
    whole = client.get("/").text
    part = client.get("/", headers={"part": "live"}).text
    assert part in whole and "<table" in part and "<html" not in part
    assert client.get("/", headers={"part": "nonsense"}).text == whole


def test_the_printed_address_is_exchanged_for_a_cookie_and_without_it_nothing_is_read(site):
    app = make_app(site, Guard(hosts=LOOPBACK, key=KEY, port=80))
    client = starlette_testclient.TestClient(app, base_url="http://localhost", follow_redirects=False)
    for address in ("/", "/plan", f"/runs/{site.index.runs()[0].id}", "/?key=wrong", "/nothing"):
        assert client.get(address).status_code == 403, address
    assert client.post("/doctor", headers={"x-tunix-rt": "1", "content-type": "application/json"}).status_code == 403
    given = client.get(f"/?key={KEY}&sort=loss")
    assert (given.status_code, given.headers["location"]) == (303, "./?sort=loss")
    assert "HttpOnly; SameSite=Strict" in given.headers["set-cookie"]
    assert client.get("/").status_code == 200  # the client keeps cookies
    # A path that looks like another host leads nowhere else.
    for odd in (f"//evil.example/?key={KEY}", f"/%5c%5cevil.example?key={KEY}", f"/https:evil?key={KEY}"):
        place = starlette_testclient.TestClient(app, base_url="http://localhost", follow_redirects=False).get(odd)
        assert place.status_code != 303 or place.headers["location"].startswith("./"), odd


def test_it_imports_neither_torch_nor_jax():
    code = (
        "import sys; from pathlib import Path; from tunix_rt.dashboard.app import make_app, respond\n"
        "from tunix_rt.dashboard.guard import Guard, LOOPBACK; from tunix_rt.dashboard.site import Site\n"
        f"from starlette.testclient import TestClient; site = Site.of(Path({str(RUNS)!r}))\n"
        "client = TestClient(make_app(site, Guard(hosts=LOOPBACK, key=None, port=80)), base_url='http://localhost')\n"
        "assert client.get('/').status_code == 200\n"
        "print([name for name in ('torch', 'jax', 'transformers', 'flax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- attacks ----------------------------------------------------------------------------------------------------------

SECRET = "the-secret-of-another-folder"
PIECES = [
    "..",
    "%2e%2e",
    "..%2f",
    "%2e%2e%2f",
    "..%5c",
    "%252e%252e%252f",
    "....//",
    ".%00.",
    "%c0%ae%c0%ae",
    "..;",
    "%u002e",
]


def hostile(rng: random.Random, ids: list[str]) -> str:
    """An address that no page of ours has in a link."""
    kind = rng.randrange(6)
    if kind == 0:
        depth = rng.randint(1, 12)
        return (
            rng.choice(["/", "/runs/", "/static/", "/data/"]) + "/".join(rng.choices(PIECES, k=depth)) + "/secret.txt"
        )
    if kind == 1:
        return f"/runs/{rng.choice(ids)}/{rng.choice(PIECES)}/{rng.choice(PIECES)}/secret.txt"
    name = rng.choice(
        ["run", "data", "model", "on", "set", "record", "row", "q", "show", "from", "to", "x", "page", "config"]
    )
    value = rng.choice(
        ["../../secret.txt", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/", "{{7*7}}", "<script>alert(1)</script>",
         "%00", "\x00", "9" * 400, "-1", "nan", "1e999", "a" * 3000, "\u202e", "a=b=c", "training.lr=1", "model.x=/etc/passwd",
         "google/gemma-3-4b", "~/.ssh/id_rsa", "=", "[" * 500, "training.max_steps=1:30", rng.randbytes(8).decode("latin-1")]
    )  # fmt: skip
    path = rng.choice(
        ["/", "/plan", "/data", "/compare", "/doctor", f"/runs/{rng.choice(ids)}", f"/runs/{rng.choice(ids)}/answers"]
    )
    more = "&".join(f"{name}={urllib.parse.quote(value)}" for _ in range(rng.choice([1, 1, 1, 300])))
    return f"{path}?{more}"[:60_000]


def attack(client, site, count: int, seed: int) -> None:
    rng, ids = random.Random(seed), [one.id for one in site.index.runs()]
    for _ in range(count):
        address = hostile(rng, ids)
        answer = client.get(address)
        assert answer.status_code < 500, (address, answer.text[:300])
        assert SECRET not in answer.text and "root:x:0:0" not in answer.text, address
        assert "<script>alert" not in answer.text and ">49<" not in answer.text, address


@pytest.fixture(scope="module")
def beside_a_secret(tmp_path_factory):
    """Runs in a folder beside a file that no page may show."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "secret.txt").write_text(SECRET)
    shutil.copytree(RUNS / "m39_cpu_v1", folder / "runs" / "one")
    site = Site.of(folder / "runs")
    app = make_app(site, Guard(hosts=LOOPBACK, key=None, port=80))
    return starlette_testclient.TestClient(app, base_url="http://localhost", raise_server_exceptions=False), site


def test_hostile_addresses_leak_nothing_and_break_nothing(beside_a_secret):
    attack(*beside_a_secret, count=300, seed=24)


@pytest.mark.slow
def test_twelve_thousand_hostile_addresses_leak_nothing_and_break_nothing(beside_a_secret):
    attack(*beside_a_secret, count=12_000, seed=2424)

"""The dashboard as an application: every page, every header, the key, parts and what an attacker sends."""

import contextlib
import random
import re
import shutil
import socket
import urllib.parse
from collections import Counter

import psutil
import pytest

from tests.browser.conftest import dashboard
from tests.conftest import ROOT
from tests.tables import tables
from tunix_rt.dashboard.app import PAGES, make_app
from tunix_rt.dashboard.guard import HEADERS, Guard, new_key
from tunix_rt.dashboard.site import Site
from tunix_rt.loopback import LOOPBACK
from tunix_rt.runs.index import run_id

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
    found = dict.fromkeys(pattern.replace("{run_id}", one) for pattern in PAGES for one in ids)
    return [*(one for one in found if one not in ("/try", "/compare")), f"/compare?run={ids[0]}&run={ids[1]}"]


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
    for address in ("/", "/plan"):
        for odd in ("nonsense", "content"):
            assert client.get(address, headers={"part": odd}).text == client.get(address).text


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


# --- attacks ----------------------------------------------------------------------------------------------------------

SECRET = "the-secret-of-another-folder"


def picked(rng: random.Random, kind: str, count: int = 1) -> str:
    """One of a table, or several with `/` between them. An entry of three is a beginning, what follows it, and how often."""
    found = rng.choices(tables(__file__)[kind], k=count)
    return "/".join(one if isinstance(one, str) else one[0] + one[1] * one[2] for one in found)


def hostile(rng: random.Random, one: str) -> str:
    """An address that no page of ours has in a link; `one` is the id of a run."""
    kind = rng.randrange(6)
    if kind == 0:
        return f"{picked(rng, 'folders')}{picked(rng, 'pieces', rng.randint(1, 12))}/secret.txt"
    if kind == 1:
        return f"/runs/{one}/{picked(rng, 'pieces', 2)}/secret.txt"
    pair = f"{picked(rng, 'names')}={urllib.parse.quote(picked(rng, 'values'))}"
    return f"{picked(rng, 'paths').replace('ID', one)}?{'&'.join([pair] * rng.choice((1, 1, 1, 300)))}"[:60_000]


def hostile_request(rng: random.Random, one: str) -> tuple[bytes, bool]:
    """Two of three are of a browser that was led to a hostile address, the others of no browser at all; and which it is."""
    address, host, closes = hostile(rng, one), "Host: localhost", "Connection: close"
    if rng.random() < 0.67:
        return f"GET {address} HTTP/1.1\r\n{host}\r\n{closes}\r\n\r\n".encode("latin-1", "replace"), True
    body, lines, method = picked(rng, "bodies"), [closes, host], picked(rng, "methods")
    lines = lines[: 1 + (rng.random() < 0.8)] + [picked(rng, "heads") for _ in range(rng.randint(0, 4))]
    if method == "POST" and rng.random() < 0.9:
        address = picked(rng, "acts").replace("ID", one)
        lines += ["X-Tunix-Rt: 1", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    rng.shuffle(lines)
    head = picked(rng, "ends").join([f"{method} {address} {picked(rng, 'versions')}", *lines, "", ""])
    return (head + body).encode("latin-1", "replace"), False


def answered(port: int, request: bytes, seconds: float = 30) -> bytes:
    """All that comes back until the server closes; nothing where it waits longer than that for the rest of the request."""
    found, ended = b"", contextlib.suppress(ConnectionError, TimeoutError)
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as one, ended:
        one.sendall(request)
        while piece := one.recv(65536):
            found += piece
            one.settimeout(30)
    return found


def attack(port: int, one: str, count: int) -> Counter[str]:
    """How often each status came back; empty where nothing did. `one` is the id of a run."""
    rng, statuses = random.Random(24), Counter[str]()
    for _ in range(count):
        request, is_plain = hostile_request(rng, one)
        answer = answered(port, request, 30 if is_plain else 0.5)
        status = answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else ""
        statuses[status] += 1
        assert not status.startswith("5") and (status or not answer), (request[:300], answer[:300])
        for leaked in (SECRET.encode(), b"root:x:0:0", b"<script>alert", b">49<"):
            assert leaked not in answer, request[:300]
    return statuses


@pytest.mark.parametrize("count", [300, pytest.param(12_000, marks=pytest.mark.slow)])
def test_hostile_requests_leak_nothing_break_nothing_and_fill_no_memory(tmp_path, count):
    (tmp_path / "secret.txt").write_text(SECRET)
    shutil.copytree(RUNS / "m39_cpu_v1", tmp_path / "runs" / "one")
    with dashboard(tmp_path / "runs", "--no-key") as (address, server):
        port = urllib.parse.urlsplit(address).port
        statuses = attack(port, run_id("one"), count)
        again = answered(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert again.startswith(b"HTTP/1.1 200")
        assert psutil.Process(server.pid).memory_info().rss <= 300 * 2**20
        server.terminate()
        assert server.stderr.read() == "Ctrl-C stops it.\n", "what clients break is not printed: it would fill a pipe"
    assert min(statuses[code] for code in ("200", "400", "403", "404", "405")) >= count / 100, statuses

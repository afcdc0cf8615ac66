"""The dashboard as an application: every page, every header, the key, parts and what an attacker sends."""

import contextlib
import random
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
from collections import Counter

import psutil
import pytest

from tests.browser.conftest import dashboard
from tests.conftest import ROOT
from tunix_rt.dashboard.app import PAGES, make_app
from tunix_rt.dashboard.guard import HEADERS, LOOPBACK, Guard, new_key
from tunix_rt.dashboard.site import Site
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


METHODS = ["GET"] * 9 + [
    "HEAD",
    "POST",
    "POST",
    "POST",
    "PUT",
    "TRACE",
    "OPTIONS",
    "CONNECT",
    "get",
    "G\x00T",
    "X" * 900,
    "",
]
HEADS = [
    "Host: evil.example", "Host: localhost", "host:", "Host: localhost:80:80", "Content-Length: -1", "Content-Length: 9999999999",
    "Content-Length: 1, 2", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue",
    "Cookie: " + "tunix_rt_1=\xff; " * 90, "Cookie: =;;==", "If-None-Match: *", "If-None-Match: " + '"' * 200,
    "Part: live", "Part: ../x",
    "Part: content", "Range: bytes=0-", "Accept-Encoding: gzip;q=nan", "X-Forwarded-Host: evil.example", "Upgrade: websocket",
    "Connection: upgrade", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: \xff", "no colon", ": empty", " folded",
    "X: " + "y" * 20_000, "X-Tunix-Rt: 2", "A\x00: b",
    "Origin: null", "Content-Type: text/plain", "Content-Type: multipart/form-data; boundary=" + "b" * 5000,
]  # fmt: skip
BODIES = [
    "",
    "{}",
    "x" * 100_000,
    '{"question": 1}',
    '{"question": "' + "a" * 60_000 + '"}',
    "[" * 60_000,
    "\xff\xfe\x00",
    "5\r\nhello\r\nZZ",
]
ACTS = "X-Tunix-Rt: 1\r\nContent-Type: application/json"


def hostile_request(rng: random.Random, ids: list[str]) -> tuple[bytes, bool]:
    """Two of three are of a browser that was led to a hostile address, the others of no browser at all; and which it is."""
    address, host = hostile(rng, ids), "Host: localhost"
    if rng.random() < 0.67:
        return f"GET {address} HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n".encode("latin-1", "replace"), True
    body, lines = (
        rng.choice(BODIES),
        ["Connection: close", *rng.sample(HEADS, rng.randint(0, 4))] + [host] * (rng.random() < 0.8),
    )
    method = rng.choice(METHODS)
    if method == "POST" and rng.random() < 0.7:
        address = rng.choice(["/doctor", "/try", f"/runs/{ids[0]}/evidence", "/runs/000000000000/evidence", address])
        lines += [ACTS, f"Content-Length: {len(body)}"]
    rng.shuffle(lines)
    end = rng.choice(["\r\n"] * 8 + ["\n", "\r"])
    head = end.join(
        [f"{method} {address} {rng.choice(['HTTP/1.1'] * 8 + ['HTTP/1.0', 'HTTP/9.9', ''])}", *lines, "", ""]
    )
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


@pytest.mark.parametrize("count", [300, pytest.param(12_000, marks=pytest.mark.slow)])
def test_hostile_requests_leak_nothing_break_nothing_and_fill_no_memory(tmp_path, count):
    (tmp_path / "secret.txt").write_text(SECRET)
    shutil.copytree(RUNS / "m39_cpu_v1", tmp_path / "runs" / "one")
    rng, ids, statuses = random.Random(24), [run_id("one")], Counter[bytes]()
    with dashboard(tmp_path / "runs", "--no-key") as (address, server):
        port = urllib.parse.urlsplit(address).port
        for _ in range(count):
            request, is_plain = hostile_request(rng, ids)
            answer = answered(port, request, 30 if is_plain else 0.5)
            status = answer[9:12] if answer.startswith(b"HTTP/1.1 ") else b""
            statuses[status] += 1
            assert not status.startswith(b"5") and (status or not answer), (request[:300], answer[:300])
            for leaked in (SECRET.encode(), b"root:x:0:0", b"<script>alert", b">49<"):
                assert leaked not in answer, request[:300]
        assert answered(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 200"
        )
        assert psutil.Process(server.pid).memory_info().rss <= 300 * 2**20
    assert min(statuses[code] for code in (b"200", b"400", b"403", b"404", b"405")) >= count / 100, statuses

"""`tunix-rt dashboard` as a process: it starts, survives slow clients, contacts nobody, ends on Ctrl-C, and writes nothing."""

import contextlib
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.browser.conftest import dashboard
from tests.conftest import ROOT
from tests.contract.test_dashboard_pages import state
from tests.program import in_process, refused
from tunix_rt.dashboard.app import PAGES
from tunix_rt.dashboard.chat import Chat
from tunix_rt.errors import InputError
from tunix_rt.runs.index import run_id

RUNS = ROOT / "submission_runs"


def fetched(address: str, cookie: str = "") -> tuple[int, str]:
    request = urllib.request.Request(address, headers={"cookie": cookie} if cookie else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status, answer.read().decode()


def test_it_starts_shows_the_run_it_is_given_and_ends_on_ctrl_c_without_a_word_also_while_it_makes_a_page(tmp_path):
    run = shutil.copytree(RUNS / "demo_v1", tmp_path / "one")
    (run / "final_model" / "chat_template.jinja").write_text("{{ 9 ** (9 ** 9) }}")  # no thread runs beside it
    before = state(run)
    with dashboard(run) as (address, server):
        assert urllib.parse.urlsplit(address).path == f"/runs/{run_id('one')}"
        base = address.partition("/runs/")[0]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetched(f"{base}/")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert "tiny-gemma3" in opener.open(address, timeout=30).read().decode()
        assert "one" in opener.open(f"{base}/", timeout=30).read().decode()
        with ThreadPoolExecutor(1) as pool:
            endless = pool.submit(opener.open, f"{base}/data?data=dev-reasoning-v2&model={run_id('one')}", timeout=30)
            with pytest.raises(TimeoutError):  # a page is ended after 20 seconds
                endless.result(timeout=2)
            assert "one" in opener.open(f"{base}/", timeout=2).read().decode()
            children = psutil.Process(server.pid).children()
            server.send_signal(signal.SIGINT)
            begun = time.monotonic()
            assert server.wait(timeout=30) == 0 and time.monotonic() - begun < 2
        assert isinstance(endless.exception(), OSError) and server.stderr.read() == "Ctrl-C stops it.\n"
        assert len(children) == 1 and psutil.wait_procs(children, timeout=5)[1] == []
    assert state(run) == before


def test_what_cannot_be_served_is_refused_with_the_way_out(tmp_path):
    assert "no such folder" in refused(in_process("dashboard", tmp_path / "nowhere", "--no-open"), 3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = refused(in_process("dashboard", RUNS, "--no-open", "--port", taken.getsockname()[1]), 2)
        assert "cannot listen on 127.0.0.1" in words and "choose another --port" in words
    assert "--no-key" in refused(in_process("dashboard", RUNS, "--no-open", "--no-key", "--host", "0.0.0.0"), 2)
    for name in ("gpu-host:8080", "http://gpu-host", "::1", ""):
        assert "give the name alone" in refused(in_process("dashboard", RUNS, "--no-open", "--allow-host", name), 2)
    (tmp_path / "link").symlink_to(run := shutil.copytree(RUNS / "m39_cpu_v1", tmp_path / "mine"))
    for folder, to in ((run, run / "pages"), (tmp_path, run / "eval" / "x"), (tmp_path, tmp_path / "link" / "y")):
        assert "in the run mine" in refused(in_process("dashboard", folder, "--export", to), 3) and not to.exists()


def test_the_program_that_opens_a_browser_is_given_a_key_that_is_not_the_printed_one(monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("click.launch", opened.append)
    monkeypatch.setattr("tunix_rt.loopback.serve", lambda app, bound, ready, close: (ready(), bound.close()))
    printed = re.search(r"\?key=(\S+)", in_process("dashboard", RUNS).stdout)[1]
    assert len(opened) == 1 and re.search(r"/\?key=\S{32}$", opened[0]) and printed not in opened[0]


def test_a_first_user_without_a_runs_folder_gets_a_page_that_says_how_to_start(tmp_path):
    assert in_process("dashboard", "--export", "pages", cwd=tmp_path).returncode == 0
    words = "There are no runs in <code>runs</code> yet. <code>tunix-rt train demo --output runs/demo</code> makes one."
    assert words in (tmp_path / "pages" / "index.html").read_text()


def test_the_pages_are_written_as_files_that_need_no_server_with_claims_filters_and_comparisons(tmp_path):
    done = in_process("dashboard", RUNS, "--export", tmp_path / "pages")
    assert done.returncode == 0, done.stderr
    files = {path.name: path.read_text() for path in (tmp_path / "pages").glob("*.html")}
    assert f"{len(files)} pages in" in done.stdout and "verifying m39_v1" in done.stderr
    reached, waiting = {"index.html"}, ["index.html"]
    while waiting:
        text = files[name := waiting.pop()]
        assert not re.search(r"<script|<form[^>]* action|(?:href|src)=\"/|<a (?![^>]*href=)", text), name
        for link in re.findall(r'href="([^"]+)"', text):
            target, _, place = link.partition("#")
            assert not place or f'id="{place}"' in text, (name, link)
            assert not target or (tmp_path / "pages" / target).is_file(), (name, link)
            if target.endswith(".html") and target not in reached:
                reached.add(target)
                waiting.append(target)
    assert reached == files.keys() and (tmp_path / "pages" / "style.css").is_file()
    ids = [run_id(path.name) for path in RUNS.iterdir()]
    assert sum(name.startswith("compare-") for name in files) == len(ids) * (len(ids) - 1) / 2
    for one in ids:
        assert re.search(rf'href="runs-{one}-evidence.html">(none|L\d)</a>', files["index.html"]), one
        assert "<h2>Verdict: " in files[f"runs-{one}-evidence.html"]
        assert all(f"runs-{one}-answers-show-{show}.html" in files for show in ("gained", "lost", "malformed"))
    assert "is not empty" in refused(in_process("dashboard", RUNS, "--export", tmp_path / "pages"), 3)
    alone = in_process("dashboard", RUNS / "m39_cpu_v1", "--export", tmp_path / "alone")
    texts = "".join(path.read_text() for path in (tmp_path / "alone").glob("*.html"))
    assert alone.returncode == 0 and "m39_cpu_v1" in texts and "m40_v1" not in texts


def test_the_trained_model_answers_beside_its_base_model_and_not_while_a_run_trains():
    busy = False
    chat = Chat(RUNS / "demo_v1", is_busy=lambda: busy)
    try:
        base, tuned = chat.ask("Rosa has 63 toys. Rosa buys 5 more toys. How many toys does Rosa have now?")["answers"]
        assert (base["model"], base["answer"]) == ("tiny-gemma3", None)
        assert tuned["answer"] == "68" and "63 + 5 = 68" in tuned["reasoning"]
        assert psutil.Process(chat._child.pid).environ()["HF_HUB_OFFLINE"] == "1"
        for question in ("", " ", "x" * 9000):
            with pytest.raises(InputError, match="no question"):
                chat.ask(question)
        busy = True
        with pytest.raises(InputError, match="a run is training"):
            chat.ask("What is 1 + 1?")
    finally:
        child = chat._child
        chat.close()
    assert child is not None and child.returncode is not None and child.stdin.closed and child.stdout.closed


HOST, ACTION = b"HTTP/1.1\r\nHost: localhost\r\n", b"Content-Type: application/json\r\nX-Tunix-Rt: 1\r\n"
UNFINISHED = (b"GET / " + HOST, b"G", b"POST /doctor " + HOST + ACTION + b"Content-Length: 9999\r\n\r\n{")


@pytest.mark.slow  # waits for the deadline of ten seconds
def test_250_clients_that_never_finish_a_request_hold_nobody_up():
    with dashboard(RUNS, "--no-key") as (address, server):
        port = urllib.parse.urlsplit(address).port
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(250)]
        for number, one in enumerate(slow):
            one.sendall(UNFINISHED[number % 3])
        for _ in range(20):
            assert fetched(address)[0] == 200
        time.sleep(13)
        for one in slow:  # a connection that is still open ends in a TimeoutError
            one.settimeout(1)
            with one, one.makefile("rb") as answer, contextlib.suppress(ConnectionResetError):
                answer.read()
        assert psutil.Process(server.pid).memory_info().rss < 300 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_it_contacts_no_other_host_by_the_word_of_the_kernel(tmp_path):
    """Every page, the doctor in the background, a verification and a chat; the processes that it starts are traced too."""
    calls, one = tmp_path / "calls", run_id("demo_v1")
    tracer = ("strace", "-f", "--seccomp-bpf", "-e", "trace=bind,connect,sendto,sendmsg,sendmmsg", "-o", calls)
    with dashboard(RUNS, "--no-key", "--chat", RUNS / "demo_v1", under=tracer) as (address, server):
        more = (f"/compare?run={one}&run={run_id('m40_v1')}", "/plan?model=gemma-3-1b&on=rtx4090", f"/data?data={one}")
        for path in (*(path.replace("{run_id}", one) for path in PAGES if path != "/compare"), *more):
            assert fetched(address + path[1:])[0] == 200
        headers = {"x-tunix-rt": "1", "content-type": "application/json"}
        for path, body in ((f"runs/{one}/evidence", b""), ("try", b'{"question": "What is 1 + 1?"}')):
            request = urllib.request.Request(address + path, body, headers)
            assert urllib.request.urlopen(request, timeout=300).status == 200
        while "<progress" in fetched(f"{address}doctor")[1] + fetched(f"{address}runs/{one}/evidence")[1]:
            time.sleep(1)
        psutil.Process(server.pid).children()[0].send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    seen = [line for line in calls.read_text().splitlines() if "AF_INET" in line]
    assert any("bind(" in line and 'inet_addr("127.0.0.1")' in line for line in seen)
    assert [line for line in seen if 'inet_addr("127.' not in line and '"::1"' not in line] == []

"""Run folders made by somebody who means harm: every page and `tunix-rt runs` survive them, quickly and in bounded memory."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tables import tables

MOST_MIB, MOST_SECONDS = 300, 20
HTML = "<img src=x onerror=alert(1)><script>alert(1)</script>{{7*7}}\u202e\x1b[31m"
LINES, OBJECTS, TEXTS, MODEL = (tables(__file__)[kind] for kind in ("lines", "objects", "texts", "model"))
"""Files of a run folder, by what they contain."""


def html(path: Path) -> None:
    """In every text of every object, behind an honest beginning."""

    def spoilt(value):
        if isinstance(value, dict):
            return {key: spoilt(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [spoilt(inner) for inner in value]
        return value + HTML if isinstance(value, str) else value

    text = path.read_text()
    if path.suffix in (".json", ".jsonl"):
        parts = text.splitlines() if path.suffix == ".jsonl" else [text]
        path.write_text("".join(json.dumps(spoilt(json.loads(part))) + "\n" for part in parts))
    else:
        path.write_text(HTML + "\n" + text + HTML)


NUMBERS = '{"step": NaN, "loss": 1e999, "lr": -Infinity, "seconds": null, "peak_bytes": "x", "tokens": '
HARMS = {
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "sparse": lambda path: os.truncate(path, 3 * 10**9),
    "long line": lambda path: path.write_bytes(path.read_bytes() + b"x" * 200_000_000),
    "link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "html": html,
    "deep": lambda path: path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"),
    "numbers": lambda path: path.write_text((NUMBERS + "9" * 4000 + "}\n") * 20),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 4000),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "unreadable": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}

CHILD = """
import re, signal, sys
from pathlib import Path
from click.testing import CliRunner
from starlette.testclient import TestClient
from tunix_rt.cli.main import cli
from tunix_rt.dashboard.app import make_app
from tunix_rt.dashboard.guard import Guard
from tunix_rt.dashboard.site import Site
from tunix_rt.loopback import LOOPBACK

def limit():  # of computing for one page; and of waiting, which is longer where other programs compute
    signal.setitimer(signal.ITIMER_PROF, int(sys.argv[2]))
    signal.alarm(30 * int(sys.argv[2]))

site, bad = Site.of(Path(sys.argv[1])), re.compile("<img src=x|<script>alert|>49<|root:x:0|\\u202e|\\x1b")
app = make_app(site, Guard(hosts=LOOPBACK, key=None, port=80))
client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
runs, ends = site.index.runs(), ("", "/answers", "/answers?show=along", "/evidence")
addresses = ["/", "/data", "/plan", *(f"/runs/{one.id}{end}" for one in runs for end in ends)]
for one, other in zip(runs, [runs[-1], *runs]):
    addresses += [f"/compare?run={one.id}&run={other.id}", f"/data?data={one.id}", f"/data?data={one.id}&row=1"]
    addresses += [f"/plan?model={one.id}&on=t4"]
for address in addresses:
    limit()
    answer = client.get(address)
    if answer.status_code >= 500 or bad.search(answer.text):
        print("PAGE", address, answer.status_code, bad.findall(answer.text), flush=True)
for words in (*(["runs", "show", str(one.root)] for one in runs), ["runs", sys.argv[1]]):
    limit()
    done = CliRunner().invoke(cli, words)
    if done.exit_code not in (0, 3) or "root:x:0" in done.output:
        print("RUNS", words, done.exit_code, repr(done.exception), flush=True)
if heavy := {"torch", "jax", "transformers", "flax", "safetensors"} & set(sys.modules):
    print("IMPORTED", heavy)
print("peak", int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
"""


def look_at(below: Path) -> None:
    """Every page and every view of the command line, in a process: none fails, takes long, fills memory or imports an engine."""
    words = [sys.executable, "-c", CHILD, str(below), str(MOST_SECONDS)]
    child = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=3600)
    *problems, last = child.stdout.splitlines() or [""]
    assert child.returncode == 0 and problems == [], child.stdout + child.stderr[-3000:]
    assert int(last.removeprefix("peak ")) <= MOST_MIB


def make_harmed(below: Path, harms, names) -> None:
    for harm, name in itertools.product(harms, names):
        run = below / f"{harm}-{name.replace('/', '_')}"
        shutil.copytree(ROOT / "submission_runs" / "m39_cpu_v1", run)
        if name in MODEL:
            tiny, weights = ROOT / "models" / "tiny-gemma3", shutil.ignore_patterns("*.safetensors")
            shutil.copytree(tiny, run / "final_model", ignore=weights, dirs_exist_ok=True)
        HARMS[harm](run / name)


def test_hostile_files_in_a_run_folder_are_shown_as_what_they_are(tmp_path):
    names = ("metrics.jsonl", "eval/predictions-after.jsonl", "result.json", MODEL[1])
    make_harmed(tmp_path, ("fifo", "sparse", "link", "html", "numbers"), names)
    look_at(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
def test_every_harm_in_every_file_is_survived(tmp_path, harm):
    texts = TEXTS[:-1] if harm == "html" else TEXTS
    make_harmed(tmp_path, (harm,), (*LINES, *OBJECTS, *texts, *MODEL))
    look_at(tmp_path)


def test_names_of_folders_cannot_be_more_than_text(tmp_path):
    for name in ("<b>x", "a\nb", "\u202egnp", "a'b\"c", "%2e%2e", "{{7*7}}", "x" * 200):
        shutil.copytree(ROOT / "submission_runs" / "m39_cpu_v1", tmp_path / name)
    (tmp_path / "out").symlink_to("/etc")
    look_at(tmp_path)

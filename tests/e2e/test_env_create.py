"""`tunix-rt env create` with real virtual environments and the real pip.

There is no GPU in these tests and no CUDA wheel is fetched: the facts are those of a computer with an H200, and the wheels
are stand-ins made here, a few lines of Python each under the names of real ones. They show what is installed, in which
order, and what is left behind; none of them computes. The last test installs the real torch, for the CPU.
"""

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.program import command, environment, refused, tunix_rt
from tests.unit.test_environment import computer
from tunix_rt.doctor.install import create_environment, error_of
from tunix_rt.storage import to_plain

H200 = computer("H200", "580.95.05")
STAND_IN = """
__version__ = "{version}"
class version:
    cuda, hip = {cuda!r}, None
class cuda:
    get_arch_list = staticmethod(lambda: ["sm_80", "sm_90"] if {cuda!r} else [])
    is_available = staticmethod(lambda: bool({cuda!r}))
def ones(count, device):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
"""


def put_wheel(index: Path, version: str, cuda: str | None) -> None:
    """A stand-in for torch in a folder laid out as a package index."""
    folder = index / "torch"
    folder.mkdir(parents=True)
    info = f"torch-{version}.dist-info"
    files = {
        "torch/__init__.py": STAND_IN.format(version=version, cuda=cuda),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={_digest(text)},{len(text)}" for name, text in files.items()]
    name = f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for inner, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"])}.items():
            wheel.writestr(inner, text)
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with a `.venv`, a registry and a wheel index of our own, and a pip that knows no others."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "registry").as_uri())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("as it was")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_what_is_left(place: Path, report) -> list[dict]:
    """Nothing but log and report; `.venv` as it was; and the report in the file is the one in hand."""
    assert {path.name for path in place.iterdir()} >= {".venv", ".venv-gpu.log", ".venv-gpu.json"}
    assert not (place / ".venv-gpu").exists()
    assert [path.name for path in (place / ".venv").iterdir()] == ["precious"]
    written = json.loads((place / ".venv-gpu.json").read_text())
    assert written == to_plain(report)
    assert (written["schema"], written["status"]) == ("tunix-rt/environment/1", "failed")
    log = (place / ".venv-gpu.log").read_text()
    for attempt in written["attempts"]:
        for ran in attempt["ran"]:
            assert f"$ {ran['command']}\n" in log
    return written["attempts"]


@pytest.mark.slow
def test_two_wheels_that_cannot_compute_end_in_a_report_and_not_on_the_cpu(place):
    put_wheel(place / "whl" / "cu130", "2.13.0+cu130", "13.0")
    put_wheel(place / "whl" / "cu129", "2.13.0+cu129", "12.9")
    put_wheel(place / "whl" / "cpu", "2.13.0+cpu", None)
    said: list[str] = []
    index = (place / "whl").as_uri()
    report = create_environment(H200, device="cuda", path=Path(".venv-gpu"), index_base=index, say=said.append)
    first, second = check_what_is_left(place, report)
    assert (first["wheel"], first["index"]) == ("torch==2.13.0+cu130", f"{index}/cu130")
    assert (second["wheel"], second["index"]) == ("torch==2.13.0+cu129", f"{index}/cu129")
    for attempt in (first, second):
        assert [ran["exit_code"] for ran in attempt["ran"]] == [0, 0, 1]
        assert attempt["failure"]["cause"] == "wheel-lacks-architecture"
        assert "no kernel image is available" in attempt["failure"]["problem"]
    assert (report.kind, report.cause) == ("wheel", "wheel-lacks-architecture")
    error = error_of(report)
    assert error.exit_code == 4
    assert ".venv-gpu.json" in error.fix and ".venv-gpu.log" in error.fix and "from source" in error.fix
    log = (place / ".venv-gpu.log").read_text()
    assert "no kernel image is available" in log and "+cpu" not in log
    assert any(line.startswith("installing torch==2.13.0+cu129") for line in said)


@pytest.mark.slow
def test_a_wheel_that_is_not_there_is_looked_for_elsewhere_and_one_without_cuda_is_not_taken(place):
    (place / "whl" / "cu130" / "torch").mkdir(parents=True)
    (place / "whl" / "cu130" / "torch" / "index.html").write_text("")
    put_wheel(place / "registry", "2.13.0", None)
    report = create_environment(H200, device="cuda", path=Path(".venv-gpu"), index_base=(place / "whl").as_uri())
    first, second = check_what_is_left(place, report)
    assert (first["failure"]["kind"], first["failure"]["cause"]) == ("wheel", "wheel-not-there")
    assert [ran["step"] for ran in first["ran"]] == ["venv", "wheel"]
    assert (second["wheel"], second["index"], second["failure"]["cause"]) == ("torch==2.13.0", "registry", "cpu-wheel")
    assert [ran["step"] for ran in second["ran"]] == ["venv", "wheel", "check"]
    assert error_of(report).exit_code == 4


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_told_from_a_wheel_that_is_not_there(place, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    report = create_environment(H200, device="cuda", path=Path(".venv-gpu"), index_base="http://me:secret@127.0.0.1:9")
    attempts = check_what_is_left(place, report)
    assert [attempt["failure"]["kind"] for attempt in attempts] == ["network", "network"]
    assert (report.kind, error_of(report).exit_code) == ("network", 4)
    for name in (".venv-gpu.log", ".venv-gpu.json"):
        assert "secret" not in (place / name).read_text()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_ends_the_child_and_removes_what_was_half_made(place, number):
    script = (
        "import json, signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests in the background are told to ignore it
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # `nohup` too
        "from tunix_rt.doctor.facts import facts_from_json\n"
        "from tunix_rt.doctor.install import create_environment\n"
        "facts = facts_from_json(json.loads(sys.argv[1]))\n"
        "create_environment(facts, device='cuda', path=Path('.venv-gpu'), index_base=sys.argv[2])\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:  # an index that takes the call and never answers
        server.settimeout(300)
        index = f"http://127.0.0.1:{server.getsockname()[1]}"
        program = subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(to_plain(H200)), index], env=environment(), start_new_session=True
        )
        pip, _ = server.accept()
        with pip:
            assert (place / ".venv-gpu").is_dir()
            program.send_signal(number)
            assert program.wait(timeout=120) == 0
            pip.settimeout(60)
            while pip.recv(4096):  # to the end of what pip had asked: it is gone
                pass
    assert not (place / ".venv-gpu").exists()
    report = json.loads((place / ".venv-gpu.json").read_text())
    assert (report["status"], report["kind"]) == ("failed", "stopped")


@pytest.mark.slow
def test_an_environment_that_is_there_is_verified_by_what_it_computes(tmp_path):
    good = tunix_rt("env", "verify", "--python", sys.executable, "--device", "cpu")
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith(f"ready: {sys.executable}, torch 2.")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    words = refused(tunix_rt("env", "verify", "--path", bare, "--device", "cpu"), 4)
    assert "No module named 'torch'" in words
    refused(tunix_rt("env", "verify", "--path", tmp_path / "nowhere", "--device", "cpu"), 2)


@pytest.mark.slow
@pytest.mark.registry
def test_a_new_environment_for_the_cpu_is_made_proven_and_used(tmp_path):
    start = time.monotonic()
    made = subprocess.run(
        command("env", "create", "--device", "cpu", "--path", "new", "--json"),
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)
    assert report["status"] == "ready" and report["versions"]["torch"].startswith("2.13.0")
    assert json.loads((tmp_path / "new.json").read_text())["status"] == "ready"
    print(f"made in {time.monotonic() - start:.0f} s: {report['versions']}")
    clean = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    asked = [tmp_path / "new" / "bin" / "tunix-rt", "train", "smoke_tiny", "--device", "cpu", "--max-steps", "2"]
    ran = subprocess.run([*asked, "--output", "run"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr

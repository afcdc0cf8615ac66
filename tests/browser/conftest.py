"""A real Chromium, driven by Playwright, on a real `tunix-rt dashboard`. Skipped with the reason where either is missing."""

import contextlib
import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.program import ROOT, command, environment

RUNS = ROOT / "submission_runs"
AXE, AXE_SHA256 = "axe-core@4.14.0", "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here (apt-get install --no-install-recommends chromium)")
    with playwright.sync_playwright() as started:
        rules = ["--host-resolver-rules=MAP evil.example 127.0.0.1"]
        browser = started.chromium.launch(executable_path=program, args=rules, timeout=200_000)
        yield browser
        browser.close()


@contextlib.contextmanager
def dashboard(folder: Path, *options: str | Path, under: tuple[str | Path, ...] = ()):
    """The address that a `tunix-rt dashboard` of `folder` prints, and its process, or that of the program it is started by."""
    words = [*under, *command("dashboard", folder, "--no-open", *options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment(), cwd=ROOT, **pipes) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + (server.stderr.read() if server.stderr and server.poll() is not None else "")
            yield found[0], server
        finally:
            server.terminate()
            server.wait(timeout=120)


@pytest.fixture(scope="session")
def address():
    """Of the five runs of record, with a page to try one of them."""
    with dashboard(RUNS, "--chat", RUNS / "demo_v1") as (found, _):
        yield found


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, a tool of the tests alone."""
    kept = ROOT / ".cache" / "axe.min.js"
    if not kept.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed; axe-core comes from the npm registry")
        with tempfile.TemporaryDirectory() as scratch:
            words = ["npm", "pack", "--silent", AXE]
            done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, timeout=120)
            if done.returncode:
                pytest.skip(f"the npm registry cannot be reached: {done.stderr.strip()[-200:]}")
            with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes(archive.extractfile("package/axe.min.js").read())  # type: ignore[union-attr]
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == AXE_SHA256
    return kept.read_text(encoding="utf-8")

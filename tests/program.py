"""Run the real program: in a subprocess, as a user would, or in this process, where only its output matters."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

ROOT = Path(__file__).parents[1]


def environment(**extra: str) -> dict[str, str]:
    """A user's environment without a model hub: nothing is fetched while tests run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "CUDA_"))}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **extra}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tunix_rt", *map(str, arguments)]


def tunix_rt(*arguments: object, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    """The finished program: exit code, stdout, stderr."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=300
    )


def in_process(*arguments: object, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """The same through click in this process: seconds less for a refusal or a view, which import no engine anew."""
    from tunix_rt.cli.main import cli

    words = list(map(str, arguments))
    with contextlib.chdir(cwd) if cwd else contextlib.nullcontext():
        done = CliRunner(env={"HF_HUB_OFFLINE": "1", **extra}).invoke(cli, words, prog_name="tunix-rt")
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def refused(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The words of a refusal, after checking that it is one: its exit code, a problem, a fix, no traceback."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr and "  fix: " in done.stderr
    return done.stderr

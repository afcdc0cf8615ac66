"""Run the real program in a subprocess, as a user would."""

import os
import subprocess
import sys
from pathlib import Path

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


def refused(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The words of a refusal, after checking that it is one: its exit code, a problem, a fix, no traceback."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr and "  fix: " in done.stderr
    return done.stderr

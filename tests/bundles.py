"""Bundles made by the real program, for tests."""

import shutil
import subprocess
from pathlib import Path

from tests.program import ROOT, tunix_rt
from tunix_rt.runs.source import write_source


def git(repo: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(repo), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def make_repository(root: Path) -> Path:
    """A repository with the source that makes the run, so that nobody's edit of the working tree comes between."""
    ignore = shutil.ignore_patterns("__pycache__", "packaged")
    for folder in ("src/tunix_rt", "models", "presets", "datasets", "evalsets"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
    return _committed(root)


def make_source_repository(commit: str, root: Path) -> Path:
    """A repository with the package of a commit of this one."""
    write_source(commit, ROOT, root)
    return _committed(root)


def _committed(root: Path) -> Path:
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "-m", "source")
    return root


def collect(run, output, repo, *more) -> subprocess.CompletedProcess[str]:
    return tunix_rt("evidence", "collect", run, "--to", output, "--repository", repo, *more)

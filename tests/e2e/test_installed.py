"""What a user has in hand: the built wheel, the old commands, the start-up time."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.program import ROOT, environment
from tunix_rt import __version__
from tunix_rt.doctor.wheels import TESTED_TORCH

HEAVY = {"torch", "jax", "transformers", "pydantic", "numpy", "rich", "yaml", "huggingface_hub", "tokenizers"}


def test_help_imports_nothing_heavy_and_takes_under_100_ms_of_cpu():
    script = (
        "import sys; sys.argv = ['tunix-rt', '--help']\n"
        "from tunix_rt.cli.main import main\n"
        "try: main()\n"
        f"except SystemExit: print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tunix_rt", "--help"], env=environment(), capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.1, seconds


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def test_the_wheel_contains_the_package_and_what_a_run_needs():
    """As the build backend lists it, and nothing that was imported into the clone; the slow series builds and uses the wheel."""
    from hatchling.builders.wheel import WheelBuilder

    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    homes = {"training/configs": "configs"} | {name: name for name in ("datasets", "evalsets", "models", "presets")}
    wanted = {
        f"tunix_rt/packaged/{name}/{path.removeprefix(f'{home}/')}"
        for home, name in homes.items()
        for path in git("ls-files", home)
    } | {"tunix_rt/packaged/commit.txt"}
    assert {path for path in packed if path.startswith("tunix_rt/packaged/")} == wanted
    assert {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "tunix_rt").rglob("*.py")} <= packed
    assert "tunix_rt/py.typed" in packed


def test_what_is_imported_into_a_clone_is_neither_packed_nor_seen_by_git():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert not {"datasets", "evalsets", "models"} & set(build["force-include"]), "whole folders would be packed"
    new = ["datasets/mine/dataset.jsonl", "evalsets/mine.jsonl", "models/mine/config.json"]
    assert git("check-ignore", *new) == new


def test_the_dockerfiles_have_no_finding_of_hadolint():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.is_file():
        pytest.skip("hadolint is not installed (scripts/setup --dev installs it on Linux, x86_64)")
    files = sorted((ROOT / "docker").glob("*.Dockerfile"))
    assert [file.stem for file in files] == ["cpu", "cuda"]
    assert subprocess.run([linter, *files], capture_output=True, text=True).stdout == ""
    wrong = subprocess.run([linter, "-"], input="FROM python\nRUN cd /opt\n", capture_output=True, text=True)
    assert wrong.returncode == 1 and "DL3006" in wrong.stdout and "DL3003" in wrong.stdout


def test_images_and_scripts_install_the_tested_torch():
    pins = {
        *re.findall(r"^ARG TORCH=(.+)$", "".join(file.read_text() for file in (ROOT / "docker").iterdir()), re.M),
        *re.findall(r"^TORCH=(.+)$", (ROOT / "scripts" / "setup").read_text(), re.M),
    }
    assert pins == {TESTED_TORCH}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What `scripts/release build` makes of the commit, and what it prints."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = subprocess.run([ROOT / "scripts" / "release", "build", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_two_builds_of_a_commit_have_the_same_bytes_and_a_wheel_of_the_sdist_is_the_same_wheel(built):
    folder, printed = built
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert dict(line.split()[::-1] for line in printed.splitlines()) == hashes
    assert {name.partition("-")[2] for name in hashes} == {
        f"{__version__}-py3-none-any.whl",
        f"{__version__}.tar.gz",
    }


@pytest.mark.slow
def test_the_built_wheel_works_alone_and_its_runs_become_bundles(built, tmp_path):
    wheel = next(built[0].glob("*.whl"))
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {**environment(), "PYTHONPATH": str(site)}

    def alone(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], env=clean, cwd=elsewhere, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert alone("-c", "import tunix_rt; print(tunix_rt.__file__)").startswith(str(site))
    alone("-m", "tunix_rt", "train", "smoke_tiny", "--output", "run", "--device", "cpu", "--max-steps", "2")
    assert json.loads((elsewhere / "run" / "result.json").read_text())["status"] == "completed"
    manifest = json.loads(alone("-m", "tunix_rt", "evidence", "collect", "run", "--to", "bundle", "--json"))
    assert git("rev-parse", "HEAD") == [manifest["commit"]]
    assert "level L1" in alone("-m", "tunix_rt", "evidence", "verify", "bundle", "--repository", str(ROOT))


def test_the_old_commands_take_the_flags_that_words_of_refusal_advise(tmp_path, monkeypatch):
    from tunix_rt.cli import train

    ran = []
    monkeypatch.setattr(train, "run_and_show", lambda config, output, *, as_json: ran.append((config, output)))
    given = ["--config", "smoke_tiny", "--output", str(tmp_path), "--set", "data.on_overflow=drop", "--model", "gpt2"]
    assert train.run_script("torch", [*given, "--weights", "random", "--resume"]) == 0
    ((config, output),) = ran
    assert output == tmp_path
    assert (config.model.model_name_or_path, config.model.weights) == ("gpt2", "random")
    assert (config.training.resume_from_checkpoint, config.data.on_overflow) == ("auto", "drop")


@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts need bash")
@pytest.mark.parametrize("name", ["setup", "demo", "test", "check", "release"])
def test_scripts_are_sound_bash(name):
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=True)
    assert os.access(ROOT / "scripts" / name, os.X_OK)


def test_setup_refuses_an_old_python_in_one_clear_line(tmp_path):
    old = tmp_path / "bin"
    old.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3", "python"):
        (old / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.18" && exit 0\nexit 1\n')
        (old / name).chmod(0o755)
    for name in ("dirname", "cat", "printf"):
        (old / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [shutil.which("bash"), str(ROOT / "scripts" / "setup")], env={"PATH": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Python 3.11, 3.12 or 3.13 is needed; found: Python 3.8.18" in done.stderr

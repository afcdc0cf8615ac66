"""`runs rm` and `runs archive`: ask first, refuse a live run, and lose nothing on the way."""

import shutil
import tarfile

import pytest

from tests.program import in_process, refused
from tunix_rt.errors import StorageError
from tunix_rt.runs import removal
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.removal import archive, held


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "runs" / "one"
    (root / "checkpoints" / "step-000001").mkdir(parents=True)
    for name in ("metrics.jsonl", "result.json", "checkpoints/step-000001/weights.bin"):
        (root / name).write_bytes(name.encode() * 100)
    return RunDir(root)


def files(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("verb", ["rm", "archive"])
def test_a_live_run_a_link_and_a_folder_without_a_run_are_refused(run, tmp_path, verb):
    before = files(run.root)
    with run.locked():
        assert "in use by another tunix-rt" in refused(in_process("runs", verb, "one", "--yes", cwd=tmp_path), 8)
    (tmp_path / "runs" / "link").symlink_to(run.root)
    assert "is a symbolic link" in refused(in_process("runs", verb, "link", "--yes", cwd=tmp_path), 3)
    (tmp_path / "mine").mkdir()
    assert "no run in 'mine'" in refused(in_process("runs", verb, "mine", "--yes", cwd=tmp_path), 3)
    assert "add --yes" in refused(in_process("runs", verb, "one", cwd=tmp_path), 2)
    assert files(run.root) == before


def test_a_run_is_deleted_and_its_neighbour_stays(run, tmp_path):
    shutil.copytree(run.root, run.root.with_name("two"))
    done = in_process("runs", "rm", "runs/one", "--yes", cwd=tmp_path)
    assert done.returncode == 0 and [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]


def test_an_archive_has_every_file_and_the_folder_is_gone(run, tmp_path):
    before = files(run.root)
    done = in_process("runs", "archive", "one", "--yes", cwd=tmp_path)
    assert done.returncode == 0 and not run.root.exists(), done.stderr
    with tarfile.open(tmp_path / "runs" / "one.tar") as tar:
        tar.extractall(tmp_path / "back", filter="data")
    assert files(tmp_path / "back" / "one") == before


def test_an_archive_that_cannot_be_read_back_leaves_the_run(run, tmp_path, monkeypatch):
    before = files(run.root)
    monkeypatch.setattr(removal, "sha256_file", lambda path: "0" * 64)  # as a disk that returns other bytes
    with held(run.root) as opened, pytest.raises(StorageError, match="differs from the file"):
        archive(opened, tmp_path / "one.tar")
    assert files(run.root) == before and not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob(".*"))
    (tmp_path / "one.tar").write_text("mine")
    with held(run.root) as opened, pytest.raises(StorageError, match=r"one\.tar exists"):
        archive(opened, tmp_path / "one.tar")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_and_options(shell):
    done = in_process("completion", shell)
    assert done.returncode == 0 and "_TUNIX_RT_COMPLETE" in done.stdout
    completed = in_process(_TUNIX_RT_COMPLETE="bash_complete", COMP_WORDS="tunix-rt train --dry", COMP_CWORD="2")
    assert "--dry-run" in completed.stdout

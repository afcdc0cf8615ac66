"""SHA256SUMS: every file of a run once, readable by `sha256sum -c`, in one form only."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_rt.errors import EvidenceError
from tunix_rt.runs.checksums import list_folder, parse_sums, sums_problems, sums_text, write_sums
from tunix_rt.runs.folder import RunDir
from tunix_rt.storage import write_json, write_text

WEIGHTS = "checkpoints/step-000003/model.safetensors"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    run = RunDir(tmp_path / "run")
    for name in ("config.yaml", "metrics.jsonl", "eval/after.json", WEIGHTS):
        write_text(run.root / name, "weights")
    write_sums(run)
    return run


def problems(run: RunDir, may_lack: tuple[str, ...] = ()) -> list[str]:
    claimed, malformed = parse_sums(run.hashes.read_bytes())
    return malformed + sums_problems(run.root, list_folder(run.root).files, claimed, may_lack=may_lack)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils is not here")
def test_sha256sum_accepts_the_file(run: RunDir) -> None:
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=run.root, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count(": OK\n")) == (0, "", 4)


def test_every_file_is_listed_once_in_order(run: RunDir) -> None:
    names = [line.split("  ", 1)[1] for line in run.hashes.read_text().splitlines()]
    assert names == [WEIGHTS, "config.yaml", "eval/after.json", "metrics.jsonl"]
    assert problems(run) == []


def test_the_lock_and_half_written_files_are_not_hashed(run: RunDir) -> None:
    for name in (".lock", ".result.json.staged", "checkpoints/.staged-step-000004/model.safetensors"):
        write_text(run.root / name, "half")
    before = run.hashes.read_bytes()
    write_sums(run)
    assert problems(run) == [] and run.hashes.read_bytes() == before


def test_a_file_that_is_written_after_its_hash_is_covered(run: RunDir) -> None:
    write_sums(run, pending={run.result: "{}\n"})
    assert problems(run) == ["result.json: missing"]
    write_text(run.result, "{}\n")
    assert problems(run) == []


@pytest.mark.parametrize("claimed", ["0" * 64, "not a hash", "A" * 64, 7])
def test_a_checkpoint_manifest_gives_the_hash_only_if_the_checkpoint_was_verified(run: RunDir, claimed: object) -> None:
    """A process that must end has no time to read tens of gigabytes again; a corrupt manifest is not used."""
    checkpoint = run.checkpoints / "step-000003"
    files = {"model.safetensors": {"sha256": claimed, "bytes": 7}, "nul\0": {"sha256": claimed, "bytes": 7}}
    write_json(checkpoint / "MANIFEST.json", {"schema": "tunix-rt/checkpoint/1", "step": 3, "files": files})
    write_sums(run)
    assert problems(run) == []
    write_sums(run, verified={checkpoint})
    changed = f"{WEIGHTS}: changed, its hash is not the one in SHA256SUMS"
    assert problems(run) == ([changed] if claimed == "0" * 64 else [])


def test_a_missing_an_extra_and_a_changed_file_are_all_listed(run: RunDir) -> None:
    run.config.unlink()
    write_text(run.root / "extra.txt", "x")
    write_text(run.root / WEIGHTS, "weightz")
    assert problems(run) == [
        "config.yaml: missing",
        "extra.txt: not in SHA256SUMS",
        f"{WEIGHTS}: changed, its hash is not the one in SHA256SUMS",
    ]
    assert problems(run, may_lack=("config.yaml", WEIGHTS))[-1].startswith(WEIGHTS), "what is there must fit"
    assert "config.yaml: missing" not in problems(run, may_lack=("config.yaml",))


@pytest.mark.parametrize(
    "line",
    [
        b" *config.yaml\n", b"  ../config.yaml\n", b"  /config.yaml\n", b"  ./config.yaml\n", b"  eval\\config.yaml\n",
        b"  .lock\n", b"  SHA256SUMS\n", b"  a\n", b"  config.yaml\n\n", b"  config.yaml\r\n", b"  config.yaml", b"  \xff\n",
    ],
)  # fmt: skip
def test_a_line_in_another_form_is_named(line: bytes) -> None:
    claimed, malformed = parse_sums(b"%b  b\n%b%b" % (b"0" * 64, b"0" * 64, line))
    assert malformed and all(one.isprintable() for one in malformed)
    assert set(claimed) <= {"b", "config.yaml"}


def test_hashes_in_capitals_are_another_form() -> None:
    assert parse_sums(b"A" * 64 + b"  a\n") == ({}, ["SHA256SUMS:1: malformed line"])


@pytest.mark.parametrize("name", ["back\\slash", "new\nline", "\udcff", "link", "pipe"])
def test_what_cannot_be_listed_is_refused_by_name(run: RunDir, name: str) -> None:
    if name == "link":
        (run.root / name).symlink_to("/etc/hostname")
    elif name == "pipe":
        os.mkfifo(run.root / name)
    else:
        (run.root / name).write_text("x")
    with pytest.raises(EvidenceError, match="cannot be hashed") as caught:
        write_sums(run)
    assert caught.value.problem.replace("\n", "").isprintable()


NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N"], include_characters="._- "), min_size=1, max_size=20)


@settings(max_examples=40)
@given(digests=st.dictionaries(NAMES.filter(lambda name: not name.startswith(".")), st.just("ab" * 32), max_size=9))
def test_what_is_written_is_read_back(digests: dict[str, str]) -> None:
    assert parse_sums(sums_text(digests).encode()) == (dict(sorted(digests.items())), [])

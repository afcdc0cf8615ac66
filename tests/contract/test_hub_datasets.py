"""A hub dataset is read out of the local cache as the hub's own library lays it out; offline, nothing is fetched."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.program import ROOT, in_process
from tunix_rt.data.sources import find_dataset
from tunix_rt.errors import InputError
from tunix_rt.evidence.facts import needed
from tunix_rt.runs.record import RunRecord

COMMIT = "5" * 40


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Put files into a cache of our own, as blobs with links to them."""

    def no_network(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def put(*names: str) -> Path:
        repository = tmp_path / "hub" / "datasets--openai--gsm8k"
        snapshot = repository / "snapshots" / COMMIT
        for folder in (repository / "refs", repository / "blobs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(COMMIT)
        for number, name in enumerate(names):
            blob = repository / "blobs" / f"{number:040d}"
            blob.write_text(json.dumps({"prompt": name, "completion": "x"}) + "\n")
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(blob)
        return snapshot

    return put


def names_of(name: str, snapshot: Path) -> list[str]:
    return [file.path.relative_to(snapshot).as_posix() for file in find_dataset(name).files]


def test_a_dataset_in_the_cache_is_found_by_its_id_and_its_parts_by_their_path(cached):
    snapshot = cached("README.md", ".gitattributes", "data/part-1.jsonl", "data/part-2.jsonl")
    assert names_of("openai/gsm8k", snapshot) == ["data/part-1.jsonl", "data/part-2.jsonl"]
    assert names_of("openai/gsm8k:data", snapshot) == ["data/part-1.jsonl", "data/part-2.jsonl"]
    assert names_of("openai/gsm8k:data/part-2.jsonl", snapshot) == ["data/part-2.jsonl"]
    assert names_of("openai/gsm8k:data/*-1*", snapshot) == ["data/part-1.jsonl"]
    assert find_dataset("openai/gsm8k").key == "openai/gsm8k"
    assert names_of("openai/gsm8k:train", snapshot) == ["data/part-1.jsonl", "data/part-2.jsonl"], (
        "no file names a split"
    )


def test_its_splits_are_refused_with_the_ids_to_give(cached):
    snapshot = cached(
        "main/train-00000-of-00001.json", "main/test-00000-of-00001.json", "socratic/train-00000-of-00001.json"
    )
    with pytest.raises(InputError, match=r"is ambiguous \(3 readings\): it has test, train") as caught:
        find_dataset("openai/gsm8k")
    given = caught.value.fix.removeprefix("give one of: ").split(", ")
    assert given == [
        "openai/gsm8k:main/test-00000-of-00001.json",
        "openai/gsm8k:main/train-00000-of-00001.json",
        "openai/gsm8k:socratic/train-00000-of-00001.json",
    ]
    assert all(len(names_of(name, snapshot)) == 1 for name in given)
    with pytest.raises(InputError, match=r"is ambiguous \(2 readings\)") as caught:
        find_dataset("openai/gsm8k:main")
    assert "openai/gsm8k:main/train-00000-of-00001.json" in caught.value.fix


def test_what_is_not_in_the_cache_is_not_fetched_and_how_to_get_it_is_said(cached):
    with pytest.raises(InputError, match="not in the local cache of the hub") as caught:
        find_dataset("openai/gsm8k")
    assert "`hf download --repo-type dataset openai/gsm8k`" in caught.value.fix
    cached("README.md", "train.jsonl")
    for name, words in (
        ("nosuch.jsonl", "there are: train.jsonl"),
        ("../../../x", "seen from its top"),
    ):
        with pytest.raises(InputError) as caught:
            find_dataset(f"openai/gsm8k:{name}")
        assert words in caught.value.fix


def test_a_dataset_that_was_fetched_in_part_is_refused(cached):
    cached("train-00000-of-00002.parquet")
    with pytest.raises(InputError, match="1 of 2 files of train are missing"):
        find_dataset("openai/gsm8k")


def test_a_folder_of_that_name_comes_first(cached, tmp_path):
    cached("train.jsonl")
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    (tmp_path / "openai" / "gsm8k" / "own.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert [file.path.name for file in find_dataset("openai/gsm8k").files] == ["own.jsonl"]


def test_a_run_records_the_commit_of_its_dataset(cached, tmp_path, monkeypatch):
    shutil.copyfile(ROOT / "datasets/dev-reasoning-v2/dataset.jsonl", cached("train.jsonl") / "train.jsonl")
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
    settings = {"data.dataset": "openai/gsm8k:train", "evaluation.enabled": "false", "training.max_steps": 1}
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = in_process("train", "smoke_tiny", "--output", tmp_path / "run", "--device", "cpu", *chosen)
    assert done.returncode == 0, done.stderr
    committed = RunRecord(tmp_path / "run").commitment
    assert committed.dataset.commits == {"openai/gsm8k:train": COMMIT}
    assert (
        f"openai/gsm8k:train at commit {COMMIT}" in dict((kind, how) for kind, _, how in needed(committed))["dataset"]
    )

"""`train --dry-run` refuses what a run refuses before its weights are loaded, with the same exit code, and writes no folder."""

import json

import pytest

from tests.program import in_process, refused

TRAIN = ("train", "smoke_tiny", "--device", "cpu", "--dry-run")


def test_a_run_that_would_begin_is_described_and_nothing_is_written(tmp_path):
    done = in_process(*TRAIN, "--output", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["steps"], found["rows_per_step"]) == ("fits", 6, 4)
    assert found["data"].startswith("dev-reasoning-v2: 522 training traces") and not (tmp_path / "run").exists()
    words = in_process("train", "smoke_tiny", "--dry-run", "--on", "t4")
    assert "This run would begin; nothing was written." in words.stdout and "on t4" in words.stdout
    few = in_process(
        "train", "--model", "tiny-gemma3", "--data", "dev-reasoning-v2", "--dry-run", "--set", "data.max_examples=30"
    )
    assert "; so few barely change a model" in few.stdout and "so few" not in words.stdout, "6 steps were asked for"


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("--set", "training.lora_dropout=0.1"), 2, "every parameter is trained"),
        (("--data", "missing.jsonl"), 3, "missing.jsonl"),
        (("--model", "gemma-2b", "--on", "2gb"), 5, "does not fit"),
        (("--model", "gemma-3-270m"), 3, "gemma-3-270m is a preset: an architecture and its size, without weights"),
        (("--device", "cuda"), 4, "no GPU present"),
        (("--output", "."), 2, "already contains mine.txt, which no run writes"),
    ],
)
def test_a_run_that_would_be_refused_is_refused_with_its_exit_code(tmp_path, words, code, problem):
    (tmp_path / "mine.txt").write_text("mine")
    assert problem in refused(in_process(*TRAIN, *words, cwd=tmp_path), code)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_is_needed_to_train_and_a_device_is_named_for_a_dry_run_alone(tmp_path):
    assert "--output is missing" in refused(in_process("train", "smoke_tiny"), 2)
    words = refused(in_process("train", "smoke_tiny", "--output", tmp_path / "run", "--on", "t4"), 2)
    assert "--on names a device for --dry-run" in words and not (tmp_path / "run").exists()

"""Whatever happens to the files of a checkpoint is noticed, said aloud, and the checkpoint before it is taken."""

import json
import logging
import random
import shutil
from pathlib import Path

import pytest

from tests.conftest import write_small_model
from tests.program import in_process, tunix_rt
from tunix_rt.runs.folder import RunDir, checkpoint_name
from tunix_rt.storage import json_text, read_json
from tunix_rt.train.resume import newest_checkpoint

CASES = 100
STEPS, NEWEST, BEFORE = 6, 6, 4
FILES = ("MANIFEST.json", "model.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    model = write_small_model("gpt2-dropout", tmp_path_factory.mktemp("damaged") / "model")
    settings = [
        "training.save_steps=2", "data.max_length=128", "training.per_device_train_batch_size=1",
        "evaluation.enabled=false", "data.on_overflow=drop",
    ]  # fmt: skip
    told = ["smoke_tiny", "--device", "cpu", "--max-steps", STEPS, "--model", model, "--weights", "random"]
    return [*told, *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture(scope="module")
def finished(arguments):
    """A whole run with checkpoints of its steps 4 and 6."""
    run = RunDir(arguments[arguments.index("--model") + 1].parent / "run")
    done = in_process("train", *arguments, "--output", run.root)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [checkpoint_name(BEFORE), checkpoint_name(NEWEST)]
    assert sorted(path.name for path in (run.checkpoints / checkpoint_name(NEWEST)).iterdir()) == sorted(FILES)
    return run


# --- the damages: each is done to the newest checkpoint, and returns the step that is to be taken then -----------------


def flip_a_bit(newest: Path, chance: random.Random) -> None:
    path = newest / chance.choice(FILES)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(newest: Path, chance: random.Random) -> None:
    path = newest / chance.choice(FILES)
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(1, len(content))])


def lose(newest: Path, chance: random.Random) -> None:
    (newest / chance.choice(FILES)).unlink()


def swap(newest: Path, chance: random.Random) -> None:
    one, other = (newest / name for name in chance.sample(FILES, 2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def empty(newest: Path, chance: random.Random) -> None:
    (newest / chance.choice(FILES)).write_bytes(b"")


def rewrite_the_manifest(newest: Path, chance: random.Random) -> None:
    """In the same hand, so that only what it says is wrong."""
    says = read_json(newest / "MANIFEST.json")
    file = chance.choice(FILES[1:])
    change = chance.randrange(6)
    if change == 0:
        says["step"] = NEWEST + 1
    elif change == 1:
        says["files"][file]["sha256"] = f"{chance.getrandbits(256):064x}"
    elif change == 2:
        says["files"][file]["bytes"] += 1
    elif change == 3:
        del says["files"][file]
    elif change == 4:
        says["files"]["another.safetensors"] = says["files"][file]
    else:
        says["schema"] = "tunix-rt/checkpoint/2"
    (newest / "MANIFEST.json").write_text(json_text(says))


def copy_under_another_name(newest: Path, chance: random.Random) -> int:
    before = newest.with_name(checkpoint_name(BEFORE))
    if chance.random() < 0.5:
        shutil.copytree(newest, newest.with_name(checkpoint_name(NEWEST + chance.randint(1, 9))))
        return NEWEST
    shutil.rmtree(newest)
    shutil.copytree(before, newest)
    return BEFORE


DAMAGES = (flip_a_bit, cut, lose, swap, empty, rewrite_the_manifest, copy_under_another_name)


def damage(run: RunDir, seed: int) -> int:
    """Do one of the damages, drawn from the seed; the step of the checkpoint that must be taken."""
    chance = random.Random(f"damage/{seed}")
    step = DAMAGES[seed % len(DAMAGES)](run.checkpoints / checkpoint_name(NEWEST), chance)
    return BEFORE if step is None else step


@pytest.fixture
def run(finished, tmp_path):
    return RunDir(shutil.copytree(finished.root, tmp_path / "run"))


def test_untouched_the_newest_is_taken_in_silence(run, caplog):
    assert newest_checkpoint(run) == (run.checkpoints / checkpoint_name(NEWEST), NEWEST)
    assert caplog.text == ""


@pytest.mark.parametrize("seed", range(CASES))
def test_a_damaged_checkpoint_is_passed_over_aloud_for_the_one_before(run, caplog, seed):
    with caplog.at_level(logging.WARNING, logger="tunix_rt"):
        taken = damage(run, seed)
        assert newest_checkpoint(run) == (run.checkpoints / checkpoint_name(taken), taken)
    damaged = max(path.name for path in run.checkpoints.iterdir())
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"Checkpoint {damaged} is corrupt, skipped: ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 5])
def test_the_whole_program_goes_on_from_the_one_before_to_the_same_weights(run, finished, arguments, seed):
    """After a flipped bit, swapped files and another manifest. In each run of the tests `test_recovery.py` resumes within its
    process, and which checkpoint is taken after each of a hundred damages is tested above."""
    assert damage(run, seed) == BEFORE
    for ending in (run.result, run.hashes):  # as if it had been killed before it wrote them
        ending.unlink()
    shutil.rmtree(run.final_model)
    done = tunix_rt("train", *arguments, "--output", run.root, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"Checkpoint {checkpoint_name(NEWEST)} is corrupt, skipped: " in done.stderr
    result = read_json(run.result)
    assert result["resumed_from"] == BEFORE
    assert [skipped["name"] for skipped in result["skipped_checkpoints"]] == [checkpoint_name(NEWEST)]
    assert result["skipped_checkpoints"][0]["problems"]
    weights = [(one.final_model / "model.safetensors").read_bytes() for one in (run, finished)]
    assert weights[0] == weights[1]
    lines = [
        [json.loads(line)["loss_hex"] for line in one.metrics.read_bytes().splitlines()] for one in (run, finished)
    ]
    assert lines[0] == lines[1]
    assert tunix_rt("evidence", "verify", run.root).returncode == 0

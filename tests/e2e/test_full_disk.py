"""A disk that fills up while a run writes ends it with exit code 8 and words, and what was kept before stays whole."""

import json
import os
import re
import resource
import subprocess

import pytest

from tests.conftest import write_small_model
from tests.integrity import list_problems
from tests.program import in_process, refused
from tests.stores import quiet
from tunix_rt.config.load import find_config, load_config
from tunix_rt.errors import StorageError
from tunix_rt.pipeline import run_pipeline
from tunix_rt.runs.folder import RunDir, checkpoint_problems, list_checkpoints
from tunix_rt.storage import read_json
from tunix_rt.train import checkpointer as saving

SMALL = [
    "smoke_tiny", "--device", "cpu", "--set", "training.max_steps=2", "--set", "training.save_steps=1",
    "--set", "evaluation.enabled=false",
]  # fmt: skip


@pytest.mark.parametrize(
    ("file_bytes", "where"),
    [
        pytest.param(1_000_000, "model.safetensors", marks=pytest.mark.slow),
        (15_000_000, "optimizer.safetensors"),
    ],
)
def test_a_disk_that_fills_up_at_a_checkpoint_is_a_storage_error(tmp_path, file_bytes, where):
    """The limit is on the length of a file: moments of 23 MB are the first to meet it; in the slow series, weights of 11 MB."""
    run, before = RunDir(tmp_path / "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        said = refused(in_process("train", *SMALL, "--output", run.root), 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert where in said and "File too large" in said
    result = json.loads(run.result.read_text(encoding="utf-8"))
    assert (result["status"], result["exit_code"]) == ("failed", 8)
    assert len(run.metrics.read_bytes().splitlines()) in (1, 2), "the steps taken meanwhile stay written"
    assert list(run.checkpoints.iterdir()) == [], "nothing half-made counts, nor holds space"


# --- a real file system that is full ---------------------------------------------------------------------------------

MIB = 2**20
DISK_BYTES = 80 * MIB
"""Room for the run of a model of 66 thousand parameters with the 64 MiB that a run leaves for its words."""


@pytest.fixture
def disk(tmp_path):
    """A file system of its own. To mount one takes rights that a test may lack."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount program here")
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk, *, leave: int) -> None:
    """Another program takes all room but `leave` bytes."""
    left = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - leave)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model("gpt2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The run that nothing stops, with the proof of its final model."""
    run = RunDir(tmp_path_factory.mktemp("whole") / "run")
    run_pipeline(configured(model), run.root, progress=quiet)
    return run


def configured(model, *, resume: bool = False):
    overrides = [
        f"model.model_name_or_path={model}", "model.weights=random", "training.device=cpu", "training.max_steps=5",
        "training.save_steps=2", "training.eval_steps=2", "data.max_length=128", "training.per_device_train_batch_size=1",
        "evaluation.enabled=false", "data.on_overflow=drop",
    ]  # fmt: skip
    flags = {"training.resume_from_checkpoint": "auto" if resume else None}
    return load_config(find_config("smoke_tiny"), overrides=overrides, flags=flags)


def test_a_volume_too_small_for_the_run_is_refused_before_weights_are_loaded(disk):
    said = refused(in_process("train", *SMALL, "--output", disk / "run"), 8)
    assert int(re.search(r"the run needs (\d+) MiB on disk, 80 MiB are free", said)[1]) > 80
    run = RunDir(disk / "run")
    assert read_json(run.result)["exit_code"] == 8
    assert not run.precommit.exists() and not run.metrics.exists()


FAULTS = {
    "too little for the next": (saving.SPARE_BYTES, r"the checkpoint of step 4, with a margin, needs 65 MiB"),
    "half a checkpoint": (400_000, "No space left on device"),
    "nothing": (0, "No space left on device"),
}


SERIES = [name if name == "half a checkpoint" else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]


@pytest.mark.parametrize("left", SERIES)
def test_a_full_disk_keeps_the_checkpoint_before_and_the_run_goes_on_once_there_is_room(
    disk, model, whole, monkeypatch, left
):
    """Filled before the check, which then refuses; or right after it said yes, so that the writing meets the end.

    The final model is not loaded once more by a fresh process here: that takes seconds, and is a promise of its own."""
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
    run, (leave, words), check = RunDir(disk / "run"), FAULTS[left], saving.require_space

    def check_and_fill(folder, needed_bytes, *, what, **named):
        early = leave == saving.SPARE_BYTES
        if "step 4" in what and early:
            fill(disk, leave=leave)
        check(folder, needed_bytes, what=what, **named)
        if "step 4" in what:
            fill(disk, leave=leave)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "require_space", check_and_fill)
        with pytest.raises(StorageError, match=words) as caught:
            run_pipeline(configured(model), run.root, progress=quiet)
    assert caught.value.exit_code == 8
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000002"]
    assert checkpoint_problems(run.checkpoints / "step-000002") == []
    if left != "nothing":  # with no byte left there is no room to say so
        assert (read_json(run.result)["status"], read_json(run.result)["exit_code"]) == ("failed", 8)
        assert list_problems(run.root) == []
    (disk / "ballast").unlink()
    run_pipeline(configured(model, resume=True), run.root, progress=quiet)
    assert read_json(run.result)["resumed_from"] == 2
    weights = [(one.final_model / "model.safetensors").read_bytes() for one in (run, whole)]
    assert weights[0] == weights[1]
    assert list_problems(run.root) == []
    assert not any(checkpoint_problems(path) for path in list_checkpoints(run.checkpoints))

"""A disk that fills up while a run writes ends it with exit code 8 and words, and what was kept before stays whole."""

import json
import resource
import subprocess

import pytest

from tests.program import ROOT, command, environment, refused
from tunix_rt.rundir import RunDir, checkpoint_problems, list_checkpoints

SMALL = [
    "smoke_tiny", "--device", "cpu", "--set", "training.max_steps=2", "--set", "training.save_steps=1",
    "--set", "evaluation.enabled=false",
]  # fmt: skip


@pytest.mark.parametrize(
    ("file_bytes", "where"), [(1_000_000, "model.safetensors"), (15_000_000, "optimizer.safetensors")]
)
def test_a_disk_that_fills_up_at_a_checkpoint_is_a_storage_error(tmp_path, file_bytes, where):
    """The limit is on the length of a file: weights of 11 MB or moments of 23 MB are the first to meet it."""
    run = RunDir(tmp_path / "run")
    ended = subprocess.run(
        command("train", *SMALL, "--output", run.root),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = refused(ended, 8)
    assert str(run.checkpoints) in said or where in said
    result = json.loads(run.result.read_text(encoding="utf-8"))
    assert (result["status"], result["exit_code"]) == ("failed", 8)
    assert len(run.metrics.read_bytes().splitlines()) == 1, "the step that was taken stays written"
    assert not any(checkpoint_problems(path) for path in list_checkpoints(run.checkpoints))

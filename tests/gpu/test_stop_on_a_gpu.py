"""A signal in the middle of a long step on a GPU: the finished step before it is saved, from another thread, and bit for bit."""

import hashlib
import json
import signal
import subprocess
import time

import pytest

from tests.program import ROOT, command, environment, tunix_rt

pytestmark = pytest.mark.gpu

ARGUMENTS = [
    "smoke_tiny", "--device", "cuda", "--max-steps", 3, "--set", "training.deterministic=true",
    "--set", "training.per_device_train_batch_size=1", "--set", "training.gradient_accumulation_steps=40",
    "--set", "data.packing=false", "--set", "evaluation.enabled=false", "--set", "training.save_steps=3",
]  # fmt: skip
"""Steps of 1.6 s on an H200: 40 micro-batches."""


def ended(folder):
    losses = [json.loads(line)["loss_hex"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return losses, hashlib.sha256((folder / "final_model" / "model.safetensors").read_bytes()).hexdigest()


def test_a_signal_in_a_long_step_saves_the_finished_one_and_the_run_continues_exactly(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert tunix_rt("train", *ARGUMENTS, "--output", whole).returncode == 0
    metrics = stopped / "metrics.jsonl"
    with subprocess.Popen(
        command("train", *ARGUMENTS, "--output", stopped),
        env=environment(),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 1:
            assert program.poll() is None
            time.sleep(0.005)
        time.sleep(0.5)  # inside step 2
        program.send_signal(signal.SIGINT)
        said = program.communicate(timeout=120)[1]
    assert program.returncode == 7, said
    result = json.loads((stopped / "result.json").read_text())
    assert result["steps_completed"] == metrics.read_bytes().count(b"\n"), "no finished step is lost"
    assert f"step {result['steps_completed']} is saved" in result["reason"] and "SIGINT: stopping" in said
    done = tunix_rt("train", *ARGUMENTS, "--output", stopped, "--resume")
    assert done.returncode == 0, done.stderr
    assert ended(stopped) == ended(whole)

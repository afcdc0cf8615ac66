"""Interrupt it anywhere and it continues exactly."""

import hashlib
import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.program import ROOT, command, environment, refused, tunix_rt

STEPS = 14
ARGUMENTS = [
    "smoke_tiny", "--device", "cpu", "--max-steps", STEPS, "--set", "training.save_steps=2",
    "--set", "training.per_device_train_batch_size=2", "--set", "evaluation.max_new_tokens=4",
]  # fmt: skip


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "final_model" / "model.safetensors").read_bytes()).hexdigest()


def losses(folder: Path) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tunix_rt("train", *ARGUMENTS, "--output", folder).returncode == 0
    return folder


def stop_after(folder: Path, steps: int, how: signal.Signals, *extra: str) -> int:
    """Start (or continue) the run, send `how` once `steps` lines are in its metrics; its exit code."""
    with subprocess.Popen(
        command("train", *ARGUMENTS, "--output", folder, *extra), env=environment(), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as program:  # fmt: skip
        deadline = time.monotonic() + 120
        metrics = folder / "metrics.jsonl"
        while program.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                program.send_signal(how)
                break
            time.sleep(0.002)
        return program.wait(timeout=120)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_run_continues_exactly(tmp_path, uninterrupted, how):
    folder = tmp_path / "run"
    assert stop_after(folder, 3, how) == 7
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "preempted" and how.name in result["reason"]
    assert result["steps_completed"] >= 3
    assert tunix_rt("evidence", "verify", folder).returncode == 0
    done = tunix_rt("train", *ARGUMENTS, "--output", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert weights(folder) == weights(uninterrupted)
    assert losses(folder) == losses(uninterrupted)
    assert json.loads((folder / "result.json").read_text())["resumed_from"] == result["steps_completed"]


def test_kills_at_random_steps_twice_in_one_run_lose_nothing_committed(tmp_path, uninterrupted):
    folder, chance = tmp_path / "run", random.Random(11)
    first = chance.randint(2, 5)
    second = first + chance.randint(2, 5)
    assert stop_after(folder, first, signal.SIGKILL) == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    assert stop_after(folder, second, signal.SIGKILL, "--resume") == -signal.SIGKILL
    done = tunix_rt("train", *ARGUMENTS, "--output", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert weights(folder) == weights(uninterrupted)
    assert losses(folder) == losses(uninterrupted)
    assert tunix_rt("evidence", "verify", folder).returncode == 0


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    stop_after(folder, 7, signal.SIGKILL)
    newest = max((folder / "checkpoints").glob("step-*"))
    damaged = bytearray((newest / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (newest / "model.safetensors").write_bytes(damaged)
    done = tunix_rt("train", *ARGUMENTS, "--output", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {newest.name} is damaged and passed over" in done.stderr
    assert weights(folder) == weights(uninterrupted)


def test_another_configuration_may_not_continue_a_run(tmp_path):
    folder = tmp_path / "run"
    stop_after(folder, 3, signal.SIGKILL)
    changed = tunix_rt("train", *ARGUMENTS, "--output", folder, "--resume", "--set", "training.learning_rate=1e-5")
    assert "training.learning_rate differ(s)" in refused(changed, 2)
    assert "already holds a run (unfinished)" in refused(tunix_rt("train", *ARGUMENTS, "--output", folder), 2)


def test_two_programs_do_not_share_a_folder(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        command("train", *ARGUMENTS, "--output", folder), env=environment(), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as first:  # fmt: skip
        while not (folder / "config.yaml").exists():
            assert first.poll() is None
            time.sleep(0.01)
        assert "is in use" in refused(tunix_rt("train", *ARGUMENTS, "--output", folder), 8)
        first.kill()


@pytest.mark.slow
def test_kills_at_random_moments_until_it_completes_lose_nothing(tmp_path, uninterrupted):
    """Moments anywhere between the start of the program and its end: import, load, evaluation, steps, saves."""
    folder, chance, kills = tmp_path / "run", random.Random(20), 0
    while kills < 20:
        extra = ["--resume"] if (folder / "precommit.json").exists() else []
        with subprocess.Popen(
            command("train", *ARGUMENTS, "--output", folder, *extra), env=environment(), cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as program:  # fmt: skip
            try:
                code = program.wait(timeout=chance.uniform(0.5, 4.5))
            except subprocess.TimeoutExpired:
                program.kill()
                kills += 1
                if not (folder / "result.json").exists():
                    continue
                break  # the moment was after the end: all is written, and there is nothing to continue
        assert code == 0
        break
    if not (folder / "result.json").exists():
        done = tunix_rt("train", *ARGUMENTS, "--output", folder, "--resume")
        assert done.returncode == 0, done.stderr
    assert kills >= 3
    assert weights(folder) == weights(uninterrupted)
    assert losses(folder) == losses(uninterrupted)
    assert tunix_rt("evidence", "verify", folder).returncode == 0

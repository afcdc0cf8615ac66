"""`tunix-rt train --nproc`: the exit code is that of the run, whatever torchrun makes of its ranks."""

import json
import signal
import subprocess
import time

import pytest

from tests.program import command, environment, refused, tunix_rt


def test_nproc_refuses_a_computer_without_a_gpu_and_has_the_exit_code_of_the_run(tmp_path):
    words = ["train", "demo", "--output", str(tmp_path / "run"), "--device", "cpu", "--set", "training.memory=auto"]
    assert "nvidia" in refused(tunix_rt(*words, "--nproc", "gpu", CUDA_VISIBLE_DEVICES=""), 4).lower()
    assert "training.memory: auto does not choose settings for 2 ranks" in refused(tunix_rt(*words, "--nproc", "2"), 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_signal_to_nproc_stops_the_run_which_then_continues(tmp_path):
    output = tmp_path / "run"
    words = [
        "train", "demo", "--device", "cpu", "--max-steps", 100, "--output", output, "--nproc", 2, "--set",
        "evaluation.enabled=false", "--set", "training.compile=false", "--set", "training.save_steps=2",
    ]  # fmt: skip
    metrics = output / "metrics.jsonl"
    with subprocess.Popen(
        command(*words), env=environment(GLOO_SOCKET_IFNAME="lo"), stderr=subprocess.PIPE, text=True
    ) as run:
        until = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
            assert run.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=300)[1]
    assert run.returncode == 7, said
    assert json.loads((output / "result.json").read_text())["status"] == "preempted"
    steps = metrics.read_bytes().count(b"\n")
    done = tunix_rt(*words, "--resume", "--stop-after", steps + 1, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 7 and metrics.read_bytes().count(b"\n") == steps + 1, done.stderr

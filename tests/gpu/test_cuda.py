"""The device contract and the loop on a real NVIDIA GPU."""

import json

import pytest

from tests.program import refused, tunix_rt

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for device in ("cpu", "cuda"):
        done = tunix_rt("train", "smoke_tiny", "--output", folder / device, "--device", device)
        assert done.returncode == 0, done.stderr
    return folder


def test_the_log_says_cuda_and_the_memory_is_the_allocators(runs):
    log = (runs / "cuda" / "training_log.txt").read_text()
    assert "Using device: cuda" in log and "device=cuda" in log
    result = json.loads((runs / "cuda" / "result.json").read_text())
    assert result["device"] == "cuda"
    # weights, gradients and two moments in float32 are the least that must have been allocated on the GPU
    assert result["memory"]["measured_bytes"] >= 4 * 4 * result["parameters"]


def test_gpu_and_cpu_take_the_same_steps(runs):
    curves = {
        device: [json.loads(line)["loss"] for line in (runs / device / "metrics.jsonl").read_text().splitlines()]
        for device in ("cpu", "cuda")
    }
    assert curves["cuda"] == pytest.approx(curves["cpu"], rel=1e-4)


def test_auto_takes_the_gpu_and_says_why(tmp_path):
    done = tunix_rt("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choice"]["device"] == "cuda"


def test_a_masked_gpu_is_refused_by_the_name_of_the_variable(tmp_path):
    done = tunix_rt("train", "smoke_tiny", "--output", tmp_path / "run", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES" in refused(done, 4)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_auto_with_a_masked_gpu_does_not_fall_to_the_cpu(tmp_path):
    done = tunix_rt("train", "smoke_tiny", "--output", tmp_path / "run", CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES" in refused(done, 4)

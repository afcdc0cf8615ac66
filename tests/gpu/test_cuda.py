"""The device contract and the loop on a real NVIDIA GPU."""

import json
import shutil
import subprocess

import pytest

from tests.program import ROOT, refused, tunix_rt

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


def test_the_run_leaves_its_proof_and_its_memory_under_our_process_id(runs):
    folder = runs / "cuda"
    assert json.loads((folder / "doctor.json").read_text())["proof"]["ok"] is True
    check = (folder / "cuda_check.txt").read_text()
    assert "torch.cuda.is_available(): True" in check and "GPU computation successful" in check
    result = json.loads((folder / "result.json").read_text())
    samples = result["gpu_memory"]
    assert [sample["step"] for sample in samples] == [1, result["steps_completed"]]
    assert all(s["by"] == "nvml" and s["used_bytes"] >= 16 * result["parameters"] for s in samples)
    assert result["started"] <= samples[0]["at"] <= samples[1]["at"] <= result["finished"]
    [process] = json.loads((folder / "processes.json").read_text())["processes"]
    assert process["pid"] == samples[0]["pid"] and process["machine"]["device"] == "cuda"
    assert set(process["machine"]["gpu"]) == {"name", "capability", "driver", "cuda", "cudnn"}
    assert f" {samples[0]['pid']} " in (folder / "nvidia_smi.txt").read_text().split("Processes:")[1]


def test_a_bundle_is_collected_from_it_and_verifies(runs, tmp_path):
    """In a repository made here of the source that ran."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    shutil.copytree(
        ROOT / "src" / "tunix_rt", tmp_path / "src" / "tunix_rt", ignore=shutil.ignore_patterns("__pycache__")
    )
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "source"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    bundle = tmp_path / "bundle"
    done = tunix_rt(
        "evidence", "collect", runs / "cuda", "--cpu-run", runs / "cpu", "--to", bundle, "--repository", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert tunix_rt("evidence", "verify", bundle, "--repository", tmp_path).returncode == 0
    assert "- [x] No silent CPU fallback" in (bundle / "README.md").read_text()


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

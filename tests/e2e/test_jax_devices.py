"""A device asked of the JAX engine is the device used, or the run ends with exit code 4 and the cause."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.program import refused, tunix_rt

HERE = {
    "tpu": any(Path(node).exists() for node in ("/dev/accel0", "/dev/vfio/0")),
    "gpu": Path("/dev/nvidiactl").exists(),
    "cuda": Path("/dev/nvidiactl").exists(),
}


@pytest.mark.parametrize(("device", "platforms"), [("tpu", ""), ("gpu", ""), ("cuda", "cpu")])
def test_an_accelerator_that_is_not_there_is_exit_code_4_and_never_the_cpu(tmp_path, device, platforms):
    if HERE[device]:
        pytest.skip(f"there is a {device} here")
    said = {"JAX_PLATFORMS": platforms} if platforms else {}
    done = tunix_rt("train", "smoke_tiny", "--backend", "jax", "--device", device, "--output", tmp_path / "run", **said)
    words = refused(done, 4)
    assert ("no TPU present" if device == "tpu" else "no NVIDIA GPU") in words, words
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("refused", 4)
    assert "Using device: cpu" not in (tmp_path / "run" / "training_log.txt").read_text()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_variables_of_other_accelerators_change_nothing_about_that(tmp_path):
    """Allocators of CUDA and of XLA are for GPUs; a shell that sets them gets the same words."""
    plain, dressed = (
        tunix_rt(
            "train", "smoke_tiny", "--backend", "jax", "--device", "tpu", "--output", tmp_path / "run", **variables
        )
        for variables in (
            {},
            {
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9",
                "XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                "TF_GPU_ALLOCATOR": "cuda_malloc_async",
            },
        )
    )  # fmt: skip
    assert refused(dressed, 4) == refused(plain, 4)


@pytest.mark.slow  # of every run tests/invariant/test_tpu_compiler.py holds it for one step on the CPU
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_variables_of_other_accelerators_change_no_bit_of_a_run_on_the_cpu(tmp_path):
    """Two steps in a shell that hides and divides GPUs, and in one that does not."""
    small = {
        "data.max_length": 64, "data.on_overflow": "drop", "data.validation_fraction": 0, "evaluation.enabled": "false",
        "training.per_device_train_batch_size": 2,
    }  # fmt: skip
    asked = [part for name, value in small.items() for part in ("--set", f"{name}={value}")]
    named = ["--model", "tiny-gemma3", "--data", "dev-reasoning-v2", "--device", "cpu", "--backend", "jax"]
    rough = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
    dressed = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    losses = []
    for name, variables in {"plain": {}, "dressed": dressed}.items():
        run = tmp_path / name
        done = tunix_rt("train", *named, "--max-steps", 2, *asked, "--output", run, **rough, **variables)
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(line)["loss_hex"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert len(losses[0]) == 2 and losses[0] == losses[1]

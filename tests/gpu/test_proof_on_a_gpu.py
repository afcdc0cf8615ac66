"""The proof on a real NVIDIA GPU, through the verb a person uses."""

import json
import os

import pytest

from tests.planted_defects import plant
from tests.program import ROOT, tunix_rt

pytestmark = pytest.mark.gpu


def doctor(dtype: str, expected: int, **extra: str) -> dict:
    done = tunix_rt("doctor", "--device", "cuda", "--dtype", dtype, "--prove", "--json", **extra)
    assert done.returncode == expected, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["proof"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_gpu_is_proven_and_its_memory_is_under_the_pid_of_the_child(dtype):
    proof = doctor(dtype, 0)
    assert proof["ok"] and "problem" not in proof
    figures = {result["name"]: result["figures"] for result in proof["results"]}
    for name in ("product", "attention", "loss", "optimizer"):
        assert 0 < figures[name]["share of allowed"] < 0.66, figures[name]
    memory = figures["memory"]
    assert memory["seen_bytes"] >= memory["allocated_bytes"] - (16 << 20) >= 1 << 28
    assert memory["after_bytes"] - memory["before_bytes"] == memory["seen_bytes"]
    assert figures["memory"]["under_our_pid"] == 1.0, "NVML hides process ids here"
    assert f"under process {proof['pid']}" in next(r["detail"] for r in proof["results"] if r["name"] == "memory")
    assert figures["speed"]["tflops"] > 1 and figures["speed"]["gb_s"] > 50
    assert proof["about"]["uuid"].startswith("GPU-") and len(proof["about"]["capability"]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_defect_on_the_gpu_fails_its_own_proof(dtype, tmp_path):
    planted = ["device", "product", "attention", "loss", "optimizer", "placement"]
    extra = plant(tmp_path, *planted, place=11)
    extra["PYTHONPATH"] = os.pathsep.join([extra["PYTHONPATH"], str(ROOT / "src")])
    proof = doctor(dtype, 4, **extra)
    details = {result["name"]: result["detail"] for result in proof["results"] if not result["ok"]}
    assert list(details) == planted
    assert "1 of 16,777,216" in details["product"]
    assert "nan" in details["attention"] and "not compatible" in details["device"]
    assert "optimizer step of vector on cpu" in details["placement"]

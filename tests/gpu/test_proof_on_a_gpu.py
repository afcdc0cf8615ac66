"""The proof on a real NVIDIA GPU, through the verb a person uses."""

import json
import os

import pytest
import torch

from tests import planted_defects as planted
from tests.program import ROOT, tunix_rt
from tunix_rt.engines.selftest import torch as torch_proofs
from tunix_rt.engines.selftest.runner import Bench, Setting

pytestmark = pytest.mark.gpu


def doctor(expected: int, *asked: str, **extra: str) -> dict:
    done = tunix_rt("doctor", "--device", "cuda", *asked, "--prove", "--json", **extra)
    assert done.returncode == expected, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["proof"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_gpu_is_proven_and_its_memory_is_under_the_pid_of_the_child(dtype):
    proof = doctor(0, "--dtype", dtype)
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
    assert proof["about"]["attention"].startswith("sdpa, flash" if dtype == "float32" else "varlen, every")


@pytest.mark.parametrize(
    ("model", "training", "attention", "optimizer"),
    [
        (
            "gemma-3-270m",
            "{dtype: float16, optim: adafactor, deterministic: true}",
            "causal, grouped, packed, window of 50 with backward, varlen, head size 256",
            "two updates of adafactor, weights in float32",
        ),
        (
            "gemma-2-2b",
            "{dtype: bf16, master_dtype: bf16, optim: adamw_8bit}",
            "packed, window of 50 with backward, flex, head size 256",
            "two updates of adamw_8bit, weights in bfloat16, rounded to nearest and at random",
        ),
    ],
)
def test_what_a_configured_run_computes_is_proven(model, training, attention, optimizer, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{model_name_or_path: {model}, weights: random}}\ntraining: {training}\n")
    results = {result["name"]: result for result in doctor(0, str(config))["results"]}
    assert attention in results["attention"]["detail"] and optimizer in results["optimizer"]["detail"]
    for name in ("attention", "loss", "optimizer"):
        assert 0 < results[name]["figures"]["share of allowed"] < 0.66, results[name]


def attention_of(**setting) -> torch_proofs.Proved:
    return torch_proofs.attention(Bench(setting=Setting(device="cuda", dtype="bfloat16", head_size=128, **setting)))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"scale": lambda scale: 1.02 * scale},
        {"before": lambda before: None if before is None else before + 1},
        {"begins": lambda begins: torch.cat([begins[:1], begins[1:-1] + 1, begins[-1:]])},
    ],
    ids=["right", "scale 2 % off", "window one too long", "borders one too late"],
)
def test_a_defect_in_what_varlen_is_asked_for_is_found(changed, monkeypatch):
    planted.kernel_off(**changed)(monkeypatch)
    result = attention_of(query_heads=4, kv_heads=1, window=512)
    assert "varlen" in result.detail or not result.ok
    assert result.ok is not bool(changed) and "nan" not in result.detail, result


@pytest.mark.filterwarnings("default")  # of torch's compiler
@pytest.mark.parametrize("right", [True, False])
def test_a_window_of_flex_that_is_one_too_long_is_found(right, monkeypatch):
    if not right:
        planted.flex_window_off(monkeypatch)
    result = attention_of(query_heads=4, kv_heads=1, window=512, capped_scores=True)
    assert result.ok is right and "nan" not in result.detail, result
    assert "flex, head size 128, scores soft-capped at 2" in result.detail or not right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_defect_on_the_gpu_fails_its_own_proof(dtype, tmp_path):
    kinds = ["device", "product", "attention", "loss", "optimizer", "placement"]
    extra = planted.plant(tmp_path, *kinds, place=11)
    extra["PYTHONPATH"] = os.pathsep.join([extra["PYTHONPATH"], str(ROOT / "src")])
    proof = doctor(4, "--dtype", dtype, **extra)
    details = {result["name"]: result["detail"] for result in proof["results"] if not result["ok"]}
    assert list(details) == kinds
    assert "1 of 16,777,216" in details["product"]
    assert "nan" in details["attention"] and "not compatible" in details["device"]
    assert "optimizer step of vector on cpu" in details["placement"]

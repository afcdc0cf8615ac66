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

HEADROOM = 0.66
"""A correct kernel uses less than two thirds of the tolerance (decision 0015): another GPU adds in another order."""


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
        assert 0 < figures[name]["share of allowed"] < HEADROOM, figures[name]
    memory = figures["memory"]
    assert memory["seen_bytes"] >= memory["allocated_bytes"] - (16 << 20) >= 1 << 28
    assert memory["after_bytes"] - memory["before_bytes"] == memory["seen_bytes"]
    assert figures["memory"]["under_our_pid"] == 1.0, "NVML hides process ids here"
    assert f"under process {proof['pid']}" in next(r["detail"] for r in proof["results"] if r["name"] == "memory")
    assert figures["speed"]["tflops"] > 1 and figures["speed"]["gb_s"] > 50
    assert proof["about"]["uuid"].startswith("GPU-") and len(proof["about"]["capability"]) == 2
    assert proof["about"]["attention"].startswith("sdpa, " if dtype == "float32" else "varlen, ")


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
        assert 0 < results[name]["figures"]["share of allowed"] < HEADROOM, results[name]


def attention_of(**setting) -> tuple[str, torch_proofs.CheckResult]:
    """The name of the attention that was checked, and the result."""
    bench = Bench(setting=Setting(device="cuda", dtype="bfloat16", head_size=128, **setting))
    result = torch_proofs.attention(bench)
    return bench.about["attention"].split(",")[0], result


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"scale": lambda scale: 1.02 * scale},
        {"before": lambda before: None if before is None else before + 1},
        {"begins": lambda begins: torch.cat([begins[:1], begins[1:-1] + 1, begins[-1:]])},
    ],
    ids=["right", "scale 2 % off", "window one too long", "boundaries one too late"],
)
def test_a_defect_around_varlen_is_found(changed, monkeypatch):
    planted.kernel_off(**changed)(monkeypatch)
    name, result = attention_of(query_heads=4, kv_heads=1, window=512)
    assert name == "varlen"
    assert result.ok is not bool(changed) and "nan" not in result.detail, result


WINDOW_DEFECTS = {"flex": (planted.flex_window_off, {}), "eager": (planted.window_off, {"dropout": True})}
"""Soft-capped scores have two implementations: flex, and eager where the model has attention dropout."""


@pytest.mark.filterwarnings("default")  # of torch's compiler
@pytest.mark.parametrize("expected", WINDOW_DEFECTS)
def test_a_window_that_is_one_too_long_is_found_beside_capped_scores(expected, monkeypatch):
    plant, needs = WINDOW_DEFECTS[expected]
    capped = {"query_heads": 4, "kv_heads": 1, "window": 512, "capped_scores": True, **needs}
    # What this process compiled before had other constants; the compiler would trace ours as symbolic, which flex rejects.
    torch.compiler.reset()
    name, right = attention_of(**capped)
    assert name == expected and right.ok, (name, right)
    assert f"{expected}, head size 128, scores soft-capped at 2" in right.detail

    lengthened = plant(monkeypatch)
    torch.compiler.reset()
    name, wrong = attention_of(**capped)
    assert name == expected and lengthened, "the planted code was not reached"
    assert not wrong.ok and "elements wrong" in wrong.detail and "nan" not in wrong.detail, wrong


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

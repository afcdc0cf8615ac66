"""A proof that cannot fail proves nothing: the references are right, and every kind of defect is found by its name."""

import functools
import importlib.util
import itertools
import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import planted_defects as planted
from tests.attention_checks import attend_alone
from tests.program import ROOT, tunix_rt
from tests.tables import parametrize, tables
from tunix_rt.doctor.selftest import CHECK_NAMES, CheckResult, SelfTest, run_selftest, selftest_problem
from tunix_rt.engines.optimizers import Hyperparameters, module_of
from tunix_rt.engines.selftest import cases as cases
from tunix_rt.engines.selftest import jax as jax_proofs
from tunix_rt.engines.selftest import reference as references
from tunix_rt.engines.selftest import runner as proving
from tunix_rt.engines.selftest import torch as torch_proofs
from tunix_rt.engines.selftest.runner import Bench, Setting
from tunix_rt.engines.torch import attention as torch_attention
from tunix_rt.engines.torch.attention import VARLEN, Attention

TYPES = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 weights": {"dtype": "bfloat16", "master_dtype": "bfloat16"},
}
"""Of the products; weights are kept in float32 where nothing else is said."""
SERIES = [pytest.param(name, marks=pytest.mark.slow) if name == "float16" else name for name in TYPES]
"""A CPU emulates float16, which takes most of the time: of the slow series."""
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")


def close(got, want):
    assert np.abs(got - want.detach().numpy()).max() < 1e-10


def normal(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@parametrize("heads", "kv_heads", "packed", "window", "scaling", "softcap")
def test_the_attention_written_by_hand_is_the_one_of_autograd(heads, kv_heads, packed, window, scaling, softcap):
    q, k, v = normal(2, heads, 37, 16), normal(2, kv_heads, 37, 16), normal(2, kv_heads, 37, 16)
    upstream = normal(2, heads, 37, 16, grad=False)
    examples = np.repeat([0, 1], [20, 17]) if packed else None
    marks = torch.zeros(37) if examples is None else torch.from_numpy(examples)
    mask = torch.ones(37, 37, dtype=torch.bool).tril() & (marks[:, None] == marks[None, :])
    if window:
        mask &= ~torch.ones(37, 37, dtype=torch.bool).tril(-window)
    if softcap:
        k_all, v_all = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        scores = torch.tanh(q @ k_all.mT * scaling / softcap) * softcap
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v_all
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=scaling)
    out.backward(upstream)
    got = references.attention(
        *(part.detach().numpy() for part in (q, k, v, upstream)),
        examples=examples, window=window, scaling=scaling, softcap=softcap,
    )  # fmt: skip
    for mine, theirs in ((got.out, out), (got.dq, q.grad), (got.dk, k.grad), (got.dv, v.grad)):
        close(mine, theirs)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_loss_written_by_hand_is_the_one_of_autograd(softcap):
    states, head, targets = normal(29, 16), normal(50, 16), torch.randint(50, (29,))
    logits = states @ head.T
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    got = references.cross_entropy(states.detach().numpy(), head.detach().numpy(), targets.numpy(), softcap=softcap)
    assert got.loss == pytest.approx(loss.item(), abs=1e-10)
    close(got.d_states, states.grad)
    close(got.d_head, head.grad)


def test_the_update_written_by_hand_is_the_one_of_torch():
    parameter = torch.nn.Parameter(normal(8, 9, grad=False))
    states = {"parameter": parameter.detach().numpy().copy()}
    adamw = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3, foreach=False)
    for step in range(1, 4):
        parameter.grad = normal(8, 9, grad=False)
        adamw.step()
        at = Hyperparameters(step=step, lr=0.1, beta1=0.8, beta2=0.99, epsilon=1e-6, decay=0.3)
        states = module_of("adamw").reference(states.pop("parameter"), states, parameter.grad.numpy(), at)
    close(states["parameter"], parameter)
    close(states["exp_avg_sq"], adamw.state[parameter]["exp_avg_sq"])


# --- each proof alone, in this process --------------------------------------------------------------------------------


SAMPLES = {name: functools.cache(getattr(cases, name)) for name in ("matmul_case", "attention_cases", "loss_case")}


@pytest.fixture(autouse=True)
def small_products_and_samples_made_once(monkeypatch):
    monkeypatch.setattr(proving, "affordable_size", lambda *_, **__: 512)
    for name, cached in SAMPLES.items():
        monkeypatch.setattr(cases, name, cached)


def found(proof, type_name: str, **setting) -> CheckResult:
    return proof(Bench(setting=Setting(device="cpu", **TYPES[type_name], **setting)))


MODELS = tables(__file__)["models"]


@pytest.mark.parametrize("type_name", SERIES)
@pytest.mark.parametrize("model", MODELS)
def test_right_kernels_use_less_than_two_thirds_of_what_is_allowed(model, type_name):
    proofs = (torch_proofs.product, torch_proofs.attention, torch_proofs.loss, torch_proofs.optimizer)
    for proof in proofs[-1:] if "optim" in MODELS[model] else proofs:
        result = found(proof, type_name, **MODELS[model])
        assert result.ok and result.figures["share of allowed"] < 0.66, result


def test_the_words_say_what_was_proven():
    detail = found(torch_proofs.attention, "float32", **MODELS["gemma-2"]).detail
    assert "causal, grouped, packed, window of 50 with backward, eager, head size 128" in detail
    assert "scores times 0.0833333 and soft-capped at 2" in detail
    assert "causal, packed with backward, sdpa, head size 64;" in found(torch_proofs.attention, "float32").detail
    detail = found(torch_proofs.optimizer, "bfloat16 weights", **MODELS["8-bit"]).detail
    assert "two updates of adamw_8bit, weights in bfloat16, rounded to nearest and at random" in detail


def test_a_small_window_of_a_model_is_proven_as_it_is():
    assert "window of 7 with backward" in found(torch_proofs.attention, "float32", window=7).detail


@pytest.fixture
def varlen(monkeypatch):
    """A run that takes varlen, whose kernel no CPU has: attention written out in its place, all around it as in a run."""
    chosen = Attention(name="varlen", training=VARLEN, generating="sdpa", why="")
    torch_attention.register()
    monkeypatch.setattr(torch_proofs, "_attention_of", lambda setting: chosen)
    monkeypatch.setattr(torch_attention, "varlen_kernel", attend_alone)


VARLEN_DEFECTS = {
    "scale 2 % off": {"scale": lambda scale: 1.02 * scale},
    "window one too long": {"before": lambda before: None if before is None else before + 1},
    "borders one too late": {"begins": lambda begins: torch.cat([begins[:1], begins[1:-1] + 1, begins[-1:]])},
}


def test_varlen_is_proven_as_a_run_calls_it(varlen):
    result = found(torch_proofs.attention, "float32", **MODELS["sliding"])
    assert result.ok and result.figures["share of allowed"] < 0.66, result
    assert "causal, grouped, packed, window of 50 with backward, varlen, head size 64" in result.detail


@pytest.mark.parametrize("defect", VARLEN_DEFECTS)
def test_a_defect_around_varlen_is_found(defect, varlen, monkeypatch):
    planted.kernel_off(**VARLEN_DEFECTS[defect])(monkeypatch)
    result = found(torch_proofs.attention, "float32", **MODELS["sliding"])
    assert not result.ok and "elements wrong" in result.detail and "nan" not in result.detail


def test_a_whole_float32_product_may_be_off_by_little():
    """0.00113 was seen on an H200; twice as much may come, four times as much is wrong."""
    want = np.zeros((4096, 4096))
    sample = cases.MatmulCase(left=None, right=None, want=want)
    setting = Setting(device="cpu", dtype="float32")
    assert sample.judge(setting, np.float32(0.0023) + want).ok
    assert not sample.judge(setting, np.float32(0.0046) + want).ok


FINITE = {
    "product of cut inputs": ("product", planted.cut_inputs, "small"),
    "one element of the product": ("product", planted.one_element, "small"),
    "scale of attention 2 % off": ("attention", planted.scale_off, "small"),
    "scale of attention 2 % off, as a model asks for it": ("attention", planted.scale_off, "gemma"),
    "one future position": ("attention", planted.seen_too_much(1, 1, 290, 291), "small"),
    "one future position of large heads": ("attention", planted.seen_too_much(0, 0, 150, 299), "gemma"),
    "one position of the example before": ("attention", planted.seen_too_much(0, 1, 71, 69), "gemma"),
    "window one too long": ("attention", planted.window_off, "sliding"),
    "window one too long beside capped scores": ("attention", planted.window_off, "gemma-2"),
    "gradient of one query": ("attention", planted.gradient_off(0), "grouped"),
    "gradient of one key": ("attention", planted.gradient_off(1), "grouped"),
    "gradient of one value": ("attention", planted.gradient_off(2), "grouped"),
    "no cap of scores": ("attention", planted.cap_forgotten, "gemma-2"),
    "no cap of logits": ("loss", planted.logit_cap_forgotten, "gemma"),
    "no gradient of other tokens": ("loss", planted.others_forgotten, "small"),
    "a chunk without its part of the gradient": ("loss", planted.chunk_forgotten, "small"),
    "gradient of one state": ("loss", planted.state_gradient_off, "small"),
    "loss without its gradients": ("loss", planted.loss_off, "small"),
    "one target lost": ("loss", planted.one_target_lost, "small"),
    "no epsilon": ("optimizer", planted.adamw_off(epsilon=lambda _: 0.0), "small"),
    "no decay": ("optimizer", planted.adamw_off(decay=lambda _: 0.0), "small"),
    "rate 1 % off": ("optimizer", planted.adamw_off(lr=lambda lr: 1.01 * lr), "small"),
    "no bias correction": ("optimizer", planted.adamw_off(count=lambda count: count * 1e9), "small"),
    "first moment": ("optimizer", planted.moment_off(0), "small"),
    "second moment": ("optimizer", planted.moment_off(1), "small"),
    "first moment in 8 bits": ("optimizer", planted.moment_off(0), "8-bit"),
    "second moment in 8 bits": ("optimizer", planted.moment_off(1), "8-bit"),
    "first moment one code off": ("optimizer", planted.code_off("encode_signed", 128), "8-bit"),
    "second moment one code off": ("optimizer", planted.code_off("encode_unsigned", 256), "8-bit"),
    "codes read as their neighbours": ("optimizer", planted.code_misread, "8-bit"),
    "moments always rounded down": ("optimizer", planted.moments_cut, "8-bit"),
    "adafactor without clipping": ("optimizer", planted.never_clipped, "adafactor"),
    "adafactor without decay": ("optimizer", planted.adafactor_off(decay=lambda _: 0.0), "adafactor"),
    "adafactor without a scale": ("optimizer", planted.adafactor_off(scale=lambda _: None), "adafactor"),
    "adafactor's second moment": ("optimizer", planted.step_share_off, "adafactor"),
}


@pytest.mark.parametrize(
    ("defect", "type_name"),
    [
        pytest.param(defect, type_name, marks=pytest.mark.slow if type_name == "float16" else ())
        for defect, type_name in itertools.product(FINITE, TYPES)
        if type_name != "bfloat16 weights" or FINITE[defect][0] in ("loss", "optimizer")  # what weights take part in
    ],
)
def test_a_finite_defect_is_found_in_every_type(defect, type_name, monkeypatch):
    proof, plant, model = FINITE[defect]
    plant(monkeypatch)
    result = found(getattr(torch_proofs, proof), type_name, **MODELS[model])
    assert not result.ok and "elements wrong" in result.detail and "nan" not in result.detail


@pytest.mark.parametrize("plant", [planted.rounded_to_nearest, planted.rounded_too_often_up])
@pytest.mark.parametrize("model", ["small", "8-bit", "adafactor"])
def test_weights_that_are_not_rounded_at_random_are_found(plant, model, monkeypatch):
    plant(monkeypatch)
    result = found(torch_proofs.optimizer, "bfloat16 weights", **MODELS[model])
    assert not result.ok and "share of weights rounded up" in result.detail


def test_both_engines_prove_the_same_eight_things():
    for engine in (torch_proofs, jax_proofs):
        assert tuple(check.__name__ for check in engine.CHECKS) == CHECK_NAMES


# --- jax, in a process of its own: once it has run, a process may not fork any more, and other tests do ---------------


@pytest.mark.slow  # the same defects are found in torch by default, by the same checks
@needs_jax
def test_finite_defects_in_jax_are_found_and_nothing_without_them():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/invariant/jax_defects.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


# --- the whole child --------------------------------------------------------------------------------------------------


def proven(dtype: str, backend: str = "torch") -> SelfTest:
    return run_selftest(
        backend=backend, device="cpu", dtype=dtype, head_size=64, query_heads=4, kv_heads=1, softcap=30.0
    )


@pytest.mark.slow  # a wall clock
def test_a_right_cpu_is_proven_within_20_seconds(tmp_path):
    """With what a configuration asks for: its step, and the attention of its model."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {model_name_or_path: tiny-gemma3}\n"
        "training: {dtype: bf16, master_dtype: bf16, optim: adafactor, deterministic: true}\n"
    )
    started = time.monotonic()
    done = tunix_rt("doctor", "--device", "cpu", str(config), "--prove", "--json")
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)["proof"]
    assert proof["ok"] and "problem" not in proof
    assert tuple(result["name"] for result in proof["results"]) == CHECK_NAMES
    figures = {result["name"]: result["figures"] for result in proof["results"]}
    assert figures["memory"]["seen_bytes"] > 0 and figures["speed"]["tflops"] > 0 and figures["speed"]["gb_s"] > 0
    details = {result["name"]: result["detail"] for result in proof["results"]}
    assert "window of 50 with backward, sdpa, head size" in details["attention"]
    assert "adafactor, weights in bfloat16, rounded to nearest and at random" in details["optimizer"]
    assert proof["about"]["attention"].startswith("sdpa, on the CPU")
    assert seconds < 20


def test_each_defect_fails_its_own_proof_and_no_other(tmp_path, monkeypatch):
    """In one child, since each is in another kernel; the place of the wrong element is another one every time."""
    kinds = ["device", "product", "attention", "loss", "optimizer", "placement"]
    for name, value in planted.plant(tmp_path, *kinds, place=random.randrange(10**9)).items():
        monkeypatch.setenv(name, value)
    proof = proven("bfloat16")
    details = {result.name: result.detail for result in proof.results if not result.ok}
    assert list(details) == kinds, proof
    assert proof.problem is None and not proof.ok
    assert "sm_120 is not compatible" in details["device"]
    assert "1 of " in details["product"] and "product[" in details["product"]
    assert "dq[1, 0, 7, 3] is nan" in details["attention"]
    assert "loss[0] is " in details["loss"]
    assert "update 1 of matrix, parameter[" in details["optimizer"]
    assert "1 of 45 tensors" in details["placement"] and "optimizer step of vector on meta" in details["placement"]
    problem, fix = selftest_problem(proof)
    assert "failed the self-test check `device`" in problem and "tunix-rt doctor --device cpu" in fix


@pytest.mark.slow
@needs_jax
def test_a_right_cpu_is_proven_with_jax(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")  # a list falls to the CPU in silence; the proof asks for one
    proof = proven("float32", backend="jax")
    assert selftest_problem(proof) is None and proof.ok
    assert tuple(result.name for result in proof.results) == CHECK_NAMES and proof.about["platform"] == "cpu"


@pytest.mark.slow
@needs_jax
def test_jax_without_the_device_asked_for_is_not_proven_on_the_cpu():
    proof = run_selftest(backend="jax", device="tpu", dtype="float32")
    problem, _ = selftest_problem(proof)
    assert "failed the self-test check `device`" in problem and "tpu" in problem
    assert not any(result.ok for result in proof.results)

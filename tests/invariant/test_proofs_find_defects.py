"""A proof that cannot fail proves nothing: the references are right, and every kind of defect is found by its name."""

import importlib.util
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.planted_defects import plant
from tunix_rt.backends import references
from tunix_rt.doctor.prove import Proof, proof_problem, prove

NAMES = ["device", "product", "attention", "loss", "optimizer", "placement", "memory", "speed"]


def close(got, want):
    assert np.abs(got - want.detach().numpy()).max() < 1e-10


def normal(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize(("heads", "kv_heads", "packed"), [(4, 4, False), (6, 2, False), (6, 2, True)])
def test_the_attention_written_by_hand_is_the_one_of_autograd(heads, kv_heads, packed):
    q, k, v = normal(2, heads, 37, 16), normal(2, kv_heads, 37, 16), normal(2, kv_heads, 37, 16)
    upstream = normal(2, heads, 37, 16, grad=False)
    examples = np.repeat([0, 1], [20, 17]) if packed else None
    marks = torch.zeros(37) if examples is None else torch.from_numpy(examples)
    mask = torch.ones(37, 37, dtype=torch.bool).tril() & (marks[:, None] == marks[None, :])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out.backward(upstream)
    got = references.attention(*(part.detach().numpy() for part in (q, k, v, upstream)), examples=examples)
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
    zero = np.zeros((8, 9))
    state = references.Adam(parameter=parameter.detach().numpy().copy(), first=zero, second=zero, step=0)
    adamw = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3, foreach=False)
    for _ in range(3):
        parameter.grad = normal(8, 9, grad=False)
        adamw.step()
        state = references.adamw_step(
            state, parameter.grad.numpy(), rate=0.1, beta1=0.8, beta2=0.99, epsilon=1e-6, decay=0.3
        )
    close(state.parameter, parameter)
    close(state.second, adamw.state[parameter]["exp_avg_sq"])


def proven(dtype: str, backend: str = "torch") -> Proof:
    return prove(backend=backend, device="cpu", dtype=dtype, head_size=64, query_heads=4, kv_heads=1, softcap=30.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_cpu_is_proven(dtype):
    proof = proven(dtype)
    assert proof_problem(proof) is None and proof.ok
    assert [result.name for result in proof.results] == NAMES
    figures = {result.name: result.figures for result in proof.results}
    assert figures["memory"]["seen_bytes"] > 0 and figures["speed"]["tflops"] > 0 and figures["speed"]["gb_s"] > 0
    assert proof.seconds < 30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_defect_fails_its_own_proof_and_no_other(dtype, tmp_path, monkeypatch):
    """In one child, since each is in another kernel; the place of the wrong element is another one every time."""
    planted = ["device", "product", "attention", "loss", "optimizer", "placement"]
    for name, value in plant(tmp_path, *planted, place=random.randrange(10**9)).items():
        monkeypatch.setenv(name, value)
    proof = proven(dtype)
    details = {result.name: result.detail for result in proof.results if not result.ok}
    assert list(details) == planted, proof
    assert proof.problem is None and not proof.ok
    assert "sm_120 is not compatible" in details["device"]
    assert "1 of " in details["product"] and "product[" in details["product"]
    assert "dq[1, 0, 7, 3] is nan" in details["attention"]
    assert "loss[0] is " in details["loss"]
    assert "matrix parameter[" in details["optimizer"]
    assert "1 of 44 tensors" in details["placement"] and "optimizer step of vector on meta" in details["placement"]
    problem, fix = proof_problem(proof)
    assert "failed the proof `device`" in problem and "tunix-rt doctor --device cpu" in fix


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_a_right_cpu_is_proven_with_jax(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")  # a list falls to the CPU in silence; the proof asks for one
    proof = proven("float32", backend="jax")
    assert proof_problem(proof) is None and proof.ok
    assert [result.name for result in proof.results] == NAMES and proof.about["platform"] == "cpu"


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_jax_without_the_device_asked_for_is_not_proven_on_the_cpu():
    proof = prove(backend="jax", device="tpu", dtype="float32")
    problem, _ = proof_problem(proof)
    assert "failed the proof `device`" in problem and "tpu" in problem
    assert not any(result.ok for result in proof.results)

"""Defects planted into jax, each with its clean counterpart. Run by test_proofs_find_defects.py in a process of its own."""

import pytest

from tests.invariant.test_proofs_find_defects import MODELS, found
from tunix_rt.engines.selftest import jax as jax_proofs


def jax_scale_off(monkeypatch):
    import jax

    softmax = jax.nn.softmax
    monkeypatch.setattr(jax.nn, "softmax", lambda scores, **named: softmax(1.02 * scores, **named))


def jax_product_off(monkeypatch):
    import jax.numpy as jnp

    matmul = jnp.matmul

    def cut(numbers):
        return numbers.astype(jnp.bfloat16).astype(numbers.dtype)

    monkeypatch.setattr(jnp, "matmul", lambda left, right: matmul(cut(left), cut(right)))


def jax_token_lost(monkeypatch):
    import jax

    total = jax.nn.logsumexp
    monkeypatch.setattr(jax.nn, "logsumexp", lambda logits, **named: total(logits[..., :-1], **named))


def jax_no_epsilon(monkeypatch):
    import optax

    adamw = optax.adamw
    monkeypatch.setattr(optax, "adamw", lambda *rate, **named: adamw(*rate, **named | {"eps": 0.0}))


@pytest.mark.parametrize(
    ("proof", "plant"),
    [
        (jax_proofs.product, jax_product_off),
        (jax_proofs.attention, jax_scale_off),
        (jax_proofs.loss, jax_token_lost),
        (jax_proofs.optimizer, jax_no_epsilon),
    ],
)
def test_a_finite_defect_in_jax_is_found_and_nothing_without_it(proof, plant, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    right = found(proof, "float32", **MODELS["gemma-2"])
    assert right.ok and right.figures["share of allowed"] < 0.66, right
    plant(monkeypatch)
    wrong = found(proof, "float32", **MODELS["gemma-2"])
    assert not wrong.ok and "elements wrong" in wrong.detail

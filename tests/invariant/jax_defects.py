"""Defects planted into jax, each with its clean counterpart. Run by test_proofs_find_defects.py in a process of its own."""

from dataclasses import replace

import pytest

from tests.invariant.test_proofs_find_defects import MODELS, found
from tunix_rt.engines.jax import chunked_loss
from tunix_rt.engines.optimizers import adamw
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
    """The last token of the vocabulary has no part in the sum of exponentials."""
    logits = chunked_loss.head_logits
    monkeypatch.setattr(
        chunked_loss, "head_logits", lambda *given, **named: logits(*given, **named).at[..., -1].set(-30.0)
    )


def jax_no_epsilon(monkeypatch):
    update = adamw.jax_update
    monkeypatch.setattr(
        adamw, "jax_update", lambda *given, optim, **named: update(*given, optim=replace(optim, epsilon=0.0), **named)
    )


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

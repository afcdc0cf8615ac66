"""Attention functions of the JAX engine: which one is chosen, and document boundaries as far as a CPU can check them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_rt.engines.jax import attention as jax_attention
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.model import exact_attention

TOKENS, HEADS, SIZE = 256, 2, 128
CONFIG = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": SIZE, "max_position_embeddings": 512, "sliding_window": 70,
    "query_pre_attn_scalar": 64,
}  # fmt: skip
GEMMA, GEMMA2 = (architecture_of(CONFIG | {"model_type": family}) for family in ("gemma", "gemma2"))
STARTS = ([0, 30, 130, 131], [0, 200])
SEGMENTS = np.stack([np.searchsorted(starts, np.arange(TOKENS), side="right") for starts in STARTS]).astype(np.int32)


@pytest.mark.parametrize("kind", [0, 1])
def test_splash_attention_keeps_examples_windows_and_caps_as_the_mask_does(kind):
    drawn = np.random.default_rng(0)
    heads = [jnp.asarray(drawn.standard_normal((2, TOKENS, of, SIZE)), jnp.float32) for of in (HEADS, 1, 1, HEADS)]

    def graded(attention):
        def summed(query, key, value):
            mixed = attention(query, key, value, segments=SEGMENTS, kind=jnp.int32(kind), architecture=GEMMA2)
            return jnp.sum(mixed * heads[3])

        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.grad(summed, argnums=(0, 1, 2)))(*heads[:3])

    for found, wanted in zip(
        graded(partial(jax_attention._splash, interpret=True)), graded(exact_attention), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=3e-5)


def test_the_examples_of_a_row_have_offsets_and_lengths():
    starts, lengths, counts = jax_attention.packed_examples(jnp.asarray(SEGMENTS), 4)
    assert starts.tolist() == [[0, 30, 130, 131, -1], [0, 200, -1, -1, -1]]
    assert lengths.tolist() == [[30, 100, 1, 125], [200, 56, -1, -1]]
    assert counts.tolist() == [4, 2]


def test_more_examples_than_a_kernel_takes_are_counted():
    _, lengths, counts = jax_attention.packed_examples(jnp.asarray(SEGMENTS), 2)
    assert lengths.tolist() == [[30, 100], [200, 56]]
    assert counts.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("platform", "architecture", "compute", "tokens", "name", "why"),
    [
        ("cpu", GEMMA, "float32", 256, "exact", "masks"),
        ("tpu", GEMMA, "bfloat16", 256, "splash", "segment ids"),
        ("tpu", GEMMA, "bfloat16", 200, "exact", "multiples of 128, not 200 tokens"),
        ("gpu", GEMMA, "float32", 256, "exact", "no float32"),
        ("gpu", GEMMA2, "bfloat16", 256, "exact", "no soft cap"),
        ("gpu", GEMMA, "bfloat16", 256, "exact", r"needs compute capability 9\.0, and compute capability is not known"),
    ],
)
def test_a_kernel_is_taken_only_where_it_computes_what_the_model_does(
    platform, architecture, compute, tokens, name, why, monkeypatch
):
    monkeypatch.setattr(jax_attention, "_capability", lambda: None)  # no GPU
    found, _, reason = jax_attention.choose_attention(platform, architecture, compute, tokens)
    assert found == name
    assert re.search(why, reason)

"""MLPs in pieces, and look-ups of tokens: what only TPUs take apart gives the numbers of the whole."""

from functools import partial

import numpy as np
import pytest

from tunix_rt.engines.jax.architecture import architecture_of

jax = pytest.importorskip("jax")
models = pytest.importorskip("tunix_rt.engines.jax.model", exc_type=ImportError)
head = pytest.importorskip("tunix_rt.engines.jax.chunked_loss", exc_type=ImportError)

ROTARY = {
    "model_type": "gemma", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ROTARY, id="gated"),
        pytest.param(GPT2, id="with biases", marks=pytest.mark.slow),
    ],
)
def test_an_mlp_in_pieces_gives_the_same_loss_and_the_same_gradients(config):
    from tunix_rt.engines.jax.weights import parameter_shapes

    architecture, random = architecture_of(config), np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: random.standard_normal(shape, np.float32) / 4,
        parameter_shapes(architecture),
        is_leaf=lambda found: isinstance(found, tuple),
    )
    ids = random.integers(1, 64, (3, 24)).astype(np.int32)
    places = np.broadcast_to(np.arange(24, dtype=np.int32), ids.shape)
    batch = models.Batch(
        ids=ids, positions=places, segments=np.ones_like(ids), targets=np.roll(ids, -1, 1),
        weights=np.ones(ids.shape, np.float32),
    )  # fmt: skip
    loss_of = partial(models.summed_loss, batch=batch, architecture=architecture, compute="float32", remat="layers")
    whole = jax.jit(jax.value_and_grad(loss_of))(params)
    apart = jax.jit(jax.value_and_grad(partial(loss_of, pieces=4)))(params)
    assert float(apart[0]) == pytest.approx(float(whole[0]), rel=1e-6)
    for one, other in zip(jax.tree.leaves(apart[1]), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * float(np.abs(other).max()))


def test_an_id_outside_the_table_is_no_number_and_the_others_are_exact():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = np.asarray(head.looked_up(table, np.asarray([[0, 3, 4, 9]]), dtype="float32", scale=2.0))
    np.testing.assert_array_equal(found[0, :2], table[[0, 3]] * 2)
    assert np.isnan(found[0, 2:]).all()

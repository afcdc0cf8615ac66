"""The loss head of the JAX engine: a few tokens of every row meet the vocabulary at a time, in a scan.

Their logits are computed again in the backward pass, so the logits of all tokens never exist, in either pass.

No engine uses this yet: `training.backend: jax` is still refused.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tunix_rt.plan.recipe import loss_rows

Array = Any


def tokens_at_once(rows: int, tokens: int) -> int:
    """How many tokens of each of `rows` meet the vocabulary at once: as many in all as in the PyTorch engine."""
    return max(1, loss_rows(rows * tokens) // rows)


def head_loss(
    states: Array,
    table: Array,
    targets: Array,
    weights: Array,
    *,
    compute: Any,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Array:
    """Cross entropy of `targets` [rows, tokens] from hidden `states` [rows, tokens, hidden] and the head's `table`
    [vocabulary, hidden]: the sum over the tokens, each times its entry of `weights`; 0 for what is no target.

    In float32, of float64 products in float64. Rows stay together, so that they may live on different devices: a chunk is
    `chunk` tokens of all of them. A target may be any number where its weight is 0.
    """
    rows, tokens, _ = states.shape
    chunk = chunk or tokens_at_once(rows, tokens)
    parts = tuple(_chunked(array, chunk) for array in (states, jnp.where(weights > 0, targets, 0), weights))
    wide = jnp.promote_types(compute, jnp.float32)

    @partial(jax.checkpoint, prevent_cse=False)
    def summed(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        some_states, some_targets, some_weights = part
        logits = head_logits(some_states, table, compute=compute, softcap=softcap)
        at_target = jnp.take_along_axis(logits, some_targets[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - at_target
        return total + jnp.sum(losses * some_weights.astype(wide)), None

    return jax.lax.scan(summed, jnp.zeros((), wide), parts)[0]


def head_logits(states: Array, table: Array, *, compute: Any, softcap: float | None = None) -> Array:
    """Logits [rows, tokens, vocabulary] of a few hidden states, in at least float32."""
    logits = _products(states, table, jnp.dtype(compute))
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


def _chunked(array: Array, chunk: int) -> Array:
    """[rows, tokens, ...] as [chunks, rows, chunk, ...], filled up with zeros."""
    rows, tokens, *rest = array.shape
    missing = -tokens % chunk
    filled = jnp.pad(array, ((0, 0), (0, missing), *((0, 0) for _ in rest)))
    return jnp.moveaxis(filled.reshape(rows, -1, chunk, *rest), 1, 0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products(states: Array, table: Array, compute: Any) -> Array:
    """Products in the type `compute`, summed and kept in at least float32: the loss is made of their last digits.

    The gradient is written out for two reasons: its products are of that type too, where automatic ones would be of
    float32; and the table's is of the table's own type, where an automatic one would be rounded to `compute` every time."""
    return _products_forward(states, table, compute)[0]


def _products_forward(states: Array, table: Array, compute: Any) -> tuple[Array, tuple[Array, Array]]:
    wide = jnp.promote_types(compute, jnp.float32)
    operands = (states.astype(compute), table.astype(compute))
    return jnp.einsum("bth,vh->btv", *operands, preferred_element_type=wide), (states, table)


def _products_backward(compute: Any, kept: tuple[Array, Array], slopes: Array) -> tuple[Array, Array]:
    (states, table), wide, slopes = kept, jnp.promote_types(compute, jnp.float32), slopes.astype(compute)
    of_states = jnp.einsum("btv,vh->bth", slopes, table.astype(compute), preferred_element_type=wide)
    of_table = jnp.einsum("btv,bth->vh", slopes, states.astype(compute), preferred_element_type=wide)
    return of_states.astype(states.dtype), of_table.astype(table.dtype)


_products.defvjp(_products_forward, _products_backward)

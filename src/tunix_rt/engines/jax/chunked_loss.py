"""The chunked loss head of the JAX engine: a scan over chunks of a few tokens of every row.

The gradients are computed with the loss, in the same pass: those of a cross entropy follow from the logits, so the logits of all
tokens never exist and none are computed twice. A sharded lm_head stays sharded: the hidden states of a chunk are all-gathered
to every shard, and the results are reduced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tunix_rt.engines.jax.mesh import DATA, FSDP, ROWS
from tunix_rt.plan.precision import loss_rows

Array = Any


class _How(NamedTuple):
    """What decides the code of a head. Can be hashed."""

    compute: Any
    softcap: float | None
    chunk: int
    mesh: Mesh | None
    """The devices of the arrays, if several."""
    is_sharded: bool
    """lm_head is sharded by its vocabulary over `FSDP`."""


def tokens_at_once(rows: int, tokens: int) -> int:
    """Tokens of each of `rows` in a chunk: as many in all as in the PyTorch engine."""
    return max(1, loss_rows(rows * tokens) // rows)


def head_loss(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    weights: Array,
    *,
    compute: Any,
    softcap: float | None = None,
    chunk: int | None = None,
    mesh: Mesh | None = None,
) -> Array:
    """Cross entropy of `targets` [rows, tokens] from `hidden` states [rows, tokens, hidden] and the weight `lm_head`
    [vocabulary, hidden]: the sum over the tokens, each times its entry of `weights`, 0 where there is no target.

    In float32, or float64 for float64 matmuls. A chunk is `chunk` tokens of every row. A target may be any number where its
    weight is 0. On the devices of `mesh` rows are sharded over all, and `lm_head` over `fsdp` where that divides it.
    """
    rows, tokens, _ = hidden.shape
    several = mesh is not None and mesh.size > 1
    how = _How(
        compute=jnp.dtype(compute),
        softcap=softcap,
        chunk=chunk or tokens_at_once(rows, tokens),
        mesh=mesh if several else None,
        is_sharded=_is_sharded(lm_head, mesh),
    )
    return _summed(hidden, lm_head, jnp.where(weights > 0, targets, 0), weights, how)


def head_logits(hidden: Array, lm_head: Array, *, compute: Any, softcap: float | None = None) -> Array:
    """Logits [rows, tokens, vocabulary] of a few hidden states, in at least float32."""
    compute = jnp.dtype(compute)
    logits = _product("bth,vh->btv", hidden, lm_head, compute)
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


def looked_up(embedding: Array, ids: Array, *, dtype: Any, scale: float = 1.0, mesh: Mesh | None = None) -> Array:
    """Rows of `embedding` [vocabulary, hidden] times `scale`, rounded to its dtype and then to `dtype`.

    An id outside the vocabulary gives NaN. Every shard of the embedding looks up its own rows."""
    take = partial(jnp.take, axis=0, mode="fill", fill_value=jnp.nan)

    def scaled(found: Array) -> Array:
        return (found if scale == 1.0 else found * jnp.asarray(scale, embedding.dtype)).astype(dtype)

    if not _is_sharded(embedding, mesh):
        return scaled(take(embedding, ids))

    def in_parts(part: Array, some_ids: Array) -> Array:
        all_ids = jax.lax.all_gather(some_ids, FSDP, axis=0, tiled=True)
        local = all_ids - jax.lax.axis_index(FSDP) * part.shape[0]
        is_here = (local >= 0) & (local < part.shape[0])
        found = scaled(take(part, jnp.where(is_here, local, 0)))
        found = jnp.where(is_here[..., None], found, jnp.zeros((), dtype))  # one shard has it: the sum is exact
        return jax.lax.psum_scatter(found, FSDP, scatter_dimension=0, tiled=True)

    rows = PartitionSpec(ROWS)
    found = jax.shard_map(in_parts, mesh=mesh, in_specs=(PartitionSpec(FSDP), rows), out_specs=rows)(embedding, ids)
    is_known = (ids >= 0) & (ids < embedding.shape[0])
    return jnp.where(is_known[..., None], found, jnp.nan)


def _is_sharded(lm_head: Array, mesh: Mesh | None) -> bool:
    """Whether `mesh.py` shards this weight by its vocabulary over several devices."""
    return mesh is not None and mesh.shape[FSDP] > 1 and lm_head.shape[0] % mesh.shape[FSDP] == 0


# --- loss and gradients ----------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden: Array, lm_head: Array, targets: Array, weights: Array, how: _How) -> Array:
    return _on_devices(partial(_scanned, how, False), how, 1)(hidden, lm_head, targets, weights)[0]


def _summed_forward(hidden: Array, lm_head: Array, targets: Array, weights: Array, how: _How) -> tuple[Array, Any]:
    loss, *gradients = _on_devices(partial(_scanned, how, True), how, 3)(hidden, lm_head, targets, weights)
    return loss, tuple(gradients)


def _summed_backward(how: _How, gradients: tuple[Array, Array], slope: Array) -> tuple[Array, Array, None, None]:
    d_hidden, d_lm_head = ((slope * gradient.astype(slope.dtype)).astype(gradient.dtype) for gradient in gradients)
    return d_hidden, d_lm_head, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def _on_devices(
    function: Callable[..., tuple[Array, ...]], how: _How, results: int
) -> Callable[..., tuple[Array, ...]]:
    """`function` of the shards of each device; of the whole arrays on one device."""
    if how.mesh is None:
        return function
    rows, lm_head = PartitionSpec(ROWS), PartitionSpec(FSDP if how.is_sharded else None)
    return jax.shard_map(
        function,
        mesh=how.mesh,
        in_specs=(rows, lm_head, rows, rows),
        out_specs=(PartitionSpec(), rows, lm_head)[:results],
        check_vma=False,  # the sums over devices are written out below
    )


def _scanned(
    how: _How, graded: bool, hidden: Array, lm_head: Array, targets: Array, weights: Array
) -> tuple[Array, ...]:
    """The loss of all rows and, where `graded`, its gradients by these hidden states and by this shard of `lm_head`."""
    parts = tuple(_chunked(array, how.chunk) for array in (hidden, targets, weights))
    wide = jnp.promote_types(how.compute, jnp.float32)

    def add(
        sums: tuple[Array, Array | None], part: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array | None], Array | None]:
        some_hidden, some_targets, some_weights = (_of_all_parts(array, how) for array in part)
        loss, dlogits = _losses(some_hidden, lm_head, some_targets, some_weights.astype(wide), how)
        if not graded:
            return (sums[0] + loss, None), None
        d_hidden = _product("btv,vh->bth", dlogits, lm_head, how.compute)
        d_lm_head = _product("btv,bth->vh", dlogits, some_hidden, how.compute).astype(lm_head.dtype)
        if how.is_sharded:  # each shard of the vocabulary adds its part; every device gets the sum for its own rows
            d_hidden = jax.lax.psum_scatter(d_hidden, FSDP, scatter_dimension=0, tiled=True)
        return (sums[0] + loss, sums[1] + d_lm_head), d_hidden.astype(hidden.dtype)

    begin = (jnp.zeros((), wide), jnp.zeros_like(lm_head) if graded else None)
    (loss, d_lm_head), d_hidden = jax.lax.scan(add, begin, parts)
    if how.mesh is not None:
        axes = DATA if how.is_sharded else ROWS  # the rows that this shard of lm_head has not seen
        loss = jax.lax.psum(loss, axes)
        d_lm_head = jax.lax.psum(d_lm_head, axes) if graded else None
    return (loss, _unchunked(d_hidden, hidden), d_lm_head) if graded else (loss,)


def _losses(hidden: Array, lm_head: Array, targets: Array, weights: Array, how: _How) -> tuple[Array, Array]:
    """The summed loss of a few tokens, and its gradient by every logit of this shard of the vocabulary."""
    logits = head_logits(hidden, lm_head, compute=how.compute, softcap=how.softcap)
    first = jax.lax.axis_index(FSDP) * lm_head.shape[0] if how.is_sharded else 0
    is_target = jnp.arange(lm_head.shape[0]) == (targets - first)[..., None]
    highest = _over_parts(jax.lax.pmax, logits.max(axis=-1), how)
    summed = _over_parts(jax.lax.psum, jnp.exp(logits - highest[..., None]).sum(axis=-1), how)
    at_target = _over_parts(jax.lax.psum, jnp.where(is_target, logits, 0).sum(axis=-1), how)
    whole = highest + jnp.log(summed)
    dlogits = (jnp.exp(logits - whole[..., None]) - is_target) * weights[..., None]
    if how.softcap is not None:
        dlogits = dlogits * (1 - jnp.square(logits / how.softcap))
    return jnp.sum((whole - at_target) * weights), dlogits


def _over_parts(reduce: Callable[..., Array], array: Array, how: _How) -> Array:
    return reduce(array, FSDP) if how.is_sharded else array


def _of_all_parts(array: Array, how: _How) -> Array:
    """The rows of all devices that have a shard of `lm_head`, which each shard needs."""
    return jax.lax.all_gather(array, FSDP, axis=0, tiled=True) if how.is_sharded else array


def _product(spelled: str, one: Array, other: Array, compute: Any) -> Array:
    """In the dtype `compute`, accumulated and returned in at least float32: the loss is made of the last digits."""
    wide = jnp.promote_types(compute, jnp.float32)
    return jnp.einsum(spelled, one.astype(compute), other.astype(compute), preferred_element_type=wide)


# --- chunks ----------------------------------------------------------------------------------------------------------


def _chunked(array: Array, chunk: int) -> Array:
    """[rows, tokens, ...] as [chunks, rows, chunk, ...], filled up with zeros."""
    rows, tokens, *rest = array.shape
    missing = -tokens % chunk
    filled = jnp.pad(array, ((0, 0), (0, missing), *((0, 0) for _ in rest)))
    return jnp.moveaxis(filled.reshape(rows, -1, chunk, *rest), 1, 0)


def _unchunked(chunks: Array, like: Array) -> Array:
    rows, tokens, *rest = like.shape
    return jnp.moveaxis(chunks, 0, 1).reshape(rows, -1, *rest)[:, :tokens]

"""The loss head of the JAX engine: a few tokens of every row meet the vocabulary at a time, in a scan.

The gradients are made with the loss, in the same pass: of a cross entropy they are at hand once the logits are, so the logits
of all tokens never exist and none are computed twice. Where the table is cut over devices it stays cut: the states of a few
tokens go to all of its parts, and what comes back is summed.
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
    """Where the arrays lie, if on several devices."""
    is_cut: bool
    """The table is cut by its vocabulary over `FSDP`."""


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
    mesh: Mesh | None = None,
) -> Array:
    """Cross entropy of `targets` [rows, tokens] from hidden `states` [rows, tokens, hidden] and the head's `table`
    [vocabulary, hidden]: the sum over the tokens, each times its entry of `weights`; 0 for what is no target.

    In float32, of float64 products in float64. A chunk is `chunk` tokens of every row. A target may be any number where its
    weight is 0. On the devices of `mesh` rows are split over all, and the table over `fsdp` where that divides it.
    """
    rows, tokens, _ = states.shape
    several = mesh is not None and mesh.size > 1
    how = _How(
        compute=jnp.dtype(compute),
        softcap=softcap,
        chunk=chunk or tokens_at_once(rows, tokens),
        mesh=mesh if several else None,
        is_cut=_is_cut(table, mesh),
    )
    return _summed(states, table, jnp.where(weights > 0, targets, 0), weights, how)


def head_logits(states: Array, table: Array, *, compute: Any, softcap: float | None = None) -> Array:
    """Logits [rows, tokens, vocabulary] of a few hidden states, in at least float32."""
    compute = jnp.dtype(compute)
    logits = _product("bth,vh->btv", states, table, compute)
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


def looked_up(table: Array, ids: Array, *, dtype: Any, scale: float = 1.0, mesh: Mesh | None = None) -> Array:
    """Rows of `table` [vocabulary, hidden] times `scale`, rounded to the table's type and then to `dtype`.

    An id outside the table gives no number (NaN). Where the table is cut over devices, every part looks up what it has."""
    take = partial(jnp.take, axis=0, mode="fill", fill_value=jnp.nan)

    def scaled(found: Array) -> Array:
        return (found if scale == 1.0 else found * jnp.asarray(scale, table.dtype)).astype(dtype)

    if not _is_cut(table, mesh):
        return scaled(take(table, ids))

    def in_parts(part: Array, some_ids: Array) -> Array:
        all_ids = jax.lax.all_gather(some_ids, FSDP, axis=0, tiled=True)
        local = all_ids - jax.lax.axis_index(FSDP) * part.shape[0]
        is_here = (local >= 0) & (local < part.shape[0])
        found = scaled(take(part, jnp.where(is_here, local, 0)))
        found = jnp.where(is_here[..., None], found, jnp.zeros((), dtype))  # one part has it: the sum is exact
        return jax.lax.psum_scatter(found, FSDP, scatter_dimension=0, tiled=True)

    rows = PartitionSpec(ROWS)
    found = jax.shard_map(in_parts, mesh=mesh, in_specs=(PartitionSpec(FSDP), rows), out_specs=rows)(table, ids)
    is_known = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(is_known[..., None], found, jnp.nan)


def _is_cut(table: Array, mesh: Mesh | None) -> bool:
    """Whether the table lies by its vocabulary over several devices, as `jax_mesh` cuts it."""
    return mesh is not None and mesh.shape[FSDP] > 1 and table.shape[0] % mesh.shape[FSDP] == 0


# --- loss and gradients ----------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(states: Array, table: Array, targets: Array, weights: Array, how: _How) -> Array:
    return _on_devices(partial(_scanned, how, False), how, 1)(states, table, targets, weights)[0]


def _summed_forward(states: Array, table: Array, targets: Array, weights: Array, how: _How) -> tuple[Array, Any]:
    loss, *gradients = _on_devices(partial(_scanned, how, True), how, 3)(states, table, targets, weights)
    return loss, tuple(gradients)


def _summed_backward(how: _How, gradients: tuple[Array, Array], slope: Array) -> tuple[Array, Array, None, None]:
    of_states, of_table = ((slope * gradient.astype(slope.dtype)).astype(gradient.dtype) for gradient in gradients)
    return of_states, of_table, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def _on_devices(
    function: Callable[..., tuple[Array, ...]], how: _How, results: int
) -> Callable[..., tuple[Array, ...]]:
    """`function` of the parts that each device has; of all of them where there is one."""
    if how.mesh is None:
        return function
    rows, table = PartitionSpec(ROWS), PartitionSpec(FSDP if how.is_cut else None)
    return jax.shard_map(
        function,
        mesh=how.mesh,
        in_specs=(rows, table, rows, rows),
        out_specs=(PartitionSpec(), rows, table)[:results],
        check_vma=False,  # the sums over devices are written out below
    )


def _scanned(how: _How, graded: bool, states: Array, table: Array, targets: Array, weights: Array) -> tuple[Array, ...]:
    """The loss of all rows and, where `graded`, its gradients by these states and by this part of the table."""
    parts = tuple(_chunked(array, how.chunk) for array in (states, targets, weights))
    wide = jnp.promote_types(how.compute, jnp.float32)

    def add(
        sums: tuple[Array, Array | None], part: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array | None], Array | None]:
        some_states, some_targets, some_weights = (_of_all_parts(array, how) for array in part)
        loss, slopes = _losses(some_states, table, some_targets, some_weights.astype(wide), how)
        if not graded:
            return (sums[0] + loss, None), None
        of_states = _product("btv,vh->bth", slopes, table, how.compute)
        of_table = _product("btv,bth->vh", slopes, some_states, how.compute).astype(table.dtype)
        if how.is_cut:  # each part of the vocabulary has its share; every device gets the sum for its own rows
            of_states = jax.lax.psum_scatter(of_states, FSDP, scatter_dimension=0, tiled=True)
        return (sums[0] + loss, sums[1] + of_table), of_states.astype(states.dtype)

    begin = (jnp.zeros((), wide), jnp.zeros_like(table) if graded else None)
    (loss, of_table), of_states = jax.lax.scan(add, begin, parts)
    if how.mesh is not None:
        axes = DATA if how.is_cut else ROWS  # the rows that this part of the table has not met
        loss = jax.lax.psum(loss, axes)
        of_table = jax.lax.psum(of_table, axes) if graded else None
    return (loss, _unchunked(of_states, states), of_table) if graded else (loss,)


def _losses(states: Array, table: Array, targets: Array, weights: Array, how: _How) -> tuple[Array, Array]:
    """The summed loss of a few tokens, and its slope at every logit of this part of the vocabulary."""
    logits = head_logits(states, table, compute=how.compute, softcap=how.softcap)
    first = jax.lax.axis_index(FSDP) * table.shape[0] if how.is_cut else 0
    is_target = jnp.arange(table.shape[0]) == (targets - first)[..., None]
    highest = _over_parts(jax.lax.pmax, logits.max(axis=-1), how)
    summed = _over_parts(jax.lax.psum, jnp.exp(logits - highest[..., None]).sum(axis=-1), how)
    at_target = _over_parts(jax.lax.psum, jnp.where(is_target, logits, 0).sum(axis=-1), how)
    whole = highest + jnp.log(summed)
    slopes = (jnp.exp(logits - whole[..., None]) - is_target) * weights[..., None]
    if how.softcap is not None:
        slopes = slopes * (1 - jnp.square(logits / how.softcap))
    return jnp.sum((whole - at_target) * weights), slopes


def _over_parts(reduce: Callable[..., Array], array: Array, how: _How) -> Array:
    return reduce(array, FSDP) if how.is_cut else array


def _of_all_parts(array: Array, how: _How) -> Array:
    """The rows of all devices that have a part of the table: each part must meet them."""
    return jax.lax.all_gather(array, FSDP, axis=0, tiled=True) if how.is_cut else array


def _product(spelled: str, one: Array, other: Array, compute: Any) -> Array:
    """In the type `compute`, summed and kept in at least float32: the loss is made of the last digits."""
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

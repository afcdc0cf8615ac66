"""The models of the JAX engine: pure functions over a tree of arrays, in one scan over the layers.

Parameters are a dictionary: `embedding` [vocabulary, hidden], `positions` where they are learned, `head` where it is not
tied, `last_norm`, and `layers`, a dictionary of arrays whose first dimension is the layer. Matrices lie as Hugging Face
stores them, so a checkpoint is a matter of names (`jax_weights.py`).

Weights stay in their own type until they are used: products are made in the type `compute`, norms and softmax in at least
float32. With weights of the type `compute` that is what transformers computes with a model of that type.

No engine uses this yet: `training.backend: jax` is still refused.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tunix_rt.backends.jax_architecture import Architecture
from tunix_rt.backends.jax_head import head_loss
from tunix_rt.data.pack import IGNORED, MicroBatch

Array = Any
Params = Mapping[str, Any]
Remat = Literal["none", "products", "layers"]
"""What a layer keeps for the backward pass: everything; the results of products with weights; its input alone."""


class Batch(NamedTuple):
    """A micro-batch as compiled code takes it, each [rows, tokens]."""

    ids: Array
    positions: Array
    segments: Array
    """Which example of its row a token belongs to. Nobody looks across."""
    targets: Array
    """What the state at a token is to predict: the token after it."""
    weights: Array
    """1 where it is a target, 0 where not."""


def batch_of(micro: MicroBatch) -> Batch:
    """`micro` in numpy, laid out as the models take it. Padding belongs to the example before it, which cannot see it."""
    after = np.pad(micro.labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
    return Batch(
        ids=micro.ids.astype(np.int32),
        positions=micro.positions.astype(np.int32),
        segments=np.cumsum(micro.positions == 0, axis=1, dtype=np.int32),
        targets=np.where(after == IGNORED, 0, after).astype(np.int32),
        weights=(after != IGNORED).astype(np.float32),
    )


def summed_loss(
    params: Params,
    batch: Batch,
    architecture: Architecture,
    *,
    compute: Any,
    remat: Remat = "none",
    chunk: int | None = None,
    attention: "Attention | None" = None,
) -> Array:
    """Cross entropy summed over the targets, in float32; of float64 in float64."""
    states = forward(
        params, batch.ids, batch.positions, batch.segments, architecture,
        compute=compute, remat=remat, attention=attention,
    )  # fmt: skip
    return head_loss(
        states, head_table(params), batch.targets, batch.weights,
        compute=compute, softcap=architecture.logit_cap, chunk=chunk,
    )  # fmt: skip


def head_table(params: Params) -> Array:
    """The projection to the vocabulary; where it is tied, the table of the input tokens."""
    return params["head"] if "head" in params else params["embedding"]


def forward(
    params: Params,
    ids: Array,
    positions: Array,
    segments: Array,
    architecture: Architecture,
    *,
    compute: Any,
    remat: Remat = "none",
    attention: "Attention | None" = None,
) -> Array:
    """Hidden states [rows, tokens, hidden] of the type `compute`, after the last norm.

    An id or a learned position outside its table gives no number (NaN), where JAX would take the nearest row in silence.
    There is no dropout.
    """
    states = _embedded(params, ids, positions, architecture).astype(compute)
    turns = _turns(positions, architecture, compute)
    attend = attention or exact_attention

    def layer(states: Array, of_layer: tuple[Mapping[str, Array], Array]) -> tuple[Array, None]:
        weights, kind = of_layer

        def mix(query: Array, key: Array, value: Array) -> Array:
            if turns is not None:
                query, key = (_turned(heads, *(part[kind] for part in turns)) for heads in (query, key))
            return attend(query, key, value, segments=segments, kind=kind, architecture=architecture)

        return _layer(states, weights, architecture, mix), None

    body = layer if remat == "none" else jax.checkpoint(layer, policy=_policy(remat), prevent_cse=False)
    states, _ = jax.lax.scan(body, states, (params["layers"], jnp.asarray(architecture.pattern, jnp.int32)))
    return _norm(states, params, "last_norm", architecture)


def _policy(remat: Remat) -> Callable[..., bool]:
    policies = jax.checkpoint_policies
    return policies.dots_with_no_batch_dims_saveable if remat == "products" else policies.nothing_saveable


def _embedded(params: Params, ids: Array, positions: Array, architecture: Architecture) -> Array:
    """Rows of the tables, in their type. The scale is rounded to it first, as in transformers."""
    take = partial(jnp.take, axis=0, mode="fill", fill_value=jnp.nan)
    found = take(params["embedding"], ids)
    if architecture.padding_id is not None:
        is_padding = (ids == architecture.padding_id)[..., None]
        found = jnp.where(is_padding, jax.lax.stop_gradient(found), found)
    if architecture.embedding_scale != 1.0:
        found = found * jnp.asarray(architecture.embedding_scale, found.dtype)
    return found + take(params["positions"], positions) if "positions" in params else found


# --- one layer -------------------------------------------------------------------------------------------------------


def _layer(states: Array, weights: Mapping[str, Array], architecture: Architecture, mix: Callable[..., Array]) -> Array:
    """`mix` is what happens between tokens, told the heads of queries, keys and values."""
    normed = _norm(states, weights, "attention_norm", architecture)
    mixed = mix(*_heads(normed, weights, architecture))
    found = _product(mixed.reshape(*states.shape[:2], -1), weights, "output", architecture)
    if architecture.post_norms:
        found = _norm(found, weights, "after_attention_norm", architecture)
    states = states + found
    found = _mlp(_norm(states, weights, "mlp_norm", architecture), weights, architecture)
    if architecture.post_norms:
        found = _norm(found, weights, "after_mlp_norm", architecture)
    return states + found


def _heads(states: Array, weights: Mapping[str, Array], architecture: Architecture) -> tuple[Array, Array, Array]:
    """Queries [rows, tokens, heads, head size]; keys and values, of which several heads may share one."""
    shape = architecture.shape
    if architecture.input_first:
        parts = jnp.split(_product(states, weights, "query_key_value", architecture), 3, axis=-1)
    else:
        parts = [_product(states, weights, name, architecture) for name in ("query", "key", "value")]
    query, key, value = (part.reshape(*states.shape[:2], -1, shape.head_dim) for part in parts)
    if shape.head_norms:
        query = _norm(query, weights, "query_norm", architecture)
        key = _norm(key, weights, "key_norm", architecture)
    return query, key, value


def _mlp(states: Array, weights: Mapping[str, Array], architecture: Architecture) -> Array:
    up = _product(states, weights, "up", architecture)
    if not architecture.shape.gated_mlp:
        return _product(_activated(up, architecture), weights, "down", architecture)
    gate = _product(states, weights, "gate", architecture)
    return _product(_activated(gate, architecture) * up, weights, "down", architecture)


def _activated(values: Array, architecture: Architecture) -> Array:
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if architecture.activation == "silu":
        return jax.nn.silu(wide).astype(values.dtype)
    return jax.nn.gelu(wide, approximate=architecture.activation == "gelu_tanh").astype(values.dtype)


def _product(states: Array, weights: Mapping[str, Array], name: str, architecture: Architecture) -> Array:
    """In the type of the states, to which weights are cast here: a cast of one layer lives as long as the layer."""
    spelled = "bti,io->bto" if architecture.input_first else "bti,oi->bto"
    found = jnp.einsum(spelled, states, weights[name].astype(states.dtype))
    bias = weights.get(f"{name}_bias")
    return found if bias is None else found + bias.astype(states.dtype)


def _norm(states: Array, weights: Mapping[str, Array], name: str, architecture: Architecture) -> Array:
    wide = states.astype(jnp.promote_types(states.dtype, jnp.float32))
    weight = weights[name].astype(wide.dtype)
    if architecture.norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + architecture.epsilon)
    if architecture.norm == "rms":  # Llama rounds before it multiplies, the others after
        return (normed.astype(states.dtype) * weight).astype(states.dtype)
    if architecture.norm == "rms_plus_one":
        return (normed * (1 + weight)).astype(states.dtype)
    return (normed * weight + weights[f"{name}_bias"].astype(wide.dtype)).astype(states.dtype)


# --- between tokens --------------------------------------------------------------------------------------------------


class Attention(Protocol):
    """Softmax of scores over the tokens that each may see, times their values: [rows, tokens, heads, head size].

    `kind`, a traced number, says which of the architecture's kinds the layer is. Code that needs its window when it is
    compiled takes one of several by `jax.lax.switch(kind, ...)`."""

    def __call__(
        self, query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
    ) -> Array: ...


def exact_attention(
    query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
) -> Array:
    """By a mask of tokens x tokens, on any platform. Distances are counted along the row: positions restart in it."""
    rows, tokens, heads, size = query.shape
    shared = query.reshape(rows, tokens, key.shape[2], -1, size)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgd,bskd->bkgts", shared, key, preferred_element_type=wide) * architecture.query_scale
    if architecture.score_cap is not None:
        scores = jnp.tanh(scores / architecture.score_cap) * architecture.score_cap
    windows = jnp.asarray([tokens if one.window is None else one.window for one in architecture.kinds], jnp.int32)
    places = jnp.arange(tokens)
    distance = places[:, None] - places[None, :]
    seen = (distance >= 0) & (distance < windows[kind]) & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(wide).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", shares, value).reshape(rows, tokens, heads, size)


def _turns(positions: Array, architecture: Architecture, compute: Any) -> tuple[Array, Array] | None:
    """Cosine and sine of every angle, [kinds, rows, tokens, 1, half a head]; None where positions are learned."""
    frequencies = np.asarray([kind.frequencies for kind in architecture.kinds])
    if frequencies.size == 0:
        return None
    wide = jnp.promote_types(compute, jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)[:, None, None, :]
    return jnp.cos(angles)[..., None, :].astype(compute), jnp.sin(angles)[..., None, :].astype(compute)


def _turned(heads: Array, cosine: Array, sine: Array) -> Array:
    """The first half of a head with the second: pairs are not neighbours, as Hugging Face stores these models."""
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

"""The models of the JAX engine: pure functions over a tree of arrays, in one scan over the layers.

Parameters are a dictionary: `embedding` [vocabulary, hidden], `positions` where they are learned, `head` where it is not
tied, `last_norm`, and `layers`, a dictionary of arrays whose first dimension is the layer. Matrices have the layout of Hugging
Face, so a checkpoint is a matter of names (`weights.py`).

Weights keep their dtype until they are used: matmuls are in the dtype `compute`, norms and softmax in at least float32. With
weights of dtype `compute` that is what transformers computes with a model of that dtype.

Training (`forward`) and generation (`generate.py`) run `through_layers`; they differ in their attention.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tunix_rt.data.packing import IGNORED, MicroBatch
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.chunked_loss import head_loss, looked_up

Array = Any
Params = Mapping[str, Any]
Remat = Literal["none", "products", "layers"]
"""What a layer saves for the backward pass: everything; the results of matmuls with weights; its input alone."""


LookUp = Callable[..., Array]
"""As `chunked_loss.looked_up`."""


class Batch(NamedTuple):
    """A micro-batch as a compiled step takes it, each [rows, tokens]."""

    ids: Array
    positions: Array
    segments: Array
    """The example of the row that a token belongs to; attention does not cross examples."""
    targets: Array
    """The next token, which the hidden state predicts."""
    weights: Array
    """1 for a target, 0 otherwise."""


def batch_of(micro: MicroBatch) -> Batch:
    """`micro` as the models take it, in numpy. Padding belongs to the example before it, which cannot attend to it."""
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
    chunk: int | None = None,
    body: Callable[..., Array] | None = None,
    **options: Any,
) -> Array:
    """Cross entropy summed over the targets, in float32; of float64 in float64. `body` computes the hidden states (`forward`
    by default), `options` are its own."""
    states = (body or forward)(
        params, batch.ids, batch.positions, batch.segments, architecture, compute=compute, **options
    )
    return head_loss(
        states, lm_head_weight(params), batch.targets, batch.weights,
        compute=compute, softcap=architecture.logit_cap, chunk=chunk,
    )  # fmt: skip


def lm_head_weight(params: Params) -> Array:
    """The lm_head weight; where it is tied, the embedding."""
    return params["head"] if "head" in params else params["embedding"]


def forward(
    params: Params,
    ids: Array,
    positions: Array,
    segments: Array,
    architecture: Architecture,
    *,
    attention: "Attention | None" = None,
    **options: Any,
) -> Array:
    """Hidden states [rows, tokens, hidden], after the last norm. `options` are those of `through_layers`.

    An id or a learned position outside its embedding gives NaN, where JAX would silently clamp it. There is no dropout."""
    attend = attention or exact_attention

    def mix(query: Array, key: Array, value: Array, kind: Array, memory: None) -> tuple[Array, None]:
        return attend(query, key, value, segments=segments, kind=kind, architecture=architecture), memory

    return through_layers(params, ids, positions, architecture, mix, None, **options)[0]


def through_layers(
    params: Params,
    ids: Array,
    positions: Array,
    architecture: Architecture,
    mix: Callable[[Array, Array, Array, Array, Any], tuple[Array, Any]],
    memory: Any,
    *,
    compute: Any,
    remat: Remat = "none",
    look_up: LookUp = looked_up,
    pieces: int = 1,
    lean: bool = True,
) -> tuple[Array, Any]:
    """Hidden states of dtype `compute` after the last norm, as of `forward`, and the `memory` that the layers pass on.

    `pieces`: the number of chunks of tokens in the MLP, whose activations are the widest. `lean`: with a 16-bit compute dtype
    and no checkpointing, float32 values between matmuls are recomputed nevertheless.
    `mix(query, key, value, kind, memory)` is the attention of a layer of kind `kind`, a traced number: it takes heads after RoPE,
    and returns the attention output and the memory for the next layer.
    """
    states = _embedded(params, ids, positions, architecture, compute, look_up)
    rope = _rope(positions, architecture, compute)

    def layer(
        carried: tuple[Array, Any], of_layer: tuple[Mapping[str, Array], Array]
    ) -> tuple[tuple[Array, Any], None]:
        (states, memory), (weights, kind) = carried, of_layer

        def rotate_and_mix(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
            if rope is not None:
                query, key = (_rotated(heads, *(part[kind] for part in rope)) for heads in (query, key))
            return mix(query, key, value, kind, memory)

        return _layer(states, weights, architecture, rotate_and_mix, pieces), None

    policy = _policy(remat, compute, lean=lean)
    body = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=False)
    of_layers = (params["layers"], jnp.asarray(architecture.pattern, jnp.int32))
    (states, memory), _ = jax.lax.scan(body, (states, memory), of_layers)
    return _norm(states, params, "last_norm", architecture), memory


def _policy(remat: Remat, compute: Any, *, lean: bool) -> Callable[..., bool] | None:
    """What a layer saves; None: everything."""
    if remat == "none":
        return _saves_16_bit if lean and jnp.dtype(compute).itemsize == 2 else None
    return _saves_matmuls if remat == "products" else jax.checkpoint_policies.nothing_saveable


def _saves_16_bit(primitive: Any, *given: Any, **parameters: Any) -> bool:
    """Everything but the float32 values inside norms and activations, which are recomputed from their 16-bit input: two thirds
    of all activations of Gemma 2B. By dimensions: cast weights have two, attention scores five."""
    if _saves_matmuls(primitive, *given, **parameters):
        return True
    if not all(one.ndim in (3, 4) for one in given):
        return False
    if primitive.name == "convert_element_type":
        return bool(jnp.dtype(parameters["new_dtype"]).itemsize <= 2)
    return all(one.dtype.itemsize <= 2 for one in given)


def _saves_matmuls(primitive: Any, *given: Any, **parameters: Any) -> bool:
    """Matmuls with weights, and the output of cuDNN attention: small beside its scores, and a tenth of the time."""
    is_matmul = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *given, **parameters)
    return bool(is_matmul) or primitive.name == "dot_product_attention_fwd_wrapper"


def _embedded(
    params: Params, ids: Array, positions: Array, architecture: Architecture, compute: Any, look_up: LookUp
) -> Array:
    """Embeddings in their dtype, then rounded. The scale is rounded to that dtype first, as in transformers."""
    embedding, learned = params["embedding"], params.get("positions")
    dtype = compute if learned is None else embedding.dtype
    output = look_up(embedding, ids, scale=architecture.embedding_scale, dtype=dtype)
    if architecture.padding_id is not None:
        is_padding = (ids == architecture.padding_id)[..., None]
        output = jnp.where(is_padding, jax.lax.stop_gradient(output), output)
    return output if learned is None else (output + looked_up(learned, positions, dtype=dtype)).astype(compute)


# --- one layer -------------------------------------------------------------------------------------------------------


def _layer(
    states: Array,
    weights: Mapping[str, Array],
    architecture: Architecture,
    mix: Callable[[Array, Array, Array], tuple[Array, Any]],
    pieces: int,
) -> tuple[Array, Any]:
    """`mix` is the attention over heads of queries, keys and values; its memory is returned too."""
    normed = _norm(states, weights, "attention_norm", architecture)
    mixed, memory = mix(*_heads(normed, weights, architecture))
    output = _linear(mixed.reshape(*states.shape[:2], -1), weights, "output", architecture)
    if architecture.post_norms:
        output = _norm(output, weights, "after_attention_norm", architecture)
    states = states + output
    output = _chunked_mlp(_norm(states, weights, "mlp_norm", architecture), weights, architecture, pieces)
    if architecture.post_norms:
        output = _norm(output, weights, "after_mlp_norm", architecture)
    return states + output, memory


def _heads(states: Array, weights: Mapping[str, Array], architecture: Architecture) -> tuple[Array, Array, Array]:
    """Queries [rows, tokens, heads, head dim]; keys and values have KV heads."""
    shape = architecture.shape
    if architecture.input_first:
        parts = jnp.split(_linear(states, weights, "query_key_value", architecture), 3, axis=-1)
    else:
        parts = [_linear(states, weights, name, architecture) for name in ("query", "key", "value")]
    query, key, value = (part.reshape(*states.shape[:2], -1, shape.head_dim) for part in parts)
    if shape.head_norms:
        query = _norm(query, weights, "query_norm", architecture)
        key = _norm(key, weights, "key_norm", architecture)
    return query, key, value


def _chunked_mlp(states: Array, weights: Mapping[str, Array], architecture: Architecture, pieces: int) -> Array:
    """Chunks of tokens of every row, so that few of the wide activations exist at once, in either pass."""
    rows, tokens, hidden = states.shape
    if pieces == 1:
        return _mlp(states, weights, architecture)
    # All-gathered once for all chunks. Gradients of the chunks accumulate in the dtype of the shared arrays: at least float32.
    shared = {name: weights[name] for name in weights if name.removesuffix("_bias") in ("gate", "up", "down")}
    shared = {name: array.astype(jnp.promote_types(array.dtype, jnp.float32)) for name, array in shared.items()}

    @partial(jax.checkpoint, prevent_cse=False)
    def one(_: None, some: Array) -> tuple[None, Array]:
        return None, _mlp(some, shared, architecture)

    apart = jnp.moveaxis(states.reshape(rows, pieces, tokens // pieces, hidden), 1, 0)
    return jnp.moveaxis(jax.lax.scan(one, None, apart)[1], 0, 1).reshape(rows, tokens, hidden)


def _mlp(states: Array, weights: Mapping[str, Array], architecture: Architecture) -> Array:
    up = _linear(states, weights, "up", architecture)
    if not architecture.shape.gated_mlp:
        return _linear(_activated(up, architecture), weights, "down", architecture)
    gate = _linear(states, weights, "gate", architecture)
    return _linear(_activated(gate, architecture) * up, weights, "down", architecture)


def _activated(values: Array, architecture: Architecture) -> Array:
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if architecture.activation == "silu":
        return jax.nn.silu(wide).astype(values.dtype)
    return jax.nn.gelu(wide, approximate=architecture.activation == "gelu_tanh").astype(values.dtype)


def _linear(states: Array, weights: Mapping[str, Array], name: str, architecture: Architecture) -> Array:
    """In the dtype of `states`, to which weights are cast here: the cast of a layer lives as long as the layer."""
    equation = "bti,io->bto" if architecture.input_first else "bti,oi->bto"
    output = jnp.einsum(equation, states, weights[name].astype(states.dtype))
    bias = weights.get(f"{name}_bias")
    return output if bias is None else output + bias.astype(states.dtype)


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


# --- attention -------------------------------------------------------------------------------------------------------


class Attention(Protocol):
    """Attention of packed rows: [rows, tokens, heads, head dim].

    `kind`, a traced number, is the index of the layer's kind in the architecture. A kernel that needs the window at compile time
    switches with `jax.lax.switch(kind, ...)`."""

    def __call__(
        self, query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
    ) -> Array: ...


def exact_attention(
    query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
) -> Array:
    """With a mask of tokens x tokens, on any platform. Windows are counted along the row, where positions restart."""
    places = jnp.arange(query.shape[1], dtype=jnp.int32)
    seen = within_window(places, places, kind, architecture) & (segments[:, :, None] == segments[:, None, :])
    return masked_attention(query, key, value, seen, architecture)


def within_window(queries: Array, keys: Array, kind: Array, architecture: Architecture) -> Array:
    """[queries, keys]: whether a layer of this kind lets the token at one index of a row attend to that at another."""
    far = np.iinfo(np.int32).max
    windows = jnp.asarray([far if one.window is None else one.window for one in architecture.kinds], jnp.int32)
    distance = queries[:, None] - keys[None, :]
    return (distance >= 0) & (distance < windows[kind])


def masked_attention(query: Array, key: Array, value: Array, seen: Array, architecture: Architecture) -> Array:
    """Attention with the mask `seen` [rows, queries, keys]; the output of a query that sees no key is undefined, but finite."""
    rows, tokens, heads, size = query.shape
    shared = query.reshape(rows, tokens, key.shape[2], -1, size)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgd,bskd->bkgts", shared, key, preferred_element_type=wide) * architecture.query_scale
    if architecture.score_cap is not None:
        scores = jnp.tanh(scores / architecture.score_cap) * architecture.score_cap
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(wide).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", probabilities, value).reshape(rows, tokens, heads, size)


def _rope(positions: Array, architecture: Architecture, compute: Any) -> tuple[Array, Array] | None:
    """Cosine and sine, [kinds, rows, tokens, 1, half the head dim]; None where positions are learned."""
    frequencies = np.asarray([kind.frequencies for kind in architecture.kinds])
    if frequencies.size == 0:
        return None
    wide = jnp.promote_types(compute, jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)[:, None, None, :]
    return jnp.cos(angles)[..., None, :].astype(compute), jnp.sin(angles)[..., None, :].astype(compute)


def _rotated(heads: Array, cosine: Array, sine: Array) -> Array:
    """Rotates the first half of a head with the second, which is the layout of Hugging Face."""
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

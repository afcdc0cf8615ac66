"""The attention functions of the JAX engine. `plan/attention_kernels.py` decides which of them serves a run.

- `exact`: a mask of tokens x tokens, on any device.
- `cudnn`: cuDNN flash attention over packed examples, given by offset and length.
- `splash`: flash attention for TPUs with segment ids. Fully masked blocks are skipped.

A window is part of the compiled code, so a model with several kinds of layers compiles one function for each.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.mesh import ROWS
from tunix_rt.engines.jax.model import Attention, exact_attention
from tunix_rt.plan.attention_kernels import CUDNN_TOKENS_PER_EXAMPLE, TPU_LANES, jax_attention

Array = Any

SPLASH_BLOCK = 512


def choose_attention(
    platform: str, architecture: Architecture, compute: str, tokens: int
) -> tuple[str, Attention, str]:
    """Name, function and reason: the fastest for rows of `tokens` on `platform` (`cpu`, `gpu`, also `cuda`, or `tpu`).

    The function runs on one device; `attention_named` makes one for several."""
    capability = _capability() if platform in ("gpu", "cuda") else None
    shape = architecture.shape
    name, why = jax_attention(shape, platform=platform, compute=compute, tokens=tokens, capability=capability)
    return name, attention_named(name), why


def _capability() -> tuple[int, int] | None:
    """The lowest CUDA compute capability of the visible GPUs; None without a GPU."""
    try:
        gpus = jax.devices("gpu")
    except RuntimeError:
        return None
    major, minor = min(tuple(map(int, str(gpu.compute_capability).split("."))) for gpu in gpus)
    return major, minor


@cache
def attention_named(name: str, mesh: Mesh | None = None) -> Attention:
    """The function of this name, for rows sharded over the devices of `mesh`. Cached, because jit compiles per function."""
    if name == "exact":
        return exact_attention
    kernel: Attention = {"cudnn": _cudnn, "splash": _splash}[name]
    return kernel if mesh is None or mesh.size == 1 else _by_rows(kernel, mesh)


def _by_rows(kernel: Attention, mesh: Mesh) -> Attention:
    """Each device computes its own rows: XLA cannot partition a kernel, and would gather all rows."""

    def attention(
        query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
    ) -> Array:
        def local(query: Array, key: Array, value: Array, segments: Array, kind: Array) -> Array:
            return kernel(query, key, value, segments=segments, kind=kind, architecture=architecture)

        rows = PartitionSpec(ROWS)
        specs = (rows, rows, rows, rows, PartitionSpec())
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return sharded(query, key, value, segments, kind)

    return attention


def _by_kind(one: Callable[..., Array], architecture: Architecture, kind: Array, tokens: int, *inputs: Array) -> Array:
    """`one(window, *inputs)` for the window of the layer. A window as long as the row is dropped."""
    windows = [None if of.window is None or of.window >= tokens else of.window for of in architecture.kinds]
    distinct = list(dict.fromkeys(windows))
    if len(distinct) == 1:
        return one(distinct[0], *inputs)
    which = jnp.asarray([distinct.index(window) for window in windows], jnp.int32)[kind]
    return jax.lax.switch(which, [partial(one, window) for window in distinct], *inputs)


# --- GPUs ------------------------------------------------------------------------------------------------------------


def _cudnn(
    query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
) -> Array:
    tokens, heads = query.shape[1:3]
    most = max(2, tokens // CUDNN_TOKENS_PER_EXAMPLE)
    starts, lengths, counts = packed_examples(segments, most)
    # JAX computes the offsets of keys from the number of query heads, so both must have as many.
    repeated = [jnp.repeat(array, heads // array.shape[2], axis=2) for array in (key, value)]

    def packed(window: int | None, query: Array, key: Array, value: Array) -> Array:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn  # the public function takes no offsets

        return cudnn.dot_product_attention(
            query, key, value, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
            scale=architecture.query_scale, mask_type=cudnn.MaskType.PADDING_CAUSAL, sliding_window_length=window,
        )  # fmt: skip

    def row_by_row(query: Array, key: Array, value: Array) -> Array:
        def one(of_row: tuple[Array, ...]) -> Array:
            *parts, examples = (array[None] for array in of_row)
            return exact_attention(*parts, segments=examples, kind=kind, architecture=architecture)[0]

        return jax.lax.map(jax.checkpoint(one), (query, key, value, segments))

    def fast(query: Array, key: Array, value: Array) -> Array:
        return _by_kind(packed, architecture, kind, tokens, query, key, value)

    return jax.lax.cond(jnp.max(counts) <= most, fast, row_by_row, query, *repeated)


def packed_examples(segments: Array, most: int) -> tuple[Array, Array, Array]:
    """For each row of `segments`: offsets of its first `most` examples [rows, most + 1] and their lengths [rows, most], both -1
    where there are fewer, and the number of all its examples [rows]."""
    rows, tokens = segments.shape
    is_first = jnp.concatenate([jnp.ones((rows, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    starts = jax.vmap(lambda of_row: jnp.nonzero(of_row, size=most + 1, fill_value=tokens)[0])(is_first)
    starts = starts.astype(jnp.int32)
    lengths = starts[:, 1:] - starts[:, :-1]
    return (
        jnp.where(starts < tokens, starts, -1),
        jnp.where(lengths > 0, lengths, -1),
        jnp.sum(is_first, axis=1, dtype=jnp.int32),
    )


# --- TPUs ------------------------------------------------------------------------------------------------------------


def _splash(
    query: Array,
    key: Array,
    value: Array,
    *,
    segments: Array,
    kind: Array,
    architecture: Architecture,
    interpret: bool = False,
) -> Array:
    """`interpret`: run the kernel in plain JAX, on any device and slowly."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    tokens, heads = query.shape[1:3]
    block = next(size for size in (SPLASH_BLOCK, 256, TPU_LANES) if tokens % size == 0)
    blocks = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip

    def one(window: int | None, query: Array, key: Array, value: Array, segments: Array) -> Array:
        shape = (tokens, tokens)
        mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads), block_sizes=blocks, head_shards=1, q_seq_shards=1,
            attn_logits_soft_cap=architecture.score_cap, interpret=interpret,
        )  # fmt: skip
        return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=splash.SegmentIds(q=ids, kv=ids)))(
            query, key, value, segments
        )

    wide = jnp.promote_types(query.dtype, jnp.float32)
    scaled = (query.astype(wide) * architecture.query_scale).astype(query.dtype)
    by_head = [jnp.swapaxes(array, 1, 2) for array in (scaled, key, value)]
    return jnp.swapaxes(_by_kind(one, architecture, kind, tokens, *by_head, segments), 1, 2)

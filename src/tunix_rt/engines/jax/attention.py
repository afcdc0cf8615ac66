"""Which code computes attention in the JAX engine: a kernel where one is exact at the boundaries between packed examples.

- `exact`: a mask of tokens x tokens, anywhere.
- `cudnn`: flash attention of cuDNN over packed examples, each told by its place and length.
- `splash`: flash attention for TPUs, told which example a token belongs to. Blocks that nobody sees are left out.

A window is part of the code that is compiled, so a model with several kinds of layers has one code for each.
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

Array = Any

LANES = 128
"""Of a TPU: what the size of a head and of a block are a multiple of."""
SPLASH_BLOCK = 512
CUDNN_TOKENS_PER_EXAMPLE = 32
"""cuDNN keeps a statistic for every example that a row may have. A row may have one for so many of its tokens; a batch in
which a row has more is computed exactly, row by row."""


def choose_attention(
    platform: str, architecture: Architecture, compute: str, tokens: int
) -> tuple[str, Attention, str]:
    """Name, function and why: the fastest for rows of `tokens` on `platform` (`cpu`, `gpu`, also `cuda`, or `tpu`).

    The function is that for one device; `attention_named` makes one for several."""
    name, why = _chosen(platform, architecture, compute, tokens)
    return name, attention_named(name), why


def _chosen(platform: str, architecture: Architecture, compute: str, tokens: int) -> tuple[str, str]:
    size = architecture.shape.head_dim
    if platform in ("gpu", "cuda"):
        against = _against_cudnn(architecture, compute)
        return ("exact", f"masks: {against}") if against else ("cudnn", "cuDNN's flash attention over packed examples")
    if platform == "tpu":
        if tokens % LANES or size % LANES:
            return "exact", f"masks: a TPU's kernel takes multiples of {LANES}, not {tokens} tokens and heads of {size}"
        if compute == "float64":
            return "exact", "masks: a TPU's kernel has no float64"
        return "splash", "splash attention with the examples of a row"
    return "exact", "masks of tokens x tokens"


def _against_cudnn(architecture: Architecture, compute: str) -> str:
    """Why cuDNN's kernel cannot be taken; empty where it can."""
    size = architecture.shape.head_dim
    if compute not in ("bfloat16", "float16"):
        return f"cuDNN's kernel has no {compute}"
    if architecture.score_cap is not None:
        return "cuDNN's kernel has no soft cap of scores"
    if size % 8 or size > 256:
        return f"cuDNN's kernel takes heads of a multiple of 8 up to 256, not of {size}"
    found = _capability()
    return "" if found >= (9, 0) else f"packed examples need compute capability 9.0, not {found[0]}.{found[1]}"


def _capability() -> tuple[int, int]:
    """The least compute capability of the GPUs here; 0.0 where there are none."""
    try:
        gpus = jax.devices("gpu")
    except RuntimeError:
        return (0, 0)
    major, minor = min(tuple(map(int, str(gpu.compute_capability).split("."))) for gpu in gpus)
    return major, minor


@cache
def attention_named(name: str, mesh: Mesh | None = None) -> Attention:
    """The function with `name`, for rows that are split over the devices of `mesh`. The same one every time: code is compiled
    for it."""
    if name == "exact":
        return exact_attention
    kernel: Attention = {"cudnn": _cudnn, "splash": _splash}[name]
    return kernel if mesh is None or mesh.size == 1 else _by_rows(kernel, mesh)


def _by_rows(kernel: Attention, mesh: Mesh) -> Attention:
    """Each device computes its rows: a compiler cannot look into a kernel, and would gather them all."""

    def attention(
        query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
    ) -> Array:
        def own(query: Array, key: Array, value: Array, segments: Array, kind: Array) -> Array:
            return kernel(query, key, value, segments=segments, kind=kind, architecture=architecture)

        rows = PartitionSpec(ROWS)
        given = (rows, rows, rows, rows, PartitionSpec())
        spread = jax.shard_map(own, mesh=mesh, in_specs=given, out_specs=rows, check_vma=False)
        return spread(query, key, value, segments, kind)

    return attention


def _by_kind(one: Callable[..., Array], architecture: Architecture, kind: Array, tokens: int, *given: Array) -> Array:
    """`one(window, *given)` for the window of the layer. One that is as long as the row is none."""
    windows = [None if of.window is None or of.window >= tokens else of.window for of in architecture.kinds]
    distinct = list(dict.fromkeys(windows))
    if len(distinct) == 1:
        return one(distinct[0], *given)
    which = jnp.asarray([distinct.index(window) for window in windows], jnp.int32)[kind]
    return jax.lax.switch(which, [partial(one, window) for window in distinct], *given)


# --- GPUs ------------------------------------------------------------------------------------------------------------


def _cudnn(
    query: Array, key: Array, value: Array, *, segments: Array, kind: Array, architecture: Architecture
) -> Array:
    tokens, heads = query.shape[1:3]
    most = max(2, tokens // CUDNN_TOKENS_PER_EXAMPLE)
    starts, lengths, counts = packed_examples(segments, most)
    # Offsets into keys are counted by cuDNN's caller in heads of queries, so there must be as many.
    shared = [jnp.repeat(array, heads // array.shape[2], axis=2) for array in (key, value)]

    def packed(window: int | None, query: Array, key: Array, value: Array) -> Array:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn  # the public function takes no offsets

        return cudnn.dot_product_attention(
            query, key, value, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
            scale=architecture.query_scale, mask_type=cudnn.MaskType.PADDING_CAUSAL, sliding_window_length=window,
        )  # fmt: skip

    def row_by_row(query: Array, key: Array, value: Array) -> Array:
        def one(of_row: tuple[Array, ...]) -> Array:
            *heads, examples = (array[None] for array in of_row)
            return exact_attention(*heads, segments=examples, kind=kind, architecture=architecture)[0]

        return jax.lax.map(jax.checkpoint(one), (query, key, value, segments))

    def fast(query: Array, key: Array, value: Array) -> Array:
        return _by_kind(packed, architecture, kind, tokens, query, key, value)

    return jax.lax.cond(jnp.max(counts) <= most, fast, row_by_row, query, *shared)


def packed_examples(segments: Array, most: int) -> tuple[Array, Array, Array]:
    """For each row of `segments`: where its first `most` examples start [rows, most + 1], how long they are [rows, most],
    both -1 for what is not there, and how many it has in all [rows]."""
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
    """`interpret`: the kernel step by step in plain JAX, which runs anywhere and is slow."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    tokens, heads = query.shape[1:3]
    block = next(size for size in (SPLASH_BLOCK, 256, LANES) if tokens % size == 0)
    blocks = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip

    def one(window: int | None, query: Array, key: Array, value: Array, segments: Array) -> Array:
        shape = (tokens, tokens)
        seen = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([seen] * heads), block_sizes=blocks, head_shards=1, q_seq_shards=1,
            attn_logits_soft_cap=architecture.score_cap, interpret=interpret,
        )  # fmt: skip
        return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=splash.SegmentIds(q=ids, kv=ids)))(
            query, key, value, segments
        )

    wide = jnp.promote_types(query.dtype, jnp.float32)
    scaled = (query.astype(wide) * architecture.query_scale).astype(query.dtype)
    by_head = [jnp.swapaxes(array, 1, 2) for array in (scaled, key, value)]
    return jnp.swapaxes(_by_kind(one, architecture, kind, tokens, *by_head, segments), 1, 2)

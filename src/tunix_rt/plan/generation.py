"""Peak memory of generation: the KV cache, the prompts that are prefilled at once, the logits, and on a GPU the CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace

from tunix_rt.plan import footprint
from tunix_rt.plan.activations import Batch, forward_of_one_layer, generation_kernel, saved_once
from tunix_rt.plan.attention_kernels import OLDEST_CAPABILITY
from tunix_rt.plan.phases import in_heap
from tunix_rt.plan.sizes import ModelShape

MIB = 2**20
PREFILL_TOKENS = {"cpu": 4096, "cuda": 16_384}
"""Tokens of prompts that are prefilled at once, padding included; a longer prompt alone."""
EVALUATION_SLACK = 0.25
GRAPH_WORKSPACE_BYTES = 32 * MIB
"""The cuBLAS workspace of the stream on which decode steps are captured."""
MOST_ROWS = {"cpu": 64, "cuda": 512}
"""Larger batches make a CPU no faster, and a GPU hardly."""
USED_SHARE = {"cpu": 0.5, "cuda": 0.85}
"""Fraction of the free memory. A CPU shares it with other programs, a GPU's is fragmented."""


def generation_parts(
    run: footprint.Footprint, batch: Batch, max_new_tokens: int, *, samples: int = 1
) -> dict[str, int]:
    """Prompts of up to a whole row, then `max_new_tokens` more. `samples` rows have the same prompt."""
    modern = batch.capability is None or batch.capability >= OLDEST_CAPABILITY
    by_graphs = batch.device != "cpu" and modern and run.widths.compute <= 4 and run.shape.trace is None
    parts = _by_graphs(run, batch, max_new_tokens, samples) if by_graphs else _by_launches(run, batch, max_new_tokens)
    return parts | run.unpacking


def _columns(shape: ModelShape, batch: Batch, max_new_tokens: int) -> int:
    return min(batch.length + max_new_tokens, max(batch.length, shape.max_positions))


def _by_graphs(run: footprint.Footprint, batch: Batch, max_new_tokens: int, samples: int) -> dict[str, int]:
    """`engines/torch/decode_graph.py`: a preallocated cache with rings, the logits of all rows, and the layers or the logits of
    the prompts that are prefilled at once."""
    shape, columns = run.shape, _columns(run.shape, batch, max_new_tokens)
    cache = 0
    for kind in (kind for kind in shape.stack if not kind.shares_kv):
        slots = (kind.layers - kind.sliding_layers) * columns
        slots += kind.sliding_layers * min(columns, kind.window or columns)
        cache += 2 * batch.rows * slots * kind.kv_size * run.widths.compute
    prompts = -(-batch.rows // samples)
    together = replace(batch, rows=min(prompts, max(1, PREFILL_TOKENS["cuda"] // batch.length)))
    kernel = "capped" if shape.capped_scores else "math" if batch.deterministic else "masked"
    layer = sum(widest(run, together, kernel) + saved_once(shape, run.widths, together, kernel)) + run.largest_cast
    if shape.heads != shape.kv_heads:  # repeated for each query head
        layer += 2 * together.tokens * shape.query_size * run.widths.compute
    logits = together.rows * shape.vocab * 4
    return {
        "casts": run.head_cast,
        "kv_cache": cache,
        "activations": layer if layer >= logits else 0,
        "loss_head": batch.rows * shape.vocab * 4 + (logits if logits > layer else 0),
        "decode_graph": GRAPH_WORKSPACE_BYTES + 3 * 8 * batch.rows * max_new_tokens,
    }


def _by_launches(run: footprint.Footprint, batch: Batch, max_new_tokens: int) -> dict[str, int]:
    """Kernel by kernel. The cache of a traced family grows, and one layer of it is copied to grow."""
    shape, width = run.shape, run.widths.compute
    tokens = batch.rows * _columns(shape, batch, max_new_tokens)
    kernel = generation_kernel(shape, run.widths, batch)
    layer = widest(run, batch, kernel) + saved_once(shape, run.widths, batch, kernel)
    logits = [batch.rows * shape.vocab * max(width, 4)] * 2
    # Keys are rotated in the dtype of the residual stream; only a cache that grows keeps it.
    static = shape.trace is None
    keys = width if shape.learned_positions or static else max(width, run.widths.stream)
    own = [kind for kind in shape.stack if not kind.shares_kv]
    cache = [tokens * kind.kv_size * (width + keys) for kind in own for _ in range(kind.layers)]
    if not static:
        cache.append(max(cache))
    cut = EVALUATION_SLACK * in_heap(layer + logits) if run.device == "cpu" else 0
    repeated = [tokens * shape.query_size * width] * 2  # KV heads repeated for each query head, in one layer
    return {
        "casts": run.casts + run.head_cast,
        "kv_cache": sum(cache) + sum(repeated),
        "activations": sum(layer),
        "loss_head": sum(logits),
        "allocator_slack": int(cut),
    }


def widest(run: footprint.Footprint, batch: Batch, kernel: str | None = None) -> list[int]:
    """The forward pass of the layer that needs most."""
    kinds = enumerate(run.shape.stack)
    each = [forward_of_one_layer(kind, run.widths.of_kind(index), batch, kernel) for index, kind in kinds]
    return max(each, key=sum)


def rows_that_fit(
    shape: ModelShape,
    *,
    dtype: str,
    device: str,
    length: int,
    max_new_tokens: int,
    free_bytes: int,
    capability: tuple[int, int] | None = None,
) -> int:
    """The largest batch of prompts of `length` tokens whose generations fit into `free_bytes` beside the weights, at least 1."""
    run = footprint.footprint_for_inference(shape, dtype, device)

    def needed(rows: int) -> int:
        batch = Batch(rows=rows, length=length, packed=False, device=device, capability=capability)
        return sum(generation_parts(run, batch, max_new_tokens).values())

    return _largest(MOST_ROWS[device], lambda rows: needed(rows) <= USED_SHARE[device] * free_bytes)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to `most` that fits, at least 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

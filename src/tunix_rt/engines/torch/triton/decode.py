"""Kernels of a decode step on CUDA: attention of one new token to a KV cache, the choice of the next token, RMSNorm.

Where a step depends on its number, the kernels read it from device memory: one captured graph computes every step.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.engines.torch.triton.cross_entropy import _capped

PART_COLUMNS = 4096
"""Logits that a program reads."""
CROWDED = 256
"""Programs of the attention that are more than a GPU runs at once."""
LEAST_QUERIES = 16
"""Rows of the smallest matrix that `tl.dot` multiplies."""


def attend_to_cache(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None, *,
    begins: torch.Tensor, state: torch.Tensor, scale: float, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """[rows, heads, 1, size] of the queries of one token in column `state[0]`, whose keys and values `new` are stored first.

    `keys` and `values` are [rows, KV heads, slots, size], rings of their slots: column c is in slot c % slots. A row sees its
    columns from `begins` on."""
    rows, heads, _, size = query.shape
    slots, out = keys.shape[2], torch.empty(rows, 1, heads, size, dtype=values.dtype, device=query.device)
    padded, groups = triton.next_power_of_2(size), heads // keys.shape[1]
    stored = (keys, values) if new is None else new
    # Many programs share a multiprocessor if each holds little; few read faster in larger blocks.
    most = 16_384 if rows * keys.shape[1] >= CROWDED else 32_768
    block = max(16, min(64, most // (padded * keys.element_size())))
    with torch.cuda.device_of(query):
        _attend[(rows, keys.shape[1])](
            query, keys, values, *stored, out, begins, state, slots, scale, softcap or 1.0,
            *query.stride()[:2], *keys.stride()[:3], *stored[0].stride()[:2], *stored[1].stride()[:2],
            STORES=new is not None, GROUPS=groups, QUERIES=max(LEAST_QUERIES, triton.next_power_of_2(groups)),
            SIZE=size, PADDED=padded, BLOCK=block, CAPPED=softcap is not None, num_warps=4, num_stages=3 if most > 16_384 else 2,
        )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit
def _attend(
    query, keys, values, new_keys, new_values, out, begins, state, slots, scale, cap, query_row, query_head, row_stride,
    head_stride, slot_stride, new_key_row, new_key_head, new_value_row, new_value_head,
    STORES: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    column, begin = tl.load(state).to(tl.int32), tl.load(begins + row).to(tl.int32)
    one, dim, each = tl.arange(0, QUERIES), tl.arange(0, PADDED), tl.arange(0, BLOCK)
    inside = dim < SIZE
    cached = row.to(tl.int64) * row_stride + head * head_stride
    if STORES:  # this program alone reads and writes the cache of its row and head
        slot = cached + (column % slots) * slot_stride + dim
        key = tl.load(new_keys + row * new_key_row + head * new_key_head + dim, mask=inside)
        value = tl.load(new_values + row * new_value_row + head * new_value_head + dim, mask=inside)
        tl.store(keys + slot, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + slot, value.to(values.dtype.element_ty), mask=inside)
        tl.debug_barrier()
    heads = head * GROUPS + one
    real = (one[:, None] < GROUPS) & inside[None, :]
    q = tl.load(query + row * query_row + heads[:, None] * query_head + dim[None, :], mask=real, other=0.0)
    q = q.to(keys.dtype.element_ty)
    filled = tl.minimum(column + 1, slots)
    first = tl.where(column < slots, begin, 0) // BLOCK * BLOCK
    top = tl.full((QUERIES,), -1.0e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, PADDED), tl.float32)
    for start in range(first, filled, BLOCK):
        place = start + each
        in_column = column - (column - place + slots) % slots
        seen = (place < filled) & (in_column >= begin)
        offsets = cached + place[:, None] * slot_stride + dim[None, :]
        there = (place < filled)[:, None] & inside[None, :]
        k = tl.load(keys + offsets, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = _capped(scores, cap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(top - higher)
        total = total * shrunk + tl.sum(weights, axis=1)
        v = tl.load(values + offsets, mask=there, other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    place = (row * tl.num_programs(1) * GROUPS + heads[:, None]) * SIZE + dim[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)


def choose_next(
    logits: torch.Tensor, keys: torch.Tensor | None, state: torch.Tensor, *, temperature: float, ids: torch.Tensor,
    tokens: torch.Tensor, scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """Writes the next token of each row into `ids` and into column `state[1]` of `tokens`, where NOT_A_TOKEN stands for NaN
    logits; into `scores` its log-probability and its distance from the runner-up.

    The choice is that of `sampling.choose`: in one pass over the logits with noise in float32, after which the best of each part
    of a row are compared in float64. `keys` are [rows, new tokens]; None: greedy."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART_COLUMNS)
    best = torch.empty(rows, parts, 2, dtype=torch.int32, device=logits.device)
    tops, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    noise = state if keys is None else keys
    stride = 0 if keys is None else keys.stride(0)
    drawn = {"DRAWN": keys is not None, "SCORED": scores is not None}
    with torch.cuda.device_of(logits):
        _best_of_part[(rows, parts)](
            logits, noise, state, best, tops, sums, vocabulary, logits.stride(0), stride, 1.0 / (temperature or 1.0),
            PAIRS=PART_COLUMNS // 2, num_warps=4, **drawn,
        )  # fmt: skip
        _best_of_row[(rows,)](
            logits, noise, state, best, tops, sums, ids, tokens, state if scores is None else scores, logits.stride(0), stride,
            tokens.stride(0), temperature or 1.0, PARTS=parts, PADDED=triton.next_power_of_2(parts), num_warps=2, **drawn,
        )  # fmt: skip


@triton.jit
def _random_pair(key, pair):
    """64 random bits of tokens 2 * pair and 2 * pair + 1: `decoding.random_bits`."""
    mixed = key + (pair + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _log2(x):
    """By the hardware's own instruction; x is no denormal."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gumbel_float32(bits):
    """-log(-log(u)) of u = 1 - (bits + 1/2) / 2**32. -log(u) is a power series of small 1 - u, whose digits u has lost."""
    v = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = v * (1.0 + v * (0.5 + v * (0.3333333 + v * (0.25 + v * 0.2))))
    return -0.6931471805599453 * _log2(tl.where(v < 0.0625, series, -0.6931471805599453 * _log2(1.0 - v)))


@triton.jit
def _best_of_part(
    logits, keys, state, best, tops, sums, vocabulary, stride, keys_stride, inverse_temperature,
    PAIRS: tl.constexpr, DRAWN: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """The best token of a part of a row, with `SCORED` the two best of its even and of its odd tokens."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pairs = part * PAIRS + tl.arange(0, PAIRS)
    start = logits + row.to(tl.int64) * stride
    even = tl.load(start + 2 * pairs, mask=2 * pairs < vocabulary, other=float("-inf")).to(tl.float32)
    odd = tl.load(start + 2 * pairs + 1, mask=2 * pairs + 1 < vocabulary, other=float("-inf")).to(tl.float32)
    by_even, by_odd = even, odd
    if DRAWN:
        key = tl.load(keys + row * keys_stride + tl.load(state + 1)).to(tl.uint64, bitcast=True)
        bits = _random_pair(key, pairs)
        by_even = even * inverse_temperature + _gumbel_float32(bits.to(tl.uint32))
        by_odd = odd * inverse_temperature + _gumbel_float32((bits >> 32).to(tl.uint32))
    place = row * parts + part
    largest = tl.max(tl.maximum(by_even, by_odd))
    at = tl.where(by_even == largest, 2 * pairs, tl.where(by_odd == largest, 2 * pairs + 1, 2147483647))
    first = tl.minimum(tl.min(at), vocabulary - 1)
    tl.store(best + place * 2, first)
    if SCORED:
        by_even = tl.where(2 * pairs == first, float("-inf"), by_even)
        by_odd = tl.where(2 * pairs + 1 == first, float("-inf"), by_odd)
        largest = tl.max(tl.maximum(by_even, by_odd))
        at = tl.where(by_even == largest, 2 * pairs, tl.where(by_odd == largest, 2 * pairs + 1, 2147483647))
        tl.store(best + place * 2 + 1, tl.minimum(tl.min(at), vocabulary - 1))
    top = tl.maximum(tl.max(tl.maximum(even, odd)), -3.0e38)  # finite, so that a part of nothing but -inf has the sum 0
    tl.store(tops + place, top)
    if SCORED:
        total = tl.sum(tl.exp(even - top) + tl.exp(odd - top))
    else:
        total = tl.sum(tl.where((even != even) | (odd != odd), float("nan"), 0.0))
    tl.store(sums + place, total)


@triton.jit
def _best_of_row(
    logits, keys, state, best, tops, sums, ids, tokens, scores, stride, keys_stride, tokens_stride, temperature,
    PARTS: tl.constexpr, PADDED: tl.constexpr, DRAWN: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    number = tl.load(state + 1)
    part = tl.arange(0, PADDED)
    top_of = tl.load(tops + row * PARTS + part, mask=part < PARTS, other=-3.0e38)
    sum_of = tl.load(sums + row * PARTS + part, mask=part < PARTS, other=0.0)
    top = tl.max(top_of)
    total = tl.sum(sum_of * tl.exp(top_of - top)) if SCORED else tl.sum(sum_of)
    candidate = tl.arange(0, 2 * PADDED)
    there = (candidate < 2 * PARTS) if SCORED else (candidate < 2 * PARTS) & (candidate % 2 == 0)
    token = tl.load(best + row * 2 * PARTS + candidate, mask=there, other=0)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=there, other=float("-inf")).to(tl.float64)
    by = x
    if DRAWN:
        key = tl.load(keys + row * keys_stride + number).to(tl.uint64, bitcast=True)
        bits = (_random_pair(key, token >> 1) >> (32 * (token & 1)).to(tl.uint64)).to(tl.uint32)
        uniform = 1.0 - (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        by = (x - top.to(tl.float64)) / temperature - tl.log(-tl.log(uniform))
        by = tl.where(there, by, float("-inf"))
    largest = tl.max(by)
    chosen = tl.min(tl.where(by == largest, token, 2147483647))  # the first of equals
    chosen_or_none = tl.where(total == total, chosen, -1)
    tl.store(ids + row, tl.maximum(chosen_or_none, 0).to(tl.int64))
    tl.store(tokens + row * tokens_stride + number, chosen_or_none.to(tl.int64))
    if SCORED:
        logit = tl.max(tl.where(there & (token == chosen), x, float("-inf")))
        second = tl.max(tl.where(token == chosen, float("-inf"), by))
        place = scores + (row * tokens_stride + number) * 2
        tl.store(place, logit - top.to(tl.float64) - tl.log(total.to(tl.float64)))
        tl.store(place + 1, largest - second)


def rms_norm(x: torch.Tensor, *, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    """`x` normalized over its last dimension; `kind` is the `norm` of the family."""
    size, dtype = x.shape[-1], torch.promote_types(x.dtype, weight.dtype) if kind == "rms" else x.dtype
    flat, out = x.reshape(-1, size), torch.empty(x.shape, dtype=dtype, device=x.device)
    with torch.cuda.device_of(x):
        _rms_norm[(len(flat),)](
            flat, weight, out, flat.stride(0), size, eps, PADDED=triton.next_power_of_2(size), ROUNDS=kind == "rms",
            PLUS_ONE=kind == "rms_plus_one", num_warps=4 if size > 512 else 1,
        )  # fmt: skip
    return out


@triton.jit
def _rms_norm(
    x, weight, out, stride, size, eps, PADDED: tl.constexpr, ROUNDS: tl.constexpr, PLUS_ONE: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    real = column < size
    read = tl.load(x + row * stride + column, mask=real, other=0.0)
    wide = read.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if ROUNDS:  # to the dtype of x before the multiplication
        wide = wide.to(read.dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    wide *= scale + 1.0 if PLUS_ONE else scale
    tl.store(out + row * size + column, wide.to(out.dtype.element_ty), mask=real)

"""Q4_K, Q5_K and Q6_K of GGUF: super-blocks of 256 weights. `gguf` dequantizes them, and has no quantizer for them.

A super-block of Q4_K and Q5_K has 8 blocks of 32 weights, `scale * code - low` with scale and low in 6 bits. One of Q6_K has 16
blocks of 16 weights, `scale * code` with a signed scale in 8 bits. Each block gets the scale with the lowest weighted squared
error among a few: large weights count more.
"""

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SUPER = 256
BLOCKS_AT_ONCE = 512
"""Super-blocks per pass: 128 Ki weights, whose intermediate arrays fit into the cache of a core."""
AFFINE_STEPS = np.linspace(-1.0, 1.0, 9, dtype=np.float32)
"""Codes more or less that the range of a block is spread over: an outlier may be clipped."""
SYMMETRIC_STEPS = np.linspace(-0.9, 0.9, 9, dtype=np.float32)
TINY = np.float32(1e-30)


def quantize(values: Floats, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.generic]:
    """The bytes of `values` as a tensor of `kind`, rows as before; float32 and float16 stay numbers."""
    if kind not in K_QUANTS:
        return gguf.quants.quantize(values, kind)
    rows = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, SUPER)
    parts = [K_QUANTS[kind](rows[at : at + BLOCKS_AT_ONCE]) for at in range(0, len(rows), BLOCKS_AT_ONCE)]
    return np.concatenate(parts).reshape(*values.shape[:-1], -1)


# --- scale and low ---------------------------------------------------------------------------------------------------


def _affine(x: Floats, most: int) -> tuple[Floats, Floats]:
    """Scale and low (positive: it is subtracted) of each block of `x`, whose codes are 0 to `most`."""
    weight = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + np.abs(x)
    low = np.minimum(x.min(axis=-1), 0)
    spread = np.maximum(x.max(axis=-1) - low, TINY)
    scale, shift, best = spread / most, low, np.full(low.shape, np.inf, dtype=np.float32)
    total, sum_x = weight.sum(axis=-1), (weight * x).sum(axis=-1)
    for step in AFFINE_STEPS:
        codes = np.clip(np.rint((x - low[..., None]) * ((most + step) / spread)[..., None]), 0, most)
        weighted = weight * codes
        sum_c, sum_cc, sum_cx = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * x).sum(-1)
        det = np.maximum(total * sum_cc - sum_c * sum_c, TINY)
        tried_scale = (total * sum_cx - sum_c * sum_x) / det
        tried_shift = (sum_cc * sum_x - sum_c * sum_cx) / det
        above = tried_shift > 0  # the format only subtracts
        tried_scale = np.where(above, sum_cx / np.maximum(sum_cc, TINY), tried_scale)
        tried_shift = np.where(above, 0, tried_shift)
        error = (weight * (tried_scale[..., None] * codes + tried_shift[..., None] - x) ** 2).sum(-1)
        better = (error < best) & (tried_scale > 0)
        scale, shift = np.where(better, tried_scale, scale), np.where(better, tried_shift, shift)
        best = np.where(better, error, best)
    return scale.astype(np.float32), -shift.astype(np.float32)


def _symmetric(x: Floats, most: int) -> Floats:
    """Signed scale of each block of `x`, whose codes are -`most` to `most` - 1: the largest weight has the extreme code."""
    weight = x * x
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], axis=-1)[..., 0]
    extreme = np.where(np.abs(largest) < TINY, TINY, largest)
    scale, best = -extreme / most, np.full(extreme.shape, np.inf, dtype=np.float32)
    for step in SYMMETRIC_STEPS:
        codes = np.clip(np.rint(x * (-(most + step) / extreme)[..., None]), -most, most - 1)
        tried = (weight * codes * x).sum(-1) / np.maximum((weight * codes * codes).sum(-1), TINY)
        error = (weight * (tried[..., None] * codes - x) ** 2).sum(-1)
        scale, best = np.where(error < best, tried, scale), np.minimum(error, best)
    return scale.astype(np.float32)


def _in_bits(values: Floats, most: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]:
    """One float16 unit per super-block, and each of `values` as a multiple of it."""
    peak = np.take_along_axis(values, np.abs(values).argmax(-1)[:, None], axis=-1)
    unit = (peak / most).astype(np.float16)
    divisor = np.where(unit == 0, np.float32(np.inf), unit.astype(np.float32))
    return unit, np.clip(np.rint(values / divisor), -128, 127).astype(np.int32)


# --- bytes -----------------------------------------------------------------------------------------------------------


def _q4_k(rows: Floats) -> Bytes:
    head, codes = _affine_super_blocks(rows, most=15)
    return np.concatenate([head, _nibbles(codes)], axis=1)


def _q5_k(rows: Floats) -> Bytes:
    head, codes = _affine_super_blocks(rows, most=31)
    fifth = (codes >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]  # one bit per block
    high = np.bitwise_or.reduce(fifth, axis=1).astype(np.uint8)
    return np.concatenate([head, high, _nibbles((codes & 15).astype(np.uint8))], axis=1)


def _affine_super_blocks(rows: Floats, *, most: int) -> tuple[Bytes, Bytes]:
    """Units with packed scales and lows, 16 bytes for each super-block; and the codes, one in a byte."""
    x = rows.reshape(-1, 8, 32)
    scale, low = _affine(x, most)
    (unit, scales), (low_unit, lows) = _in_bits(scale, 63), _in_bits(low, 63)
    scales, lows = np.clip(scales, 0, 63), np.clip(lows, 0, 63)
    step = unit.astype(np.float32) * scales
    shifted = x + (low_unit.astype(np.float32) * lows)[..., None]
    divisor = np.where(step == 0, np.float32(np.inf), step)[..., None]
    codes = np.clip(np.rint(shifted / divisor), 0, most).astype(np.uint8)
    first, second = (scales[:, :4], lows[:, :4]), (scales[:, 4:], lows[:, 4:])
    packed = np.concatenate(
        [
            first[0] | (second[0] >> 4 << 6),
            first[1] | (second[1] >> 4 << 6),
            (second[0] & 15) | ((second[1] & 15) << 4),
        ],
        axis=1,
    ).astype(np.uint8)
    return np.concatenate([unit.view(np.uint8), low_unit.view(np.uint8), packed], axis=1), codes.reshape(-1, SUPER)


def _nibbles(codes: Bytes) -> Bytes:
    """Two codes in a byte: of each 64, the first 32 in the low half and the others in the high half."""
    pairs = codes.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, SUPER // 2).astype(np.uint8)


def _q6_k(rows: Floats) -> Bytes:
    x = rows.reshape(-1, 16, 16)
    unit, scales = _in_bits(_symmetric(x, 32), -128)
    step = (unit.astype(np.float32) * scales)[..., None]
    codes = np.clip(np.rint(x / np.where(step == 0, np.float32(np.inf), step)), -32, 31) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    lows = np.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], axis=2)
    highs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    parts = [lows.reshape(-1, 128), highs.reshape(-1, 64), scales.astype(np.int8), unit]
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


K_QUANTS: dict[gguf.GGMLQuantizationType, Callable[[Floats], Bytes]] = {
    gguf.GGMLQuantizationType.Q4_K: _q4_k,
    gguf.GGMLQuantizationType.Q5_K: _q5_k,
    gguf.GGMLQuantizationType.Q6_K: _q6_k,
}

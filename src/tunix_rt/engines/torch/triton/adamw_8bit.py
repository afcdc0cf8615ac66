"""AdamW with states of 8 bits in Triton, of one tensor and of many in one launch: bfloat16 and float32 weights.

A block of 256 states shares a scale, its largest magnitude. A program has several blocks in registers from their codes to
their codes, so that nothing of the size of a tensor is made: 10 bytes are moved for a bfloat16 weight, 16 for one of float32.
The rule is that of `triton/adamw.py`, the codes are those of `rounding.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.config.optimizers import BLOCK
from tunix_rt.engines.torch import update_rules as rounding
from tunix_rt.engines.torch.triton.adamw import PLAIN_SUMS, TYPES, TensorGroup, adamw_numbers, moved, place, sent
from tunix_rt.engines.torch.triton.update import GROUP, at_random, noise, on
from tunix_rt.engines.torch.update_rules import StepSettings

BLOCKS = 8
"""Blocks of a program. A warp has one: 32 threads of eight elements, which share a draw."""


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


_CUT = tl.constexpr(rounding.CUT)
_SIGN = tl.constexpr(rounding.SIGNED_LEVELS)
_LOWEST_SIGNED = tl.constexpr(rounding.lowest(rounding.SIGNED_LEVELS))
_LOWEST_UNSIGNED = tl.constexpr(rounding.lowest(rounding.UNSIGNED_LEVELS))
_FOOT, _FLOOR = tl.constexpr(rounding.FOOT), tl.constexpr(rounding.FLOOR)
_TINY, _HEADROOM = tl.constexpr(rounding.TINY), tl.constexpr(rounding.HEADROOM)
_SHARE = tl.constexpr(rounding.SIGNED_SHARE)
# What a level is multiplied with instead of being divided, to the bits of `torch_rounding.tables`. One product is enough
# for levels of four bits; those less the foot have more, and need what float32 left of the factor.
_UNSIGNED = tl.constexpr(_float32(1.0 / rounding.HEADROOM))
_SIGNED = tl.constexpr(_float32(1.0 / rounding.SIGNED_SHARE))
_SIGNED_REST = tl.constexpr(_float32(1.0 / rounding.SIGNED_SHARE - _float32(1.0 / rounding.SIGNED_SHARE)))


# --- codes -----------------------------------------------------------------------------------------------------------


@triton.jit
def _decoded_signed(codes, largest):
    codes = codes.to(tl.int32)
    level = (((codes & (_SIGN - 1)) << _CUT) + _LOWEST_SIGNED).to(tl.float32, bitcast=True) - _FOOT
    size = tl.fma(level, _SIGNED, level * _SIGNED_REST)
    return tl.where(codes >= _SIGN, -size, size) * largest


@triton.jit
def _decoded_unsigned(codes, largest):
    level = ((codes.to(tl.int32) << _CUT) + _LOWEST_UNSIGNED).to(tl.float32, bitcast=True)
    return level * _UNSIGNED * largest


@triton.jit
def _cut(shares, drawn, lowest: tl.constexpr):
    return (shares.to(tl.int32, bitcast=True) + drawn - lowest) >> _CUT


@triton.jit
def _largest(values):
    """Of each block, and never 0. Then what 1 is divided by it, of which shares are made."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), _TINY)
    return largest, tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), largest)


@triton.jit
def _encoded(m, v, over_m, over_v, seed, group, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of both. 20 bits are drawn for each: 16 of its own, and below them the last four of the other, which decide so
    rarely that both are as good as independent."""
    for_m, for_v = noise(seed, group, COUNT, BLOCK, 1), noise(seed, group, COUNT, BLOCK, 2)
    shares = tl.abs(m) * (over_m * _SHARE)[:, None] + _FOOT
    first = _cut(shares, (for_m << 4) | (for_v & 15), _LOWEST_SIGNED) + tl.where(m < 0, _SIGN, 0)
    shares = tl.maximum(v * (over_v * _HEADROOM)[:, None], _FLOOR)
    second = _cut(shares, (for_v << 4) | (for_m & 15), _LOWEST_UNSIGNED)
    return first.to(tl.uint8), second.to(tl.uint8)


# --- the update ------------------------------------------------------------------------------------------------------


@triton.jit
def _read(at, there, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=there, other=0)


@triton.jit
def _part(
    weights, gradient, first, first_largest, second, second_largest, scale, finite, program, elements, seed,
    decay, pace, share1, beta2, share2, correction, epsilon,
    AT_RANDOM: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks of a program. `WHOLE`: none goes beyond the last element, so that nothing splits wide loads."""
    block = program * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = block[:, None] * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[None, :]
    there = block * BLOCK < elements
    inside = at < elements
    g = _read(gradient + at, inside, WHOLE).to(tl.float32)
    w = _read(weights + at, inside, WHOLE).to(tl.float32)
    old_m = _decoded_signed(
        _read(first + at, there[:, None], WHOLE), _read(first_largest + block, there, WHOLE)[:, None]
    )
    old_v = _decoded_unsigned(
        _read(second + at, there[:, None], WHOLE), _read(second_largest + block, there, WHOLE)[:, None]
    )
    if scale is not None:
        g = g * tl.load(scale).to(tl.float32)
    m, v, w = moved(g, old_m, old_v, w, decay, pace, share1, beta2, share2, correction, epsilon)
    if not WHOLE:  # what is kept beyond the end stays, and is rounded again with its block
        m, v = tl.where(inside, m, old_m), tl.where(inside, v, old_v)
    most_m, over_m = _largest(m)
    most_v, over_v = _largest(v)
    codes_m, codes_v = _encoded(m, v, over_m, over_v, seed, group, COUNT, BLOCK)
    if WHOLE:
        there, inside = tl.full((COUNT,), 1, tl.int1), tl.full((COUNT, BLOCK), 1, tl.int1)
    if finite is not None:
        holds = tl.load(finite) != 0
        there, inside = there & holds, inside & holds
    tl.store(first + at, codes_m, mask=there[:, None])
    tl.store(second + at, codes_v, mask=there[:, None])
    tl.store(first_largest + block, most_m, mask=there)
    tl.store(second_largest + block, most_v, mask=there)
    if weights.dtype.element_ty == tl.float32:
        tl.store(weights + at, w, mask=inside)
    elif AT_RANDOM:
        tl.store(weights + at, at_random(w, noise(seed, group, COUNT, BLOCK)), mask=inside)
    else:
        tl.store(weights + at, w.to(tl.bfloat16), mask=inside)


@triton.jit
def _parts(
    weights, gradient, first, first_largest, second, second_largest, scale, finite, program, elements, seed,
    decay, pace, share1, beta2, share2, correction, epsilon,
    AT_RANDOM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (program + 1) * (COUNT * BLOCK) <= elements:
        _part(
            weights, gradient, first, first_largest, second, second_largest, scale, finite, program, elements, seed,
            decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, True, COUNT, BLOCK,
        )  # fmt: skip
    else:
        _part(
            weights, gradient, first, first_largest, second, second_largest, scale, finite, program, elements, seed,
            decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, False, COUNT, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "elements"])
def _one_kernel(
    weights, gradient, first, first_largest, second, second_largest, scale, finite, elements, seed,
    decay, pace, share1, beta2, share2, correction, epsilon,
    AT_RANDOM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _parts(
        weights, gradient, first, first_largest, second, second_largest, scale, finite,
        tl.program_id(0).to(tl.int64), elements, seed,
        decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, COUNT, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def _many_kernel(
    owners, kept, given, tensors, scale, finite, decay, pace, share1, beta2, share2, correction, epsilon,
    WEIGHTS: tl.constexpr, AT_RANDOM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kept` are rows of `TensorGroup.kept`, `given` rows of weights, gradients and seeds. A gradient at 0: not this time."""
    tensor = tl.load(owners + tl.program_id(0))
    gradient = place(given + tensors, tensor, WEIGHTS)
    if gradient.to(tl.int64) != 0:
        program = tl.program_id(0) - tl.load(kept + 5 * tensors + tensor)
        decay = tl.where(tl.load(kept + 6 * tensors + tensor) != 0, decay, 0.0)
        _parts(
            place(given, tensor, WEIGHTS), gradient,
            place(kept, tensor, tl.uint8), place(kept + tensors, tensor, tl.float32),
            place(kept + 2 * tensors, tensor, tl.uint8), place(kept + 3 * tensors, tensor, tl.float32),
            scale, finite, program, tl.load(kept + 4 * tensors + tensor), tl.load(given + 2 * tensors + tensor),
            decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, COUNT, BLOCK,
        )  # fmt: skip


# --- what the optimizer calls ----------------------------------------------------------------------------------------


_LAUNCH = {"BLOCK": BLOCK, "num_warps": 8, "maxnreg": 80, **PLAIN_SUMS}
"""With so few registers three programs are under way at a time, else two."""


def adamw_8bit(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    first_largest: torch.Tensor,
    second: torch.Tensor,
    second_largest: torch.Tensor,
    *,
    now: StepSettings,
    decay: float,
    seed: int,
    scale: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
) -> None:
    """One update in place. All six lie in order in memory. Moments are rounded at random always, weights if `now` says so."""
    elements = weights.numel()
    with on(weights.device):
        _one_kernel[(-(-elements // (BLOCKS * BLOCK)),)](
            weights, gradient, first, first_largest, second, second_largest, scale, finite, elements, seed,
            now.lr * decay, *adamw_numbers(now), AT_RANDOM=now.stochastic, COUNT=BLOCKS, **_LAUNCH,
        )  # fmt: skip


def group_8bit(
    states: Sequence[tuple[torch.Tensor, ...]], decayed: Sequence[bool], sizes: Sequence[int]
) -> TensorGroup:
    """Tensors of so many elements for `adamw_8bit_many`: of each both states, each with its scales behind it."""
    return TensorGroup.of(states, decayed, sizes=sizes, block=BLOCKS * BLOCK)


def adamw_8bit_many(
    group: TensorGroup,
    weights: Sequence[int],
    gradients: Sequence[int],
    seeds: Sequence[int],
    *,
    dtype: torch.dtype,
    now: StepSettings,
    decay: float,
    scale: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
) -> None:
    """One update of each tensor of `group` whose gradient is not at 0, to the bits of `adamw_8bit`.

    `weights` and `gradients` are addresses, multiples of 16, of numbers of type `dtype` that lie in order."""
    device, tensors = group.kept.device, len(group.states)
    given = sent(torch.tensor([*weights, *gradients, *seeds]), device)
    with on(device):
        _many_kernel[(len(group.owners),)](
            group.owners, group.kept, given, tensors, scale, finite, now.lr * decay, *adamw_numbers(now),
            WEIGHTS=TYPES[dtype], AT_RANDOM=now.stochastic, COUNT=group.block // BLOCK, **_LAUNCH,
        )  # fmt: skip

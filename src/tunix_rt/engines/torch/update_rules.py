"""Rounding at random: float32 to bfloat16, and moments to 8 bits. The mean over many roundings is the number itself.

Both do the same: random bits are added to the bit pattern of a float below the last bit that is kept, and the rest is cut
away. Between two neighbours the pattern of a float grows evenly with its value, so the upper one is taken with the share
of the way to it. A pattern holds sign and magnitude, so negative numbers need nothing of their own.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tunix_rt.plan.optimizers import BLOCK

# --- where the random bits come from ---------------------------------------------------------------------------------


def seed_of(seed: int, step: int, index: int, device: str) -> int:
    """The seed for parameter number `index` in step `step`. torch's CPU generator takes 32 bits of it, CUDA's 63."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()[:8], "big")
    return mixed >> 32 if device == "cpu" else mixed >> 1


# --- weights: float32 to bfloat16 ------------------------------------------------------------------------------------

LARGEST = torch.finfo(torch.bfloat16).max
_UPPER_HALF = 1 if sys.byteorder == "little" else 0
"""Which of the two 16-bit halves of a float32 is a bfloat16."""


def round_to_bfloat16_(target: torch.Tensor, values: torch.Tensor, generator: torch.Generator) -> None:
    """Put `values` (float32, contiguous, spoilt by it) into `target` (bfloat16), each up or down at random.

    From the largest bfloat16 on nothing is random: the bits are only cut. A finite number so never becomes Inf, Inf stays
    Inf and NaN stays NaN. (One that does not come from arithmetic, with its mark in the bits cut away, becomes Inf.)"""
    bits = values.view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    bits.addcmul_(noise, values.abs() < LARGEST)
    target.view(torch.int16).copy_(bits.view(torch.int16)[_UPPER_HALF::2])


# --- moments: float32 to 8 bits --------------------------------------------------------------------------------------
#
# A code is a float of 8 bits, relative to the largest magnitude of its block: eight levels to a doubling, so that they lie
# 6 to 12 % apart.
#   unsigned  256 levels, from 2.6e-10 to 1. None is 0, and what is below the lowest is rounded up to it: a second moment
#             of 0 beside a first moment that is not 0 would make an update of any size.
#   signed    a sign and 128 levels, from 1.7e-5 to 1, moved down so that the first is 0: below that size they lie evenly.

CUT = 20
"""Bits of a float32 that are cut away: of 23 after the point, three stay."""
_ONE = 0x3F80_0000
"""Bit pattern of 1.0, the last level."""
HEADROOM = 1.0 - 2.0**-20
"""The largest magnitude is put so far below the last level: rounding in float32 must not carry it beyond."""
TINY = torch.finfo(torch.float32).tiny
SIGNED_LEVELS, UNSIGNED_LEVELS = 128, 256
"""A code of the signed ones from 128 on stands for a negative number."""


def lowest(levels: int) -> int:
    """Bit pattern of the first of `levels` levels."""
    return _ONE - ((levels - 1) << CUT)


def _levels(levels: int) -> torch.Tensor:
    patterns = lowest(levels) + (torch.arange(levels, dtype=torch.int32) << CUT)
    return patterns.view(torch.float32).double()


FLOOR = _levels(UNSIGNED_LEVELS)[0].item()
FOOT = _levels(SIGNED_LEVELS)[0].item()
SIGNED_SHARE = (1.0 - FOOT) * HEADROOM
"""What the largest magnitude of a block becomes before the foot is added."""


@functools.cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the 256 signed and the 256 unsigned codes, relative to their block."""
    magnitudes = (_levels(SIGNED_LEVELS) - FOOT) / SIGNED_SHARE
    signed, unsigned = torch.cat([magnitudes, -magnitudes]), _levels(UNSIGNED_LEVELS) / HEADROOM
    return signed.float().to(device), unsigned.float().to(device)


def decode(codes: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The moments behind `codes` [blocks, elements], which are relative to `absmax` [blocks, 1]."""
    return table.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(absmax)


def encode_signed(values: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a first moment [blocks, elements] in float32, and what they are relative to."""
    absmax = _largest(values)
    shares = values.abs().mul_(SIGNED_SHARE / absmax).add_(FOOT)
    codes = _cut(shares, SIGNED_LEVELS, generator).add_(values < 0, alpha=SIGNED_LEVELS)
    return codes.to(torch.uint8), absmax


def encode_unsigned(values: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a second moment [blocks, elements] in float32, and what they are relative to."""
    absmax = _largest(values)
    shares = torch.mul(values, HEADROOM / absmax).clamp_(min=FLOOR)
    return _cut(shares, UNSIGNED_LEVELS, generator).to(torch.uint8), absmax


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block, and never 0, which nothing can be divided by."""
    return torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True).clamp_(min=TINY)


def _cut(shares: torch.Tensor, levels: int, generator: torch.Generator) -> torch.Tensor:
    """The numbers of the levels next to `shares` (spoilt by it), the upper or the lower at random, as int32."""
    first = lowest(levels)
    noise = torch.empty_like(shares, dtype=torch.int32).random_(-first, (1 << CUT) - first, generator=generator)
    return shares.view(torch.int32).add_(noise).bitwise_right_shift_(CUT)


SLICE_ELEMENTS = 8 * 2**20
"""Elements updated at a time, a multiple of the 8-bit block: 32 MiB for a temporary in float32. A slice has at least one row
of a matrix of Adafactor. Random bits are drawn slice by slice, so this number is part of what a seed means."""

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What holds for every parameter in a step."""

    step: int
    rate: float
    beta1: float
    beta2: float
    epsilon: float
    stochastic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update of one parameter."""

    weights: torch.Tensor
    """The parameter itself, [rows, columns] where Adafactor factors it, else [elements, 1]."""
    gradient: torch.Tensor
    """In the same shape, not yet multiplied by `scale`."""
    state: State
    decay: float
    scale: torch.Tensor | None
    sound: torch.Tensor | None
    count: torch.Tensor
    """Number of the step on the device, as torch's fused kernel wants it."""
    generator: torch.Generator
    now: Now

    @property
    def work(self) -> torch.dtype:
        """The type in which the update is computed."""
        return torch.float64 if self.weights.dtype == torch.float64 else torch.float32

    def slices(self) -> Iterator[slice]:
        rows = max(1, SLICE_ELEMENTS // max(1, self.weights.shape[1]))
        for start in range(0, len(self.weights), rows):
            yield slice(start, min(start + rows, len(self.weights)))

    def scaled_gradient(self, at: slice) -> torch.Tensor:
        """The gradient in the type of the work; not to be written to. A scale of shape [1] makes cast and product one pass."""
        if self.scale is None:
            return self.gradient[at].to(self.work)
        return self.gradient[at] * self.scale.to(self.work).view(1)

    def whole(self, name: str) -> torch.Tensor:
        """A moment that is kept of every element, in the shape of `weights`."""
        return column(self.state[name])

    def take(self, at: slice) -> torch.Tensor:
        """Weights to be changed in place: the parameter's own, or a copy where they are bfloat16."""
        return self.weights[at].to(self.work)

    def put(self, at: slice, changed: torch.Tensor) -> None:
        """Round what `take` gave, where that was a copy."""
        if self.weights.dtype != torch.bfloat16:
            return
        if self.now.stochastic:
            round_to_bfloat16_(self.weights[at].view(-1), changed.view(-1), self.generator)
        else:
            self.weights[at].copy_(changed)

    def keep(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put `new` into the state, unless the update is not sound."""
        old.copy_(new if self.sound is None else torch.where(self.sound, new, old))


# --- the three rules -------------------------------------------------------------------------------------------------


def _adamw(update: Update) -> None:
    """w <- w - rate decay w - rate m' / (sqrt(v') + epsilon): m is the mean of g and v that of g^2, m' and v' what they
    come to without their start at 0. Torch's fused kernel computes it."""
    first, second = update.whole("exp_avg"), update.whole("exp_avg_sq")
    for at in update.slices():
        weights = update.take(at)
        _fused_adamw(update, weights, update.scaled_gradient(at), first[at], second[at])
        update.put(at, weights)


def _adamw_8bit(update: Update) -> None:
    """The same, with m and v unpacked from 8 bits and packed again. A small tensor has them whole."""
    if update.state["exp_avg"].dtype != torch.uint8:
        _adamw(update)
        return
    state, (signed, unsigned) = update.state, tables(update.weights.device)
    for at in update.slices():
        blocks, elements = slice(at.start // BLOCK, -(-at.stop // BLOCK)), at.stop - at.start
        first = decode(state["exp_avg"][blocks], state["exp_avg_absmax"][blocks], signed)
        second = decode(state["exp_avg_sq"][blocks], state["exp_avg_sq_absmax"][blocks], unsigned)
        weights, first, second = update.take(at), first.to(update.work), second.to(update.work)
        moments = (moment.view(-1, 1)[:elements] for moment in (first, second))  # the last block may go beyond the end
        _fused_adamw(update, weights, update.scaled_gradient(at), *moments)
        update.put(at, weights)
        for name, moment, encode in (
            ("exp_avg", first, encode_signed),
            ("exp_avg_sq", second, encode_unsigned),
        ):
            codes, absmax = encode(moment.float(), update.generator)
            update.keep(state[name][blocks], codes)
            update.keep(state[f"{name}_absmax"][blocks], absmax)


def _adafactor(update: Update) -> None:
    """w <- w - rate decay w - rate u / max(1, RMS(u)): u = g / sqrt(v), v the mean of g^2, of a matrix in rows and columns
    only. `across` and `down` are what g is multiplied with to be u: element by element, and row by row."""
    across, down = (_factored if "exp_avg_sq_row" in update.state else _unfactored)(update)
    squares = torch.zeros((), dtype=update.work, device=update.weights.device)
    for at in update.slices():
        of_rows = torch.linalg.vector_norm(update.gradient[at] * across(at), dim=1, keepdim=True)
        squares += of_rows.mul_(down(at)).square_().sum()
    pace = -update.now.rate / (squares / update.weights.numel()).sqrt_().clamp_(min=1.0)
    kept = torch.full_like(pace, 1.0 - update.now.rate * update.decay)
    if update.sound is not None:
        kept = torch.where(update.sound, kept, 1.0)
    for at in update.slices():
        weights, moved, speed = update.take(at), update.gradient[at] * across(at), down(at) * pace
        if update.sound is not None:  # both: NaN times 0 would be NaN
            moved, speed = (torch.where(update.sound, values, 0.0) for values in (moved, speed))
        if update.decay:
            weights.mul_(kept)
        update.put(at, weights.addcmul_(moved, speed))


RULES = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}


# --- what the rules are made of --------------------------------------------------------------------------------------


def _fused_adamw(
    update: Update, weights: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> None:
    unsound = None if update.sound is None else update.sound.logical_not().float()
    lists = [weights], [gradient], [first], [second]
    fused_kernel(*lists, now=update.now, decay=update.decay, count=update.count, unsound=unsound)


def fused_kernel(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    *,
    now: Now,
    decay: float,
    count: torch.Tensor,
    unsound: torch.Tensor | None = None,
) -> None:
    """What `torch.optim.AdamW(fused=True)` calls. It reads memory in order, whatever the strides say."""
    torch._fused_adamw_(
        weights, gradients, first, second, [], [count] * len(weights), lr=now.rate, beta1=now.beta1, beta2=now.beta2,
        weight_decay=decay, eps=now.epsilon, amsgrad=False, maximize=False, found_inf=unsound,
    )  # fmt: skip


def column(tensor: torch.Tensor) -> torch.Tensor:
    """The elements below each other as they lie in memory; copied first where they do not lie in order."""
    return tensor.contiguous().as_strided((tensor.numel(), 1), (1, 1))


_Factor = Callable[[slice], torch.Tensor]


def _factored(update: Update) -> tuple[_Factor, _Factor]:
    """Move the means of rows and columns of g^2. v is their outer product over the mean of the rows."""
    height, width = update.weights.shape
    rows = torch.empty(height, dtype=update.work, device=update.weights.device)
    columns = torch.zeros(width, dtype=update.work, device=update.weights.device)
    for at in update.slices():
        rows[at] = torch.linalg.vector_norm(update.gradient[at], dim=1, dtype=update.work)
        columns += torch.linalg.vector_norm(update.gradient[at], dim=0, dtype=update.work).square_()
    scale = _scale(update)
    rows = _moved(update, update.state["exp_avg_sq_row"], rows.mul_(scale).square_().div_(width))
    columns = _moved(update, update.state["exp_avg_sq_col"], columns.mul_(scale).mul_(scale).div_(height)).rsqrt_()
    down = (rows.mean().sqrt() * rows.rsqrt() * scale).view(-1, 1)  # the mean over a row could be too large for float32
    return lambda _: columns, lambda at: down[at]


def _unfactored(update: Update) -> tuple[_Factor, _Factor]:
    """Move the mean of g^2 of every element."""
    second, scale = update.whole("exp_avg_sq"), _scale(update)
    for at in update.slices():
        _moved(update, second[at], update.scaled_gradient(at).square())
    return lambda at: second[at].rsqrt(), lambda _: scale


def _moved(update: Update, mean: torch.Tensor, towards: torch.Tensor) -> torch.Tensor:
    """`mean` moved `towards` (spoilt by it) by the share of this step: all of the way at the first. Kept, where sound."""
    moved = mean.lerp(towards.add_(1e-30), update.now.step**-0.8)
    update.keep(mean, moved)
    return moved


def _scale(update: Update) -> torch.Tensor:
    if update.scale is None:
        return torch.ones((), dtype=update.work, device=update.weights.device)
    return update.scale.to(update.work)

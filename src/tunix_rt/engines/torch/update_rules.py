"""What the updates of `engines/optimizers/` need from PyTorch: one `Update`, stochastic rounding, and 8-bit codes.

Weights are rounded from float32 to bfloat16, and optimizer states to 8 bits, at random: the mean over many roundings is the
number itself. Random bits are added to the bit pattern of a float below the last bit that is kept, and the rest is cut away.
Between two neighbours the pattern of a float grows evenly with its value, so the upper one is taken with the share of the way
to it. A pattern holds sign and magnitude, so negative numbers need nothing of their own.
"""

import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tunix_rt.engines.torch.sharding import Sharding
from tunix_rt.plan.footprint import UPDATE_ELEMENTS

# --- where the random bits come from ---------------------------------------------------------------------------------


def seed_of(seed: int, step: int, index: int, device: str) -> int:
    """The seed for parameter number `index` in step `step`. torch's CPU generator takes 32 bits of it, CUDA's 63."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()[:8], "big")
    return mixed >> 32 if device == "cpu" else mixed >> 1


# --- weights: float32 to bfloat16 ------------------------------------------------------------------------------------

LARGEST = torch.finfo(torch.bfloat16).max
_UPPER_HALF = 1 if sys.byteorder == "little" else 0
"""Which of the two 16-bit halves of a float32 is a bfloat16."""


@dataclass(slots=True, kw_only=True)
class Bits:
    """Random bits for the elements of a tensor, slice by slice. A shard draws those of the whole slice and takes its own, so
    that they do not depend on the number of ranks."""

    generator: torch.Generator
    skipped: int = 0
    """Elements of the slice before those that are here."""
    elements: int | None = None
    """Elements of the slice in the whole tensor; None: all of them are here."""

    def like(self, values: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Numbers from `low` up to `high`, one for each of `values`, whose rows are never cut."""
        if self.elements is None:
            return torch.empty_like(values, dtype=torch.int32).random_(low, high, generator=self.generator)
        row = values.shape[-1] if values.dim() == 2 else 1
        drawn = torch.empty(-(-self.elements // row) * row, dtype=torch.int32, device=values.device)
        drawn.random_(low, high, generator=self.generator)
        return drawn[self.skipped : self.skipped + values.numel()].view(values.shape)


def round_to_bfloat16_(target: torch.Tensor, values: torch.Tensor, bits: Bits) -> None:
    """Put `values` (float32, contiguous, overwritten) into `target` (bfloat16), each up or down at random.

    From the largest bfloat16 on nothing is random: the bits are only cut. A finite number so never becomes Inf, Inf stays
    Inf and NaN stays NaN. (One that does not come from arithmetic, with its mark in the bits cut away, becomes Inf.)"""
    patterns = values.view(torch.int32)
    noise = bits.like(patterns, 0, 1 << 16)
    patterns.addcmul_(noise, values.abs() < LARGEST)
    target.view(torch.int16).copy_(patterns.view(torch.int16)[_UPPER_HALF::2])


# --- optimizer states: float32 to 8 bits -----------------------------------------------------------------------------
#
# A code is a float of 8 bits, relative to the largest magnitude of its block: eight levels to a doubling, so that they lie
# 6 to 12 % apart.
#   unsigned  256 levels, from 2.6e-10 to 1. None is 0, and what is below the lowest is rounded up to it: an exp_avg_sq
#             of 0 beside an exp_avg that is not 0 would make an update of any size.
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
    """The states behind `codes` [blocks, elements], which are relative to `absmax` [blocks, 1]."""
    return table.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(absmax)


def encode_signed(values: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of an `exp_avg` [blocks, elements] in float32, and what they are relative to."""
    absmax = _largest(values)
    shares = values.abs().mul_(SIGNED_SHARE / absmax).add_(FOOT)
    codes = _cut(shares, SIGNED_LEVELS, bits).add_(values < 0, alpha=SIGNED_LEVELS)
    return codes.to(torch.uint8), absmax


def encode_unsigned(values: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of an `exp_avg_sq` [blocks, elements] in float32, and what they are relative to."""
    absmax = _largest(values)
    shares = torch.mul(values, HEADROOM / absmax).clamp_(min=FLOOR)
    return _cut(shares, UNSIGNED_LEVELS, bits).to(torch.uint8), absmax


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block, and never 0, which nothing can be divided by."""
    return torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True).clamp_(min=TINY)


def _cut(shares: torch.Tensor, levels: int, bits: Bits) -> torch.Tensor:
    """The numbers of the levels next to `shares` (overwritten), the upper or the lower at random, as int32."""
    first = lowest(levels)
    noise = bits.like(shares, -first, (1 << CUT) - first)
    return shares.view(torch.int32).add_(noise).bitwise_right_shift_(CUT)


# --- one update ------------------------------------------------------------------------------------------------------

SLICE_ELEMENTS = UPDATE_ELEMENTS
"""Elements updated at a time, a multiple of the 8-bit block: 32 MiB for a temporary in float32. A slice has at least one row
of a matrix of Adafactor. Random bits are drawn slice by slice, so this number is part of what a seed means."""

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What is the same for every parameter in a step."""

    step: int
    lr: float
    beta1: float
    beta2: float
    epsilon: float
    stochastic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update of one parameter."""

    weights: torch.Tensor
    """The parameter itself, [rows, columns] where its states are factored, else [elements, 1]."""
    gradient: torch.Tensor
    """In the same shape, not yet multiplied by `scale`."""
    state: State
    decay: float
    scale: torch.Tensor | None
    finite: torch.Tensor | None
    """Where false, nothing changes."""
    count: torch.Tensor
    """Number of the step on the device, as PyTorch's fused kernel takes it."""
    bits: Bits
    now: StepSettings
    sharding: Sharding | None = None
    """None: the whole parameter is here."""
    first: int
    """The first row of `weights` in the whole parameter."""
    whole: int
    """Rows of the whole parameter."""

    @property
    def work(self) -> torch.dtype:
        """The dtype in which the update is computed."""
        return torch.float64 if self.weights.dtype == torch.float64 else torch.float32

    def slices(self) -> Iterator[slice]:
        """The slices of the whole parameter, as far as they are here: those of other ranks are empty."""
        width = self.weights.shape[1]
        rows = max(1, SLICE_ELEMENTS // max(1, width))
        for start in range(0, self.whole, rows):
            stop = min(start + rows, self.whole)
            low, high = (min(max(row - self.first, 0), len(self.weights)) for row in (start, stop))
            if self.sharding is not None:
                skipped = (self.first + low - start) * width if low < high else 0
                self.bits.skipped, self.bits.elements = skipped, (stop - start) * width
            yield slice(low, high)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over the shards of the parameter."""
        return tensor if self.sharding is None else self.sharding.total(tensor)

    def mean_of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of one value for each row."""
        return values.mean() if self.sharding is None else self.total(values.sum()) / self.whole

    def scaled_gradient(self, at: slice) -> torch.Tensor:
        """The gradient in the dtype of the work; read-only. A scale of shape [1] makes cast and product one pass."""
        if self.scale is None:
            return self.gradient[at].to(self.work)
        return self.gradient[at] * self.scale.to(self.work).view(1)

    def scale_or_one(self) -> torch.Tensor:
        if self.scale is None:
            return torch.ones((), dtype=self.work, device=self.weights.device)
        return self.scale.to(self.work)

    def full(self, name: str) -> torch.Tensor:
        """A state with a value for every element, in the shape of `weights`."""
        return column(self.state[name])

    def take(self, at: slice) -> torch.Tensor:
        """Weights to be changed in place: the parameter's own, or a copy where they are bfloat16."""
        return self.weights[at].to(self.work)

    def put(self, at: slice, changed: torch.Tensor) -> None:
        """Round what `take` gave, where that was a copy."""
        if self.weights.dtype != torch.bfloat16:
            return
        if self.now.stochastic:
            round_to_bfloat16_(self.weights[at].view(-1), changed.view(-1), self.bits)
        else:
            self.weights[at].copy_(changed)

    def keep(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put `new` into the state, unless the update is not finite."""
        old.copy_(new if self.finite is None else torch.where(self.finite, new, old))

    def fused_adamw(
        self, weights: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """PyTorch's fused AdamW on one slice."""
        skip = None if self.finite is None else self.finite.logical_not().float()
        lists = [weights], [gradient], [first], [second]
        fused_kernel(*lists, now=self.now, decay=self.decay, count=self.count, skip=skip)


def fused_kernel(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    *,
    now: StepSettings,
    decay: float,
    count: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """What `torch.optim.AdamW(fused=True)` calls. It reads memory in order, whatever the strides are."""
    torch._fused_adamw_(
        weights, gradients, first, second, [], [count] * len(weights), lr=now.lr, beta1=now.beta1, beta2=now.beta2,
        weight_decay=decay, eps=now.epsilon, amsgrad=False, maximize=False, found_inf=skip,
    )  # fmt: skip


def column(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a column, in memory order; copied first where they are not contiguous."""
    return tensor.contiguous().as_strided((tensor.numel(), 1), (1, 1))

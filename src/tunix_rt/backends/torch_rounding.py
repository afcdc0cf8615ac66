"""Rounding at random: float32 to bfloat16, and moments to 8 bits. The mean over many roundings is the number itself.

Both do the same: random bits are added to the bit pattern of a float below the last bit that is kept, and the rest is cut
away. Between two neighbours the pattern of a float grows evenly with its value, so the upper one is taken with the share
of the way to it. A pattern holds sign and magnitude, so negative numbers need nothing of their own.
"""

import functools
import hashlib
import sys

import torch

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

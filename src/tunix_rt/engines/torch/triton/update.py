"""What the updates in Triton share: random bits and rounding by them, the norm of a gradient, and what is made of it.

Random bits are counter based (Philox): the key is the seed, the counter the number of the group of eight neighbours that an
element belongs to, and of the stream: weights and both 8-bit optimizer states have one each. One draw has 128 bits, 16 for each
of the eight. Groups start anew in every row of a factored matrix, and run through any other tensor.
How the work is cut into blocks has no part in it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

import contextlib
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.engines.torch import update_rules as rounding

_LARGEST = tl.constexpr(rounding.LARGEST)
GROUP = tl.constexpr(8)
"""Elements that share a draw."""

SPAN = 65_536
"""Elements whose squares one program sums up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The gradient is clipped by its own norm. `norm` (float64) and `good` (bool), of shape [], are written."""

    limit: float | None
    """None: the norm is only reported."""
    norm: torch.Tensor
    good: torch.Tensor
    """Whether the update was finite: it was so far, and the norm is finite."""

    @staticmethod
    def workspace(device: torch.device, count: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`norm` and `good` for as many updates, which is sooner done than each by itself.

        They lie 16 bytes apart: kernels are compiled again for an address that is no multiple of it."""
        norms = torch.empty((count, 2), dtype=torch.float64, device=device)
        goods = torch.empty((count, 16), dtype=torch.bool, device=device)
        return list(zip(norms[:, 0].unbind(), goods[:, 0].unbind(), strict=True))


_HERE = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton starts a kernel on the current device, whatever its tensors say. To go there takes time, so only if need be."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


# --- in kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def noise(seed, group, height: tl.constexpr, width: tl.constexpr, stream: tl.constexpr = 0):
    """16 random bits for each of [height, width] elements (height 0: [width]), of which eight neighbours are a `group`.

    Weights have stream 0. A group of another stream has to be int64."""
    if stream == 0:
        first, second, third, fourth = tl.randint4x(seed, group)
    else:
        low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
        first, second, third, fourth = tl.philox(seed, low, high, low * 0 + stream, low * 0)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    drawn = tl.reshape(halves, (width,)) if height == 0 else tl.reshape(halves, (height, width))
    return drawn.to(tl.int32)


@triton.jit
def at_random(values, noise):
    """`torch_rounding.round_to_bfloat16_`: from the largest bfloat16 on, bits are only cut."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(values) < _LARGEST, bits + noise, bits)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def judged(squares, scale, finite, limit, norm, good):
    """What the gradient is multiplied with, and whether the update is finite. `squares` is the sum of its squares, in
    float64. With `norm` both are computed here and returned."""
    factor = tl.full((), 1.0, tl.float32)
    holds = tl.full((), 1, tl.int1)
    if scale is not None:
        factor = tl.load(scale).to(tl.float32)
    if finite is not None:
        holds = tl.load(finite) != 0
    if norm is not None:
        length = tl.sqrt(squares)
        tl.store(norm, length)
        holds = holds & (length < float("inf"))
        tl.store(good, holds)
        if limit is not None:
            factor = tl.minimum(limit / (length + 1e-6), 1.0).to(tl.float32)
    return factor, holds


# --- the norm of a gradient ------------------------------------------------------------------------------------------


@triton.jit
def _squares_kernel(gradient, sums, elements, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SPAN, BLOCK):
        at = program * SPAN + start + tl.arange(0, BLOCK)
        g = tl.load(gradient + at, mask=at < elements, other=0.0).to(tl.float32)
        found += g * g
    tl.store(sums + 1 + program, tl.sum(found, axis=0))


@triton.jit
def _clip_kernel(sums, count, finite, limit, norm, good, BLOCK: tl.constexpr):
    """`sums` begins with room for what the gradient is multiplied with."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + 1 + at, mask=at < count, other=0.0).to(tl.float64)
    factor, _ = judged(tl.sum(total, axis=0), None, finite, limit, norm, good)
    tl.store(sums, factor)


def clip_scale(gradient: torch.Tensor, *, finite: torch.Tensor | None, clip: Clip) -> torch.Tensor:
    """A float32 tensor that begins with what `gradient` has to be multiplied with. It is read once."""
    elements = gradient.numel()
    count = -(-elements // SPAN)
    sums = torch.empty(1 + count, dtype=torch.float32, device=gradient.device)
    with on(gradient.device):
        _squares_kernel[(count,)](gradient, sums, elements, SPAN=SPAN, BLOCK=4096, num_warps=4)
        _clip_kernel[(1,)](sums, count, finite, clip.limit, clip.norm, clip.good, BLOCK=1024, num_warps=4)
    return sums

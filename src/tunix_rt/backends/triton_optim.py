"""AdamW and Adafactor for bfloat16 weights on a GPU, in Triton: each number is read and written as often as it must be.

The rules are those of `torch_optim.py`, computed in float32 and rounded once. Nothing is summed by atomics, so that the same
update gives the same bits, and nothing waits for the device. Bytes moved for a weight: AdamW 22 (weights, gradient and two
float32 moments, and 2 more for a norm to clip by), Adafactor of a matrix 10 (the gradient three times, the weights in and
out), its norm among them.

Random bits are counter based (Philox): the key is the seed, the counter the number of the group of eight neighbours that an
element belongs to. One draw has 128 bits, 16 for each of them. Groups start anew in every row of a factored matrix, and run
through any other tensor. How the work is cut into blocks has no part in it.

To start a kernel takes Python longer than a small tensor takes the GPU. AdamW therefore has two: of one tensor, as soon as its
gradient is there, and of all tensors of a step in one launch, which finds them by a table of addresses. What they compute is
one function, to the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

import contextlib
import itertools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from triton.errors import TritonError  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.backends import torch_rounding as rounding

_LARGEST = tl.constexpr(rounding.LARGEST)
_GROUP = tl.constexpr(8)
"""Elements that share a draw."""

FLAT_BLOCK = 2048
"""Elements of a program of AdamW."""
SPAN = 65_536
"""Elements whose squares one program sums up."""
ROWS, COLUMNS = 128, 256
"""What of a matrix a program of Adafactor goes through. 256 columns are one warp's: 32 threads of eight elements, 16 bytes."""
WHOLE_UP_TO = 16_384
"""Elements of a tensor that Adafactor does not factor, and that one program updates by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The gradient is clipped by its own norm. `norm` (float64) and `good` (bool), of shape [], are written."""

    limit: float | None
    """None: the norm is only told."""
    norm: torch.Tensor
    good: torch.Tensor
    """Whether the update was sound: it was so far, and the norm is finite."""

    @staticmethod
    def room(device: torch.device, count: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`norm` and `good` for as many updates, which is sooner done than each by itself.

        They lie 16 bytes apart: kernels are compiled again for an address that is no multiple of it."""
        norms = torch.empty((count, 2), dtype=torch.float64, device=device)
        goods = torch.empty((count, 16), dtype=torch.bool, device=device)
        return list(zip(norms[:, 0].unbind(), goods[:, 0].unbind(), strict=True))


# --- what the kernels share ------------------------------------------------------------------------------------------


@triton.jit
def _noise(seed, group, height: tl.constexpr, width: tl.constexpr):
    """16 random bits for each of [height, width] elements (height 0: [width]), of which eight neighbours are a `group`."""
    first, second, third, fourth = tl.randint4x(seed, group)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    drawn = tl.reshape(halves, (width,)) if height == 0 else tl.reshape(halves, (height, width))
    return drawn.to(tl.int32)


@triton.jit
def _at_random(values, noise):
    """`torch_rounding.round_to_bfloat16_`: from the largest bfloat16 on, bits are only cut."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(values) < _LARGEST, bits + noise, bits)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _judged(squares, scale, sound, limit, norm, good):
    """What the gradient is multiplied with, and whether the update is sound. `squares` is the sum of its squares, in
    float64. With `norm` both are found out here, and told."""
    factor = tl.full((), 1.0, tl.float32)
    holds = tl.full((), 1, tl.int1)
    if scale is not None:
        factor = tl.load(scale).to(tl.float32)
    if sound is not None:
        holds = tl.load(sound) != 0
    if norm is not None:
        length = tl.sqrt(squares)
        tl.store(norm, length)
        holds = holds & (length < float("inf"))
        tl.store(good, holds)
        if limit is not None:
            factor = tl.minimum(limit / (length + 1e-6), 1.0).to(tl.float32)
    return factor, holds


# --- AdamW -----------------------------------------------------------------------------------------------------------


@triton.jit
def _adamw_part(
    weights, gradient, first, second, scale, sound, at, inside, group, seed,
    decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `at` that are `inside`. What is rounded once is written as `fma`, and `_ADAMW` keeps the compiler from making
    more of them: left to itself it could choose otherwise in another kernel."""
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        g = g * tl.load(scale).to(tl.float32)
    m = tl.fma(g - m, share1, m)
    v = tl.fma(v, beta2, share2 * g * g)
    w = w - tl.fma(w, decay, pace * m / tl.fma(tl.sqrt_rn(v), correction, epsilon))
    if sound is not None:
        inside = inside & (tl.load(sound) != 0)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)
    if AT_RANDOM:
        tl.store(weights + at, _at_random(w, _noise(seed, group, 0, BLOCK)), mask=inside)
    else:
        tl.store(weights + at, w.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    weights, gradient, first, second, scale, sound, elements, seed,
    decay, pace, share1, beta2, share2, correction, epsilon,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    group = program * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    _adamw_part(
        weights, gradient, first, second, scale, sound, at, at < elements, group, seed,
        decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, BLOCK,
    )  # fmt: skip


_ADAMW = {"num_warps": 4, "enable_fp_fusion": False}


def _adamw_numbers(*, step: int, rate: float, beta1: float, beta2: float, epsilon: float) -> tuple[float, ...]:
    """From `pace` on, in the order of the kernels."""
    return (
        rate / (1.0 - beta1**step), 1.0 - beta1, beta2, 1.0 - beta2, (1.0 - beta2**step) ** -0.5, epsilon,
    )  # fmt: skip


def adamw(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    step: int,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    seed: int | None,
    scale: torch.Tensor | None = None,
    sound: torch.Tensor | None = None,
) -> None:
    """One update in place. All four lie in order in memory. Without `seed`, weights are rounded to nearest."""
    elements = weights.numel()
    numbers = _adamw_numbers(step=step, rate=rate, beta1=beta1, beta2=beta2, epsilon=epsilon)
    with _on(weights.device):
        _adamw_kernel[(-(-elements // FLAT_BLOCK),)](
            weights, gradient, first, second, scale, sound, elements, seed or 0, rate * decay, *numbers,
            AT_RANDOM=seed is not None, BLOCK=FLAT_BLOCK, **_ADAMW,
        )  # fmt: skip


# --- AdamW of many tensors in one launch -----------------------------------------------------------------------------


@triton.jit
def _place(addresses, tensor, kind: tl.constexpr):
    """A pointer out of a table. It is aligned to 16 bytes, which the compiler cannot see."""
    return tl.multiple_of(tl.multiple_of(tl.load(addresses + tensor), 16).to(tl.pointer_type(kind)), 16)


@triton.jit(do_not_specialize=["tensors"])
def _adamw_many_kernel(
    owners, kept, given, tensors, scale, sound, decay, pace, share1, beta2, share2, correction, epsilon,
    MOMENTS: tl.constexpr, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kept` are rows of `Crowd.kept`, `given` rows of weights, gradients and seeds. A gradient at 0: not this time."""
    tensor = tl.load(owners + tl.program_id(0))
    gradient = _place(given + tensors, tensor, tl.bfloat16)
    if gradient.to(tl.int64) != 0:
        weights = _place(given, tensor, tl.bfloat16)
        first, second = _place(kept, tensor, MOMENTS), _place(kept + tensors, tensor, MOMENTS)
        elements = tl.load(kept + 2 * tensors + tensor)
        program = tl.program_id(0) - tl.load(kept + 3 * tensors + tensor)
        decay = tl.where(tl.load(kept + 4 * tensors + tensor) != 0, decay, 0.0)
        seed = tl.load(given + 2 * tensors + tensor) if AT_RANDOM else 0
        at = program * BLOCK + tl.arange(0, BLOCK)
        group = program * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
        whole = tl.multiple_of(elements // _GROUP * _GROUP, _GROUP)  # up to there a mask does not split wide loads
        _adamw_part(
            weights, gradient, first, second, scale, sound, at, at < whole, group, seed,
            decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, BLOCK,
        )  # fmt: skip
        if (whole < elements) & (whole // BLOCK == program):
            last = whole + tl.arange(0, _GROUP)
            number = whole // _GROUP + tl.arange(0, 1)
            _adamw_part(
                weights, gradient, first, second, scale, sound, last, last < elements, number, seed,
                decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, _GROUP,
            )  # fmt: skip


_MOMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crowd:
    """Tensors that `adamw_many` updates in one launch, and what of them is the same in every step."""

    moments: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Held, because `kept` has their addresses. Of one device and one type."""
    owners: torch.Tensor
    """Of each program, the number of the tensor that it has a block of: int32."""
    kept: torch.Tensor
    """Of each tensor: addresses of its two moments, elements, its first program, whether it is decayed. int64."""
    block: int

    @staticmethod
    def of(moments: Sequence[tuple[torch.Tensor, torch.Tensor]], decayed: Sequence[bool]) -> "Crowd":
        device, sizes = moments[0][0].device, [first.numel() for first, _ in moments]
        programs = [-(-size // FLAT_BLOCK) for size in sizes]
        starts = list(itertools.accumulate(programs, initial=0))[:-1]
        addresses = [[moment.data_ptr() for moment in moments_] for moments_ in zip(*moments, strict=True)]
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(programs))
        kept = torch.tensor([*addresses, sizes, starts, list(map(int, decayed))])
        return Crowd(
            moments=tuple(moments), owners=_sent(owners, device), kept=_sent(kept, device), block=FLAT_BLOCK
        )  # fmt: skip


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`, not waited for. Torch gives pinned memory to nobody else before it has been copied."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def adamw_many(
    crowd: Crowd,
    weights: Sequence[int],
    gradients: Sequence[int],
    seeds: Sequence[int] | None,
    *,
    step: int,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    scale: torch.Tensor | None = None,
    sound: torch.Tensor | None = None,
) -> None:
    """One update of each tensor of `crowd` whose gradient is not at 0, to the bits of `adamw`.

    `weights` and `gradients` are addresses, multiples of 16, of bfloat16 numbers that lie in order."""
    device, tensors = crowd.kept.device, len(crowd.moments)
    given = _sent(torch.tensor([*weights, *gradients, *(seeds or ())]), device)
    numbers = _adamw_numbers(step=step, rate=rate, beta1=beta1, beta2=beta2, epsilon=epsilon)
    with _on(device):
        _adamw_many_kernel[(len(crowd.owners),)](
            crowd.owners, crowd.kept, given, tensors, scale, sound, rate * decay, *numbers,
            MOMENTS=_MOMENTS[crowd.moments[0][0].dtype], AT_RANDOM=seeds is not None, BLOCK=crowd.block,
            maxnreg=96, **_ADAMW,  # as few as for one tensor: with more, less of them would be under way at a time
        )  # fmt: skip


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
def _clip_kernel(sums, count, sound, limit, norm, good, BLOCK: tl.constexpr):
    """`sums` begins with room for what the gradient is multiplied with."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + 1 + at, mask=at < count, other=0.0).to(tl.float64)
    factor, _ = _judged(tl.sum(total, axis=0), None, sound, limit, norm, good)
    tl.store(sums, factor)


def clip(gradient: torch.Tensor, *, sound: torch.Tensor | None, clip: Clip) -> torch.Tensor:
    """A float32 tensor that begins with what `gradient` has to be multiplied with. It is read once."""
    elements = gradient.numel()
    count = -(-elements // SPAN)
    sums = torch.empty(1 + count, dtype=torch.float32, device=gradient.device)
    with _on(gradient.device):
        _squares_kernel[(count,)](gradient, sums, elements, SPAN=SPAN, BLOCK=4096, num_warps=4)
        _clip_kernel[(1,)](sums, count, sound, clip.limit, clip.norm, clip.good, BLOCK=1024, num_warps=4)
    return sums


# --- Adafactor of a matrix -------------------------------------------------------------------------------------------
#
# Four kernels in a row, and sums by torch between them:
#   sums     rows and columns of g^2, of each part of the matrix by itself
#   means    one program: norm and clipping, the means moved, what a row and a column of g is multiplied with to be u
#   length   squares of u, of each part
#   apply    w <- w - rate decay w - rate u / max(1, RMS(u))


@triton.jit
def _sums_kernel(
    gradient, row_sums, column_sums, height, width, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    parts = tl.cdiv(width, BC)
    down, across = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = across * BC + tl.arange(0, BC)
    found = tl.zeros((BR, BC), tl.float32)
    for start in range(0, ROWS, BR):
        row = down * ROWS + start + tl.arange(0, BR)
        inside = (row < height)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        square = g * g
        found += square
        tl.store(row_sums + across.to(tl.int64) * height + row, tl.sum(square, axis=1), mask=row < height)
    tl.store(column_sums + down.to(tl.int64) * width + column, tl.sum(found, axis=0), mask=column < width)


@triton.jit
def _means_kernel(
    row_sums, column_sums, row_means, column_means, scale, sound, limit, norm, good,
    of_rows, of_columns, scalars, height, width, share, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float64)
    if norm is not None:
        for start in range(0, height, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(row_sums + at, mask=at < height, other=0.0).to(tl.float64)
    factor, holds = _judged(tl.sum(total, axis=0), scale, sound, limit, norm, good)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, height, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < height
        mean = tl.load(row_means + at, mask=inside, other=0.0)
        towards = tl.load(row_sums + at, mask=inside, other=0.0) * factor * factor / width + 1e-30
        mean = mean + share * (towards - mean)
        total += tl.where(inside, mean, 0.0).to(tl.float64)
        tl.store(of_rows + at, factor / tl.sqrt_rn(mean), mask=inside)
        tl.store(row_means + at, mean, mask=inside & holds)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        mean = tl.load(column_means + at, mask=inside, other=0.0)
        towards = tl.load(column_sums + at, mask=inside, other=0.0) * factor * factor / height + 1e-30
        mean = mean + share * (towards - mean)
        tl.store(of_columns + at, 1.0 / tl.sqrt_rn(mean), mask=inside)
        tl.store(column_means + at, mean, mask=inside & holds)
    tl.store(scalars, tl.sqrt(tl.sum(total, axis=0) / height).to(tl.float32))
    tl.store(scalars + 1, tl.where(holds, 1.0, 0.0))


@triton.jit
def _length_kernel(
    gradient, of_rows, of_columns, scalars, sums, height, width,
    ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(width, BC)
    down, across = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = across * BC + tl.arange(0, BC)
    by_column = tl.load(of_columns + column, mask=column < width, other=0.0)
    by_all = tl.load(scalars)
    found = tl.zeros((BR, BC), tl.float32)
    for start in range(0, ROWS, BR):
        row = down * ROWS + start + tl.arange(0, BR)
        inside = (row < height)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        by_row = tl.load(of_rows + row, mask=row < height, other=0.0) * by_all
        u = g * by_column[None, :] * by_row[:, None]
        found += u * u
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(found, axis=1), axis=0))


@triton.jit(do_not_specialize=["seed"])
def _apply_kernel(
    weights, gradient, of_rows, of_columns, scalars, squares, height, width, seed, decay, rate,
    AT_RANDOM: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(width, BC)
    down, across = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = across * BC + tl.arange(0, BC)
    group = across * (BC // _GROUP) + tl.arange(0, BC // _GROUP)
    by_column = tl.load(of_columns + column, mask=column < width, other=0.0)
    holds = tl.load(scalars + 1).to(tl.int32) != 0
    size = tl.sqrt(tl.load(squares) / height / width).to(tl.float32)
    by_all = tl.load(scalars) * (rate / tl.where(size > 1.0, size, 1.0))
    for start in range(0, ROWS, BR):
        row = down * ROWS + start + tl.arange(0, BR)
        inside = (row < height)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        by_row = tl.load(of_rows + row, mask=row < height, other=0.0) * by_all
        w = w - (decay * w + g * by_column[None, :] * by_row[:, None])
        if AT_RANDOM:
            number = row.to(tl.int64)[:, None] * tl.cdiv(width, _GROUP) + group[None, :]
            tl.store(weights + at, _at_random(w, _noise(seed, number, BR, BC)), mask=inside & holds)
        else:
            tl.store(weights + at, w.to(tl.bfloat16), mask=inside & holds)


def adafactor(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    row_means: torch.Tensor,
    column_means: torch.Tensor,
    *,
    step: int,
    rate: float,
    decay: float,
    seed: int | None,
    scale: torch.Tensor | None = None,
    sound: torch.Tensor | None = None,
    clip: Clip | None = None,
) -> None:
    """One update of a matrix in place, `scale` or `clip` applied. Without `seed`, weights are rounded to nearest."""
    (height, width), device = weights.shape, weights.device
    columns = min(COLUMNS, max(8, _power_of_2(width)))
    down, across = -(-height // ROWS), -(-width // columns)
    sizes = [
        across * height,
        down * width,
        height,
        width,
        4,
        down * across,
    ]  # all but the last keep multiples of 4 aligned
    room = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    row_sums, column_sums, of_rows, of_columns, scalars, lengths = room
    cut = {"ROWS": ROWS, "BC": columns}
    with _on(device):
        _sums_kernel[(down * across,)](
            gradient, row_sums, column_sums, height, width, BR=_part(8192, columns), num_warps=8, **cut
        )
        _means_kernel[(1,)](
            row_sums if across == 1 else row_sums.view(across, height).sum(dim=0),
            column_sums if down == 1 else column_sums.view(down, width).sum(dim=0),
            row_means, column_means, scale, sound, clip and clip.limit, clip and clip.norm, clip and clip.good,
            of_rows, of_columns, scalars, height, width, step**-0.8, BLOCK=4096, num_warps=16,
        )  # fmt: skip
        _length_kernel[(down * across,)](
            gradient, of_rows, of_columns, scalars, lengths, height, width,
            BR=_part(8192, columns), num_warps=8, **cut,
        )  # fmt: skip
        _apply_kernel[(down * across,)](
            weights, gradient, of_rows, of_columns, scalars, lengths.sum(dtype=torch.float64), height, width,
            seed or 0, rate * decay, rate, AT_RANDOM=seed is not None, BR=_part(4096, columns), num_warps=8, **cut,
        )  # fmt: skip


def _power_of_2(number: int) -> int:
    """The next from `number` on. Triton's own, and its quotient rounded up, take as long as a launch."""
    return 1 << (number - 1).bit_length()


def _part(elements: int, columns: int) -> int:
    """Rows that a program has in registers at a time."""
    return min(ROWS, elements // columns)


# --- Adafactor of anything else --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed"])
def _whole_kernel(
    weights, gradient, means, scale, sound, limit, norm, good, elements, seed, decay, rate, share,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < elements
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    factor, holds = _judged(tl.sum(g.to(tl.float64) * g, axis=0), scale, sound, limit, norm, good)
    g = g * factor
    v = tl.load(means + at, mask=inside, other=0.0)
    v = v + share * (g * g + 1e-30 - v)
    u = g / tl.sqrt_rn(v)
    size = tl.sqrt(tl.sum(u * u, axis=0) / elements)
    w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    w = w - (decay * w + u * (rate / tl.where(size > 1.0, size, 1.0)))
    tl.store(means + at, v, mask=inside & holds)
    if AT_RANDOM:
        group = tl.arange(0, BLOCK // _GROUP)
        tl.store(weights + at, _at_random(w, _noise(seed, group, 0, BLOCK)), mask=inside & holds)
    else:
        tl.store(weights + at, w.to(tl.bfloat16), mask=inside & holds)


def adafactor_whole(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    means: torch.Tensor,
    *,
    step: int,
    rate: float,
    decay: float,
    seed: int | None,
    scale: torch.Tensor | None = None,
    sound: torch.Tensor | None = None,
    clip: Clip | None = None,
) -> None:
    """One update of at most `WHOLE_UP_TO` elements, by one program."""
    elements = weights.numel()
    with _on(weights.device):
        _whole_kernel[(1,)](
            weights, gradient, means, scale, sound, clip and clip.limit, clip and clip.norm, clip and clip.good,
            elements, seed or 0, rate * decay, rate, step**-0.8,
            AT_RANDOM=seed is not None, BLOCK=max(256, _power_of_2(elements)), num_warps=8,
        )  # fmt: skip


# --- whether it runs here --------------------------------------------------------------------------------------------


_HERE = contextlib.nullcontext()


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton starts a kernel on the current device, whatever its tensors say. To go there takes time, so only if need be."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def problem(device: torch.device) -> str | None:
    """Why the kernels cannot be used on `device`. Takes a second where they are compiled for the first time."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its compute capability is below 8.0"
    weights = torch.ones(8, dtype=torch.bfloat16, device=device)
    moments = (torch.zeros(8, device=device) for _ in range(2))
    try:
        adamw(
            weights, weights.clone(), *moments, step=1, rate=0.0, beta1=0.9, beta2=0.9, epsilon=1.0, decay=0.0, seed=1
        )
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError, TritonError) as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]
    return None

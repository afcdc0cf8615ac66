"""Adafactor for bfloat16 weights in Triton: of a matrix, whose rows and columns have means, and of anything else."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.engines.torch.triton.update import GROUP, Clip, at_random, judged, noise, on
from tunix_rt.engines.torch.update_rules import StepSettings

ROWS, COLUMNS = 128, 256
"""What of a matrix a program goes through. 256 columns are one warp's: 32 threads of eight elements, 16 bytes."""
WHOLE_UP_TO = 16_384
"""Elements of a tensor that is not factored, and that one program updates by itself."""


# --- a matrix --------------------------------------------------------------------------------------------------------
#
# Four kernels in a row, and sums by torch between them:
#   sums     rows and columns of g^2, of each part of the matrix by itself
#   means    one program: norm and clipping, the means moved, what a row and a column of g is multiplied with to be u
#   length   squares of u, of each part
#   apply    w <- w - lr decay w - lr u / max(1, RMS(u))


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
    row_sums, column_sums, row_means, column_means, scale, finite, limit, norm, good,
    of_rows, of_columns, scalars, height, width, share, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float64)
    if norm is not None:
        for start in range(0, height, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(row_sums + at, mask=at < height, other=0.0).to(tl.float64)
    factor, holds = judged(tl.sum(total, axis=0), scale, finite, limit, norm, good)
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
    weights, gradient, of_rows, of_columns, scalars, squares, height, width, seed, decay, lr,
    AT_RANDOM: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(width, BC)
    down, across = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = across * BC + tl.arange(0, BC)
    group = across * (BC // GROUP) + tl.arange(0, BC // GROUP)
    by_column = tl.load(of_columns + column, mask=column < width, other=0.0)
    holds = tl.load(scalars + 1).to(tl.int32) != 0
    size = tl.sqrt(tl.load(squares) / height / width).to(tl.float32)
    by_all = tl.load(scalars) * (lr / tl.where(size > 1.0, size, 1.0))
    for start in range(0, ROWS, BR):
        row = down * ROWS + start + tl.arange(0, BR)
        inside = (row < height)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        by_row = tl.load(of_rows + row, mask=row < height, other=0.0) * by_all
        w = w - (decay * w + g * by_column[None, :] * by_row[:, None])
        if AT_RANDOM:
            number = row.to(tl.int64)[:, None] * tl.cdiv(width, GROUP) + group[None, :]
            tl.store(weights + at, at_random(w, noise(seed, number, BR, BC)), mask=inside & holds)
        else:
            tl.store(weights + at, w.to(tl.bfloat16), mask=inside & holds)


def adafactor(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    row_means: torch.Tensor,
    column_means: torch.Tensor,
    *,
    now: StepSettings,
    decay: float,
    seed: int | None,
    scale: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
    clip: Clip | None = None,
) -> None:
    """One update of a matrix in place, `scale` or `clip` applied. Without `seed`, weights are rounded to nearest."""
    (height, width), device = weights.shape, weights.device
    columns = min(COLUMNS, max(8, _power_of_2(width)))
    down, across = -(-height // ROWS), -(-width // columns)
    # all but the last keep multiples of 4 aligned
    sizes = [across * height, down * width, height, width, 4, down * across]
    workspace = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    row_sums, column_sums, of_rows, of_columns, scalars, lengths = workspace
    cut = {"ROWS": ROWS, "BC": columns}
    with on(device):
        _sums_kernel[(down * across,)](
            gradient, row_sums, column_sums, height, width, BR=_part(8192, columns), num_warps=8, **cut
        )
        _means_kernel[(1,)](
            row_sums if across == 1 else row_sums.view(across, height).sum(dim=0),
            column_sums if down == 1 else column_sums.view(down, width).sum(dim=0),
            row_means, column_means, scale, finite, clip and clip.limit, clip and clip.norm, clip and clip.good,
            of_rows, of_columns, scalars, height, width, now.step**-0.8, BLOCK=4096, num_warps=16,
        )  # fmt: skip
        _length_kernel[(down * across,)](
            gradient, of_rows, of_columns, scalars, lengths, height, width,
            BR=_part(8192, columns), num_warps=8, **cut,
        )  # fmt: skip
        _apply_kernel[(down * across,)](
            weights, gradient, of_rows, of_columns, scalars, lengths.sum(dtype=torch.float64), height, width,
            seed or 0, now.lr * decay, now.lr, AT_RANDOM=seed is not None, BR=_part(4096, columns), num_warps=8, **cut,
        )  # fmt: skip


def _power_of_2(number: int) -> int:
    """The next from `number` on. Triton's own, and its quotient rounded up, take as long as a launch."""
    return 1 << (number - 1).bit_length()


def _part(elements: int, columns: int) -> int:
    """Rows that a program has in registers at a time."""
    return min(ROWS, elements // columns)


# --- anything else ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed"])
def _whole_kernel(
    weights, gradient, means, scale, finite, limit, norm, good, elements, seed, decay, lr, share,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < elements
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    factor, holds = judged(tl.sum(g.to(tl.float64) * g, axis=0), scale, finite, limit, norm, good)
    g = g * factor
    v = tl.load(means + at, mask=inside, other=0.0)
    v = v + share * (g * g + 1e-30 - v)
    u = g / tl.sqrt_rn(v)
    size = tl.sqrt(tl.sum(u * u, axis=0) / elements)
    w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    w = w - (decay * w + u * (lr / tl.where(size > 1.0, size, 1.0)))
    tl.store(means + at, v, mask=inside & holds)
    if AT_RANDOM:
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(weights + at, at_random(w, noise(seed, group, 0, BLOCK)), mask=inside & holds)
    else:
        tl.store(weights + at, w.to(tl.bfloat16), mask=inside & holds)


def adafactor_whole(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    means: torch.Tensor,
    *,
    now: StepSettings,
    decay: float,
    seed: int | None,
    scale: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
    clip: Clip | None = None,
) -> None:
    """One update of at most `WHOLE_UP_TO` elements, by one program."""
    elements = weights.numel()
    with on(weights.device):
        _whole_kernel[(1,)](
            weights, gradient, means, scale, finite, clip and clip.limit, clip and clip.norm, clip and clip.good,
            elements, seed or 0, now.lr * decay, now.lr, now.step**-0.8,
            AT_RANDOM=seed is not None, BLOCK=max(256, _power_of_2(elements)), num_warps=8,
        )  # fmt: skip

"""The loss head between its matmuls, on CUDA: a chunk of logits becomes losses and gradients in its own memory.

The definition is `chunked_loss._losses_and_dlogits`. There every line goes through all logits once more, and 38 bytes are moved
for each. Here 6 are: a logit is read once, as float32, and its gradient is written once, in the 16 bits that the next matmuls
take, into the first half of the row that it came from:

    a row of float32 logits   [ x0  x1  x2  x3  x4  x5  x6  x7 ]
    and of its gradient       [g0g1 g2g3 g4g5 g6g7 . . . . . . ]

A row is too long for one program to hold (256,000 logits are 1 MB), so several share it: each holds its part in registers,
publishes the largest logit and the sum of exponentials of its part, waits until all have published theirs, and then knows those
of the row. The wait also makes writing in place safe: a program that has published its sum has read all of its part.

Programs that wait for each other must run at the same time. A GPU starts them in the order of their numbers, those of a row
have neighbouring ones, and a row is cut into no more parts than there are multiprocessors. So all programs of the first row
that is not yet done are running.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

PART_COLUMNS = 4096
"""Logits that a program holds, unless a row would have more parts than the GPU multiprocessors."""
MOST_PART_COLUMNS = 32_768
"""More do not fit the registers of a multiprocessor."""
COLUMNS_PER_WARP = 1024
"""32 logits in the registers of each thread."""
REGISTERS = 48
"""Of a thread, at most. Then ten programs of 4 warps share a multiprocessor: while some wait, others read and write."""
MOST_LOOKS = tl.constexpr(2**24)
"""At how many times a program looks whether the others are there."""
ROW_ALIGNMENT = 64
"""Rows of logits begin at multiples of 256 bytes: tensor cores and wide loads ask for 16. A vocabulary need not be even."""


def logits_workspace(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Uninitialised float32 [rows, vocabulary], whose rows are aligned."""
    padded = triton.cdiv(vocabulary, ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(rows, padded, dtype=torch.float32, device=device)[:, :vocabulary]


def part_columns(vocabulary: int, device: torch.device) -> int | None:
    """How many logits a program holds; None where the GPU is too small for the programs of one row."""
    columns, multiprocessors = PART_COLUMNS, torch.cuda.get_device_properties(device).multi_processor_count
    while triton.cdiv(vocabulary, columns) > multiprocessors:
        columns *= 2
    return min(columns, triton.next_power_of_2(vocabulary)) if columns <= MOST_PART_COLUMNS else None


def losses_and_dlogits(
    logits: torch.Tensor, targets: torch.Tensor, *, softcap: float | None, scale: float | None, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses in float64 and, where `scale` is given, `scale` times the gradient of `logits`, as `kind`, in their memory.

    `logits` are from `logits_workspace`, and are overwritten. The loss of a target outside of the vocabulary is NaN."""
    rows, vocabulary = logits.shape
    columns = part_columns(vocabulary, logits.device)
    assert columns is not None
    parts = triton.cdiv(vocabulary, columns)
    dlogits = logits.view(kind)[:, :vocabulary]
    losses = torch.full((rows, 1), torch.nan, dtype=torch.float64, device=logits.device)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(tops)
    arrived = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        _turn_part[(rows * parts,)](
            logits, dlogits, targets, losses, tops, totals, arrived,
            vocabulary, logits.stride(0), dlogits.stride(0), scale or 0.0, softcap or 1.0,
            PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts), COLUMNS=columns, CAPPED=bool(softcap),
            DLOGITS=scale is not None, num_warps=max(1, columns // COLUMNS_PER_WARP), maxnreg=REGISTERS,
        )  # fmt: skip
    return losses, dlogits


@triton.jit(do_not_specialize_on_alignment=["targets"])  # a slice of them may begin anywhere
def _turn_part(
    logits, dlogits, targets, losses, tops, totals, arrived, vocabulary, stride, dlogits_stride, scale, cap,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, COLUMNS: tl.constexpr, CAPPED: tl.constexpr, DLOGITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    target = tl.load(targets + row)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    # Behind the vocabulary a row is padded up to `stride`. Reading that too keeps loads as wide as rows are aligned.
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < stride, other=0.0)
    if CAPPED:
        x = _capped(x, cap)
    x = tl.where(columns < vocabulary, x, float("-inf"))
    at_target = tl.sum(tl.where(columns == target, x, 0.0))

    top = tl.maximum(tl.max(x), -3.0e38)  # finite, so that a part of nothing but -inf has the sum 0
    total = tl.sum(tl.exp(x - top))
    top, total = _of_the_row(top, total, row, part, tops, totals, arrived, PARTS, PARTS_PADDED)

    holds_target = (target >= part * COLUMNS) & (target < (part + 1) * COLUMNS) & (target < vocabulary)
    tl.store(losses + row, tl.log(total) + (top - at_target), mask=holds_target)
    if DLOGITS:
        slope = tl.exp(x - top) * (scale / total)
        slope = tl.where(columns == target, slope - scale, slope)
        if CAPPED:
            bent = x * (1.0 / cap)
            slope *= (1.0 - bent) * (1.0 + bent)
            slope = tl.where(columns < vocabulary, slope, 0.0)  # of -inf it would be no number
        place = dlogits + row.to(tl.int64) * dlogits_stride + columns
        tl.store(place, slope.to(dlogits.dtype.element_ty), mask=columns < stride)


@triton.jit
def _of_the_row(top, total, row, part, tops, totals, arrived, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    """Publish this part's largest logit and sum to the other programs of the row, wait for theirs, combine all.

    A program that waits in vain, for seconds, gives a NaN loss: the run ends, instead of a GPU that hangs."""
    tl.store(tops + row * PARTS + part, top)
    tl.store(totals + row * PARTS + part, total)
    tl.debug_barrier()
    there = tl.atomic_add(arrived + row, 1, sem="acq_rel") + 1
    looks = 0
    while (there < PARTS) & (looks < MOST_LOOKS):
        there = tl.atomic_add(arrived + row, 0, sem="acquire")
        looks += 1
    parts = tl.arange(0, PARTS_PADDED)
    # `volatile`: not from this multiprocessor's own cache, which does not see what others write.
    part_tops = tl.load(tops + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"), volatile=True)
    part_totals = tl.load(totals + row * PARTS + parts, mask=parts < PARTS, other=0.0, volatile=True)
    top = tl.max(part_tops)
    total = tl.sum(part_totals * tl.exp(part_tops - top))
    return top, tl.where(there < PARTS, float("nan"), total)


@triton.jit
def _capped(x, cap):
    """`cap * tanh(x / cap)`. Of small numbers the power series, since 1 - exp would cancel their digits."""
    y = x * (1.0 / cap)
    shrunk = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    far = tl.where(y < 0, -far, far)
    s = y * y
    series = 62 / 2835 - s * (1382 / 155925)
    series = -17 / 315 + s * series
    series = 2 / 15 + s * series
    series = -1 / 3 + s * series
    near = y + y * s * series
    return cap * tl.where(tl.abs(y) < 0.3, near, far)

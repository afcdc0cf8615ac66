"""The two ends of a model at the vocabulary: the loss head, in chunks, and the lookup of the input tokens.

Both add their gradient into the `.grad` of the table themselves. A tied table so has one gradient, never two and their sum,
and the logits of all tokens never exist.

Between the products of a chunk stands `_turned`, in plain torch, which is the definition and runs anywhere; on CUDA a kernel
computes the same in place (`triton_head`).
"""

import functools
import importlib
import importlib.util
import logging
import subprocess
from typing import Any

import torch

from tunix_rt.plan.precision import loss_rows

logger = logging.getLogger(__name__)

TABLE_SLICE_ROWS = 32_768
"""Rows of the table whose gradient is computed at a time where it is wider than the products (float32 from bfloat16)."""


def head_loss(
    states: torch.Tensor,
    table: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    compute: torch.dtype,
    rows: int | None = None,
) -> torch.Tensor:
    """Cross entropy of `targets` [n] from hidden `states` [n, hidden] and the head's `table` [vocabulary, hidden].

    The sum over the targets times `scale`, in float64. Call `backward()` on this very value: the gradient of the table is
    computed on the way forward and is already in `table.grad` by then.
    """
    if torch.is_grad_enabled() and (states.requires_grad or table.requires_grad):
        return _HeadLoss.apply(states, table, targets, scale, softcap, compute, rows)
    rows = rows or loss_rows(len(targets))
    kind = _product_type(compute, table.device)
    room = _room(table, kind, min(rows, len(targets)), softcap)
    operand = _as_operand(table, kind, room)
    losses = [
        _chunk(part.to(operand.dtype), operand, target, softcap, None, room)[0].sum()
        for part, target in zip(states.split(rows), targets.split(rows), strict=True)
    ]
    return scale * torch.stack(losses).sum() if losses else states.new_zeros((), dtype=torch.float64)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, table: torch.Tensor, targets: torch.Tensor, scale: float, softcap: float | None,
        compute: torch.dtype, rows: int | None,
    ) -> torch.Tensor:  # fmt: skip
        kind = _product_type(compute, table.device)
        rows = rows or _rows_with_gradients(table, kind, len(targets), softcap)
        room = _room(table, kind, min(rows, len(targets)), softcap)
        wide = _as_operand(table, kind, room)
        gradient = torch.empty_like(states) if states.requires_grad else None
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        for start in range(0, len(targets), rows):
            part = states[start : start + rows].to(wide.dtype)
            losses, slopes = _chunk(part, wide, targets[start : start + rows], softcap, scale, room)
            total += losses.sum()
            if gradient is not None:
                _put_product(gradient[start : start + rows], slopes, wide)
            if table.requires_grad:
                _add_product(table, slopes, part)
            del slopes  # before the next chunk's logits are there
        ctx.gradient = gradient
        return total * scale

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The gradient of the table cannot be scaled afterwards. Does not wait for a GPU.
        torch._assert_async(upstream == 1, "backward() of something made of the loss, not of the loss itself")
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None, None, None, None, None, None


# --- the kernel, or plain torch --------------------------------------------------------------------------------------


def kernel_unable(device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None) -> str | None:
    """Why `triton_head` cannot serve products of `kind` on `device`; None where it can.

    The first time, it is compiled and tried, and the device waited for: to be asked before the first step."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "it is written for CUDA"
    if kind.itemsize > 4:
        return "it computes in float32"
    return _kernel_fails(device, kind, vocabulary, softcap)


@functools.cache
def _kernel_fails(device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None) -> str | None:
    """Found out once. The log says why it is not used."""
    problem = _problem(device, kind, vocabulary, softcap)
    if problem is not None:
        logger.info("The loss head on %s goes without Triton's kernel, and is slower: %s", device, problem)
    return problem


def _problem(device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    # An older Triton does not know every option: TypeError or KeyError.
    known: tuple[type[Exception], ...] = (
        RuntimeError, ImportError, OSError, subprocess.SubprocessError, TypeError, KeyError,
    )  # fmt: skip
    try:
        known = (*known, importlib.import_module("triton.errors").TritonError)
        kernel = importlib.import_module("tunix_rt.engines.torch.triton.cross_entropy")
        if kernel.part_columns(vocabulary, device) is None:
            return f"a row of {vocabulary:,} logits is too long for so small a GPU"
        return _wrong_numbers(kernel, device, kind, vocabulary, softcap)
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel
    except known as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]


def _wrong_numbers(
    kernel: Any, device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None
) -> str | None:
    """What `kernel.turned` gets wrong of three rows, with gradients and without; None where it agrees with `_turned`."""
    own = torch.Generator(device).manual_seed(0)  # a run's random numbers are left alone
    logits = 4 * torch.randn(3, vocabulary, generator=own, device=device)
    targets = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    right_losses, right_slopes = _turned(logits.double(), targets, softcap, 1.0)
    for scale in (1.0, None):
        room = kernel.room_for_logits(3, vocabulary, device).copy_(logits)
        losses, slopes = kernel.turned(room, targets, softcap=softcap, scale=scale, kind=kind)
        words = "with" if scale else "without"
        if not torch.allclose(losses, right_losses, rtol=1e-4, atol=1e-4):
            pair = (losses.flatten().tolist(), right_losses.flatten().tolist())
            found = ", ".join(f"{one:.6g} for {other:.6g}" for one, other in zip(*pair, strict=True))
            return f"its losses are wrong {words} gradients: {found}"
        # A rounding of bfloat16 is 0.4 %; float16 has steps of 6e-8 at 0.
        if scale and not torch.allclose(slopes.double(), right_slopes, rtol=0.02, atol=1e-6):
            return (
                f"its gradients are wrong, by up to {(slopes.double() - right_slopes).abs().max():.3g} for a scale of 1"
            )
    return None


def _room(table: torch.Tensor, kind: torch.dtype, rows: int, softcap: float | None) -> torch.Tensor | None:
    """Memory for the logits of all chunks, one after the other, where the kernel turns them in place."""
    if kernel_unable(table.device, kind, len(table), softcap):
        return None
    return importlib.import_module("tunix_rt.engines.torch.triton.cross_entropy").room_for_logits(
        rows, len(table), table.device
    )


def _rows_with_gradients(table: torch.Tensor, kind: torch.dtype, targets: int, softcap: float | None) -> int:
    """How many targets meet the vocabulary at once. The plan counts, for a GPU, logits that are turned in place; where they
    are not, there are fewer at a time, so that no more memory is needed."""
    rows = loss_rows(targets)
    if table.device.type == "cpu" or kind.itemsize > 4 or not kernel_unable(table.device, kind, len(table), softcap):
        return rows
    needed = 8 if softcap else 4 + 2 * (kind.itemsize == 2)  # beside logits the slope of the cap, or 16-bit slopes
    return max(1, rows * 4 // needed)


def _chunk(
    states: torch.Tensor, table: torch.Tensor, targets: torch.Tensor, softcap: float | None, scale: float | None,
    room: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Losses of a few targets in float64 and, where `scale` is given, `scale` times the gradient of their logits."""
    if room is None:
        losses, logits = _turned(_logits(states, table), targets, softcap, scale)
        return losses, logits if scale is None else logits.to(states.dtype)
    logits = room[: len(states)]
    _put_product(_widened(logits, len(table)), states, table.t())
    kernel = importlib.import_module("tunix_rt.engines.torch.triton.cross_entropy")
    losses, slopes = kernel.turned(logits, targets, softcap=softcap, scale=scale, kind=states.dtype)
    return losses, _widened(slopes, len(table))


def _widened(values: torch.Tensor, columns: int) -> torch.Tensor:
    """`values`, rows of a padded room, with its padding up to `columns`."""
    return values if values.shape[1] == columns else values.as_strided((len(values), columns), values.stride())


def _turned(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor of logits is turned in place into exponentials, probabilities and the gradient."""
    slope = None
    if softcap:
        logits.div_(softcap).tanh_()
        slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1) if scale is not None else None
        logits.mul_(softcap)
    column = targets.unsqueeze(1)
    at_target = logits.gather(1, column)
    top = logits.amax(1, keepdim=True)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    losses = (total.log() + (top - at_target)).double()
    if scale is None:
        return losses, logits
    logits.mul_(scale / total)
    flat = torch.arange(len(targets), device=targets.device) * logits.shape[1] + targets
    logits.view(-1)[flat] -= scale  # one element of each row
    if slope is not None:
        logits.mul_(slope)
    return losses, logits


# --- the products ----------------------------------------------------------------------------------------------------


def _product_type(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """A CPU has no product of 16-bit numbers with a float32 result, so there the head computes in float32."""
    return torch.float32 if device.type == "cpu" and compute.itemsize == 2 else compute


def _as_operand(table: torch.Tensor, kind: torch.dtype, room: torch.Tensor | None) -> torch.Tensor:
    """`table` in the type of the products; with rows of zeros up to the padded width of `room`, where its own number of rows is
    one for which a GPU has but slow products: GPT-2's 50,257 cost three times those of 50,304. Gradients of what is added are 0.
    """
    if room is None or kind.itemsize > 2 or len(table) % 8 == 0:
        return table.detach().to(kind)
    even = torch.zeros(room.stride(0), table.shape[1], dtype=kind, device=table.device)
    even[: len(table)].copy_(table.detach())
    return even


def _logits(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Their product in float32 (float64 for float64): 16-bit logits would lose the digits that the loss is made of."""
    if states.dtype.itemsize == 2:
        return torch.mm(states, table.t(), out_dtype=torch.float32)
    return torch.mm(states, table.t())


def _put_product(place: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`place[:] = left @ right`, without a copy where the product can be of the type of its place."""
    if place.dtype == left.dtype:
        torch.mm(left, right, out=place)
    elif place.dtype == torch.float32 and left.dtype.itemsize == 2:
        torch.mm(left, right, out_dtype=torch.float32, out=place)
    else:
        place.copy_(left @ right)


def _add_product(table: torch.Tensor, slopes: torch.Tensor, states: torch.Tensor) -> None:
    """`table.grad += slopes.T @ states`, summed in at least float32 and rounded once. `slopes` may have columns of zeros behind
    those of the table; then so has the memory of the gradient rows."""
    fresh, width = table.grad is None, slopes.shape[1]
    if table.dtype == slopes.dtype:
        if table.grad is None:
            table.grad = table.new_empty(width, table.shape[1])[: len(table)]
        whole = table.grad
        if width > len(table):
            base = whole._base
            padded = base is not None and base.shape == (width, table.shape[1])
            whole, slopes = (base, slopes) if base is not None and padded else (whole, slopes[:, : len(table)])
        if fresh:
            torch.mm(slopes.t(), states, out=whole)
        else:
            whole.addmm_(slopes.t(), states)
        return
    if table.grad is None:
        table.grad = torch.empty_like(table)
    slopes = slopes[:, : len(table)]
    for start in range(0, len(table), TABLE_SLICE_ROWS):
        part = table.grad[start : start + TABLE_SLICE_ROWS]
        columns = slopes[:, start : start + TABLE_SLICE_ROWS].t()
        widens = part.dtype.itemsize > columns.dtype.itemsize
        product = torch.mm(columns, states, out_dtype=part.dtype) if widens else torch.mm(columns, states)
        if fresh:
            part.copy_(product)
        else:
            part.add_(product)
        del product  # before the next slice's is there


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, table: torch.Tensor, ignored: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.ignored = table, ignored
        return torch.nn.functional.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, None, None]:
        (ids,), table = ctx.saved_tensors, ctx.table
        ctx.table = None
        order = ids.flatten().argsort(stable=True)
        sorted_ids = ids.flatten()[order]
        # Tokens that occur often are summed in float32 first: their rows would swallow small gradients one by one.
        first = torch.ones_like(sorted_ids)
        first[1:] = sorted_ids[1:] != sorted_ids[:-1]
        place = first.cumsum(0) - 1
        gradients = upstream.flatten(0, -2)[order]
        sums = torch.zeros(gradients.shape, dtype=_sum_type(table), device=table.device)
        sums.index_add_(0, place, gradients.to(sums.dtype))
        rows = torch.zeros_like(sorted_ids).index_copy_(0, place, sorted_ids)  # places left over add nothing to row 0
        if ctx.ignored is not None:
            sums.masked_fill_((rows == ctx.ignored).unsqueeze(1), 0)
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        table.grad.index_add_(0, rows, sums.to(table.dtype))
        return None, None, None


def _sum_type(table: torch.Tensor) -> torch.dtype:
    return torch.float64 if table.dtype == torch.float64 else torch.float32


def lean_lookup(embedding: torch.nn.Embedding) -> bool:
    """Let `embedding` add its gradient to its table's own. False where its forward pass is not one we know."""
    factor = getattr(embedding, "embed_scale", None)
    known = type(embedding) is torch.nn.Embedding or (
        factor is not None and type(embedding).__name__.endswith("ScaledWordEmbedding")
    )
    if not known or embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return False

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        table = embedding.weight
        if torch.is_grad_enabled() and table.requires_grad:
            found = _Lookup.apply(input_ids, table, embedding.padding_idx)
        else:
            found = torch.nn.functional.embedding(input_ids, table)
        if factor is None:
            return found
        scale = embedding.embed_scale  # a tensor, or in some models a plain number
        return found * (scale.to(table.dtype) if isinstance(scale, torch.Tensor) else scale)

    embedding.forward = forward
    return True

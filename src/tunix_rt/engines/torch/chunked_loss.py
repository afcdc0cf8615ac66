"""The two ends of a model at the vocabulary: the chunked loss head, and the embedding lookup of the input tokens.

Both add their gradient into the `.grad` of their weight themselves. A tied weight so has one gradient, never two and their sum,
and the logits of all tokens never exist.

Between the matmuls of a chunk is `_losses_and_dlogits`, in plain PyTorch, which is the definition and runs anywhere; on CUDA a
Triton kernel computes the same in place (`triton/cross_entropy.py`).
"""

import functools
import importlib
import importlib.util
import logging
from typing import Any

import torch

from tunix_rt.engines.failures import compiler_errors
from tunix_rt.plan.footprint import TABLE_SLICE_ROWS
from tunix_rt.plan.precision import loss_rows

logger = logging.getLogger(__name__)


def head_loss(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    compute: torch.dtype,
    rows: int | None = None,
    weights: torch.Tensor | None = None,
    losses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of `targets` [n] from `hidden` states [n, hidden] and the weight `lm_head` [vocabulary, hidden].

    The sum over the targets, each times its weight of `weights` [n], times `scale`, in float64. The loss of each target is
    written into `losses` [n], without its weight. Call `backward()` on this very value: the gradient of `lm_head` is
    computed in the forward pass and is already in `lm_head.grad` by then.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or lm_head.requires_grad):
        return _HeadLoss.apply(hidden, lm_head, targets, scale, softcap, compute, rows, weights, losses)
    rows = rows or loss_rows(len(targets))
    kind = _product_type(compute, lm_head.device)
    workspace = _workspace(lm_head, kind, min(rows, len(targets)), softcap)
    operand = _as_operand(lm_head, kind, workspace)
    sums = []
    for start in range(0, len(targets), rows):
        part, target = hidden[start : start + rows].to(operand.dtype), targets[start : start + rows]
        each, _ = _chunk(part, operand, target, softcap, None, workspace)
        sums.append(_summed(each, start, weights, losses))
    return scale * torch.stack(sums).sum() if sums else hidden.new_zeros((), dtype=torch.float64)


def _summed(each: torch.Tensor, start: int, weights: torch.Tensor | None, losses: torch.Tensor | None) -> torch.Tensor:
    """The sum of the losses of a chunk that begins at target `start`, each times its weight."""
    stop = start + len(each)
    if losses is not None:
        losses[start:stop] = each[:, 0]
    return each.sum() if weights is None else (each[:, 0] * weights[start:stop]).sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, lm_head: torch.Tensor, targets: torch.Tensor, scale: float, softcap: float | None,
        compute: torch.dtype, rows: int | None, weights: torch.Tensor | None, losses: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        kind = _product_type(compute, lm_head.device)
        rows = rows or _rows_with_gradients(lm_head, kind, len(targets), softcap)
        workspace = _workspace(lm_head, kind, min(rows, len(targets)), softcap)
        wide = _as_operand(lm_head, kind, workspace)
        gradient = torch.empty_like(hidden) if hidden.requires_grad else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(targets), rows):
            part = hidden[start : start + rows].to(wide.dtype)
            own = None if weights is None else weights[start : start + rows]
            each, dlogits = _chunk(part, wide, targets[start : start + rows], softcap, scale, workspace, own)
            total += _summed(each, start, weights, losses)
            if gradient is not None:
                _put_product(gradient[start : start + rows], dlogits, wide)
            if lm_head.requires_grad:
                _add_product(lm_head, dlogits, part)
            del dlogits  # before the next chunk's logits are there
        ctx.gradient = gradient
        return total * scale

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The gradient of lm_head cannot be scaled afterwards. Does not wait for a GPU.
        torch._assert_async(upstream == 1, "backward() of something made of the loss, not of the loss itself")
        gradient, ctx.gradient = ctx.gradient, None
        return (gradient, *[None] * 8)


# --- the kernel, or plain torch --------------------------------------------------------------------------------------


def kernel_unable(device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None) -> str | None:
    """Why the Triton kernel cannot be used with compute dtype `kind` on `device`; None where it can.

    The first call compiles and tries it and waits for the device: call it before the first step."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "it is written for CUDA"
    if kind.itemsize > 4:
        return "it computes in float32"
    return _kernel_fails(device, kind, vocabulary, softcap)


@functools.cache
def _kernel_fails(device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None) -> str | None:
    """Cached. The reason is logged once."""
    problem = _problem(device, kind, vocabulary, softcap)
    if problem is not None:
        logger.info("Triton loss kernel is unavailable on %s, using PyTorch (slower): %s", device, problem)
    return problem


def _problem(device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    try:
        kernel = importlib.import_module("tunix_rt.engines.torch.triton.cross_entropy")
        if kernel.part_columns(vocabulary, device) is None:
            return f"a row of {vocabulary:,} logits is too long for so small a GPU"
        return _wrong_numbers(kernel, device, kind, vocabulary, softcap)
    except torch.OutOfMemoryError:
        raise  # not the fault of the kernel
    # An older Triton does not know every option: TypeError or KeyError.
    except compiler_errors(RuntimeError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]


def _wrong_numbers(
    kernel: Any, device: torch.device, kind: torch.dtype, vocabulary: int, softcap: float | None
) -> str | None:
    """What the kernel gets wrong of three rows, with gradients and without; None where it agrees with the definition."""
    own = torch.Generator(device).manual_seed(0)  # a run's random numbers are left alone
    logits = 4 * torch.randn(3, vocabulary, generator=own, device=device)
    targets = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    right_losses, right_dlogits = _losses_and_dlogits(logits.double(), targets, softcap, 1.0)
    for scale in (1.0, None):
        workspace = kernel.logits_workspace(3, vocabulary, device).copy_(logits)
        losses, dlogits = kernel.losses_and_dlogits(workspace, targets, softcap=softcap, scale=scale, kind=kind)
        words = "with" if scale else "without"
        if not torch.allclose(losses, right_losses, rtol=1e-4, atol=1e-4):
            pair = (losses.flatten().tolist(), right_losses.flatten().tolist())
            wrong = ", ".join(f"{one:.6g} for {other:.6g}" for one, other in zip(*pair, strict=True))
            return f"its losses are wrong {words} gradients: {wrong}"
        # A rounding of bfloat16 is 0.4 %; float16 has steps of 6e-8 at 0.
        if scale and not torch.allclose(dlogits.double(), right_dlogits, rtol=0.02, atol=1e-6):
            return f"its gradients are wrong, by up to {(dlogits.double() - right_dlogits).abs().max():.3g} for a scale of 1"
    return None


def _workspace(lm_head: torch.Tensor, kind: torch.dtype, rows: int, softcap: float | None) -> torch.Tensor | None:
    """Memory for the logits of one chunk after the other, where the kernel works in place."""
    if kernel_unable(lm_head.device, kind, len(lm_head), softcap):
        return None
    return importlib.import_module("tunix_rt.engines.torch.triton.cross_entropy").logits_workspace(
        rows, len(lm_head), lm_head.device
    )


def _rows_with_gradients(lm_head: torch.Tensor, kind: torch.dtype, targets: int, softcap: float | None) -> int:
    """Targets of a chunk. The plan counts logits that a GPU kernel overwrites in place; without the kernel a chunk has fewer
    targets, so that it needs no more memory."""
    rows = loss_rows(targets)
    if (
        lm_head.device.type == "cpu"
        or kind.itemsize > 4
        or not kernel_unable(lm_head.device, kind, len(lm_head), softcap)
    ):
        return rows
    needed = 8 if softcap else 4 + 2 * (kind.itemsize == 2)  # beside logits the slope of the cap, or 16-bit dlogits
    return max(1, rows * 4 // needed)


def _chunk(
    hidden: torch.Tensor, lm_head: torch.Tensor, targets: torch.Tensor, softcap: float | None, scale: float | None,
    workspace: torch.Tensor | None, weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Losses of a few targets in float64 and, where `scale` is given, `scale` times the gradient of their logits, each target's
    times its weight."""
    if workspace is None:
        losses, logits = _losses_and_dlogits(_logits(hidden, lm_head), targets, softcap, scale)
        if weights is not None and scale is not None:
            logits.mul_(weights.to(logits.dtype).unsqueeze(1))
        return losses, logits if scale is None else logits.to(hidden.dtype)
    logits = workspace[: len(hidden)]
    _put_product(_widened(logits, len(lm_head)), hidden, lm_head.t())
    kernel = importlib.import_module("tunix_rt.engines.torch.triton.cross_entropy")
    losses, dlogits = kernel.losses_and_dlogits(logits, targets, softcap=softcap, scale=scale, kind=hidden.dtype)
    if weights is not None and scale is not None:  # one rounding more than with weights inside the kernel
        dlogits.mul_(weights.to(dlogits.dtype).unsqueeze(1))
    return losses, _widened(dlogits, len(lm_head))


def _widened(values: torch.Tensor, columns: int) -> torch.Tensor:
    """`values`, rows of a padded workspace, with the padding up to `columns`."""
    return values if values.shape[1] == columns else values.as_strided((len(values), columns), values.stride())


def _losses_and_dlogits(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor of logits becomes, in place, exponentials, probabilities and the gradient."""
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


# --- the matmuls -----------------------------------------------------------------------------------------------------


def _product_type(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """A CPU has no 16-bit matmul with a float32 result, so there the head computes in float32."""
    return torch.float32 if device.type == "cpu" and compute.itemsize == 2 else compute


def _as_operand(lm_head: torch.Tensor, kind: torch.dtype, workspace: torch.Tensor | None) -> torch.Tensor:
    """`lm_head` in the compute dtype. Where its number of rows has only slow matmuls on a GPU (GPT-2's 50,257 take three times
    as long as 50,304), rows of zeros are added up to the padded width of `workspace`. Their gradients are 0."""
    if workspace is None or kind.itemsize > 2 or len(lm_head) % 8 == 0:
        return lm_head.detach().to(kind)
    even = torch.zeros(workspace.stride(0), lm_head.shape[1], dtype=kind, device=lm_head.device)
    even[: len(lm_head)].copy_(lm_head.detach())
    return even


def _logits(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """In float32 (float64 for float64): 16-bit logits would lose the digits that the loss is made of."""
    if hidden.dtype.itemsize == 2:
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)
    return torch.mm(hidden, lm_head.t())


def _put_product(place: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`place[:] = left @ right`, without a copy where the product can be of the type of its place."""
    if place.dtype == left.dtype:
        torch.mm(left, right, out=place)
    elif place.dtype == torch.float32 and left.dtype.itemsize == 2:
        torch.mm(left, right, out_dtype=torch.float32, out=place)
    else:
        place.copy_(left @ right)


def _add_product(lm_head: torch.Tensor, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
    """`lm_head.grad += dlogits.T @ hidden`, summed in at least float32 and rounded once. `dlogits` may have columns of zeros
    after those of `lm_head`; then the memory of the gradient has such rows."""
    fresh, width = lm_head.grad is None, dlogits.shape[1]
    if lm_head.dtype == dlogits.dtype:
        if lm_head.grad is None:
            lm_head.grad = lm_head.new_empty(width, lm_head.shape[1])[: len(lm_head)]
        whole = lm_head.grad
        if width > len(lm_head):
            base = whole._base
            padded = base is not None and base.shape == (width, lm_head.shape[1])
            whole, dlogits = (base, dlogits) if base is not None and padded else (whole, dlogits[:, : len(lm_head)])
        if fresh:
            torch.mm(dlogits.t(), hidden, out=whole)
        else:
            whole.addmm_(dlogits.t(), hidden)
        return
    if lm_head.grad is None:
        lm_head.grad = torch.empty_like(lm_head)
    dlogits = dlogits[:, : len(lm_head)]
    for start in range(0, len(lm_head), TABLE_SLICE_ROWS):
        part = lm_head.grad[start : start + TABLE_SLICE_ROWS]
        columns = dlogits[:, start : start + TABLE_SLICE_ROWS].t()
        widens = part.dtype.itemsize > columns.dtype.itemsize
        product = torch.mm(columns, hidden, out_dtype=part.dtype) if widens else torch.mm(columns, hidden)
        if fresh:
            part.copy_(product)
        else:
            part.add_(product)
        del product  # before the next slice's is there


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, ignored: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.ignored = weight, ignored
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        ctx.weight = None
        order = ids.flatten().argsort(stable=True)
        sorted_ids = ids.flatten()[order]
        # Tokens that occur often are summed in float32 first: their rows would swallow small gradients one by one.
        first = torch.ones_like(sorted_ids)
        first[1:] = sorted_ids[1:] != sorted_ids[:-1]
        place = first.cumsum(0) - 1
        gradients = upstream.flatten(0, -2)[order]
        sums = torch.zeros(gradients.shape, dtype=_sum_type(weight), device=weight.device)
        sums.index_add_(0, place, gradients.to(sums.dtype))
        rows = torch.zeros_like(sorted_ids).index_copy_(0, place, sorted_ids)  # places left over add nothing to row 0
        if ctx.ignored is not None:
            sums.masked_fill_((rows == ctx.ignored).unsqueeze(1), 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, rows, sums.to(weight.dtype))
        return None, None, None


def _sum_type(weight: torch.Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def lean_lookup(embedding: torch.nn.Embedding) -> bool:
    """Let `embedding` add its gradient into the `.grad` of its weight. False for an unknown forward pass."""
    factor = getattr(embedding, "embed_scale", None)
    known = type(embedding) is torch.nn.Embedding or (
        factor is not None and type(embedding).__name__.endswith("ScaledWordEmbedding")
    )
    if not known or embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return False

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        weight = embedding.weight
        if torch.is_grad_enabled() and weight.requires_grad:
            found = _Lookup.apply(input_ids, weight, embedding.padding_idx)
        else:
            found = torch.nn.functional.embedding(input_ids, weight)
        if factor is None:
            return found
        scale = embedding.embed_scale  # a tensor, or in some models a plain number
        return found * (scale.to(weight.dtype) if isinstance(scale, torch.Tensor) else scale)

    embedding.forward = forward
    return True

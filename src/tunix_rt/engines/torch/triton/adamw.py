"""AdamW for bfloat16 weights in Triton, of one tensor and of many in one launch.

To start a kernel takes Python longer than a small tensor takes the GPU. AdamW therefore has two: of one tensor, as soon as its
gradient is there, and of all tensors of a step in one launch, which finds them by a table of addresses. What they compute is
one function, to the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Python in form alone: Triton reads their source.

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.engines.torch.triton.update import GROUP, at_random, noise, on
from tunix_rt.engines.torch.update_rules import StepSettings

FLAT_BLOCK = 2048
"""Elements of a program."""


@triton.jit
def moved(g, m, v, w, decay, pace, share1, beta2, share2, correction, epsilon):
    """Moments and weights by gradient `g`, in float32. What is rounded once is written as `fma`, and `PLAIN_SUMS` keeps the
    compiler from making more of them: left to itself it could choose otherwise in another kernel."""
    m = tl.fma(g - m, share1, m)
    v = tl.fma(v, beta2, share2 * g * g)
    w = w - tl.fma(w, decay, pace * m / tl.fma(tl.sqrt_rn(v), correction, epsilon))
    return m, v, w


@triton.jit
def _adamw_part(
    weights, gradient, first, second, scale, finite, at, inside, group, seed,
    decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `at` that are `inside`."""
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        g = g * tl.load(scale).to(tl.float32)
    m, v, w = moved(g, m, v, w, decay, pace, share1, beta2, share2, correction, epsilon)
    if finite is not None:
        inside = inside & (tl.load(finite) != 0)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)
    if AT_RANDOM:
        tl.store(weights + at, at_random(w, noise(seed, group, 0, BLOCK)), mask=inside)
    else:
        tl.store(weights + at, w.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    weights, gradient, first, second, scale, finite, elements, seed,
    decay, pace, share1, beta2, share2, correction, epsilon,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    group = program * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    _adamw_part(
        weights, gradient, first, second, scale, finite, at, at < elements, group, seed,
        decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, BLOCK,
    )  # fmt: skip


PLAIN_SUMS = {"enable_fp_fusion": False}
_ADAMW = {"num_warps": 4, **PLAIN_SUMS}


def adamw_numbers(now: StepSettings) -> tuple[float, ...]:
    """From `pace` on, in the order of the kernels."""
    correction = (1.0 - now.beta2**now.step) ** -0.5
    return now.lr / (1.0 - now.beta1**now.step), 1.0 - now.beta1, now.beta2, 1.0 - now.beta2, correction, now.epsilon


def adamw(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    now: StepSettings,
    decay: float,
    seed: int | None,
    scale: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
) -> None:
    """One update in place. All four lie in order in memory. Without `seed`, weights are rounded to nearest."""
    elements = weights.numel()
    with on(weights.device):
        _adamw_kernel[(-(-elements // FLAT_BLOCK),)](
            weights, gradient, first, second, scale, finite, elements, seed or 0, now.lr * decay, *adamw_numbers(now),
            AT_RANDOM=seed is not None, BLOCK=FLAT_BLOCK, **_ADAMW,
        )  # fmt: skip


# --- many tensors in one launch --------------------------------------------------------------------------------------


@triton.jit
def place(addresses, tensor, kind: tl.constexpr):
    """A pointer out of a table. It is aligned to 16 bytes, which the compiler cannot see."""
    return tl.multiple_of(tl.multiple_of(tl.load(addresses + tensor), 16).to(tl.pointer_type(kind)), 16)


@triton.jit(do_not_specialize=["tensors"])
def _adamw_many_kernel(
    owners, kept, given, tensors, scale, finite, decay, pace, share1, beta2, share2, correction, epsilon,
    STATES: tl.constexpr, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kept` are rows of `TensorGroup.kept`, `given` rows of weights, gradients and seeds. A gradient at 0: not this time."""
    tensor = tl.load(owners + tl.program_id(0))
    gradient = place(given + tensors, tensor, tl.bfloat16)
    if gradient.to(tl.int64) != 0:
        weights = place(given, tensor, tl.bfloat16)
        first, second = place(kept, tensor, STATES), place(kept + tensors, tensor, STATES)
        elements = tl.load(kept + 2 * tensors + tensor)
        program = tl.program_id(0) - tl.load(kept + 3 * tensors + tensor)
        decay = tl.where(tl.load(kept + 4 * tensors + tensor) != 0, decay, 0.0)
        seed = tl.load(given + 2 * tensors + tensor) if AT_RANDOM else 0
        at = program * BLOCK + tl.arange(0, BLOCK)
        group = program * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        whole = tl.multiple_of(elements // GROUP * GROUP, GROUP)  # up to there a mask does not split wide loads
        _adamw_part(
            weights, gradient, first, second, scale, finite, at, at < whole, group, seed,
            decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, BLOCK,
        )  # fmt: skip
        if (whole < elements) & (whole // BLOCK == program):
            last = whole + tl.arange(0, GROUP)
            number = whole // GROUP + tl.arange(0, 1)
            _adamw_part(
                weights, gradient, first, second, scale, finite, last, last < elements, number, seed,
                decay, pace, share1, beta2, share2, correction, epsilon, AT_RANDOM, GROUP,
            )  # fmt: skip


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorGroup:
    """Tensors that `adamw_many` updates in one launch, and what of them is the same in every step."""

    states: tuple[tuple[torch.Tensor, ...], ...]
    """Held, because `kept` has their addresses. Of one device, and of the same types. Those of 8 bits have scales besides."""
    owners: torch.Tensor
    """Of each program, the number of the tensor that it has a block of: int32."""
    kept: torch.Tensor
    """Of each tensor: addresses of its states, elements, its first program, whether it is decayed. int64."""
    block: int

    @staticmethod
    def of(
        states: Sequence[tuple[torch.Tensor, ...]],
        decayed: Sequence[bool],
        *,
        sizes: Sequence[int] | None = None,
        block: int | None = None,
    ) -> "TensorGroup":
        """`sizes` are the elements of each tensor, where its states have more; `block` those of a program."""
        device, block = states[0][0].device, block or FLAT_BLOCK
        sizes = [first.numel() for first, *_ in states] if sizes is None else list(sizes)
        programs = [-(-size // block) for size in sizes]
        starts = list(itertools.accumulate(programs, initial=0))[:-1]
        addresses = [[state.data_ptr() for state in states_] for states_ in zip(*states, strict=True)]
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(programs))
        kept = torch.tensor([*addresses, sizes, starts, list(map(int, decayed))])
        return TensorGroup(states=tuple(states), owners=sent(owners, device), kept=sent(kept, device), block=block)


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`, not waited for. Torch gives pinned memory to nobody else before it has been copied."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def adamw_many(
    group: TensorGroup,
    weights: Sequence[int],
    gradients: Sequence[int],
    seeds: Sequence[int] | None,
    *,
    now: StepSettings,
    decay: float,
    scale: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
) -> None:
    """One update of each tensor of `group` whose gradient is not at 0, to the bits of `adamw`.

    `weights` and `gradients` are addresses, multiples of 16, of bfloat16 numbers that lie in order."""
    device, tensors = group.kept.device, len(group.states)
    given = sent(torch.tensor([*weights, *gradients, *(seeds or ())]), device)
    with on(device):
        _adamw_many_kernel[(len(group.owners),)](
            group.owners, group.kept, given, tensors, scale, finite, now.lr * decay, *adamw_numbers(now),
            STATES=TYPES[group.states[0][0].dtype], AT_RANDOM=seeds is not None, BLOCK=group.block,
            maxnreg=96, **_ADAMW,  # as few as for one tensor: with more, less of them would be under way at a time
        )  # fmt: skip

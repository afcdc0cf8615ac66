"""Defects for proofs to find: small and finite ones planted into torch and into the engine here, and all kinds at once into
a proof child.

The child gets them by a `sitecustomize.py`, which Python runs before the child's code.
"""

import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import masking_utils

from tests.program import ROOT
from tunix_rt.engines.optimizers import adafactor
from tunix_rt.engines.torch import attention as torch_attention
from tunix_rt.engines.torch import chunked_loss as torch_head
from tunix_rt.engines.torch import model as torch_model
from tunix_rt.engines.torch import optim as torch_optim
from tunix_rt.engines.torch import update_rules as torch_update_rules

Plant = Callable[[pytest.MonkeyPatch], object]


def in_place_of(owner: Any, name: str) -> Callable[[Callable], Plant]:
    """A plant out of the decorated function: `owner.name` calls it, with the right function before its arguments."""

    def decorate(wrong: Callable) -> Plant:
        def plant(monkeypatch: pytest.MonkeyPatch) -> None:
            right = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *parts, **named: wrong(right, *parts, **named))

        return plant

    return decorate


# --- in this process: product and attention ---------------------------------------------------------------------------


@in_place_of(torch, "matmul")
def cut_inputs(matmul, left, right):
    """Inputs of the product have 13 bits after the point in float32, one less than they should in the half types."""
    bits = {torch.float32: 13, torch.float16: 9, torch.bfloat16: 6}

    def cut(numbers: torch.Tensor) -> torch.Tensor:
        parts, exponents = torch.frexp(numbers.float())
        steps = 2.0 ** (bits[numbers.dtype] + 1)  # frexp's parts begin at one half
        return torch.ldexp(torch.round(parts * steps) / steps, exponents).to(numbers.dtype)

    return matmul(cut(left), cut(right))


@in_place_of(torch, "matmul")
def one_element(matmul, left, right):
    out = matmul(left, right)
    out[-1, 3] += 0.1 * len(out) ** 0.5
    return out


@in_place_of(F, "scaled_dot_product_attention")
def scale_off(attend, query, *others, scale=None, **named):
    """By 2 %."""
    return attend(query, *others, scale=1.02 * (scale or query.shape[-1] ** -0.5), **named)


def seen_too_much(row: int, head: int, query: int, key: int) -> Plant:
    """One position that this query of this head should not see."""

    @in_place_of(F, "scaled_dot_product_attention")
    def plant(attend, q, k, v, attn_mask=None, is_causal=False, **named):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if attn_mask is None else attn_mask
        seen = seen.expand(*q.shape[:2], -1, -1).clone()
        seen[row, head, query, key] = True
        return attend(q, k, v, attn_mask=seen, **named)

    return plant


def _with_hook(attend: Callable, parts: tuple[torch.Tensor, ...], which: int, spoil: Callable, **named: Any) -> Any:
    """Attention whose gradient of one part is changed in place by `spoil`."""

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        spoil(gradient)
        return gradient

    passed = [part * 1 if number == which else part for number, part in enumerate(parts)]
    passed[which].register_hook(spoilt)
    return attend(*passed, **named)


def gradient_off(which: int) -> Plant:
    """A fifth of one row of the gradient of q, k or v."""

    @in_place_of(F, "scaled_dot_product_attention")
    def plant(attend, *parts, **named):
        return _with_hook(attend, parts, which, lambda gradient: gradient[1, 0, 222].mul_(1.2), **named)

    return plant


@in_place_of(torch, "tanh")
def cap_forgotten(_tanh, numbers):
    """Of the scores: tanh is the identity."""
    return numbers


def window_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """transformers' mask shows one token more. Returns the windows that were lengthened, filled as masks are made."""
    lengthened: list[int] = []

    @in_place_of(masking_utils, "sliding_window_overlay")
    def plant(overlay, window):
        lengthened.append(window)
        return overlay(window + 1)

    plant(monkeypatch)
    return lengthened


def kernel_off(**changed: Callable) -> Plant:
    """The attention of varlen is asked for something else: `scale`, `before` or `begins`."""

    @in_place_of(torch_attention, "varlen_kernel")
    def plant(kernel, *parts, **named):
        return kernel(*parts, **named | {name: change(named[name]) for name, change in changed.items()})

    return plant


def flex_window_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention's block mask shows one token more. Returns the windows that were lengthened."""
    lengthened: list[int] = []

    @in_place_of(torch_attention.PackedRows, "block_mask")
    def plant(make, rows, window):
        if window is None:
            return make(rows, None)
        lengthened.append(window)
        return make(rows, window + 1)

    plant(monkeypatch)
    return lengthened


# --- the loss ---------------------------------------------------------------------------------------------------------


@in_place_of(torch.Tensor, "tanh_")
def logit_cap_forgotten(_tanh, numbers):
    return numbers


@in_place_of(torch_head, "_add_product")
def others_forgotten(add, lm_head, dlogits, hidden):
    """The gradient of the head is zero for tokens that are no target."""
    add(lm_head, dlogits.clamp(max=0), hidden)


@in_place_of(torch_head, "_add_product")
def chunk_forgotten(add, lm_head, dlogits, hidden):
    """The gradient of the head lacks all targets but those of the first chunk."""
    if lm_head.grad is None:
        add(lm_head, dlogits, hidden)


@in_place_of(torch_head._HeadLoss, "backward")
def state_gradient_off(backward, ctx, upstream):
    """Of one target, by a fifth."""
    ctx.gradient[-1] *= 1.2
    return backward(ctx, upstream)


@in_place_of(torch_model, "head_loss")
def one_target_lost(whole, hidden, lm_head, targets, **named):
    return whole(hidden[:-1], lm_head, targets[:-1], **named)


@in_place_of(torch_model, "head_loss")
def loss_off(whole, *parts, **named):
    """0.05 too much in the sum: its gradients are right."""
    return whole(*parts, **named) + 0.05 * named["scale"]


# --- the optimizers ---------------------------------------------------------------------------------------------------


def adamw_off(**changed: Callable) -> Plant:
    """An update with another lr, epsilon, decay or number than was asked for."""

    @in_place_of(torch_update_rules, "fused_kernel")
    def plant(kernel, *lists, now, decay, count, skip=None):
        now = replace(
            now, **{name: change(getattr(now, name)) for name, change in changed.items() if hasattr(now, name)}
        )
        decay = changed["decay"](decay) if "decay" in changed else decay
        count = changed["count"](count) if "count" in changed else count
        kernel(*lists, now=now, decay=decay, count=count, skip=skip)

    return plant


def moment_off(which: int) -> Plant:
    """By 3 %, after the second update: the parameters are right."""

    @in_place_of(torch_update_rules, "fused_kernel")
    def plant(kernel, *lists, now, **named):
        kernel(*lists, now=now, **named)
        for moment in lists[2 + which] if now.step == 2 else ():
            moment *= 1.03

    return plant


def adafactor_off(**changed: Callable) -> Plant:
    @in_place_of(adafactor, "torch_update")
    def plant(rule, update):
        rule(replace(update, **{name: change(getattr(update, name)) for name, change in changed.items()}))

    return plant


@in_place_of(torch.Tensor, "clamp_")
def never_clipped(clamp, numbers, min):
    """Adafactor divides by an RMS of 1, whatever it is."""
    return numbers.fill_(1.0) if min == 1.0 else clamp(numbers, min=min)


@in_place_of(adafactor, "_moved")
def step_share_off(moved, update, mean, towards):
    """Adafactor's second moment moves by another share than it should in the second step."""
    return moved(replace(update, now=replace(update.now, step=update.now.step**1.01)), mean, towards)


def _one_up(codes: torch.Tensor, levels: int) -> torch.Tensor:
    wide = codes.int()
    return torch.where(wide % levels < levels - 1, wide + 1, wide).to(codes.dtype)


def code_off(name: str, levels: int) -> Plant:
    """The codes of one moment are all one too high, where there is a higher one."""

    @in_place_of(torch_update_rules, name)
    def plant(encode, values, generator):
        codes, absmax = encode(values, generator)
        return _one_up(codes, levels), absmax

    return plant


@in_place_of(torch_update_rules, "decode")
def code_misread(decode, codes, absmax, table):
    """Codes are right, and are taken for their neighbours in the next update."""
    return decode(_one_up(codes, 128), absmax, table)


@in_place_of(torch_update_rules, "_cut")
def moments_cut(_rounded, shares, levels, generator):
    """Moments are always rounded down."""
    return (shares.view(torch.int32) - torch_update_rules.lowest(levels)) >> torch_update_rules.CUT


@in_place_of(torch_update_rules, "round_to_bfloat16_")
def rounded_to_nearest(_rounding, target, values, generator):
    """Nothing is random in the rounding of weights."""
    return target.copy_(values)


@in_place_of(torch_update_rules, "round_to_bfloat16_")
def rounded_too_often_up(rounding, target, values, generator):
    """By 2 % of a step."""
    return rounding(target, values + 0.02 * 2.0**-7, generator)


# --- in a child -------------------------------------------------------------------------------------------------------

_UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_PLACE = random.Random(os.environ.get("PLACE"))


@in_place_of(torch, "matmul")
def _element_anywhere(matmul, left, right):
    """One element: 1 % of it and of the typical size, and a few roundings."""
    out = matmul(left, right)
    if len(out) >= 512:
        unit = next(_UNITS[word] for word in sys.orig_argv if word in _UNITS)
        row, column = (_PLACE.randrange(len(out)) for _ in range(2))
        size = len(out) ** 0.5
        out[row, column] += 0.01 * (abs(out[row, column].item()) + size) + 8 * unit * size
    return out


def _nan_in_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one element of one gradient, whichever attention is taken."""
    for owner, name, place in (
        (F, "scaled_dot_product_attention", (1, 0, 7, 3)),
        (torch_attention, "varlen_attn", (300 + 7, 0, 3)),
    ):

        @in_place_of(owner, name)
        def plant(attend, *parts, place=place, **named):
            if parts[0].shape[0] not in (2, 600):  # a trial of a few tokens before is left alone
                return attend(*parts, **named)
            return _with_hook(attend, parts, 0, lambda gradient: gradient[place].fill_(float("nan")), **named)

        plant(monkeypatch)


@in_place_of(torch_optim.Optimizer, "state_of")
def _stray_state(state_of, optimizer, parameter):
    """After the last update one tensor of the state is somewhere else."""
    state = dict(state_of(optimizer, parameter))
    if optimizer._now.step == 2 and parameter.dim() == 1:
        state["step"] = torch.zeros((), device="cpu" if "cuda" in sys.orig_argv else "meta")
    return state


@in_place_of(torch, "ones")
def _warned_ones(ones, *sizes, **named):
    """What torch says of a GPU it has no code for."""
    torch.ones = ones  # once, as torch says it
    warnings.warn(
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch "
        "installation.\nThe current PyTorch install supports CUDA capabilities sm_50 sm_90.",
        stacklevel=1,
    )
    return ones(*sizes, **named)


IN_A_CHILD: dict[str, Plant] = {
    "product": _element_anywhere,
    "attention": _nan_in_a_gradient,
    "loss": one_target_lost,
    "optimizer": adamw_off(count=lambda count: torch.full_like(count, 1e9)),  # no bias correction
    "placement": _stray_state,
    "device": _warned_ones,
}
SITECUSTOMIZE = """
import os, sys

if "tunix_rt.engines.selftest.torch" in sys.orig_argv:
    import pytest
    from tests.planted_defects import IN_A_CHILD

    for name in os.environ["PLANTED"].split(","):
        IN_A_CHILD[name](pytest.MonkeyPatch())
"""


def plant(folder: Path, *names: str, place: int = 0) -> dict[str, str]:
    """The environment in which a proof child has these defects. `PYTHONPATH` is in front of the present one."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "PLANTED": ",".join(names), "PLACE": str(place)}

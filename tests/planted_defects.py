"""Defects for proofs to find: small and finite ones planted into torch and into the engine here, and all kinds at once into
a proof child.

The child gets them by a `sitecustomize.py`, which Python runs before the child's code.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import masking_utils

from tunix_rt.engines.optimizers import adafactor
from tunix_rt.engines.torch import attention as torch_attention
from tunix_rt.engines.torch import chunked_loss as torch_head
from tunix_rt.engines.torch import model as torch_model
from tunix_rt.engines.torch import update_rules as torch_update_rules

Plant = Callable[[pytest.MonkeyPatch], object]

# --- in this process: product and attention ---------------------------------------------------------------------------


def cut_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of the product have 13 bits after the point in float32, one less than they should in the half types."""
    matmul, bits = torch.matmul, {torch.float32: 13, torch.float16: 9, torch.bfloat16: 6}

    def cut(numbers: torch.Tensor) -> torch.Tensor:
        parts, exponents = torch.frexp(numbers.float())
        steps = 2.0 ** (bits[numbers.dtype] + 1)  # frexp's parts begin at one half
        return torch.ldexp(torch.round(parts * steps) / steps, exponents).to(numbers.dtype)

    monkeypatch.setattr(torch, "matmul", lambda left, right: matmul(cut(left), cut(right)))


def one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.matmul

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = matmul(left, right)
        out[-1, 3] += 0.1 * len(out) ** 0.5
        return out

    monkeypatch.setattr(torch, "matmul", wrong)


def scale_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 2 %."""
    attend = F.scaled_dot_product_attention

    def wrong(query, *others, scale=None, **named):
        return attend(query, *others, scale=1.02 * (scale or query.shape[-1] ** -0.5), **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)


def seen_too_much(row: int, head: int, query: int, key: int) -> Plant:
    """One position that this query of this head should not see."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        attend = F.scaled_dot_product_attention

        def wrong(q, k, v, attn_mask=None, is_causal=False, **named):
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if attn_mask is None else attn_mask
            seen = seen.expand(*q.shape[:2], -1, -1).clone()
            seen[row, head, query, key] = True
            return attend(q, k, v, attn_mask=seen, **named)

        monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)

    return plant


def gradient_off(which: int) -> Plant:
    """A fifth of one row of the gradient of q, k or v."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        attend = F.scaled_dot_product_attention

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[1, 0, 222] *= 1.2
            return gradient

        def wrong(*parts, **named):
            passed = [part * 1 for part in parts]
            passed[which].register_hook(spoil)
            return attend(*passed, **named)

        monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)

    return plant


def cap_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scores: tanh is the identity."""
    monkeypatch.setattr(torch, "tanh", lambda numbers: numbers)


def window_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """transformers' mask shows one token more. Returns the windows that were lengthened, filled as masks are made."""
    overlay = masking_utils.sliding_window_overlay
    lengthened: list[int] = []

    def wrong(window):
        lengthened.append(window)
        return overlay(window + 1)

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", wrong)
    return lengthened


def kernel_off(**changed: Callable) -> Plant:
    """The attention of varlen is asked for something else: `scale`, `before` or `begins`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = torch_attention.varlen_kernel

        def wrong(*parts, **named):
            return kernel(*parts, **named | {name: change(named[name]) for name, change in changed.items()})

        monkeypatch.setattr(torch_attention, "varlen_kernel", wrong)

    return plant


def flex_window_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention's block mask shows one token more. Returns the windows that were lengthened."""
    make = torch_attention.PackedRows.block_mask
    lengthened: list[int] = []

    def wrong(rows, window):
        if window is None:
            return make(rows, None)
        lengthened.append(window)
        return make(rows, window + 1)

    monkeypatch.setattr(torch_attention.PackedRows, "block_mask", wrong)
    return lengthened


# --- the loss ---------------------------------------------------------------------------------------------------------


def logit_cap_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "tanh_", lambda numbers: numbers)


def others_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head is zero for tokens that are no target."""
    add = torch_head._add_product
    monkeypatch.setattr(
        torch_head, "_add_product", lambda lm_head, dlogits, hidden: add(lm_head, dlogits.clamp(max=0), hidden)
    )


def chunk_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head lacks all targets but those of the first chunk."""
    add = torch_head._add_product

    def wrong(lm_head, dlogits, hidden):
        if lm_head.grad is None:
            add(lm_head, dlogits, hidden)

    monkeypatch.setattr(torch_head, "_add_product", wrong)


def state_gradient_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one target, by a fifth."""
    backward = torch_head._HeadLoss.backward

    def wrong(ctx, upstream):
        ctx.gradient[-1] *= 1.2
        return backward(ctx, upstream)

    monkeypatch.setattr(torch_head._HeadLoss, "backward", staticmethod(wrong))


def one_target_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch_model.head_loss
    monkeypatch.setattr(
        torch_model,
        "head_loss",
        lambda hidden, lm_head, targets, **named: whole(hidden[:-1], lm_head, targets[:-1], **named),
    )


def loss_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.05 too much in the sum: its gradients are right."""
    whole = torch_model.head_loss
    monkeypatch.setattr(
        torch_model, "head_loss", lambda *parts, **named: whole(*parts, **named) + 0.05 * named["scale"]
    )


# --- the optimizers ---------------------------------------------------------------------------------------------------


def adamw_off(**changed: Callable[[float], float]) -> Plant:
    """An update with another lr, epsilon, decay or number than was asked for."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = torch_update_rules.fused_kernel

        def wrong(*lists, now, decay, count, skip=None):
            now = replace(
                now, **{name: change(getattr(now, name)) for name, change in changed.items() if hasattr(now, name)}
            )
            decay = changed["decay"](decay) if "decay" in changed else decay
            count = changed["count"](count) if "count" in changed else count
            kernel(*lists, now=now, decay=decay, count=count, skip=skip)

        monkeypatch.setattr(torch_update_rules, "fused_kernel", wrong)

    return plant


def moment_off(which: int) -> Plant:
    """By 3 %, after the second update: the parameters are right."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = torch_update_rules.fused_kernel

        def wrong(*lists, now, **named):
            kernel(*lists, now=now, **named)
            for moment in lists[2 + which] if now.step == 2 else ():
                moment *= 1.03

        monkeypatch.setattr(torch_update_rules, "fused_kernel", wrong)

    return plant


def adafactor_off(**changed: Callable) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        rule = adafactor.torch_update

        def wrong(update):
            rule(replace(update, **{name: change(getattr(update, name)) for name, change in changed.items()}))

        monkeypatch.setattr(adafactor, "torch_update", wrong)

    return plant


def never_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adafactor divides by an RMS of 1, whatever it is."""
    clamp = torch.Tensor.clamp_
    monkeypatch.setattr(
        torch.Tensor, "clamp_", lambda numbers, min: numbers.fill_(1.0) if min == 1.0 else clamp(numbers, min=min)
    )


def step_share_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adafactor's second moment moves by another share than it should in the second step."""
    moved = adafactor._moved

    def wrong(update, mean, towards):
        return moved(replace(update, now=replace(update.now, step=update.now.step**1.01)), mean, towards)

    monkeypatch.setattr(adafactor, "_moved", wrong)


def _one_up(codes: torch.Tensor, levels: int) -> torch.Tensor:
    wide = codes.int()
    return torch.where(wide % levels < levels - 1, wide + 1, wide).to(codes.dtype)


def code_off(name: str, levels: int) -> Plant:
    """The codes of one moment are all one too high, where there is a higher one."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        encode = getattr(torch_update_rules, name)

        def wrong(values, generator):
            codes, absmax = encode(values, generator)
            return _one_up(codes, levels), absmax

        monkeypatch.setattr(torch_update_rules, name, wrong)

    return plant


def code_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are right, and are taken for their neighbours in the next update."""
    decode = torch_update_rules.decode
    monkeypatch.setattr(
        torch_update_rules, "decode", lambda codes, absmax, table: decode(_one_up(codes, 128), absmax, table)
    )


def moments_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are always rounded down."""

    def wrong(shares, levels, generator):
        return (shares.view(torch.int32) - torch_update_rules.lowest(levels)) >> torch_update_rules.CUT

    monkeypatch.setattr(torch_update_rules, "_cut", wrong)


def rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is random in the rounding of weights."""
    monkeypatch.setattr(
        torch_update_rules, "round_to_bfloat16_", lambda target, values, generator: target.copy_(values)
    )


def rounded_too_often_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 2 % of a step."""
    rounding = torch_update_rules.round_to_bfloat16_
    monkeypatch.setattr(
        torch_update_rules,
        "round_to_bfloat16_",
        lambda target, values, generator: rounding(target, values + 0.02 * 2.0**-7, generator),
    )


# --- in a child -------------------------------------------------------------------------------------------------------

PLANT = """
import os, random, sys

if "tunix_rt.engines.selftest.torch" in sys.orig_argv:
    import warnings
    import torch
    import torch.nn.functional as F
    from tunix_rt.engines.torch import attention as torch_attention, model as torch_model
    from tunix_rt.engines.torch import optim as torch_optim, update_rules as torch_update_rules

    planted = os.environ["PLANTED"].split(",")
    on_cuda = "cuda" in sys.orig_argv
    units = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    unit = next(units[word] for word in sys.orig_argv if word in units)

    if "product" in planted:  # one element: 1 % of it and of the typical size, and a few roundings
        matmul, place = torch.matmul, random.Random(os.environ["PLACE"])

        def wrong_matmul(left, right):
            out = matmul(left, right)
            if len(out) >= 512:
                row, column = (place.randrange(len(out)) for _ in range(2))
                size = len(out) ** 0.5
                out[row, column] += 0.01 * (abs(out[row, column].item()) + size) + 8 * unit * size
            return out

        torch.matmul = wrong_matmul

    if "attention" in planted:  # one NaN in one element of one gradient, whichever attention is taken

        def spoilt(attend, place):
            def wrong_attend(query, *others, **named):
                passed = query * 1

                def spoil(gradient):
                    gradient = gradient.clone()
                    gradient[place] = float("nan")
                    return gradient

                if query.shape[0] in (2, 600):  # a trial of a few tokens before is left alone
                    passed.register_hook(spoil)
                return attend(passed, *others, **named)

            return wrong_attend

        F.scaled_dot_product_attention = spoilt(F.scaled_dot_product_attention, (1, 0, 7, 3))
        torch_attention.varlen_attn = spoilt(torch_attention.varlen_attn, (300 + 7, 0, 3))

    if "loss" in planted:  # the last target is left out
        whole = torch_model.head_loss
        torch_model.head_loss = lambda states, table, targets, **named: whole(
            states[:-1], table, targets[:-1], **named
        )

    if "optimizer" in planted:  # no bias correction: as if a billion steps had gone before
        kernel = torch_update_rules.fused_kernel

        def uncorrected(*lists, count, **named):
            kernel(*lists, count=torch.full_like(count, 1e9), **named)

        torch_update_rules.fused_kernel = uncorrected

    if "placement" in planted:  # after the last update one tensor of the state is somewhere else
        state_of = torch_optim.Optimizer.state_of

        def stray_state(self, parameter):
            state = dict(state_of(self, parameter))
            if self._now.step == 2 and parameter.dim() == 1:
                state["step"] = torch.zeros((), device="cpu" if on_cuda else "meta")
            return state

        torch_optim.Optimizer.state_of = stray_state

    if "device" in planted:  # what torch says of a GPU it has no code for
        ones = torch.ones

        def warned_ones(*sizes, **named):
            torch.ones = ones  # once, as torch says it
            warnings.warn(
                "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch "
                "installation.\\nThe current PyTorch install supports CUDA capabilities sm_50 sm_90."
            )
            return ones(*sizes, **named)

        torch.ones = warned_ones
"""


def plant(folder: Path, *names: str, place: int = 0) -> dict[str, str]:
    """The environment in which a proof child has these defects. `PYTHONPATH` is in front of the present one."""
    (folder / "sitecustomize.py").write_text(PLANT)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "PLANTED": ",".join(names), "PLACE": str(place)}

"""Defects for proofs to find: small and finite ones planted into torch here, and all kinds at once into a proof child.

The child gets them by a `sitecustomize.py`, which Python runs before the child's code.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

Plant = Callable[[pytest.MonkeyPatch], None]

# --- in this process --------------------------------------------------------------------------------------------------


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
    """Of scores and of logits alike: tanh is the identity."""
    monkeypatch.setattr(torch, "tanh", lambda numbers: numbers)


class _HeadGradient(torch.autograd.Function):
    """A product whose gradient of the head is zero where no target is."""

    @staticmethod
    def forward(ctx, states, head):
        ctx.save_for_backward(states, head)
        return states @ head.T

    @staticmethod
    def backward(ctx, upstream):
        states, head = ctx.saved_tensors
        only_targets = torch.where(upstream < 0, upstream, torch.zeros_like(upstream))
        return upstream @ head, only_targets.T @ states


def others_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head is zero for tokens that are no target."""
    monkeypatch.setattr(F, "linear", lambda states, head, bias=None: _HeadGradient.apply(states, head))


def state_gradient_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one target, by a fifth."""
    linear = F.linear

    def wrong(states, head, bias=None):
        passed = states * 1
        passed.register_hook(lambda gradient: torch.cat([gradient[:-1], 1.2 * gradient[-1:]]))
        return linear(passed, head, bias)

    monkeypatch.setattr(F, "linear", wrong)


def one_target_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = F.cross_entropy
    monkeypatch.setattr(
        F, "cross_entropy", lambda logits, targets, **named: entropy(logits[:-1], targets[:-1], **named)
    )


def loss_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant too much: its gradients are right."""
    entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *parts, **named: entropy(*parts, **named) + 2.0)


def group_off(**changed: Callable[[float], float]) -> Plant:
    """An update with another rate, epsilon or decay than was asked for."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        step = torch.optim.AdamW.step

        def wrong(self, closure=None):
            asked = [dict(group) for group in self.param_groups]
            for group in self.param_groups:
                group.update({name: change(group[name]) for name, change in changed.items()})
            step(self, closure)
            for group, before in zip(self.param_groups, asked, strict=True):
                group.update({name: before[name] for name in changed})

        monkeypatch.setattr(torch.optim.AdamW, "step", wrong)

    return plant


def moment_off(name: str) -> Plant:
    """By 3 %, after the update: the parameters are right."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        step = torch.optim.AdamW.step

        def wrong(self, closure=None):
            step(self, closure)
            for state in self.state.values():
                if state["step"].item() == 2:
                    state[name] *= 1.03

        monkeypatch.setattr(torch.optim.AdamW, "step", wrong)

    return plant


# --- in a child -------------------------------------------------------------------------------------------------------

PLANT = """
import os, random, sys

if "tunix_rt.backends.torch_proofs" in sys.orig_argv:
    import warnings
    import torch
    import torch.nn.functional as F

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

    if "attention" in planted:  # one NaN in one element of one gradient
        attend = F.scaled_dot_product_attention

        def wrong_attend(query, *others, **named):
            passed = query * 1

            def spoil(gradient):
                gradient = gradient.clone()
                gradient[1, 0, 7, 3] = float("nan")
                return gradient

            passed.register_hook(spoil)
            return attend(passed, *others, **named)

        F.scaled_dot_product_attention = wrong_attend

    if "loss" in planted:  # the last token is left out
        entropy = F.cross_entropy
        F.cross_entropy = lambda logits, targets, **named: entropy(logits[:-1], targets[:-1], **named)

    if "optimizer" in planted:  # no bias correction

        @torch.no_grad()
        def uncorrected_step(self, closure=None):
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.zeros((), device=parameter.device)
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
                    state["step"] += 1
                    state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    root = state["exp_avg_sq"].sqrt().add_(group["eps"])
                    parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"])

        torch.optim.AdamW.step = uncorrected_step

    if "placement" in planted:  # after the last update one tensor of the state is somewhere else
        step = torch.optim.AdamW.step

        def stray_step(self, closure=None):
            step(self, closure)
            last = list(self.state.values())[-1]
            if last["step"].item() == 2:
                last["step"] = last["step"].to("cpu" if on_cuda else "meta")

        torch.optim.AdamW.step = stray_step

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

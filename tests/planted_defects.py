"""Defects planted into torch for a proof child alone: a `sitecustomize.py` that Python runs before the child's code."""

import os
from pathlib import Path

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

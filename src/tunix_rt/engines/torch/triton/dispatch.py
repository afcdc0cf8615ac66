"""AdamW and Adafactor for bfloat16 weights on a GPU, and AdamW with moments of 8 bits for float32 weights too, in Triton: each
number is read and written as often as it must be.

The rules are those of `update_rules.py`, computed in float32 and rounded once. Nothing is summed by atomics, so that the
same update gives the same bits, and nothing waits for the device. Bytes moved for a weight: AdamW 22 (weights, gradient and two
float32 moments, and 2 more for a norm to clip by), with moments of 8 bits 10 (16 of float32 weights), Adafactor of a matrix 10
(the gradient three times, the weights in and out), its norm among them.

The kernels are in `adamw.py`, `adamw_8bit.py` and `adafactor.py`, what they share in `update.py`. Here
is what the optimizer calls, and whether it runs.
"""

import subprocess
from typing import Any

import torch
from triton.errors import TritonError  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.engines.torch.triton.adafactor import WHOLE_UP_TO, adafactor, adafactor_whole
from tunix_rt.engines.torch.triton.adamw import Crowd, adamw, adamw_many
from tunix_rt.engines.torch.triton.adamw_8bit import adamw_8bit, adamw_8bit_many, crowd_8bit
from tunix_rt.engines.torch.triton.update import Clip, clip
from tunix_rt.plan.optimizers import BLOCK

__all__ = [
    "WHOLE_UP_TO", "Clip", "Crowd", "adafactor", "adafactor_whole", "adamw", "adamw_8bit", "adamw_8bit_many", "adamw_many",
    "clip", "crowd_8bit", "problem",
]  # fmt: skip


def problem(device: torch.device) -> str | None:
    """Why the kernels cannot be used on `device`. Takes some seconds where they are compiled for the first time."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its compute capability is below 8.0"
    weights = torch.ones(8, dtype=torch.bfloat16, device=device)
    moments = (torch.zeros(8, device=device) for _ in range(2))
    coded = (
        torch.zeros(1, size, dtype=kind, device=device) for size, kind in [(BLOCK, torch.uint8), (1, torch.float32)] * 2
    )
    same: dict[str, Any] = {"step": 1, "rate": 0.0, "beta1": 0.9, "beta2": 0.9, "epsilon": 1.0, "decay": 0.0, "seed": 1}
    try:
        adamw(weights, weights.clone(), *moments, **same)
        adamw_8bit(weights, weights.clone(), *coded, stochastic=True, **same)
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel
    except (RuntimeError, ImportError, OSError, TypeError, KeyError, subprocess.SubprocessError, TritonError) as error:
        # TypeError and KeyError: what an older Triton says to options it does not know
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]
    return None

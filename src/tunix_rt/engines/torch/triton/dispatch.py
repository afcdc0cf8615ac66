"""The Triton kernels of the optimizers, as `optim.py` calls them by the name of the optimizer.

The updates are those of `engines/optimizers/`, computed in float32 and rounded once. Nothing is summed by atomics, so the same
update gives the same bits, and nothing waits for the device. Bytes moved per bfloat16 weight: AdamW 22 (weights, gradient and
two float32 states, and 2 more for a norm to clip by), with 8-bit states 10 (16 for a float32 weight), Adafactor of a matrix 10
(the gradient three times, the weights in and out), its norm among them.
"""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.errors import TritonError  # type: ignore[import-not-found, unused-ignore]

from tunix_rt.config.optimizers import BLOCK
from tunix_rt.engines.torch.triton.adafactor import WHOLE_UP_TO, adafactor, adafactor_whole
from tunix_rt.engines.torch.triton.adamw import TensorGroup, adamw, adamw_many
from tunix_rt.engines.torch.triton.adamw_8bit import adamw_8bit, adamw_8bit_many, group_8bit
from tunix_rt.engines.torch.triton.update import Clip, clip_scale
from tunix_rt.engines.torch.update_rules import StepSettings

__all__ = ["GROUPED", "WHOLE_UP_TO", "Clip", "TensorGroup", "group", "problem", "supports", "update", "update_group"]

GROUPED = frozenset({"adamw", "adamw_8bit"})
"""Optimizers with a kernel that updates many tensors in one launch."""


def supports(name: str, parameter: torch.Tensor) -> bool:
    """Whether the kernel of optimizer `name` takes a parameter of this shape."""
    return name != "adafactor" or parameter.dim() == 2 or parameter.numel() <= WHOLE_UP_TO


def update(
    name: str,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    *,
    now: StepSettings,
    decay: float,
    seed: int,
    scale: torch.Tensor | None,
    finite: torch.Tensor | None,
    clip: Clip | None,
) -> None:
    """One update in place by optimizer `name`. `clip` is in place of a scale."""
    tensors, kernel = (parameter, gradient, *states.values()), _kernel(name, parameter)
    # 8-bit states are rounded at random in any case
    own_seed = seed if now.stochastic or name == "adamw_8bit" else None
    if name == "adafactor":
        kernel(*tensors, now=now, decay=decay, seed=own_seed, scale=scale, finite=finite, clip=clip)
        return
    if clip is not None:
        scale, finite = clip_scale(gradient, finite=finite, clip=clip), clip.good
    kernel(*tensors, now=now, decay=decay, seed=own_seed, scale=scale, finite=finite)


def _kernel(name: str, parameter: torch.Tensor) -> Any:
    if name == "adafactor":
        return adafactor if parameter.dim() == 2 else adafactor_whole
    return adamw_8bit if name == "adamw_8bit" else adamw


def group(
    name: str, states: Sequence[tuple[torch.Tensor, ...]], decayed: Sequence[bool], sizes: Sequence[int]
) -> TensorGroup:
    """The tensors of one launch: their states, whether each is decayed, and its number of elements."""
    return group_8bit(states, decayed, sizes) if name == "adamw_8bit" else TensorGroup.of(states, decayed)


def update_group(
    name: str,
    tensors: TensorGroup,
    weights: Sequence[int],
    gradients: Sequence[int],
    seeds: Sequence[int],
    *,
    dtype: torch.dtype,
    now: StepSettings,
    decay: float,
    scale: torch.Tensor | None,
    finite: torch.Tensor | None,
) -> None:
    """One update of each tensor whose gradient has an address, in one launch."""
    same: dict[str, Any] = {"now": now, "decay": decay, "scale": scale, "finite": finite}
    if name == "adamw_8bit":
        adamw_8bit_many(tensors, weights, gradients, seeds, dtype=dtype, **same)
    else:
        adamw_many(tensors, weights, gradients, seeds if now.stochastic else None, **same)


def problem(device: torch.device) -> str | None:
    """Why the kernels cannot be used on `device`. Takes some seconds where they are compiled for the first time."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its compute capability is below 8.0"
    weights = torch.ones(8, dtype=torch.bfloat16, device=device)
    moments = (torch.zeros(8, device=device) for _ in range(2))
    coded = (
        torch.zeros(1, size, dtype=kind, device=device) for size, kind in [(BLOCK, torch.uint8), (1, torch.float32)] * 2
    )
    now = StepSettings(step=1, lr=0.0, beta1=0.9, beta2=0.9, epsilon=1.0, stochastic=True)
    try:
        adamw(weights, weights.clone(), *moments, now=now, decay=0.0, seed=1)
        adamw_8bit(weights, weights.clone(), *coded, now=now, decay=0.0, seed=1)
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel
    except (RuntimeError, ImportError, OSError, TypeError, KeyError, subprocess.SubprocessError, TritonError) as error:
        # TypeError and KeyError: what an older Triton says to options it does not know
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]
    return None

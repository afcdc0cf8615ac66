"""Which code updates a parameter, which parameters share a launch, and what no optimizer here updates."""

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tunix_rt.config.optimizers import BLOCK, OPTIMIZERS, OptimizerSpec, optimizer_of
from tunix_rt.engines.optimizers import module_of
from tunix_rt.engines.torch.sharding import Sharding
from tunix_rt.errors import ConfigError, TunixError
from tunix_rt.ranks import Part, part_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which code updates a parameter."""

    name: str
    spec: OptimizerSpec
    module: ModuleType
    """Of `engines/optimizers`."""
    kernels: ModuleType | None
    """`triton/dispatch.py`, where it has a kernel for this parameter."""
    fused: bool
    """Updated together with others by `torch_update_many`."""


def rule_of(name: str, parameter: torch.nn.Parameter, sharding: Sharding | None) -> Rule:
    spec, module = OPTIMIZERS[name], module_of(name)
    kernels = None
    summed = spec.factored and sharding is not None  # over ranks, which a kernel does not
    if parameter.device.type == "cuda" and dtype_name(parameter) in spec.triton and parameter.numel() and not summed:
        kernels = triton_kernels(parameter.device)
        kernels = kernels if kernels and kernels.supports(name, parameter) else None
    fused = spec.fused and parameter.dtype != torch.bfloat16
    return Rule(name=name, spec=spec, module=module, kernels=kernels, fused=fused)


@functools.cache
def triton_kernels(device: torch.device) -> ModuleType | None:
    """`triton/dispatch.py`, where its kernels can be compiled for `device`; else the reason is logged."""
    problem: str | None = "Triton is not installed"
    if importlib.util.find_spec("triton") is not None:
        try:
            kernels = importlib.import_module("tunix_rt.engines.torch.triton.dispatch")
            problem = kernels.problem(device)
        except ImportError as error:
            problem = f"Triton cannot be imported: {error}"
        if problem is None:
            return kernels
    logger.info("Triton optimizer kernels are unavailable on %s, using PyTorch (slower): %s", device, problem)
    return None


def has_kernels(kind: str, weights: str, device: torch.device, sharding: Sharding | None) -> bool:
    """Whether Triton kernels update weights of this dtype on `device` under optimizer `kind`."""
    if sharding is not None and OPTIMIZERS[kind].factored:
        return False
    return device.type == "cuda" and weights in OPTIMIZERS[kind].triton and triton_kernels(device) is not None


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Tensors as `refuse_other_tensors` compares them."""
    return {name: f"{list(one.shape)} {dtype_name(one)}" for name, one in tensors.items()}


def wide_places(weights: torch.Tensor, gradient: torch.Tensor) -> tuple[int, int] | None:
    """Where both lie, if they are of one type, in order, and from addresses on at which loads of 16 bytes can start."""
    first, second = weights.data_ptr(), gradient.data_ptr()
    fit = (first | second) % 16 == 0 and gradient.is_contiguous() and gradient.dtype == weights.dtype
    return (first, second) if fit else None


GroupKey = tuple[torch.device, str, torch.dtype]
"""Device, optimizer and dtype of weights: what tensors that share a launch have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that one launch updates. One joins with its first gradient."""

    numbers: dict[int, int]
    """Number of a parameter -> its place in `tensors`."""
    tensors: Any
    """Their `triton.adamw.TensorGroup`."""


def refuse_cut_blocks(name: str, kind: str, part: Part, shards: int) -> None:
    """ConfigError where ranks would share a block of 8-bit states."""
    elements = part_of(part.shape, 0, shards).rows * math.prod(part.shape[1:])
    if OPTIMIZERS[optimizer_of(kind, part.shape)].quantized and shards > 1 and elements % BLOCK:
        raise ConfigError(
            f"training.optim: {kind}: {name} {list(part.shape)} has {elements:,} elements on each of {shards} ranks, "
            f"which is no multiple of the {BLOCK} elements of a block",
            fix="use another number of ranks, or training.optim: adamw or adafactor",
        )


def refuse_unfit(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise TunixError(
            f"{name}: weights of type {parameter.dtype} are not updated, small changes would be lost in them",
            fix="keep the weights in float32 and cast them for the forward pass",
        )
    if not parameter.is_contiguous():
        raise TunixError(
            f"{name}: its {parameter.numel():,} weights do not lie in order", fix="call .contiguous() on it"
        )

"""4-bit base weights for LoRA (QLoRA): bitsandbytes packs the frozen projections in NF4, and unpacks one for each matmul."""

import logging
from typing import Any

import torch
from torch.nn import functional

from tunix_rt.errors import InputError
from tunix_rt.plan.adapters import NF4_BLOCK

logger = logging.getLogger(__name__)


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight is kept in NF4, with 8-bit scales of blocks of 64 ("double quantization")."""

    def __init__(self, linear: torch.nn.Linear, device: torch.device) -> None:
        from bitsandbytes.functional import quantize_4bit

        torch.nn.Module.__init__(self)  # that of Linear would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Flat: the CPU kernel of bitsandbytes 0.50 mixes up scales where a row is no multiple of a block.
        weight = linear.weight.data.to(device).contiguous().view(-1)
        packed, self.state = quantize_4bit(weight, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4")
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Unpacked, in the dtype that it was quantized from; a new tensor each time."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self.state).view(self.out_features, self.in_features)

    @property
    def stored(self) -> list[torch.Tensor]:
        """The tensors that the weight is kept in, without the tables of levels, which all layers have in common."""
        return [self.packed, self.state.absmax, self.state.state2.absmax, self.state.offset]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Matmul.apply(input, self)


class _Matmul(torch.autograd.Function):
    """Saves neither input nor weight: the gradient of the input needs the weight alone, which is unpacked again."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        context.layer = layer
        return functional.linear(hidden, layer.weight, layer.bias)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ context.layer.weight, None


def quantize(model: Any, *, name: str, device: torch.device) -> None:
    """Quantize the projections of all layers on `device`, one after the other. In place; the rest stays where and as it is."""
    head, inside = model.get_output_embeddings(), set(model.base_model.modules())
    others = {
        type(one).__name__ for one in inside for parameter in one.parameters(recurse=False) if parameter.dim() > 2
    }
    found = [one for one in model.named_modules() if type(one[1]) is torch.nn.Linear and one[1] in inside]
    found = [(place, linear) for place, linear in found if linear is not head]
    if others or not found:
        what = f"weights of {', '.join(sorted(others))} are no matrices" if others else "it has no linear projections"
        raise InputError(f"training.load_in_4bit: {name}: {what}", fix="leave training.load_in_4bit out")
    levels: dict[str, torch.Tensor] = {}
    for place, linear in found:
        quantized = QuantizedLinear(linear, device)
        quantized.state.code = levels.setdefault("nf4", quantized.state.code)
        quantized.state.state2.code = levels.setdefault("scales", quantized.state.state2.code)
        parent, _, own = place.rpartition(".")
        setattr(model.get_submodule(parent), own, quantized)
        linear.weight = None  # `found` still has the module
    stored = sum(tensor.nbytes for one in model.modules() if isinstance(one, QuantizedLinear) for tensor in one.stored)
    logger.info("4-bit base weights: %d projections in NF4, %.2f GiB with scales", len(found), stored / 2**30)
    if device.type == "cpu":
        logger.warning("4-bit base weights on a CPU are slow: every matmul unpacks its weight")

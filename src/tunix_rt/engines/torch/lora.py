"""LoRA through `peft`: adapters at every projection of every layer, all other weights frozen."""

from typing import Any

import torch

from tunix_rt.errors import InputError
from tunix_rt.models.resolve import ModelSource


def add_adapters(model: Any, *, rank: int, source: ModelSource) -> Any:
    """`model` with trainable adapters of `rank` in float32, alpha twice the rank. In place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError(
            "training.lora_rank: peft is not installed", fix="pip install 'tunix-rt[lora]', or leave the setting out"
        ) from error
    modules = _projections(model)
    projections = sorted({name.rpartition(".")[2] for name, _ in modules})
    transposed = any(type(module).__name__ == "Conv1D" for _, module in modules)  # as in GPT-2
    if not projections:
        raise InputError(f"{source.name}: has no projections for adapters", fix="leave training.lora_rank out")
    settings = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none", target_modules=projections,
        fan_in_fan_out=transposed,
    )  # fmt: skip
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _projections(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """The linear modules of the layers, by name, without the lm_head."""
    head = model.get_output_embeddings()
    kinds = ("Linear", "Conv1D")
    return [
        (name, module)
        for name, module in model.base_model.named_modules()
        if type(module).__name__ in kinds and module is not head
    ]


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the model with each adapter merged into its projection, under the names without adapters.

    On the host and in float32: rounding to 16 bits would lose most of what an adapter has learned. Weights are cast on the host,
    so that a GPU needs memory for the delta of one adapter only. Tied tensors stay tied. The model is not changed."""
    from peft.tuners.lora import LoraLayer

    merged: dict[str, torch.Tensor] = {}
    widened: dict[tuple[int, torch.Size], torch.Tensor] = {}
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            continue
        if ".base_layer." in name and name.endswith(".weight"):
            with torch.no_grad():
                delta = adapted[name.split(".base_layer.")[0]].get_delta_weight("default")
            whole = (tensor.cpu() + delta.cpu()).float()
            del delta  # before the next one is there
        elif (whole := widened.get((tensor.data_ptr(), tensor.shape))) is None:
            whole = widened[tensor.data_ptr(), tensor.shape] = tensor.cpu().float()
        merged[name.replace(".base_layer.", ".")] = whole
    return merged

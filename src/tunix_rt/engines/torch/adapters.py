"""LoRA through `peft`: trainable adapters beside projections of the layers, all other weights frozen."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from tunix_rt.config.settings import Training
from tunix_rt.engines.torch.quantization import QuantizedLinear
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.plan.adapters import ALL_LINEAR, SETTING, Targets, alpha_of, chosen_modules, is_target

logger = logging.getLogger(__name__)

T = TypeVar("T")


def add_adapters(model: Any, training: Training, *, name: str) -> Any:
    """The model `name` with trainable adapters in float32, where and as `training` has them. In place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError(
            "training.lora_rank: peft is not installed", fix="pip install 'tunix-rt[lora]', or leave the setting out"
        ) from error
    projections, targets = _projections(model), training.lora_target_modules
    if not projections:
        raise InputError(f"{name}: has no projections for adapters", fix="leave training.lora_rank out")
    chosen = chosen_modules(list(projections), targets, name)
    _refuse_others(model, set(projections), targets, name)
    everywhere = sorted({module.rpartition(".")[2] for module in projections})
    settings = LoraConfig(
        r=training.lora_rank, lora_alpha=alpha_of(training), lora_dropout=training.lora_dropout, bias="none",
        target_modules=everywhere if targets == ALL_LINEAR else targets if isinstance(targets, str) else [*targets],
        fan_in_fan_out=any(type(projections[one]).__name__ == "Conv1D" for one in chosen),  # as in GPT-2
    )  # fmt: skip
    inject_adapter_in_model(settings, model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "LoRA: rank %d, alpha %g, dropout %g; %d of %d projections have adapters, %s trained parameters",
        training.lora_rank, alpha_of(training), training.lora_dropout, len(chosen), len(projections), f"{trained:,}",
    )  # fmt: skip
    return model


def add_meta_adapters(model: Any, training: Training, *, name: str) -> dict[str, torch.Tensor]:
    """Add adapters to a model on the meta device. Returns their weights, drawn as for a model that is loaded whole."""
    for module in _projections(model).values():  # peft draws on the device of a projection; this one takes no memory
        weight = torch.zeros((), dtype=module.weight.dtype).expand(module.weight.shape)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
    add_adapters(model, training, name=name)
    drawn = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.to("meta")
    return drawn


def without_adapters(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The weights but for those of adapters, under the names that they have without them."""
    return {name.replace(".base_layer.", "."): one for name, one in named if "lora_" not in name}


def _projections(model: Any) -> dict[str, torch.nn.Module]:
    """The linear modules of the layers, by name, without the lm_head."""
    head, inside = model.get_output_embeddings(), set(model.base_model.modules())
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "QuantizedLinear", "Conv1D") and module is not head and module in inside
    }


def _refuse_others(model: Any, projections: set[str], targets: Targets, name: str) -> None:
    """Refuse a target that is no projection: the loss is computed in chunks from the weight of the lm_head alone."""
    for found, module in model.named_modules():
        if targets != ALL_LINEAR and found not in projections and is_target(found, targets):
            is_head = module is model.get_output_embeddings()
            why = "the lm_head, which is never adapted" if is_head else f"a {type(module).__name__}, not a projection"
            raise ConfigError(
                f"{SETTING}: {found or 'the whole model'} of {name} is {why}",
                fix="match projections of the layers alone; a list such as [q_proj, v_proj] does",
            )


def _named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight but those of adapters; one that is kept in 4 bits is unpacked when it is reached."""
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if "lora_" not in name)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield f"{name}.weight", module.weight


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the model with each adapter merged into its projection, under the names without adapters.

    On the host and in float32: rounding to 16 bits would lose most of what an adapter has learned. Weights are cast on the host,
    so that a GPU needs memory for the delta of one adapter only. Tied tensors stay tied. The model is not changed."""
    from peft.tuners.lora import LoraLayer

    merged: dict[str, torch.Tensor] = {}
    widened: dict[tuple[int, torch.Size], torch.Tensor] = {}
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in _named_weights(model):
        if ".base_layer." in name and name.endswith(".weight"):
            with torch.no_grad():
                delta = adapted[name.split(".base_layer.")[0]].get_delta_weight("default")
            whole = (tensor.cpu() + delta.cpu()).float()
            del delta  # before the next one is there
        elif isinstance(model.get_submodule(name.rpartition(".")[0]), QuantizedLinear):  # memory of its own, soon freed
            whole = tensor.cpu().float()
        elif (whole := widened.get((tensor.data_ptr(), tensor.shape))) is None:
            whole = widened[tensor.data_ptr(), tensor.shape] = tensor.cpu().float()
        merged[name.replace(".base_layer.", ".")] = whole
    return merged


def merging(model: Any, whole: Callable[[str], torch.Tensor | None]) -> Callable[[str], torch.Tensor | None]:
    """`whole` under the names without adapters, each merged into its projection, in float32: `merged_weights` of a sharded
    model, a tensor at a time."""
    from peft.tuners.lora import LoraLayer

    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}

    def merged(name: str) -> torch.Tensor | None:
        place, _, kind = name.rpartition(".")
        if (module := adapted.get(place)) is None:
            tensor = whole(name)
            return tensor.float() if tensor is not None and tensor.is_floating_point() else tensor
        base = whole(f"{place}.base_layer.{kind}")
        if kind != "weight":
            return None if base is None else base.float()
        after, before = (whole(f"{place}.lora_{factor}.default.weight") for factor in "BA")
        if base is None or after is None or before is None:  # another rank merges
            return None
        delta = after @ before * module.scaling["default"]
        return (base + (delta.T if module.fan_in_fan_out else delta)).float()

    return merged

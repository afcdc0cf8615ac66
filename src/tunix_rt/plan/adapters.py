"""LoRA adapters: which modules of a model have one. The planner and the engine read the same choice."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress

from tunix_rt.config.load import quoted
from tunix_rt.config.settings import Training
from tunix_rt.errors import ConfigError
from tunix_rt.plan.shape import Dimensions, ModelShape

ALL_LINEAR = "all-linear"
SETTING = "training.lora_target_modules"
Targets = str | tuple[str, ...]


def alpha_of(training: Training) -> float:
    """`lora_alpha`, by default twice the rank; adapters are scaled by its ratio to the rank."""
    alpha = training.lora_alpha or 2 * (training.lora_rank or 0)
    return int(alpha) if alpha == int(alpha) else alpha


def is_target(module: str, targets: Targets) -> bool:
    """Whether `module` has an adapter, by the rules of PEFT: a text must match the whole name; a name in a list is the module's
    own, or its last parts."""
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


def chosen_modules(projections: Sequence[str], targets: Targets, model: str) -> list[str]:
    """The `projections` of `model` that have an adapter. A ConfigError for a target that is none of them."""
    names = ", ".join(dict.fromkeys(one.rpartition(".")[2] for one in projections))
    fix = (
        f"set a list of some of these names: {names}; or a regular expression that matches whole names, such as "
        f"{projections[0]}; or leave it out for all of them"
    )
    try:
        chosen = [module for module in projections if is_target(module, targets)]
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{SETTING}: {quoted(str(targets))} is no regular expression: {error}", fix=fix) from error
    listed = [targets] if isinstance(targets, str) else [(name,) for name in targets]
    for target in listed:
        if not any(is_target(module, target) for module in chosen):
            name = quoted(target if isinstance(target, str) else target[0])
            raise ConfigError(f"{SETTING}: {name} matches no projection of {model}", fix=fix)
    return chosen


def modules_of(shape: ModelShape) -> list[list[str]]:
    """Names of the modules with the matrices of each layer, in the order of `Tensors.matrices`; not of a traced model."""
    layers, names = "model.layers", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    if shape.fused_matrices:
        names = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    elif not shape.gated_mlp:
        layers, names = "transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    return [[f"{layers}.{layer}.{name}" for name in names] for layer in range(shape.layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a run, whose factors compute in float32. Counts are those of one layer; where layers differ, of a layer
    with the modules of all of them, which is an upper bound of what each saves."""

    rank: int
    dropout: bool
    matrices: tuple[Dimensions, ...]
    """With an adapter beside them, of all layers."""
    inputs: int
    """Adapters of the first matmuls of attention: query, key and value."""
    output: int
    mlp_inputs: int
    down: int

    @property
    def factors(self) -> list[Dimensions]:
        """The two factors beside each matrix."""
        return [factor for one in self.matrices for factor in ((one[0], self.rank), (self.rank, one[1]))]

    def saved_inputs(self, size: int, count: int, *, compute: int, device: str, there: bool = False) -> list[int]:
        """Bytes that `count` adapters with one input of `size` elements save of it, in float32: with dropout, each its own and a
        mask; else a cast for each, or the input itself, unless it is `there` already. `compute` is the width of the input."""
        if self.dropout:  # the mask: a factor per element on a CPU, a boolean on a GPU
            return [4 * size, size * (4 if device == "cpu" else 1)] * count
        return [4 * size] * (count if compute != 4 else count > 0 and not there)


def adapters_of(matrices: list[Dimensions], shape: ModelShape, training: Training) -> Adapters | None:
    """The adapters of a run, `matrices` being those of a layer; None without LoRA. Modules of a traced model have no names here:
    all of them are counted."""
    if training.lora_rank is None:
        return None
    masks: Sequence[Sequence[bool]] = [[True] * len(matrices)] * shape.layers
    if shape.trace is None:
        masks = _masks(shape, training.lora_target_modules)
    of_any = [any(layers) for layers in zip(*masks, strict=True)]
    first = 3 if shape.gated_mlp and not shape.fused_matrices else 1
    return Adapters(
        rank=training.lora_rank,
        dropout=training.lora_dropout > 0,
        matrices=tuple(one for mask in masks for one in compress(matrices, mask)),
        inputs=sum(of_any[:first]),
        output=sum(of_any[first : first + 1]),
        mlp_inputs=sum(of_any[first + 1 : -1]),
        down=sum(of_any[-1:]),
    )


@lru_cache(maxsize=64)
def _masks(shape: ModelShape, targets: Targets) -> list[list[bool]]:
    """For each layer, which of its matrices have an adapter."""
    modules = modules_of(shape)
    chosen = set(chosen_modules([name for layer in modules for name in layer], targets, shape.model_type))
    return [[name in chosen for name in layer] for layer in modules]

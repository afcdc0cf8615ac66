"""LoRA adapters: which modules of a model have one. The planner and the engine read the same choice."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tunix_rt.config.load import quoted
from tunix_rt.config.settings import Training
from tunix_rt.errors import ConfigError
from tunix_rt.plan.sizes import Dimensions, ModelShape
from tunix_rt.plan.tensors import tensors_of

ALL_LINEAR = "all-linear"
SETTING = "training.lora_target_modules"
NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one: those of bitsandbytes, and of the QLoRA paper (arXiv:2305.14314)."""
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


def modules_of(shape: ModelShape) -> list[dict[str, Dimensions]]:
    """Modules with a matrix, by name: those of each layer in the order of their matmuls, then those outside the layers; not of
    a traced model."""
    first = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    last = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layers, kinds = "model.layers", []
    for kind in shape.stack:
        between = ["router.proj"] * (kind.experts is not None)
        between += ["per_layer_input_gate", "per_layer_projection"] * (kind.layer_input > 0)
        names = [*first[: 1 + kind.kv_matrices], "self_attn.o_proj", *between, *last]
        if kind.fused_matrices:
            names = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
        elif not kind.gated_mlp:
            layers, names = "transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
        matrices = [one for one in tensors_of(kind).matrices if len(one) == 2]  # experts have no modules
        kinds.append(list(zip(names, matrices, strict=True)))
    order = shape.order or (0,) * shape.layers
    found: list[dict[str, Dimensions]] = [
        {f"{layers}.{at}.{name}": one for name, one in kinds[kind]} for at, kind in enumerate(order)
    ]
    if shape.layer_input:
        found.append({"model.per_layer_model_projection": (shape.layer_inputs, shape.hidden)})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBit:
    """Bytes of frozen matrices in NF4."""

    packed: int
    scales: int
    """A byte for each block, a float32 for each 256 of them, and one float32 for a matrix."""
    unpacked: int
    """The largest matrix while it is unpacked, in the compute dtype, beside its scales in float32."""

    @classmethod
    def of(cls, matrices: Sequence[Dimensions], compute: int) -> "FourBit":
        sizes = [math.prod(one) for one in matrices]
        blocks = [-(-size // NF4_BLOCK) for size in sizes]
        return cls(
            packed=sum((size + 1) // 2 for size in sizes),
            scales=sum(count + 4 * -(-count // NF4_SCALE_BLOCK) + 4 for count in blocks),
            unpacked=max(size * compute + 4 * count for size, count in zip(sizes, blocks, strict=True)),
        )


def refuse_four_bit(shape: ModelShape, training: Training) -> None:
    """Refuse 4-bit weights of a model whose projections have no exact plan, or are no linear layers."""
    linear = (shape.gated_mlp or shape.fused_matrices) and all(kind.experts is None for kind in shape.stack)
    if training.load_in_4bit and (shape.trace is not None or not linear):
        why = "has a traced plan" if shape.trace is not None else "has projections that are no linear layers"
        raise ConfigError(
            f"training.load_in_4bit: {shape.model_type} {why}, and its memory in 4 bits is not known",
            fix="leave training.load_in_4bit out; `tunix-rt models` lists the exact families",
        )


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
    gate: int = 0
    """Of the layer's own embedding, and then of its projection."""
    projection: int = 0
    router: int = 0
    once: bool = False
    """Of the projection to the layers' own embeddings."""
    unpacked: int = 0
    """Bytes that a matmul with 4-bit weights needs, and that are free again when its adapter computes."""
    kinds: tuple["Adapters", ...] = ()
    """Where layers differ: those of each kind of layer."""

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
    kind = partial(Adapters, rank=training.lora_rank, dropout=training.lora_dropout > 0)
    if shape.trace is not None:
        everywhere = tuple(matrices) * shape.layers
        return kind(matrices=everywhere, inputs=1, output=1, mlp_inputs=max(0, len(matrices) - 3), down=1)
    chosen = _chosen(shape, training.lora_target_modules)
    modules = modules_of(shape)
    order = shape.order or (0,) * shape.layers
    of_kinds = []
    for index, layer in enumerate(shape.stack):
        names = [[*modules[at]] for at, of in enumerate(order) if of == index]
        of_any = [any(same) for same in zip(*([name in chosen for name in each] for each in names), strict=True)]
        first = 1 + layer.kv_matrices if layer.gated_mlp and not layer.fused_matrices else 1
        mlp = 3 if layer.gated_mlp and not layer.fused_matrices else 2
        own = of_any[-mlp - 2 : -mlp] if layer.layer_input else [False, False]
        of_kinds.append(
            kind(
                matrices=tuple(
                    one
                    for at, of in enumerate(order)
                    if of == index
                    for name, one in modules[at].items()
                    if name in chosen
                ),
                inputs=sum(of_any[:first]),
                output=sum(of_any[first : first + 1]),
                mlp_inputs=sum(of_any[-mlp:-1]),
                down=sum(of_any[-1:]),
                router=sum(of_any[first + 1 : first + 2]) if layer.experts is not None else 0,
                gate=own[0],
                projection=own[1],
                once=any(name in chosen for name in modules[-1]) if layer.layer_input else False,
            )
        )
    if not shape.kinds:
        return of_kinds[0]
    everything = tuple(one for of in modules for name, one in of.items() if name in chosen)
    return replace(of_kinds[0], matrices=everything, kinds=tuple(of_kinds))


@lru_cache(maxsize=64)
def _chosen(shape: ModelShape, targets: Targets) -> frozenset[str]:
    """Names of the modules with an adapter."""
    return frozenset(chosen_modules([name for of in modules_of(shape) for name in of], targets, shape.model_type))

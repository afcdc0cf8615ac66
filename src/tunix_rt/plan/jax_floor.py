"""The least memory that a JAX run needs on each of its devices, as a sum of named parts. Loads nothing.

XLA decides what a step needs, and reports it before a weight is loaded (`engines/jax/load.py`; without the device,
`tunix-rt plan --exact`). This module counts what no compiler saves: weights, optimizer states and gradients, sharded as
`engines/jax/mesh.py` shards them, the batch, and the input of every layer, which full activation checkpointing saves too.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tunix_rt.config.optimizers import state_tensors
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.plan.activations import DTYPE_BYTES
from tunix_rt.plan.attention_kernels import TPU_LANES
from tunix_rt.plan.compile_policy import compiled_length
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES, MemoryPlan, longest_row, predict
from tunix_rt.plan.phases import phase_of, times
from tunix_rt.plan.precision import Recipe, recipe_of
from tunix_rt.plan.sizes import Dimensions, ModelShape
from tunix_rt.plan.tensors import tensors_of

BATCH_BYTES = 20
"""Of a token in a batch: its id, target, position, example and loss weight."""


def row_length(tokens: int, device: str) -> int:
    """The padded length of rows of up to `tokens` tokens in a compiled step; a TPU's attention kernel needs multiples of 128."""
    return -(-tokens // TPU_LANES) * TPU_LANES if device == "tpu" else compiled_length(tokens)


def predict_jax(
    shape: ModelShape,
    config: RunConfig,
    *,
    device: str,
    devices: int = 1,
    rows: int | None = None,
    row_tokens: int | None = None,
    target_share: float = 1.0,
) -> MemoryPlan:
    """A lower bound for training `shape` under `config` on each of `devices`; on a CPU, whose devices share one memory, on
    all of them together. `rows` counts a micro-batch on all devices, by default `per_device_train_batch_size` on each."""
    training = config.training
    all_rows = rows or training.per_device_train_batch_size * devices
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    positions = -(-all_rows // devices) * row_length(length, device)
    recipe, shards = recipe_of(training), max(1, devices // training.data_replicas)
    state = _state(shape, recipe, shards)
    step = phase_of(
        "step",
        **state,
        gradients=state["weights"],
        activations=shape.layers * positions * shape.hidden * DTYPE_BYTES[recipe.compute],
        batch=BATCH_BYTES * training.gradient_accumulation_steps * positions,
    )
    shared = devices if device == "cpu" else 1
    eval_rows = _eval_batch_size(shape, config, device, row_tokens, target_share)
    phases = [times(phase, shared) for phase in (phase_of("load", weights=state["weights"]), step)]
    return MemoryPlan(
        layers="compiled",
        device=device,
        dtype=training.dtype,
        parameters=shape.parameters,
        rows=all_rows,
        row_tokens=length,
        target_share=target_share,
        phases=tuple(phases),
        peak_phase="step",
        peak_bytes=phases[-1].total_bytes,
        least_bytes=phases[-1].total_bytes,
        context_bytes=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
        eval_rows=eval_rows,
        generation_rows=eval_rows,
        devices=devices,
    )


def with_compiled_step(floor: MemoryPlan, parts: Mapping[str, int]) -> MemoryPlan:
    """The prediction of a run whose step is compiled: what the compiler counts on each device in place of the lower bound,
    which stays where it counts nothing."""
    if not parts:
        return floor
    step = times(phase_of("compiled step", **parts), floor.devices if floor.device == "cpu" else 1)
    phases = (*(phase for phase in floor.phases if phase.name != "step"), step)
    size = step.total_bytes
    return replace(floor, phases=phases, peak_phase=step.name, peak_bytes=size, least_bytes=size)


def savings(training: Training) -> list[str]:
    """What makes a compiled step smaller, the least change of the result first: settings that differ from `training`."""
    rows, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    halved = f"training.per_device_train_batch_size={rows // 2} --set training.gradient_accumulation_steps={2 * accumulation}"
    candidates = {
        "training.data_replicas=1": training.data_replicas > 1,
        "training.gradient_checkpointing=true": training.gradient_checkpointing is not True,
        halved: rows % 2 == 0,
        "training.dtype=bfloat16 --set training.master_dtype=bfloat16": training.master_dtype != "bfloat16",
        "training.optim=adafactor": training.optim != "adafactor",
    }
    lines = [f"--set {line}" for line, smaller in candidates.items() if smaller]
    return [*lines, "shorter rows (data.max_length), a smaller model or more devices"]


def _eval_batch_size(
    shape: ModelShape, config: RunConfig, device: str, row_tokens: int | None, target_share: float
) -> int:
    """As the PyTorch engine chooses it for one device: no engine evaluates with more memory than that training needs."""
    fixed = config.evaluation.per_device_eval_batch_size
    return fixed or predict(
        shape, config, device="cpu" if device == "cpu" else "cuda", row_tokens=row_tokens, target_share=target_share,
        layers="compiled",
    ).eval_rows  # fmt: skip


def _state(shape: ModelShape, recipe: Recipe, shards: int) -> dict[str, int]:
    """Bytes of weights and optimizer states on one device."""
    tensors = tensors_of(shape)
    layer, others = tensors.layer, [*tensors.embeddings, *tensors.others]
    stacked = _Sharding(shards=shards, layers=shape.layers)
    single = _Sharding(shards=shards, layers=None)

    def states(of: Iterable[Dimensions], sharding: _Sharding) -> int:
        made = (state_tensors(one, recipe.optimizer, recipe.weights).values() for one in of)
        return sum(sharding.elements(one) * DTYPE_BYTES[stored] for tensors in made for one, stored in tensors)

    elements = sum(map(stacked.elements, layer)) + sum(map(single.elements, others))
    return {
        "weights": DTYPE_BYTES[recipe.weights] * elements,
        "optimizer": states(layer, stacked) + states(others, single),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharding:
    """How an array is laid over `shards` devices; arrays of the layers are stacked along a first dimension."""

    shards: int
    layers: int | None

    def elements(self, dimensions: Dimensions) -> int:
        """On one device: a shard if the number of shards divides a dimension other than that of the layers, else all."""
        divides = any(size % self.shards == 0 for size in dimensions)
        return (self.layers or 1) * math.prod(dimensions) // (self.shards if divides else 1)

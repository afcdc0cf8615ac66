"""Settings that exclude each other, or lack one that they need: refused before anything is read."""

from collections.abc import Iterator
from typing import Any

from tunix_rt.config.capabilities import LORA_SETTINGS, refuse_unsupported
from tunix_rt.config.optimizers import OPTIMIZERS
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.errors import ConfigError


def require_runnable(config: RunConfig) -> None:
    """Refuse a configuration that lacks a required setting or combines settings that exclude each other."""
    if not config.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    if config.model.revision == "flax":
        raise ConfigError(
            "model.revision: `flax` is a branch of msgpack weights, which tunix-rt does not load",
            fix="set model.revision: main (safetensors)",
        )
    if not config.data.dataset:
        raise ConfigError("no dataset is named", fix="set data.dataset, or give --data")
    training = config.training
    sampled = config.evaluation.samples_during_training and config.evaluation.evalset
    if training.patience and not training.eval_steps:
        raise ConfigError(
            "training.patience counts evaluations, and training.eval_steps is not set",
            fix="set training.eval_steps, or leave training.patience out",
        )
    if training.eval_steps and not config.data.holds_out and (training.patience or not sampled):
        needs = "training.patience" if training.patience and sampled else "training.eval_steps"
        raise ConfigError(
            f"{needs} needs held-out traces, and data.validation_fraction is 0",
            fix=f"set data.validation_fraction above 0 or data.validation, or leave {needs} out",
        )
    refuse_unsupported(training, implementation=config.model.implementation)
    conflicts = (*_conflicts(training), *_conflicts_with_adapters(training), *_conflicts_with_rollouts(config))
    for refused, problem, fix in conflicts:
        if refused:
            raise ConfigError(problem, fix=fix)


def _default_of(name: str) -> Any:
    return Training.model_fields[name].default


def _conflicts(training: Training) -> Iterator[tuple[bool, str, str]]:
    """Settings that exclude each other: (whether they do here, the problem, the fix)."""
    master, dtype = training.master_dtype, training.dtype
    yield (
        master == "bfloat16" and dtype != "bfloat16",
        f"training.master_dtype: bfloat16 needs training.dtype: bfloat16, not {dtype}",
        "set training.dtype: bfloat16, or leave training.master_dtype out",
    )
    yield (
        master == "float32" and dtype == "float64",
        "training.master_dtype: a float64 run has float64 weights",
        "leave training.master_dtype out",
    )
    yield (
        training.optim_in_backward and training.gradient_accumulation_steps > 1,
        "training.optim_in_backward frees gradients, which gradient accumulation has to keep",
        "set training.gradient_accumulation_steps: 1, or training.optim_in_backward: false",
    )
    yield (
        training.optim_in_backward and dtype == "float16",
        "training.optim_in_backward cannot repeat a float16 step that overflows: some parameters are already updated",
        "set training.dtype: bfloat16, or training.optim_in_backward: false",
    )
    yield (
        master != "bfloat16" and not training.stochastic_rounding,
        "training.stochastic_rounding applies to bfloat16 weights only",
        "set training.master_dtype: bfloat16, or leave training.stochastic_rounding out",
    )
    optimizer = OPTIMIZERS[training.optim]
    unused = [n for n in optimizer.ignores if getattr(training, n) != _default_of(n)]
    yield (
        bool(unused),
        f"{', '.join(f'training.{name}' for name in unused)}: not used by {optimizer.title}",
        "leave it out, or set training.optim: adamw",
    )


def _conflicts_with_adapters(training: Training) -> Iterator[tuple[bool, str, str]]:
    """The same of settings of LoRA adapters."""
    lora = training.lora_rank is not None
    yield (
        training.optim_in_backward and lora,
        "training.optim_in_backward saves no memory with LoRA adapters, whose gradients are small",
        "set training.optim_in_backward: false",
    )
    yield (
        lora and training.dtype == "float64",
        "training.lora_rank: adapters are trained in float32, not in float64",
        "set training.dtype: float32, or leave training.lora_rank out",
    )
    yield (
        lora and training.save_dtype is not None,
        "training.save_dtype: merged adapters are saved in float32; rounding would lose most of what they learned",
        "leave training.save_dtype out, and convert the final model with `tunix-rt export`",
    )
    yield (
        lora and training.master_dtype == "bfloat16",
        "training.master_dtype: adapters are trained in float32, and frozen weights have training.dtype",
        "leave training.master_dtype out",
    )
    yield (
        training.load_in_4bit and training.compile is True,
        "training.load_in_4bit: layers with 4-bit weights are not compiled",
        "leave training.compile out",
    )
    alone = ", ".join(f"training.{n}" for n in LORA_SETTINGS[1:] if getattr(training, n) != _default_of(n))
    yield (
        bool(alone) and not lora, f"{alone}: every parameter is trained",
        "set training.lora_rank, or leave it out",
    )  # fmt: skip


NOT_WITH_ROLLOUTS = {
    "training.gradient_accumulation_steps": "the number of micro-batches follows from the rollouts",
    "training.optim_in_backward": "the log-probabilities are compared with the sampler's before anything is updated",
    "training.load_in_4bit": "adapters are not tried with rollouts yet",
    "training.lora_rank": "adapters are not tried with rollouts yet",
    "training.patience": "the held-out loss of traces says nothing of rewards; alarms stop such a run",
    "training.memory": "the planner does not choose settings of rollouts yet",
    "training.compile": "rollouts are compared with layers that are not compiled",
    "training.data_replicas": "rollouts are not shared among ranks yet",
    "data.group_by_length": "rows are sorted by length within each step",
    "data.completion_only_loss": "what the model generated is trained, and nothing else",
}  # fmt: skip
"""Settings that must have their default with `training.method: grpo` or `rft`, and why."""


def _conflicts_with_rollouts(config: RunConfig) -> Iterator[tuple[bool, str, str]]:
    """The same of reinforcement learning."""
    training = config.training
    method, alone = f"training.method: {training.method}", "set training.method: grpo or rft, or leave it out"
    if not training.samples:
        yield training.rollouts is not None, "training.rollouts: with training.method: sft nothing is sampled", alone
        return
    keys = "{prompts: 32, samples: 8, max_new_tokens: 256, advantage: mean}"
    yield training.rollouts is None, f"{method} needs training.rollouts", f"set training.rollouts: {keys}"
    for name, why in NOT_WITH_ROLLOUTS.items():
        section, key = name.split(".")
        inner = getattr(config, section)
        value = getattr(inner, key)
        plain = value == type(inner).model_fields[key].default or (key == "compile" and value is False)
        yield not plain, f"{name}: {why}", f"leave {name} out"
    yield training.dtype == "float16", f"{method}: float16 overflows are not tried yet", "set training.dtype: bfloat16"
    tokens = training.rollouts.max_new_tokens if training.rollouts else 0
    yield (
        tokens >= config.data.max_length,
        f"training.rollouts.max_new_tokens is {tokens}, data.max_length {config.data.max_length}: no room for a prompt",
        "raise data.max_length, which holds a prompt and its rollout",
    )

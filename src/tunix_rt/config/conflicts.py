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
    for refused, problem, fix in (*_conflicts(training), *_conflicts_with_adapters(training)):
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

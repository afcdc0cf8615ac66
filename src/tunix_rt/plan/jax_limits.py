"""What the JAX engine does not do, in one table: by name, with the way out. Known without jax.

Settings end with exit code 2, models with 3. Which architectures it knows stands in `engines/jax/architecture.py`, which
refuses others in the same way.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.errors import ConfigError, InputError

USE_TORCH = "or set training.backend: torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A setting, what the engine makes of it, and the way out."""

    setting: str
    holds: Callable[[Training], bool]
    """Whether it is asked for."""
    problem: str
    fix: str


LIMITS = (
    Limit(
        setting="training.lora_rank",
        holds=lambda training: training.lora_rank is not None,
        problem="the JAX engine trains every parameter and has no adapters",
        fix=f"leave it out: the state is split over all devices, {USE_TORCH}",
    ),
    Limit(
        setting="training.dtype: float16",
        holds=lambda training: training.dtype == "float16",
        problem="the JAX engine has no loss scale, which float16 needs",
        fix=f"set training.dtype: bfloat16, {USE_TORCH}",
    ),
    Limit(
        setting="training.optim: adamw_8bit",
        holds=lambda training: training.optim == "adamw_8bit",
        problem="the JAX engine has no moments of 8 bits",
        fix=f"set training.optim: adafactor, which keeps less still, or adamw, {USE_TORCH}",
    ),
    Limit(
        setting="training.optim_in_backward",
        holds=lambda training: training.optim_in_backward,
        problem="the JAX engine updates all tensors at the end of a step",
        fix=f"leave it out, {USE_TORCH}",
    ),
    Limit(
        setting="training.compile: false",
        holds=lambda training: training.compile is False,
        problem="the JAX engine computes compiled steps alone",
        fix=f"leave it out, {USE_TORCH}",
    ),
)


def limits_met(training: Training) -> Iterator[Limit]:
    """The settings of `training` that the JAX engine refuses."""
    return (limit for limit in LIMITS if limit.holds(training))


def refuse_for_jax(config: RunConfig) -> None:
    """Raise for the first setting that the JAX engine does not honour; nothing for another engine."""
    if config.training.backend != "jax":
        return
    for limit in limits_met(config.training):
        raise ConfigError(f"{limit.setting}: {limit.problem}", fix=limit.fix)


def refuse_profile(backend: str, steps: int) -> None:
    if backend == "jax" and steps:
        raise ConfigError(
            f"--profile {steps}: the JAX engine records no steps",
            fix=f"leave it out, and use jax's own profiler, {USE_TORCH}",
        )


def refuse_dropout(name: str, rate: float, config: Mapping[str, Any]) -> None:
    """The models of the JAX engine drop nothing at random: one that asks for it would be trained otherwise than it says."""
    if rate > 0:
        said = [key for key, value in config.items() if ("dropout" in key or key.endswith("_pdrop")) and value]
        raise InputError(
            f"{name}: config.json asks for dropout of {rate:g} ({', '.join(sorted(said)) or 'by default'}), "
            "which the JAX engine does not do",
            fix=f"set it to 0 in a copy of the model's config.json, {USE_TORCH}",
        )

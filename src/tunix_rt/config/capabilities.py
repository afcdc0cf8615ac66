"""What each engine supports, as data: known without torch and without JAX.

The configuration, the planner, the command line and the engines read one table; none of them compares the name of an engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunix_rt.config.optimizers import OPTIMIZERS, optimizers_of
from tunix_rt.errors import ConfigError
from tunix_rt.ranks import world

if TYPE_CHECKING:
    from tunix_rt.config.settings import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """An engine: what it can be configured to do, and how it uses a computer."""

    title: str
    """As people call it."""
    extra: str
    """The extra of the package that installs it: `pip install "tunix-rt[EXTRA]"`."""
    devices: tuple[str, ...]
    """Values of `training.device`."""
    dtypes: tuple[str, ...]
    """Values of `training.dtype`."""
    optimizers: tuple[str, ...]
    """Values of `training.optim`."""
    implementations: tuple[str, ...]
    """Values of `model.implementation`."""
    checkpointing: tuple[bool | float, ...]
    """Values of `training.gradient_checkpointing` that differ in memory and speed, the most memory first."""
    lora: bool = False
    """Trains adapters: `training.lora_rank` and the settings beside it."""
    optim_in_backward: bool = False
    """Updates a tensor as soon as its gradient is complete."""
    eager: bool = False
    """Runs without a compiler: `training.compile: false`."""
    profile: bool = False
    """Records a profile of training steps: `--profile`."""
    dropout: bool = False
    """Trains models with dropout."""
    rollouts: tuple[str, ...] = ()
    """Devices on which it trains on rollouts: `training.method: grpo` or `rft`."""
    ranks: bool = False
    """Shards a run over the ranks that a launcher starts, each with one device."""
    multi_device: bool = False
    """Shards a run over every visible device; `per_device_train_batch_size` counts the rows of each."""
    multi_process: bool = False
    """Runs on the devices of several processes, which a launcher starts with the same command."""
    compiles_whole_step: bool = False
    """Compiles a step before it reads a weight. The compiler decides whether the step fits; no layer runs uncompiled."""
    own_models: bool = False
    """Has its own code for each model family, in `engines/jax/architecture.py`; else every family of transformers."""
    threads_by_affinity: bool = False
    """Starts a thread for each CPU core that the process may run on; else as many as it is configured to."""
    cpu_baseline: bool = False
    """The evidence of a GPU run includes the same run on the CPU. Models that JAX is for are too large for most CPUs."""


LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_target_modules", "lora_dropout", "load_in_4bit")
"""Settings of `training`; all but the first need the first."""
CAPABILITIES: dict[str, Capabilities] = {
    "torch": Capabilities(
        title="PyTorch",
        extra="training",
        devices=("cpu", "cuda"),
        dtypes=("float32", "float64", "bfloat16", "float16"),
        optimizers=optimizers_of("torch"),
        implementations=("auto",),
        checkpointing=(False, 0.75, 0.5, 0.25, True),
        lora=True,
        optim_in_backward=True,
        eager=True,
        profile=True,
        dropout=True,
        rollouts=("cpu",),
        ranks=True,
        cpu_baseline=True,
    ),
    "jax": Capabilities(
        title="JAX",
        extra="jax",
        devices=("cpu", "cuda", "tpu"),
        dtypes=("float32", "float64", "bfloat16"),
        optimizers=optimizers_of("jax"),
        implementations=("auto", "tunix"),
        checkpointing=(False, 0.5, True),  # every fraction saves the matmul results of all layers
        multi_device=True,
        multi_process=True,
        compiles_whole_step=True,
        own_models=True,
        threads_by_affinity=True,
    ),
}
"""By the value of `training.backend`."""


def capabilities_of(training: "Training") -> Capabilities:
    return CAPABILITIES[training.backend]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A requested setting that an engine does not support."""

    setting: str
    problem: str
    fix: str


def unsupported(
    training: "Training", engine: Capabilities, *, implementation: str = "auto", profile_steps: int = 0
) -> Iterator[Unsupported]:
    """What `training`, `model.implementation` and `--profile` request and `engine` does not support."""
    for setting, supported, reason, instead in _requests(training, engine, implementation, profile_steps):
        if not supported:
            others = [name for name, other in CAPABILITIES.items() if other is not engine]
            problem = f"{setting}: the {engine.title} engine {reason}"
            yield Unsupported(
                setting=setting, problem=problem, fix=f"{instead}, or set training.backend: {' or '.join(others)}"
            )


def _requests(
    training: "Training", engine: Capabilities, implementation: str, profile_steps: int
) -> Iterator[tuple[str, bool, str, str]]:
    """Each request: the setting, whether `engine` supports it, why not, and what to do instead."""
    yield (
        f"model.implementation: {implementation}", implementation in engine.implementations,
        "runs the models of transformers", "leave it out",
    )  # fmt: skip
    yield (
        f"training.data_replicas: {training.data_replicas}",
        training.data_replicas == 1 or engine.multi_device or (engine.ranks and world().size > 1),
        "trains on one device", "start several ranks with --nproc, or leave it out",
    )  # fmt: skip
    for name in LORA_SETTINGS:
        yield (
            f"training.{name}", engine.lora or getattr(training, name) == type(training).model_fields[name].default,
            "trains every parameter and has no adapters", "leave it out: the state is sharded over all devices",
        )  # fmt: skip
    yield (
        f"training.dtype: {training.dtype}", training.dtype in engine.dtypes,
        "has no loss scaling, which float16 needs", "set training.dtype: bfloat16",
    )  # fmt: skip
    yield (
        f"training.optim: {training.optim}", training.optim in engine.optimizers,
        f"has no {OPTIMIZERS[training.optim].title}", f"set training.optim: {' or '.join(engine.optimizers)}",
    )  # fmt: skip
    yield (
        "training.optim_in_backward", not training.optim_in_backward or engine.optim_in_backward,
        "updates all tensors at the end of a step", "leave it out",
    )  # fmt: skip
    yield (
        f"training.method: {training.method}", not training.samples or bool(engine.rollouts),
        "has no loss with a weight for each target", "set training.method: sft",
    )  # fmt: skip
    yield (
        "training.compile: false", training.compile is not False or engine.eager,
        "runs compiled steps only", "leave it out",
    )  # fmt: skip
    yield (
        f"--profile {profile_steps}", not profile_steps or engine.profile,
        "records no profile", "leave it out and use the engine's own profiler",
    )  # fmt: skip


def refuse_rollouts(training: "Training", device: str) -> None:
    """ConfigError for rollouts on a device, or over several ranks, where they are not supported yet."""
    supported = CAPABILITIES[training.backend].rollouts
    where = f"on {device}" if device not in supported else "over several ranks" if world().size > 1 else None
    if training.samples and where:
        raise ConfigError(
            f"training.method: {training.method} is not supported {where} yet",
            fix=f"set training.device: {' or '.join(supported)}, on one rank",
        )


def refuse_unsupported(
    training: "Training", engine: str | None = None, *, implementation: str = "auto", profile_steps: int = 0
) -> None:
    """ConfigError for the first setting that the engine does not support; `engine` is by default `training.backend`."""
    known = CAPABILITIES[engine or training.backend]
    for found in unsupported(training, known, implementation=implementation, profile_steps=profile_steps):
        raise ConfigError(found.problem, fix=found.fix)

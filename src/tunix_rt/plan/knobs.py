"""The settings that the solver may change so that a run needs less memory, and what each changes in its result."""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import product
from math import log2

from tunix_rt.config.capabilities import capabilities_of
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.optimizers import OPTIMIZERS, OptimizerSpec
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError
from tunix_rt.plan.fit import Device

WEIGHTS = {
    "dtype": 1, "weights": 4, "in backward": 8, **{name: spec.departure or 0 for name, spec in OPTIMIZERS.items()},
}  # fmt: skip
"""How much a change of the result weighs: another compute dtype, 8-bit optimizer states, bfloat16 weights, updates in the
backward pass, Adafactor. Each weighs more than all before it together."""
BFLOAT16_CAPABILITY = (8, 0)
"""The first CUDA compute capability with bfloat16."""

Settings = dict[str, object]
ROWS, ACCUMULATION = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
CHECKPOINTING, EVAL_BATCH = "training.gradient_checkpointing", "evaluation.per_device_eval_batch_size"
REPLICAS, EVALUATION = "training.data_replicas", "evaluation.enabled"


def with_copied(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """`config` with `settings`, unvalidated, which is a hundred times as fast as `config.load.with_settings`."""
    sections: dict[str, Settings] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    )


def differing(written: RunConfig, config: RunConfig) -> Settings:
    """The training settings of `config` that differ from those `written`."""
    before, after = dict(written.training), dict(config.training)
    return {f"training.{key}": value for key, value in after.items() if value != before[key]}


def value_of(config: RunConfig, name: str) -> object:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def can_run(config: RunConfig) -> bool:
    """Whether the engine supports these settings together, for any model and dataset."""
    named = config.model.model_name_or_path and config.data.dataset
    names: Settings = {} if named else {"model.model_name_or_path": "any", "data.dataset": "any"}
    try:
        require_runnable(with_copied(config, names | {REPLICAS: 1}))  # which the number of ranks decides
    except ConfigError:
        return False
    return True


def runnable(config: RunConfig, settings: Settings) -> RunConfig | None:
    """`config` with `settings`; None if the engine does not support them together. Cached for a search over devices."""
    return _runnable(config, tuple(settings.items()))


@lru_cache(maxsize=4096)
def _runnable(config: RunConfig, settings: tuple[tuple[str, object], ...]) -> RunConfig | None:
    changed = with_copied(config, dict(settings))
    return changed if can_run(changed) else None


# --- what may be changed ----------------------------------------------------------------------------------------------


def narrow_type(choice: Device) -> str | None:
    """The 16-bit dtype that is faster than float32 on a device; None for a CPU, which seldom has one."""
    if choice.device == "tpu":
        return "bfloat16"
    if choice.device != "cuda":
        return None
    known = choice.capability
    return "bfloat16" if known is not None and known >= BFLOAT16_CAPABILITY else "float16"


def rungs_of(config: RunConfig, choice: Device) -> Iterator[Settings]:
    """Every way to change the result, the empty one first. Engines do not support all of them: see `can_run`."""
    training, narrow = config.training, narrow_type(choice)
    types: list[Settings] = [{}]
    if training.dtype == "float64":
        types.append({"training.dtype": "float32"})
    elif training.dtype == "float32" and narrow:
        types.append({"training.dtype": narrow})
    elif training.dtype == "float16":  # not supported by optim_in_backward
        types.append({"training.dtype": narrow if narrow == "bfloat16" else "float32"})
    if training.lora_rank is not None:
        yield from types
        return
    if narrow == "bfloat16" and training.master_dtype != "bfloat16":
        types.append({"training.dtype": "bfloat16", "training.master_dtype": "bfloat16"})
    optimizers: list[Settings] = [{}]
    further = [name for name, spec in OPTIMIZERS.items() if _departs_further(spec, training.optim)]
    optimizers += [{"training.optim": name} for name in further]
    updates: list[Settings] = [{}] if training.optim_in_backward else [{}, {"training.optim_in_backward": True}]
    for one, optimizer, update in product(types, optimizers, updates):
        yield one | optimizer | update


def _departs_further(spec: OptimizerSpec, configured: str) -> bool:
    now = OPTIMIZERS[configured].departure
    return now is not None and spec.departure is not None and spec.departure > now


def changes_of_result(config: RunConfig, changed: RunConfig) -> Iterator[str]:
    """Keys of `WEIGHTS` for what differs in the result."""
    before, after = config.training, changed.training
    if after.dtype != before.dtype:
        yield "dtype"
    if after.optim != before.optim:
        yield after.optim
    if after.master_dtype != before.master_dtype:
        yield "weights"
    if after.optim_in_backward and not before.optim_in_backward:
        yield "in backward"


_COSTS = {
    "training.dtype=bfloat16": "bfloat16 matmuls",
    "training.dtype=float16": "float16 matmuls",
    "training.dtype=float32": "float32 matmuls",
    "training.master_dtype=bfloat16": "bfloat16 weights",
    **{f"training.optim={name}": spec.change for name, spec in OPTIMIZERS.items() if spec.change},
    "training.optim_in_backward=true": "gradients clipped per tensor",
}
"""What a setting changes in the result, beside the order of additions."""


def costs_of(settings: Settings, config: RunConfig, changed: RunConfig) -> Iterator[str]:
    for name, value in settings.items():
        if cost := _COSTS.get(f"{name}={_yaml(value)}"):
            yield cost
    if rows_of_step(changed) < rows_of_step(config):
        yield f"{rows_of_step(changed)} instead of {rows_of_step(config)} rows in a step"
    if changed.training.lora_rank is not None and config.training.lora_rank is None:
        yield "LoRA adapters instead of every parameter"
    if changed.data.max_length < config.data.max_length:
        yield "longer traces are dropped: other data"


def rows_of_step(config: RunConfig) -> int:
    return config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps


def set_line(settings: Mapping[str, object]) -> str:
    """As command line options."""
    return " ".join(f"--set {name}={_yaml(value)}" for name, value in settings.items())


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- what leaves the result alone ------------------------------------------------------------------------------------


MANY_SPLITS = 12
"""Ways to split a batch into micro-batches: of more than these, only some are tried."""


@cache
def splits(total: int) -> tuple[tuple[int, int], ...]:
    """Rows of a micro-batch and their number, for `total` rows in a step; most rows first. Of many, those nearest to a power
    of two, with the largest and the smallest: memory and speed differ little between them."""
    small = [rows for rows in range(1, int(total**0.5) + 1) if total % rows == 0]
    divisors = sorted({*small, *(total // rows for rows in small)}, reverse=True)
    found = [(rows, total // rows) for rows in divisors if rows <= 65_536 and total // rows <= 65_536]
    if len(found) <= MANY_SPLITS:
        return tuple(found)
    near = {_nearest(found, power) for power in range(found[0][0].bit_length() + 1)}
    return tuple(sorted({*near, found[0], found[-1]}, reverse=True))


def _nearest(splits: list[tuple[int, int]], power: int) -> tuple[int, int]:
    return min(splits, key=lambda one: abs(log2(one[0]) - power))


def checkpointing_of(config: RunConfig) -> list[bool | float]:
    """Values of `gradient_checkpointing` to try, the one in `config` first. Where the compiler decides, only the one that
    needs the least memory."""
    engine, now = capabilities_of(config.training), config.training.gradient_checkpointing
    if engine.compiles_whole_step:
        return [True]
    return [now, *(fraction for fraction in engine.checkpointing if fraction is not now and fraction != now)]


def replicas_of(config: RunConfig, choice: Device, devices: int) -> list[Settings]:
    """Numbers of data-parallel replicas to try on several ranks, the one in `config` first: one, and one for each node, which
    keeps gathers within nodes."""
    links = getattr(choice, "links", None)
    if devices == 1 or capabilities_of(config.training).compiles_whole_step:
        return [{}]
    numbers = {config.training.data_replicas: None, 1: None, links.nodes if links else 1: None}
    return [{REPLICAS: number} for number in numbers if devices % number == 0 and devices // number > 1]


def eval_batch_sizes(config: RunConfig) -> list[int | None]:
    """Evaluation batch sizes to try: the one in `config`, then half of it and so on. None: as many as fit."""
    size = config.evaluation.per_device_eval_batch_size
    sizes: list[int | None] = [size]
    while size and size > 1:
        size //= 2
        sizes.append(size)
    return sizes

"""What may be changed in a run so that it needs less memory, what of that changes its result, and in which words."""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import product
from math import log2

from tunix_rt.config.settings import RunConfig, require_runnable
from tunix_rt.errors import ConfigError
from tunix_rt.plan.jax_limits import limits_met
from tunix_rt.plan.target import Device

KEPT_SHARES: tuple[bool | float, ...] = (False, 0.75, 0.5, 0.25, True)
"""What `training.gradient_checkpointing` is tried with; on the JAX engine every share is the same."""
WEIGHTS = {"products": 1, "moments": 2, "weights": 4, "updates": 8, "adafactor": 16}
"""How much a change of the result weighs: products in another type, moments in 8 bits, weights kept in bfloat16, updates in
the backward pass, Adafactor. Each weighs more than all before it together."""
BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability from which on a GPU computes in bfloat16."""

Settings = dict[str, object]
ROWS, ACCUMULATION = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
KEPT, ASKED = "training.gradient_checkpointing", "evaluation.per_device_eval_batch_size"


def with_copied(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """`config` with `settings`, unchecked, which is a hundred times as fast as `config.with_settings`."""
    sections: dict[str, Settings] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    )


def differing(asked: RunConfig, config: RunConfig) -> Settings:
    """The settings of `config` for a training that `asked` has otherwise."""
    before, after = dict(asked.training), dict(config.training)
    return {f"training.{key}": value for key, value in after.items() if value != before[key]}


def value_of(config: RunConfig, name: str) -> object:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def can_run(config: RunConfig) -> bool:
    """Whether the engine honours these settings together; which model and data they are for is of no matter."""
    named = config.model.model_name_or_path and config.data.dataset
    names: Settings = {"model.model_name_or_path": "any", "data.dataset": "any"}
    try:
        require_runnable(config if named else with_copied(config, names))
    except ConfigError:
        return False
    return config.training.backend != "jax" or not any(limits_met(config.training))


def runnable(config: RunConfig, settings: Settings) -> RunConfig | None:
    """`config` with `settings`; None where no engine honours them together. Kept: every device is asked about the same."""
    return _runnable(config, tuple(settings.items()))


@lru_cache(maxsize=4096)
def _runnable(config: RunConfig, settings: tuple[tuple[str, object], ...]) -> RunConfig | None:
    changed = with_copied(config, dict(settings))
    return changed if can_run(changed) else None


# --- what may be changed ----------------------------------------------------------------------------------------------


def narrow_type(choice: Device) -> str | None:
    """The 16-bit type that a device computes in faster than in float32; None for a CPU, which seldom has one."""
    if choice.device == "tpu":
        return "bfloat16"
    if choice.device != "cuda":
        return None
    known = choice.capability
    return "bfloat16" if known is not None and known >= BFLOAT16_CAPABILITY else "float16"


def rungs_of(config: RunConfig, choice: Device) -> Iterator[Settings]:
    """Every way to change the result, and first the one that does not. Some of them no engine honours: see `can_run`."""
    training, narrow = config.training, narrow_type(choice)
    types: list[Settings] = [{}]
    if training.dtype == "float64":
        types.append({"training.dtype": "float32"})
    elif training.dtype == "float32" and narrow:
        types.append({"training.dtype": narrow})
    elif training.dtype == "float16":  # which no update in backward can be computed in
        types.append({"training.dtype": narrow if narrow == "bfloat16" else "float32"})
    if training.lora_rank is not None:
        yield from types
        return
    if narrow == "bfloat16" and training.master_dtype != "bfloat16":
        types.append({"training.dtype": "bfloat16", "training.master_dtype": "bfloat16"})
    smaller = {"adamw": ("adamw_8bit", "adafactor"), "adamw_8bit": ("adafactor",)}.get(training.optim, ())
    optimizers: list[Settings] = [{}]
    optimizers += [{"training.optim": name} for name in smaller]
    updates: list[Settings] = [{}] if training.optim_in_backward else [{}, {"training.optim_in_backward": True}]
    for one, optimizer, update in product(types, optimizers, updates):
        yield one | optimizer | update


def changes_of_result(config: RunConfig, changed: RunConfig) -> Iterator[str]:
    """The names of what differs in the result, as they are weighed."""
    before, after = config.training, changed.training
    if after.dtype != before.dtype:
        yield "products"
    if after.optim != before.optim:
        yield "moments" if after.optim == "adamw_8bit" else "adafactor"
    if after.master_dtype != before.master_dtype:
        yield "weights"
    if after.optim_in_backward and not before.optim_in_backward:
        yield "updates"


_COSTS = {
    "training.dtype=bfloat16": "products in bfloat16",
    "training.dtype=float16": "products in float16",
    "training.dtype=float32": "products in float32",
    "training.master_dtype=bfloat16": "weights kept in bfloat16",
    "training.optim=adamw_8bit": "AdamW with moments of 8 bits",
    "training.optim=adafactor": "Adafactor instead of AdamW",
    "training.optim_in_backward=true": "gradients clipped tensor by tensor",
}
"""What a setting changes in the result, beyond the order of additions."""


def costs_of(settings: Settings, config: RunConfig, changed: RunConfig) -> Iterator[str]:
    for name, value in settings.items():
        if cost := _COSTS.get(f"{name}={_yaml(value)}"):
            yield cost
    if rows_of_step(changed) < rows_of_step(config):
        yield f"{rows_of_step(changed)} instead of {rows_of_step(config)} rows in a step"
    if changed.training.lora_rank is not None and config.training.lora_rank is None:
        yield "adapters are trained instead of every parameter"
    if changed.data.max_length < config.data.max_length:
        yield "longer traces are left out: other data"


def rows_of_step(config: RunConfig) -> int:
    return config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps


def set_line(settings: Mapping[str, object]) -> str:
    """Ready for the command line."""
    return " ".join(f"--set {name}={_yaml(value)}" for name, value in settings.items())


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- what leaves the result alone ------------------------------------------------------------------------------------


MANY_SPLITS = 12
"""Ways to split the rows of a step: of more than these, only some are tried."""


@cache
def splits(total: int) -> tuple[tuple[int, int], ...]:
    """Rows at a time and how often, for so many rows in a step; most rows first. Of many, those whose rows are nearest to a
    power of two, and the most and the fewest: between two of them memory and speed differ by little."""
    small = [rows for rows in range(1, int(total**0.5) + 1) if total % rows == 0]
    divisors = sorted({*small, *(total // rows for rows in small)}, reverse=True)
    found = [(rows, total // rows) for rows in divisors if rows <= 65_536 and total // rows <= 65_536]
    if len(found) <= MANY_SPLITS:
        return tuple(found)
    near = {_nearest(found, power) for power in range(found[0][0].bit_length() + 1)}
    return tuple(sorted({*near, found[0], found[-1]}, reverse=True))


def _nearest(splits: list[tuple[int, int]], power: int) -> tuple[int, int]:
    return min(splits, key=lambda one: abs(log2(one[0]) - power))


def kept_shares(config: RunConfig) -> list[bool | float]:
    """What may be computed again: no less and no more than anything, and first as it is asked for."""
    asked = config.training.gradient_checkpointing
    tried = (False, 0.5, True) if config.training.backend == "jax" else KEPT_SHARES
    return [asked, *(share for share in tried if share is not asked and share != asked)]


def asked_at_once(config: RunConfig) -> list[int | None]:
    """Questions at once: as it is asked for, then half of it and so on. Where nothing is asked for, as few as fit are taken."""
    rows = config.evaluation.per_device_eval_batch_size
    found: list[int | None] = [rows]
    while rows and rows > 1:
        rows //= 2
        found.append(rows)
    return found

"""A first configuration for a device: what `tunix-rt init` writes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import DoesNotFitError, InputError
from tunix_rt.plan.fit import GIB
from tunix_rt.plan.knobs import narrow_type, value_of
from tunix_rt.plan.run import RunPlan, plan_run
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.target import Target

METHODS: Mapping[str, dict[str, Any]] = {
    "full": {"training.learning_rate": 2e-5},
    "lora": {"training.learning_rate": 2e-4, "training.lora_rank": 16},
    "qlora": {"training.learning_rate": 2e-4, "training.lora_rank": 16, "training.load_in_4bit": True},
}
"""What is trained, and the settings of each way."""
TITLES = {"full": "every parameter", "lora": "LoRA adapters", "qlora": "LoRA adapters beside 4-bit weights"}
ROWS = {"training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 2}
"""Of a step; the planner splits them otherwise where memory is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """The configuration, its plan, and what was tried before."""

    method: str
    plan: RunPlan
    settings: Mapping[str, Any]
    """By dotted name, in the order of the file."""
    chosen: Mapping[str, Any]
    """Those that the planner changed so that the run fits, or is faster."""
    misfits: Sequence[str]
    """A sentence for every way that does not fit."""

    def yaml(self, device: str) -> str:
        """A commented YAML."""
        fit = f"{self.plan.memory.peak_bytes / GIB:.2f} GiB predicted, {self.plan.fit.available_bytes / GIB:.2f} GiB available"
        lines = [
            f"# Written by tunix-rt init for {device}: {self.plan.verdict}, {fit}.",
            f"# Trains {TITLES[self.method]}.",
        ]
        lines += [f"# Not {sentence}." for sentence in self.misfits]
        section = ""
        for name, value in self.settings.items():
            here, leaf = name.split(".")
            lines += [f"{here}:"] * (here != section)
            section = here
            why = "chosen by the planner. " if name in self.chosen else ""
            lines.append(f"  {leaf}: {_written(value)}  # {why}{_sentence(here, leaf)}")
        return "\n".join(lines) + "\n"


def starter(given: Mapping[str, Any], method: str, shape: ModelShape, target: Target) -> Starter:
    """A configuration with the `given` settings that fits `target`; DoesNotFitError if none does. `method` is a way of METHODS,
    or `auto`: the first that fits."""
    misfits: list[str] = []
    for name in METHODS if method == "auto" else (method,):
        settings = dict(given) | _of_device(target) | ROWS | METHODS[name]
        config = _config(settings | {"training.memory": "auto"})
        require_runnable(config)
        try:
            plan = plan_run(config, shape, target)
        except InputError as error:  # 4 bits, where the modules of the family are not known
            misfits.append(f"{TITLES[name]}: {error.problem}")
            continue
        chosen = dict(plan.fitting["chosen"]) if plan.fitting else {}
        if plan.fit.fits or plan.memory.lower_bound:
            known = {key: value_of(plan.config, key) for key in settings} | chosen
            order = sorted(known, key=lambda key: list(RunConfig.model_fields).index(key.split(".")[0]))
            return Starter(
                method=name,
                plan=plan,
                settings={key: known[key] for key in order},
                chosen=chosen,
                misfits=tuple(misfits),
            )
        least, free = plan.memory.least_bytes / GIB, plan.fit.available_bytes / GIB
        misfits.append(f"{TITLES[name]}: no settings fit into {free:.2f} GiB ({least:.2f} GiB without savings)")
    raise DoesNotFitError(
        f"does not fit on {target.name}\n  " + "\n  ".join(misfits),
        fix="use --method auto, a shorter --max-length, a smaller model, or a larger device: --on NAME",
    )


def _of_device(target: Target) -> dict[str, Any]:
    engine = {"training.backend": "jax"} if target.device == "tpu" else {}
    return {**engine, "training.device": target.device, "training.dtype": narrow_type(target) or "float32"}


def _config(settings: Mapping[str, Any]) -> RunConfig:
    nested: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, leaf = name.split(".")
        nested.setdefault(section, {})[leaf] = value
    return build_config(nested, "init")


def _sentence(section: str, name: str) -> str:
    """The first sentence of a setting's description."""
    annotation: Any = RunConfig.model_fields[section].annotation
    text = " ".join(str(annotation.model_fields[name].description).split())
    return text.split(". ")[0].split("; ")[0].rstrip(".")


def _written(value: Any) -> str:
    return str(yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)).split("\n")[
        0
    ]

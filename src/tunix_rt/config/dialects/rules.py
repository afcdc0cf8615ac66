"""The rules of a dialect's table: what becomes of a key of another trainer."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from tunix_rt.config.optimizers import OPTIMIZERS
from tunix_rt.config.settings import DTYPE_ALIASES, TrackerName

Given = Mapping[str, Any]
"""Every key of the file."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one key with its value: settings, or the reason for none."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """The reason, the nearest way, or how the meaning differs here."""
    refused: bool = False
    instead: str = ""
    """Of a refused key: the setting that, on the command line, replaces it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One key of a dialect. `describe` is its line in the documentation."""

    read: Callable[[Any, Given], Verdict]
    kind: str
    """`mapped`, `without effect` or `refused`: at its usual values; a refused key that is off has no effect."""
    describe: str


Table = Mapping[str, Rule]
OFF: tuple[Any, ...] = (
    None,
    False,
    0,
    "",
    "no",
    "none",
    "None",
    "null",
    "false",
    "False",
    "off",
    "n/a",
    [],
    {},
    ["none"],
)
"""Values that turn a feature off."""


def is_off(value: Any) -> bool:
    return any(value is one or (type(value) is type(one) and value == one) for one in OFF) or value == 0.0


def is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1", "on") if isinstance(value, str) else bool(value)


def number(value: Any) -> Any:
    """A number that YAML reads as text (`2e-4`); any other value unchanged."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.I) else value


def refusal(way: str, *, instead: str = "") -> Verdict:
    return Verdict(note=way, refused=True, instead=instead)


def mapped(**names: str) -> dict[str, Rule]:
    """Key -> setting, the value unchanged; a value that is not set leaves the setting out."""
    return {key: _to(setting) for key, setting in names.items()}


def _to(setting: str) -> Rule:
    def read(value: Any, given: Given) -> Verdict:
        if value is None or value == "null":
            return Verdict(note="not set")
        return Verdict({setting: number(value)})

    return Rule(read, "mapped", f"`{setting}`")


def without(reason: str, keys: str) -> dict[str, Rule]:
    """Keys that change nothing here, whatever their value."""
    return dict.fromkeys(keys.split(), Rule(lambda value, given: Verdict(note=reason), "without effect", reason))


def refused(way: str, keys: str, *, unless: tuple[Any, ...] = ()) -> dict[str, Rule]:
    """Keys that are refused, unless they are off or have a value that is what happens here."""

    def read(value: Any, given: Given) -> Verdict:
        if is_off(value) or any(value == one and type(value) is type(one) for one in unless):
            return Verdict(note="off" if is_off(value) else "as here")
        return refusal(way)

    return dict.fromkeys(keys.split(), Rule(read, "refused", way))


def read_by(function: Callable[[Any, Given], Verdict], *keys: str) -> dict[str, Rule]:
    """Keys that a function reads; its docstring is their line in the documentation."""
    line = (function.__doc__ or "").strip()
    kind = "without effect" if line.startswith("without effect") else "mapped"
    return dict.fromkeys(keys, Rule(function, kind, line))


# --- values that several dialects share -------------------------------------------------------------------------------

OPTIMIZER_NAMES = {
    "adamw": "adamw torch.optim.adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla paged_adamw "
    "paged_adamw_32bit bitsandbytes.optim.pagedadamw",
    "adamw_8bit": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit bitsandbytes.optim.adamw8bit bitsandbytes.optim.pagedadamw8bit",
    "adafactor": "adafactor",
}
"""Ours -> theirs."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def optimizer(value: Any, given: Given) -> Verdict:
    """`training.optim`: AdamW by any name, 8-bit AdamW, Adafactor; any other optimizer is refused"""
    name = str(value).lower()
    if found := next((ours for ours, theirs in OPTIMIZER_NAMES.items() if name in theirs.split()), None):
        return Verdict({"training.optim": found}, "optimizer states stay on the device" if "paged" in name else "")
    return refusal(f"`training.optim` is one of: {', '.join(OPTIMIZERS)}")


def scheduler(value: Any, given: Given) -> Verdict:
    """`training.lr_scheduler_type`: linear, cosine, constant, constant_with_warmup; any other schedule is refused"""
    name = str(value).lower()
    if name in SCHEDULES:
        return Verdict({"training.lr_scheduler_type": SCHEDULES[name]})
    return refusal("the nearest are linear, cosine and constant_with_warmup")


def warmup_steps(value: Any, given: Given) -> Verdict:
    """`training.warmup_steps` with `training.warmup_from_zero`"""
    schedule = str(given.get("lr_scheduler_type", given.get("lr_scheduler", ""))).lower()
    if schedule == "constant" and not is_off(value):
        return Verdict(note="the schedule `constant` has no warm-up; `constant_with_warmup` has")
    if is_off(value):
        return Verdict(note="not set" if value is None else "off")
    return Verdict(warm_up(value))


def warm_up(steps: Any) -> dict[str, Any]:
    """Settings of `steps` of warm-up as transformers and torchtune have it: the first step has a learning rate of 0."""
    return {"training.warmup_steps": number(steps), "training.warmup_from_zero": True}


def warmup_ratio(value: Any, given: Given) -> Verdict:
    """`training.warmup_steps` with `training.warmup_from_zero`: a share of all steps; `warmup_steps` wins over it"""
    if not is_off(given.get("warmup_steps")):
        return Verdict(note="`warmup_steps` wins over it")
    return warmup_steps(value, given)


def save_total_limit(value: Any, given: Given) -> Verdict:
    """`training.save_total_limit`, at least 2: the newest checkpoint may be corrupt"""
    if value is None:
        return Verdict(note="not set: two are kept here, and the best")
    one = number(value) == 1
    return Verdict({"training.save_total_limit": 2 if one else value}, "at least 2 are kept" if one else "")


def steps_or_share(setting: str, otherwise: str) -> Rule:
    """A number of steps; a share of all steps has no effect."""

    def read(value: Any, given: Given) -> Verdict:
        steps = number(value)
        if isinstance(steps, int | float) and not isinstance(steps, bool) and steps >= 1:
            return Verdict({setting: int(steps)})
        return Verdict(note=otherwise)

    return Rule(read, "mapped", f"`{setting}`; a share of all steps has no effect: {otherwise}")


def report_to(value: Any, given: Given) -> Verdict:
    """`training.report_to`; a tracker that tunix-rt does not have is without effect"""
    values = [one for one in (value if isinstance(value, list) else [value]) if not is_off(one)]
    return trackers([str(one) for one in values])


def trackers(names: Sequence[str]) -> Verdict:
    """Those of `names` that tunix-rt has."""
    known, other = ([name for name in names if (name in get_args(TrackerName)) == here] for here in (True, False))
    note = f"without effect: {', '.join(other)}; every step is in metrics.jsonl" if other else ""
    if other and not known:
        return Verdict(note=note)
    return Verdict({"training.report_to": known if len(known) > 1 else known[0] if known else "none"}, note)


IN_8_BIT = "frozen weights have 16 bits, or 4 (NF4, training.load_in_4bit); leave the key out"
FROZEN = "4-bit weights are frozen: train LoRA adapters beside them"


def four_bit(value: Any, *, lora: bool, nested: bool) -> Verdict:
    """`training.load_in_4bit` of a key that is on or off; `nested`: the scales are quantized there too."""
    if not is_on(value):
        return Verdict(note="off")
    if not lora:
        return refusal(FROZEN)
    return Verdict(
        {"training.load_in_4bit": True}, "" if nested else "the scales are quantized too: double quantization"
    )


def dtype_name(value: Any) -> str:
    name = str(value).lower().removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def chat_template(name: str, own: Mapping[str, str], texts: str) -> Verdict:
    """A named template: one of `own` (theirs -> ours), else that of the tokenizer, unless it is one of `texts`."""
    if name in own:
        return Verdict({"data.chat_template": own[name]})
    if name in texts.split():
        return refusal("data.chat_template is tokenizer, gemma, chatml or plain")
    return Verdict({"data.chat_template": "tokenizer"}, f"the tokenizer's own template, not another copy of `{name}`")


def names_of(value: Any) -> list[str]:
    """`a,b` or a list of names."""
    return [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(","))]


SPLIT = "a whole split of a hub dataset is read; or name the files of the split in data.dataset"


def is_path(name: str) -> bool:
    """Whether `name` ends like a data file."""
    return name.endswith((".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt"))


def of_split(name: str, split: Any) -> str | None:
    """`owner/name:split` for a split of a hub dataset; a file as it is. None for a part of a split, and for other splits of a
    file than `train`."""
    is_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not is_path(name) and not os.path.exists(name)
    if split is None or (split == "train" and not is_hub):
        return name
    return f"{name}:{split}" if is_hub and re.fullmatch(r"[\w-]+", str(split)) else None


def files_of(one: Mapping[str, Any]) -> list[str]:
    """Names of a dataset of a list, from `data_files` or `path`, and `split`; empty for a split that has no name here."""
    found = [of_split(name, one.get("split")) for name in names_of(one.get("data_files") or one.get("path"))]
    return [] if None in found else [name for name in found if name]

"""Old and foreign spellings of settings; file, `--set` and flags become one `RunConfig`, or one error with every mistake."""

import difflib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from tunix_rt import assets
from tunix_rt.config.settings import RunConfig
from tunix_rt.config.strict_yaml import MOST_DIGITS, parse_yaml, read_text, read_yaml
from tunix_rt.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from tunix_rt.config.dialects.conversion import Conversion

    Report = Callable[[Conversion, Path], Conversion]
    """Shows what became of the keys, and looks up what the configuration alone cannot say: the type of the model."""

# Canonical name -> its old and foreign spellings. A bare key belongs to the top level.
_SPELLINGS = {
    "model.model_name_or_path": ("model.name", "model.id", "model.model_id"),
    "data.max_length": (
        "model.max_length", "data.max_seq_length", "training.max_seq_length", "training.max_length", "max_seq_length",
    ),
    "training.dtype": ("model.dtype", "model.torch_dtype"),
    "data.dataset": ("data.dataset_key", "data.dataset_name", "dataset_name"),
    "training.data_seed": ("data.shuffle_seed", "training.shuffle_seed"),
    "data.packing": ("training.packing",),
    "data.completion_only_loss": ("training.completion_only_loss",),
    "training.max_steps": ("training.num_steps",),
    "training.num_train_epochs": ("training.num_epochs", "training.epochs"),
    "training.per_device_train_batch_size": ("training.batch_size", "training.per_device_batch_size", "batch_size"),
    "training.optim": ("training.optimizer", "optimizer"),
    "training.learning_rate": ("training.lr",),
    "training.lr_scheduler_type": ("training.lr_scheduler",),
    "training.save_steps": ("training.save_every_steps",),
    "training.eval_steps": ("training.eval_every_steps",),
    "training.patience": ("training.early_stopping_patience",),
    "training.logging_steps": ("training.log_every_steps",),
    "training.max_grad_norm": ("training.gradient_clip",),
    "training.compile": ("training.torch_compile",),
    "training.lora_rank": ("training.lora_r", "lora_r"),
    "training.lora_target_modules": ("training.target_modules", "target_modules"),
    "data.system_instruction": ("training.system_instruction",),
    "evaluation.per_device_eval_batch_size": ("training.per_device_eval_batch_size",),
    "evaluation.evalset": ("evaluation.eval_set", "eval_set"),
}  # fmt: skip
OLD_NAMES = {old: new for new, spellings in _SPELLINGS.items() for old in spellings}

# Settings of other trainers that tunix-rt does not have: what to write instead.
INSTEAD = {
    "output_dir": "give the folder on the command line: --output DIR",
    "output": "give the folder on the command line: --output DIR",
    "run_name": "a run is its folder: --output DIR",
    "bf16": "training.dtype: bfloat16",
    "fp16": "training.dtype: float16",
    "warmup_ratio": "training.warmup_steps: a value below 1 is a fraction of all steps",
    "no_cuda": "training.device: cpu",
    "use_cpu": "training.device: cpu",
    "trust_remote_code": "tunix-rt never runs code of a model repository; leave the key out",
    "bnb_4bit_quant_type": "training.load_in_4bit is always nf4; leave the key out",
    "use_bnb_nested_quant": "training.load_in_4bit always quantizes the scales too; leave the key out",
    "eval_strategy": "training.eval_steps: N",
    "save_strategy": "training.save_steps: N",
    "use_peft": "training.lora_rank: N",
    "lora_target_linear": "training.lora_target_modules: all-linear, which is the default; leave the key out",
    "adapter": "training.lora_rank: N",
    "lora_target": "training.lora_target_modules: [NAMES], or all-linear",
    "base_model": "model.model_name_or_path: NAME",
    "sequence_len": "data.max_length: N",
    "cutoff_len": "data.max_length: N",
    "micro_batch_size": "training.per_device_train_batch_size: N",
    "val_set_size": "data.validation_fraction: a fraction below 1",
    "datasets": "data.dataset: NAME",
    "template": "data.chat_template: NAME",
    "stage": "tunix-rt does supervised fine-tuning (sft); leave the key out",
    "optimizer_in_bwd": "training.optim_in_backward: true",
}

_HOME = {name: section for section, field in RunConfig.model_fields.items() for name in field.annotation.model_fields}  # type: ignore[union-attr]
SETTINGS = frozenset(f"{section}.{name}" for name, section in _HOME.items())


def modernise(raw: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Rename old keys and sort them into sections. Two spellings of one setting may agree, never differ."""
    new: dict[str, dict[str, Any]] = {}
    spelled: dict[str, str] = {}
    unknown: list[str] = []
    for key, value in _leaves(raw, source):
        name = OLD_NAMES.get(key, key)
        if "." not in name and name in _HOME:
            name = f"{_HOME[name]}.{name}"
        if name not in SETTINGS:
            unknown.append(key)
            continue
        section, leaf = name.split(".")
        if name in spelled and new[section][leaf] != value:
            problem = f"{source}: `{spelled[name]}` and `{key}` both set {name}, differently"
            raise ConfigError(problem, fix=f"keep only `{name}`")
        spelled[name] = key
        new.setdefault(section, {})[leaf] = value
    if len(unknown) == 1:
        raise ConfigError(f"{source}: unknown setting `{unknown[0]}`", fix=_nearest(unknown[0]))
    if unknown:
        listed = "\n".join(f"  {key}: {_nearest(key)}" for key in unknown[:20])  # a page at most
        raise ConfigError(f"{source}: {len(unknown)} unknown settings\n{listed}", fix="see docs/reference/config.md")
    return new


def _leaves(raw: Mapping[Any, Any], source: str) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if not isinstance(key, str):
            raise ConfigError(f"{source}: {key!r} is not the name of a setting", fix="a name is plain text")
        if key not in RunConfig.model_fields:
            yield key, value
        elif isinstance(value, Mapping):
            for leaf, inner in value.items():
                yield f"{key}.{leaf}", inner
        elif value is not None:  # an empty section is fine, a scalar where a section belongs is not
            raise ConfigError(f"{source}: `{key}` is a section", fix=f"write its settings below `{key}:`")


def _nearest(key: str) -> str:
    leaf = key.rsplit(".", 1)[-1]
    for name in (key, leaf, key.split(".")[0]):
        if name in INSTEAD:
            return INSTEAD[name]
    if leaf in _HOME:
        return f"`{leaf}` belongs in `{_HOME[leaf]}`"
    from tunix_rt.config.dialects.conversion import hint

    if foreign := hint(key) or hint(leaf):
        return foreign
    section, sections = key.split(".")[0], RunConfig.model_fields
    if section not in sections and (close := difflib.get_close_matches(section, sections, n=1, cutoff=0.8)):
        return f"did you mean the section `{close[0]}`?"
    names = {**dict.fromkeys(_HOME), **{old.rsplit(".", 1)[-1]: new for old, new in OLD_NAMES.items()}}
    close = difflib.get_close_matches(leaf, names, n=1)
    if not close:
        return "see docs/reference/config.md for every setting"
    name = names[close[0]] or f"{_HOME[close[0]]}.{close[0]}"
    return f"did you mean `{name}`?"


def setting_named(leaf: str) -> str | None:
    """The setting that `leaf` alone names, in any known spelling."""
    if leaf in _HOME:
        return f"{_HOME[leaf]}.{leaf}"
    return next((new for old, new in OLD_NAMES.items() if old.rsplit(".", 1)[-1] == leaf), None)


def find_config(name: str) -> Path:
    """The file `name`, or the shipped configuration of that name (with or without `training/configs/` and `.yaml`)."""
    if os.path.isfile(name):  # unlike Path.is_file, never raises
        return Path(name)
    stem = name.removeprefix("training/configs/").removesuffix(".yaml")
    shipped = assets.find("configs", f"{stem}.yaml") if "/" not in stem else None
    if shipped is not None:
        return shipped
    known = sorted({p.stem for folder in assets.search_path("configs") for p in folder.glob("*.yaml")})
    fix = did_you_mean(stem, known, otherwise=f"give a file, or one of: {', '.join(known)}")
    raise ConfigError(f"no configuration {name!r}", fix=fix)


def parse_override(text: str) -> tuple[str, Any]:
    """`section.key=value` as (name, value); the value is read as YAML."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        known = f" {text.strip()}" if text.strip() in SETTINGS or text.strip() in OLD_NAMES else ""
        what = "`=`" if not equals else "name before its `=`"
        raise ConfigError(f"--set{known} has no {what}", fix="write --set section.key=value")
    return name.strip(), parse_yaml(value, f"--set {name.strip()}")


def build_config(raw: Mapping[str, Any], source: str) -> RunConfig:
    """`raw` in any known spelling as a RunConfig, or one ConfigError with all mistakes."""
    try:
        return RunConfig.model_validate(modernise(raw, source))
    except ValidationError as error:
        mistakes = [_mistake(item) for item in error.errors(include_url=False)]
        problem = f"{source}: {len(mistakes)} mistake(s)\n" + "\n".join(mistakes)
        raise ConfigError(problem, fix=_correction(error.errors(include_url=False))) from error


def _correction(errors: Sequence[Any]) -> str:
    """What to write instead: the accepted values of one wrong choice."""
    accepted = errors[0].get("ctx", {}).get("expected") if len(errors) == 1 else None
    return f"use {accepted}" if accepted else "correct what is listed; docs/reference/config.md describes every setting"


def _mistake(item: Any) -> str:
    """The setting, what it takes, and what it got."""
    name = ".".join(str(part) for part in item["loc"] if isinstance(part, str) and not part.startswith("function-"))
    message = item["msg"].removeprefix("Value error, ")
    return f"  {name}: {message} (got {_kind_of(item['input'])})"


LONGEST_SHOWN = 24


def quoted(text: str) -> str:
    """A text that was given, for an error. A long one may be a password in the wrong place: only its length. What is known as a
    secret is redacted where the error is printed."""
    return repr(text) if len(text) <= LONGEST_SHOWN else f"a text of {len(text):,} characters"


def _kind_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else "yes" if value else "no"
    if isinstance(value, int | float):
        endless = isinstance(value, float) and not math.isfinite(value)
        short = abs(value) < 10**MOST_DIGITS  # of a longer one Python may refuse to write out the digits
        return repr(value) if short or endless else f"a number of more than {MOST_DIGITS} digits"
    if isinstance(value, str):
        return quoted(value)
    return "a section" if isinstance(value, Mapping) else f"a {type(value).__name__}"


MOST_PARENTS = 10
"""Files that one configuration may extend, one after the other."""


def read_settings(path: Path, report: "Report | None" = None, given: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The settings of a file in sections: those of the file that it `extends`, with its own over them.

    A configuration of another trainer is converted, and `report` gets what became of its keys; without `report` it is
    refused. A `given` setting replaces the key that it comes from."""
    from tunix_rt.config.dialects.conversion import convert, dialect_of, parse

    chain: list[tuple[Path, dict[str, dict[str, Any]]]] = []
    here: Path | None = path
    while here is not None:
        if any(os.path.samefile(here, seen) for seen, _ in chain):
            names = " extends ".join(str(one) for one, _ in chain)
            raise ConfigError(f"{names} extends {here}: a cycle", fix="remove one `extends:`")
        if len(chain) > MOST_PARENTS:
            raise ConfigError(f"{path}: `extends` more than {MOST_PARENTS} files deep", fix="extend fewer files")
        text = read_text(here)
        raw = parse(text, str(here))
        if dialect_of(raw) is not None:
            found = convert(text, str(here), folder=Path())
            if report is None:
                fix = f"convert it first: tunix-rt convert {here} --to OUT.yaml"
                raise ConfigError(f"{here}: a configuration of {found.title}", fix=fix)
            found = report(found, here)
            found.require_accepted(str(here), given)
            chain.append((here, found.nested()))
            break
        own = read_yaml(here)
        parent = own.pop("extends", None)
        chain.append((here, modernise(own, str(here))))
        here = _parent_of(here, parent)
    merged: dict[str, dict[str, Any]] = {}
    for _, sections in reversed(chain):
        for section, settings in sections.items():
            merged.setdefault(section, {}).update(settings)
    return merged


def _parent_of(path: Path, parent: Any) -> Path | None:
    """The file that `path` extends, by its path as seen from the folder of `path`."""
    if parent is None:
        return None
    if not isinstance(parent, str) or not parent.strip():
        raise ConfigError(f"{path}: `extends` is the path of one file", fix="write extends: base.yaml")
    if os.path.isabs(parent):
        raise ConfigError(f"{path}: `extends` is an absolute path", fix="write the path as seen from this file")
    found = path.parent / parent
    if not os.path.isfile(found):
        raise ConfigError(f"{path}: extends {parent}: no such file", fix=f"the path starts at {path.parent}")
    return found


def load_config(
    path: Path | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    report: "Report | None" = None,
) -> RunConfig:
    """File, then `--set`, then named flags, each over the one before. Raises ConfigError with every mistake.

    A file of another trainer needs a `report`, which gets what became of its keys."""
    source = str(path) if path else "command line"
    later = [(dict([parse_override(text)]), f"--set {text.partition('=')[0].strip()}") for text in overrides]
    later.append(({name: value for name, value in (flags or {}).items() if value is not None}, "command line"))
    given = {OLD_NAMES.get(name, name) for names, _ in later for name in names}
    merged = read_settings(path, report, given) if path else {}
    for names, origin in later:
        nested = modernise(_nest(names, origin), origin)
        for section, settings in nested.items():
            merged.setdefault(section, {}).update(settings)
    overridden = any(names for names, _ in later)
    return build_config(merged, f"{source} and the command line" if overridden and path else source)


def _nest(names: Mapping[str, Any], source: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in names.items():
        section, dot, leaf = name.partition(".")
        if not dot:
            nested[name] = value
        elif section in RunConfig.model_fields:
            nested.setdefault(section, {})[leaf] = value
        else:
            raise ConfigError(f"{source}: unknown setting `{name}`", fix=_nearest(name))
    return nested


def dump_yaml(config: RunConfig) -> str:
    """Every setting in canonical spelling, the text of `config.yaml` in a run folder."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """`config` with some settings changed, each by its dotted name."""
    plain = config.model_dump()
    for name, value in settings.items():
        section, leaf = name.split(".")
        plain[section][leaf] = value
    return RunConfig.model_validate(plain)

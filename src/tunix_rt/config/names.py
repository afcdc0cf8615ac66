"""Old and foreign spellings of settings. An unknown key is an error with the nearest name, never ignored."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError

# Old or foreign spelling -> canonical name. A bare key belongs to the top level.
OLD_NAMES = {
    "model.name": "model.model_name_or_path",
    "model.id": "model.model_name_or_path",
    "model.model_id": "model.model_name_or_path",
    "model.max_length": "data.max_length",
    "model.dtype": "training.dtype",
    "model.torch_dtype": "training.dtype",
    "data.dataset_key": "data.dataset",
    "data.dataset_name": "data.dataset",
    "data.shuffle_seed": "training.data_seed",
    "data.max_seq_length": "data.max_length",
    "training.max_seq_length": "data.max_length",
    "training.max_length": "data.max_length",
    "training.packing": "data.packing",
    "training.completion_only_loss": "data.completion_only_loss",
    "training.num_steps": "training.max_steps",
    "training.num_epochs": "training.num_train_epochs",
    "training.epochs": "training.num_train_epochs",
    "training.batch_size": "training.per_device_train_batch_size",
    "training.per_device_batch_size": "training.per_device_train_batch_size",
    "training.optimizer": "training.optim",
    "training.lr": "training.learning_rate",
    "training.lr_scheduler": "training.lr_scheduler_type",
    "training.save_every_steps": "training.save_steps",
    "training.eval_every_steps": "training.eval_steps",
    "training.log_every_steps": "training.logging_steps",
    "training.gradient_clip": "training.max_grad_norm",
    "training.torch_compile": "training.compile",
    "training.shuffle_seed": "training.data_seed",
    "training.system_instruction": "data.system_instruction",
    "training.per_device_eval_batch_size": "evaluation.per_device_eval_batch_size",
    "evaluation.eval_set": "evaluation.evalset",
    "batch_size": "training.per_device_train_batch_size",
    "max_seq_length": "data.max_length",
    "optimizer": "training.optim",
    "dataset_name": "data.dataset",
    "eval_set": "evaluation.evalset",
}

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
    "load_in_4bit": "tunix-rt trains every parameter; leave the key out",
    "eval_strategy": "training.eval_steps: N",
    "save_strategy": "training.save_steps: N",
    "use_peft": "training.lora_rank: N",
    "lora_r": "training.lora_rank: N",
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
            raise ConfigError(
                f"{source}: `{spelled[name]}` and `{key}` both set {name}, differently", fix=f"keep only `{name}`"
            )
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
    names = {**dict.fromkeys(_HOME), **{old.rsplit(".", 1)[-1]: new for old, new in OLD_NAMES.items()}}
    close = difflib.get_close_matches(leaf, names, n=1)
    if not close:
        return "see docs/reference/config.md for every setting"
    name = names[close[0]] or f"{_HOME[close[0]]}.{close[0]}"
    return f"did you mean `{name}`?"

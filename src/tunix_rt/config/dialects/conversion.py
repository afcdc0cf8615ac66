"""A configuration of another trainer as one of ours. Every key is mapped, without effect here, or refused; none is ignored."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tunix_rt.config.dialects import axolotl, llama_factory, torchtune, trl
from tunix_rt.config.dialects.rules import Verdict, is_off, names_of, number, of_split, refusal
from tunix_rt.config.settings import RunConfig
from tunix_rt.config.strict_yaml import parse_yaml, read_yaml
from tunix_rt.errors import ConfigError, did_you_mean

DIALECTS: dict[str, ModuleType] = {
    "axolotl": axolotl, "llama-factory": llama_factory, "trl": trl, "torchtune": torchtune,
}  # fmt: skip
"""By the value of `--from`."""
REMOTE_CODE = "trust_remote_code"
OWN = frozenset(RunConfig.model_fields)
SIGNS = {
    "axolotl": ("base_model", {"datasets", "sequence_len", "micro_batch_size", "num_epochs", "adapter", "pretraining_dataset"}),
    "llama-factory": ("model_name_or_path", {"stage", "finetuning_type", "cutoff_len", "template", "dataset_dir"}),
}  # fmt: skip
"""Dialect -> the key that it needs, and those of which it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One key of the file, or one default of its trainer."""

    key: str
    settings: tuple[str, ...] = ()
    """`section.key: value`."""
    note: str = ""
    instead: str = ""
    """Of a refused key: the setting that, on the command line, replaces it."""

    def describe(self) -> str:
        if not self.settings:
            return f"{self.key}: {self.note}"
        return f"{self.key} -> {', '.join(self.settings)}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What became of every key."""

    dialect: str
    settings: Mapping[str, Any]
    """By dotted name."""
    origins: Mapping[str, str]
    """Setting -> the key it comes from, or the default."""
    mapped: tuple[Line, ...]
    without_effect: tuple[Line, ...]
    refused: tuple[Line, ...]
    defaults: tuple[Line, ...]
    """Settings that the trainer's own defaults decide, where they differ from ours."""

    @property
    def title(self) -> str:
        return str(DIALECTS[self.dialect].TITLE)

    def nested(self) -> dict[str, dict[str, Any]]:
        """The settings in sections."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.settings.items():
            section, leaf = name.split(".")
            sections.setdefault(section, {})[leaf] = value
        return sections

    @property
    def asks_for_remote_code(self) -> bool:
        return any(line.key == REMOTE_CODE for line in self.refused)

    def without_remote_code(self) -> "Conversion":
        """The same where the type of the model is known: code of its repository has no effect."""
        none = Line(key=REMOTE_CODE, note="the type of the model is known; code of a model repository is never run")
        kept = tuple(line for line in self.refused if line.key != REMOTE_CODE)
        return replace(self, refused=kept, without_effect=(*self.without_effect, none))

    def require_accepted(self, source: str, given: Collection[str] = ()) -> None:
        """ConfigError with every refused key and its nearest way, but for keys that a `given` setting replaces."""
        if refused := [line for line in self.refused if line.instead not in given]:
            listed = "\n".join(f"  {line.key}: {line.note}" for line in refused)
            problem = f"{source}: {len(refused)} key(s) of {self.title} cannot be converted\n{listed}"
            raise ConfigError(problem, fix="change or delete these keys")

    def yaml(self, source: str) -> str:
        """The settings as a commented YAML of ours."""
        lines = [f"# From {source} ({self.title}), by tunix-rt convert."]
        for section, settings in ((name, self.nested().get(name, {})) for name in RunConfig.model_fields):
            if settings:
                lines.append(f"{section}:")
            for name, value in settings.items():
                lines.append(f"  {name}: {_written(value)}  # {self.origins[f'{section}.{name}']}")
        if self.without_effect:
            lines += ["", "# Without effect here:", *(f"#   {line.key}: {line.note}" for line in self.without_effect)]
        return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    """A value as YAML, in one line."""
    if isinstance(value, str | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(yaml.safe_dump(value)).split("\n")[0]


def dialect_of(raw: Any) -> str | None:
    """The dialect of a parsed file; None for one of ours, or one that cannot be recognised."""
    if not isinstance(raw, Mapping):
        return None
    if any(key.endswith("_component_") for key, _ in torchtune.flattened({str(k): v for k, v in raw.items()})):
        return "torchtune"
    if raw.keys() & OWN or "extends" in raw:
        return None
    for name, (needed, one_of) in SIGNS.items():
        if needed in raw and raw.keys() & one_of:
            return name
    own = {leaf for field in RunConfig.model_fields.values() for leaf in field.annotation.model_fields}  # type: ignore[union-attr]
    foreign = raw.keys() & trl.TABLE.keys() - own
    named = "model_name_or_path" in raw and bool(
        raw.keys() & {"dataset_name", "datasets"} and foreign - {"dataset_name"}
    )
    return "trl" if named or len(foreign) >= 5 else None


def parse(text: str, source: str) -> Any:
    """A file in any dialect as a mapping: YAML, JSON, or the command line of TRL."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    body = "\n".join(lines)
    return trl.from_command(body, source) if trl.is_command(body) else parse_yaml(text, source)


def hint(key: str) -> str | None:
    """What a key of another trainer is here; None if no dialect has it."""
    for module in DIALECTS.values():
        if rule := module.TABLE.get(key):
            return f"a key of {module.TITLE}: {rule.describe}"
    return None


def convert(text: str, source: str = "FILE", *, dialect: str | None = None, folder: Path | None = None) -> Conversion:
    """What becomes of every key of `text`. `folder` is where LLaMA-Factory's dataset_dir is looked for."""
    raw = parse(text, source)
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{source}: no mapping of keys to values", fix="give a YAML or JSON file, or a command line of TRL"
        )
    found = dialect or ("trl" if trl.is_command(text.lstrip()) else dialect_of(raw))
    if found is None:
        own = bool(raw.keys() & OWN) or "extends" in raw
        fix = "it is one of ours already: tunix-rt train FILE" if own else f"name it: --from {'|'.join(DIALECTS)}"
        raise ConfigError(f"{source}: not recognised as a configuration of another trainer", fix=fix)
    given = {str(key): value for key, value in raw.items()}
    if found == "torchtune":
        given = torchtune.resolved(given)
    return _collect(found, given, folder)


def _collect(dialect: str, given: Mapping[str, Any], folder: Path | None) -> Conversion:
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    module = DIALECTS[dialect]
    default = f"default of {module.TITLE}"
    lines: dict[str, list[Line]] = {"mapped": [], "without": [], "refused": [], "defaults": []}
    absent = module.implied(given)
    given = {**given, **absent}
    for key, value in given.items():
        verdict = _read(dialect, key, value, given)
        if dialect == "llama-factory" and key in ("dataset", "eval_dataset") and folder and not is_off(value):
            verdict = _from_dataset_info(verdict, key, given, folder)
        clash = next((n for n, v in verdict.settings.items() if n in settings and settings[n] != v), None)
        if clash:
            verdict = refusal(f"{origins[clash]} sets {clash} differently; keep one of them")
        shown = tuple(f"{name}: {_written(one)}" for name, one in verdict.settings.items())
        kind = "refused" if verdict.refused else "mapped" if verdict.settings else "without"
        kind = "defaults" if key in absent else kind
        lines[kind].append(Line(key=key, settings=shown, note=verdict.note, instead=verdict.instead))
        settings |= verdict.settings
        origins |= dict.fromkeys(verdict.settings, default if key in absent else key)
    defaults = dict(_defaults(dialect, settings))
    for name, value in defaults.items():
        note = f"; {module.NOTES[name]}" if name in module.NOTES else ""
        lines["defaults"].append(Line(key=name, note=f"{_written(value)}{note}"))
    return Conversion(
        dialect=dialect, settings=settings | defaults,
        origins=dict.fromkeys(defaults, default) | origins,
        mapped=tuple(lines["mapped"]), without_effect=tuple(lines["without"]), refused=tuple(lines["refused"]),
        defaults=tuple(lines["defaults"]),
    )  # fmt: skip


def _read(dialect: str, key: str, value: Any, given: Mapping[str, Any]) -> Verdict:
    module = DIALECTS[dialect]
    if key not in module.TABLE:
        otherwise = "delete it, or report it: tunix-rt does not know this key"
        return refusal(
            f"no key of {module.TITLE} that is known here; {did_you_mean(key, module.TABLE, otherwise=otherwise)}"
        )
    try:
        return module.TABLE[key].read(value, given)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):  # a value of another type than the key takes
        return refusal(f"a {type(value).__name__} is no value of this key")


def _defaults(dialect: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The trainer's defaults for settings that no key decides, unless they exclude one that is."""
    module = DIALECTS[dialect]
    chosen = module.DEFAULTS | (module.LORA_DEFAULTS if "training.lora_rank" in settings else {})
    held_out = "data.validation" in settings or number(settings.get("data.validation_fraction", 0)) > 0
    for name, value in chosen.items():
        if name in settings or (name == "data.validation_fraction" and held_out):
            continue
        yield name, value


def _from_dataset_info(verdict: Verdict, key: str, given: Mapping[str, Any], folder: Path) -> Verdict:
    """The files, formats and columns of the names in `dataset_info.json`, where it is there; `verdict` is that without it."""
    listing = folder / str(given.get("dataset_dir", "data")) / "dataset_info.json"
    names = names_of(given[key])
    if not listing.is_file() or (verdict.settings and not any(name in read_yaml(listing) for name in names)):
        return verdict
    known = read_yaml(listing)
    setting = "data.dataset" if key == "dataset" else "data.validation"
    files: list[str] = []
    formats: set[str] = set()
    columns: dict[str, str] = {}
    for name in names:
        entry = known.get(name)
        if not isinstance(entry, dict):
            way = did_you_mean(name, known, otherwise=f"{listing} has no {name!r}; give a file: --data FILE")
            return refusal(way, instead=setting)
        place = entry.get("hf_hub_url") or (str(listing.parent / entry["file_name"]) if "file_name" in entry else None)
        place = place and of_split(place, entry.get("split"))
        if place is None or not set(entry) <= {"file_name", "hf_hub_url", "split", "formatting", "columns", "tags"}:
            way = "file_name, or hf_hub_url with a whole split, formatting, columns and tags can be converted"
            return refusal(f"{name} of {listing}: {way}")
        messages = (entry.get("tags") or {}).get("role_tag") == "role"
        formats.add(
            "alpaca" if entry.get("formatting", "alpaca") == "alpaca" else "messages" if messages else "sharegpt"
        )
        columns |= _columns(entry.get("columns") or {}, messages=messages)
        files.append(place)
    if len(formats) > 1:
        return refusal("the datasets of a run have one format: import them first, tunix-rt data import")
    settings: dict[str, Any] = {setting: files if len(files) > 1 else files[0]}
    if setting == "data.dataset":
        settings |= {"data.format": formats.pop()} | ({"data.columns": columns} if columns else {})
    return Verdict(settings, f"from {listing}")


def _columns(theirs: Mapping[str, str], *, messages: bool) -> dict[str, str]:
    ours = {
        "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history",
        "messages": "messages" if messages else "conversations",
    }  # fmt: skip
    return {ours[key]: name for key, name in theirs.items() if key in ours and ours[key] != name}

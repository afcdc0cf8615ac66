"""File, `--set` and flags become one `RunConfig`, or one error with every mistake."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tunix_rt import assets
from tunix_rt.config.names import OLD_NAMES, SETTINGS, _nearest, modernise
from tunix_rt.config.settings import RunConfig
from tunix_rt.config.yaml import parse_yaml, read_yaml
from tunix_rt.errors import ConfigError

MOST_DIGITS = 12
"""A longer number is not printed in an error: it may be a password."""


def find_config(name: str) -> Path:
    """The file `name`, or the shipped configuration of that name (with or without `training/configs/` and `.yaml`)."""
    if os.path.isfile(name):  # unlike Path.is_file, never raises
        return Path(name)
    stem = name.removeprefix("training/configs/").removesuffix(".yaml")
    shipped = assets.find("configs", f"{stem}.yaml") if "/" not in stem else None
    if shipped is not None:
        return shipped
    known = sorted({p.stem for folder in assets.search_path("configs") for p in folder.glob("*.yaml")})
    raise ConfigError(f"no configuration {name!r}", fix=f"give a file, or one of: {', '.join(known)}")


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
        raise ConfigError(
            f"{source}: {len(mistakes)} mistake(s)\n" + "\n".join(mistakes), fix="see docs/reference/config.md"
        ) from error


def _mistake(item: Any) -> str:
    """The setting, what it takes, and what it got: a short number itself, of any other value only its type. A text may be a
    password in the wrong place."""
    name = ".".join(str(part) for part in item["loc"] if isinstance(part, str) and not part.startswith("function-"))
    message = item["msg"].removeprefix("Value error, ")
    return f"  {name}: {message} (got {_kind_of(item['input'])})"


def _kind_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else "yes" if value else "no"
    if isinstance(value, int | float):
        endless = isinstance(value, float) and not math.isfinite(value)
        short = abs(value) < 10**MOST_DIGITS  # of a longer one Python may refuse to write out the digits
        return repr(value) if short or endless else f"a number of more than {MOST_DIGITS} digits"
    if isinstance(value, str):
        return f"a text of {len(value):,} characters"
    return "a section" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def load_config(
    path: Path | None, *, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> RunConfig:
    """File, then `--set`, then named flags, each over the one before. Raises ConfigError with every mistake."""
    source = str(path) if path else "command line"
    merged = modernise(read_yaml(path), source) if path else {}
    later = [(dict([parse_override(text)]), f"--set {text.partition('=')[0].strip()}") for text in overrides]
    later.append(({name: value for name, value in (flags or {}).items() if value is not None}, "command line"))
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

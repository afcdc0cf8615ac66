"""Strict YAML of a page or so: what a configuration is written in."""

import re
from pathlib import Path
from typing import Any

import yaml

from tunix_rt.errors import ConfigError

MOST_DIGITS = 12
"""A longer number is not printed in an error: it may be a password."""
MAX_CONFIG_BYTES = 32_000
"""A shipped configuration has under 1,000; PyYAML needs about 11 s for a megabyte of brackets."""
MAX_DEPTH = 20


_NOT_DECIMAL = re.compile(r":|^[-+]?0[\dxXbB_]")
"""In a number: base 60, 16, 8 or 2. `max_steps: 1:30` is 90."""


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML of plain settings: no aliases (they can grow without bound), no tags, no key that would be lost."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _at(event.start_mark, "aliases (*name) are not allowed")
        if event.tag is not None:
            raise _at(event.start_mark, "tags (!name) are not allowed")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _at(event.start_mark, f"nested deeper than {MAX_DEPTH}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise _at(key.start_mark, "a key must be a plain scalar")
            if key.value in seen:
                raise _at(key.start_mark, f"duplicate key {key.value!r}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if type(value) in (int, float) and _NOT_DECIMAL.search(node.value) and len(node.value) <= MOST_DIGITS:
                raise _at(node.start_mark, f"{node.value} is {value} in YAML: write {value}")
            return value
        except (ValueError, OverflowError) as error:  # an invalid date or number
            raise _at(node.start_mark, str(error)[:200]) from error


def _at(mark: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document, or a ConfigError that names source and line."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: {error.problem}", fix="correct the YAML") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: {error.reason}", fix="save the file as UTF-8 text") from error


def read_text(path: Path) -> str:
    """The text of a configuration of a page or so, or a ConfigError."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            problem = f"{path}: over {MAX_CONFIG_BYTES:,} bytes"
            raise ConfigError(problem, fix="a configuration has a page of text at most")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", fix="save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", fix="check the path and its permissions") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file `path`."""
    raw = parse_yaml(read_text(path), str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        problem = f"{path}: a {type(raw).__name__}, not settings"
        raise ConfigError(problem, fix="write `section:` and `key: value` lines")
    return raw

"""Reading what may be garbage: whoever hands a run folder over may have changed any byte of it.

Nothing here raises for what it reads. It says what is wrong, in words that are safe to print.
"""

import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACEHOLDERS = ("", "unknown", "todo", "tbd", "n/a", "null", "nan", "placeholder", "fixme")


def read_bytes(path: Path) -> tuple[bytes | None, str]:
    """The content, or None and why not. Only a regular file is opened: a pipe would wait for ever."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None, f"{path.name} is not a regular file"
        return path.read_bytes(), ""
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"


def parse_object(data: bytes) -> dict[str, Any] | str:
    """The JSON object in `data`, or what is wrong with it. A key given twice would hide one of its values."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(keys := dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return keys

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg}"
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return value if isinstance(value, dict) else "not a JSON object"


def nulls(value: Any) -> list[str]:
    """Dotted names of all nulls."""
    return sorted(name for name, inner in _leaves(value) if inner is None)


def placeholders(value: Any) -> list[str]:
    """Dotted names of everything that stands where a fact should: null, an empty text, `unknown`, `TODO`, a number that is
    none."""
    return sorted(
        name
        for name, inner in _leaves(value)
        if inner is None
        or (isinstance(inner, str) and inner.strip().casefold() in PLACEHOLDERS)
        or (isinstance(inner, float) and not math.isfinite(inner))
    )


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything inside, by dotted name. No recursion: what arrives may be nested deeper than Python's stack."""
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        name, inner = pending.pop()
        yield name, inner
        pairs = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        pending += [(f"{name}.{key}" if name else str(key), deeper) for key, deeper in pairs]


def shown(value: Any) -> str:
    """`value` in one short printable line; of a list or an object only that it is one."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__}"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."

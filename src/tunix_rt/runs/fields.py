"""Types of single values in the files of a run, and the base of every schema.

Constraints are checked by pydantic-core, in Rust: a metrics file has a line per step. Patterns use its regular expressions,
which know no backtracking and take `$` for the very end.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

from tunix_rt.runs.checksums import few, plain, shown

_UNSEEN = r"\p{Cc}\p{Cf}\p{Zl}\p{Zp}"
"""Control, bidirectional and zero-width characters and line separators. Half a surrogate pair is no text to pydantic."""

T = TypeVar("T")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in lower-case hexadecimal."""
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
Amount = Annotated[float, Field(ge=0)]
"""Seconds, losses, norms, rates per second: finite, and never below 0."""
Share = Annotated[float, Field(ge=0, le=1)]
FloatHex = Annotated[str, Field(pattern=r"^-?0x[01]\.[0-9a-f]{1,13}p[+-](?:[0-9]{1,3}|10[01][0-9]|102[0-3])$")]
"""What `float.hex` writes; `float.fromhex` always reads it."""
Text = Annotated[str, Field(pattern=rf"^[^{_UNSEEN}]*$", max_length=500)]
"""One printable line."""
_EDGE, _INNER = rf"[^{_UNSEEN}|<>`\\\s]", rf"[^{_UNSEEN}|<>`\\]"
Name = Annotated[str, Field(pattern=rf"^{_EDGE}(?:{_INNER}*{_EDGE})?$", max_length=200)]
"""Of a device, a model, a dataset, a run, a file: one line that is safe in Markdown and in a table."""
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}$")]
Installed = Annotated[str, Field(pattern=r"^(?:not installed|[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63})$")]
"""Version of a package that the engine needs; a run without it fails when its engine is loaded."""
Device = Literal["cpu", "cuda", "tpu"]
Engine = Literal["torch", "jax"]
Weights = Literal["pretrained", "random"]
Status = Literal["completed", "refused", "failed", "preempted"]


def _real_moment(text: str) -> str:
    datetime.fromisoformat(text)  # the 31st of February is a ValueError
    return text


_DAY, _TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
Moment = Annotated[str, Field(pattern=rf"^{_DAY}T{_TIME}\+00:00$"), AfterValidator(_real_moment)]
"""ISO 8601 in UTC, with its offset."""
Day = Annotated[str, Field(pattern=f"^{_DAY}$"), AfterValidator(_real_moment)]


class _NotNull:
    """Takes `null` out of an optional type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return schema["schema"] if schema["type"] == "nullable" else schema


Maybe = Annotated[T | None, _NotNull()]
"""A key that may be missing, and is None then. `null` in the file is refused."""
Many = Annotated[tuple[T, ...], Field(strict=False, fail_fast=True)]
"""A JSON list, up to its first wrong item. Give each use a `max_length`."""
Digests = Annotated[dict[Name, Digest], Field(max_length=5_000)]
Commits = Annotated[dict[Name, Annotated[str, Field(pattern="^[0-9a-f]{40}$")]], Field(max_length=512)]
"""Of datasets of the hub, by the name they were given by."""
Versions = Annotated[dict[Name, Version], Field(max_length=64)]
Figures = Annotated[dict[Name, JsonValue], Field(max_length=64)]
"""Values of any kind. The code that uses them checks values or types."""


class Facts(BaseModel):
    """The base of every schema: no other keys, no conversions, no NaN, no unlimited text. The same
    applies to dataclasses in it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, str_max_length=400_000, defer_build=True
    )


MOST_LISTED = 10_000
"""Mistakes in one object beyond which they are only counted: a list of each would take a gigabyte."""
_MESSAGES = {
    "extra_forbidden": "unknown key", "unexpected_keyword_argument": "unknown key", "missing": "missing",
    "dict_type": "not an object", "model_type": "not an object", "dataclass_type": "not an object",
    "tuple_type": "not a list", "string_pattern_mismatch": "not of the declared form",
}  # fmt: skip


def problems_of(error: ValidationError) -> Iterator[str]:
    """A printable line per mistake: `dotted.path: what is wrong`, and the value; at most 50."""
    if (count := error.error_count()) > MOST_LISTED:
        return iter((f"{count:,} mistakes",))
    return few(map(_problem, error.errors(include_url=False, include_context=False)))


def _problem(one: ErrorDetails) -> str:
    place = ".".join(plain(part) if isinstance(part, str) else str(part) for part in one["loc"])
    message = _MESSAGES.get(one["type"], one["msg"][:200])
    value = "" if message in ("unknown key", "missing") else f": {shown(one['input'])}"
    return f"{place or 'the object'}: {message}{value}"

"""The records that arrive: reasoning traces and evaluation items. Read strictly: a skipped line is a lie in the row count."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tunix_rt.errors import InputError

MAX_LINE_BYTES = 1_000_000

Text = Annotated[str, Field(min_length=1)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _says_something(cls, value: Any) -> Any:
        """Text that is blank, or that no tokenizer can encode, is a mistake in the file."""
        if isinstance(value, str):
            if not value.strip():
                raise ValueError("blank text")
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("half of a surrogate pair; the file was cut or converted badly")
            if "\x00" in value:
                raise ValueError("a NUL character")
        return value


class TraceStep(Record):
    i: Annotated[int, Field(ge=0, le=10**6, strict=True)]
    """Position, counted from 0."""
    type: Text
    """What kind of step: fact, compute, conclude, or a word of your own."""
    content: Text
    """The sentence."""


class Trace(Record):
    """One question, the reasoning, the answer."""

    id: Text | None = None
    prompt: Text
    steps: Annotated[tuple[TraceStep, ...], Field(min_length=1)]
    final_answer: Text
    meta: dict[str, Any] = {}

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[TraceStep, ...]) -> tuple[TraceStep, ...]:
        if [step.i for step in steps] != list(range(len(steps))):
            raise ValueError(f"steps are numbered {[step.i for step in steps]}, not 0 to {len(steps) - 1}")
        return steps


class EvalItem(Record):
    """One held-out question with its answer."""

    id: Text
    prompt: Text
    answer: Text
    section: Text
    category: Text = "none"
    template: Text = "none"
    difficulty: Text = "none"


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_records(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """Every line of a JSONL file as `kind`. The first bad line ends it with file, line and what to do."""
    records = [_parse(line, kind, f"{path}:{number}") for number, line in _lines(path)]
    if not records:
        raise InputError(f"{path} holds no rows", fix="give a JSONL file with one record per line")
    return records


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    blank_at = None
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{path}:{number}: over {MAX_LINE_BYTES:,} bytes in one line", fix="is it JSONL?")
                if not line.strip():
                    blank_at = blank_at or number
                    continue
                if blank_at:
                    raise InputError(f"{path}:{blank_at}: a blank line", fix="remove it; every line is one record")
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="check the path and its permissions") from error


def _parse(line: bytes, kind: type[AnyRecord], where: str) -> AnyRecord:
    fix = f"correct line {where.rpartition(':')[2]}; a record has {', '.join(kind.model_fields)}"
    try:
        raw = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text", fix="save the file as UTF-8, unpacked") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})", fix=fix) from error
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])[:200] or "the line"
        raise InputError(f"{where}: {name}: {first['msg'].removeprefix('Value error, ')}", fix=fix) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found

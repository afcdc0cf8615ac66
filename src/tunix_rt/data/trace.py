"""The one normal form of a training record: what was said, by whom, and for a trace its steps and its answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, field_validator

from tunix_rt.data.readers import kind_of, parse_line, read_lines
from tunix_rt.data.streams import Version, printable
from tunix_rt.errors import InputError

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One record, whatever format it came in.

    With `steps` it is a reasoning trace: what the model is to say is made of `steps` and `answer`, in the configured tags,
    and comes after `turns`. Without, the turns of the assistant are in `turns`.
    """

    turns: tuple[Turn, ...]
    steps: tuple[str, ...] = ()
    answer: str | None = None

    @property
    def question(self) -> str:
        """All that the user said: samples with the same question are the same question."""
        return "\n".join(turn.text for turn in self.turns if turn.role == "user")

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the record, as it arrived."""
        said = (*(turn.text for turn in self.turns), *self.steps)
        return said if self.answer is None else (*said, self.answer)


def as_text(value: Any) -> str:
    """The value, which must be text that says something; which characters it may hold is for the rules to say."""
    if type(value) is not str:
        raise ValueError(f"{kind_of(value)}, not text")
    if not value or value.isspace():
        raise ValueError("blank text")
    return value


def _as_mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{kind_of(value)}, not an object")
    return value


def _encodable(value: str) -> str:
    """Eval items meet no rules: what no tokenizer can encode is refused here."""
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("half of a surrogate pair; the file was cut or converted badly")
    if "\x00" in value:
        raise ValueError("a NUL character")
    return value


# Plain: pydantic's own text refuses half a surrogate pair, which would hide it from the rules.
Text = Annotated[str, PlainValidator(as_text)]
CleanText = Annotated[Text, AfterValidator(_encodable)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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
    meta: Annotated[dict[str, Any], PlainValidator(_as_mapping)] = {}

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[TraceStep, ...]) -> tuple[TraceStep, ...]:
        if [step.i for step in steps] != list(range(len(steps))):
            raise ValueError(f"steps are numbered {[step.i for step in steps]}, not 0 to {len(steps) - 1}")
        return steps


class EvalItem(Record):
    """One held-out question with its answer."""

    id: CleanText
    prompt: CleanText
    answer: CleanText
    section: CleanText = "all"
    category: CleanText = "none"
    template: CleanText = "none"
    difficulty: CleanText = "none"


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_records(path: Path, kind: type[AnyRecord], version: Version | None = None) -> list[AnyRecord]:
    """Every line of a JSONL file as `kind`. The first bad line ends it with file, line and what to do."""
    records = [_record(line, kind, f"{path}:{number}") for number, line in read_lines(path, version)]
    if not records:
        raise InputError(f"{path} holds no rows", fix="give a JSONL file with one record per line")
    return records


def _record(line: bytes, kind: type[AnyRecord], where: str) -> AnyRecord:
    try:
        return kind.model_validate(parse_line(line, where))
    except ValidationError as error:
        field, words = first_problem(error)
        fix = f"correct line {where.rpartition(':')[2]}; a record has {', '.join(kind.model_fields)}"
        raise InputError(f"{where}: {field}: {words}", fix=fix) from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Dotted name of the first field that is wrong, and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])[:200] or "the record"
    return printable(name), first["msg"].removeprefix("Value error, ")[:500]

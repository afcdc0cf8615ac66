"""The normal form of a training record (turns; for a trace also steps and answer), and how messages become one.

Messages are parsed strictly: a field that would be lost is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, field_validator

from tunix_rt.data.containers import Version, printable
from tunix_rt.data.readers import BadRecord, kind_of, parse_line, read_lines
from tunix_rt.errors import InputError

Role = Literal["system", "user", "assistant", "text"]
"""`text` is the only turn of a plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One record, whatever its format.

    With `steps` it is a reasoning trace: the completion is made of `steps` and `answer`, in the configured tags, and
    follows `turns`. Without, the assistant's turns are in `turns`.
    """

    turns: tuple[Turn, ...]
    steps: tuple[str, ...] = ()
    answer: str | None = None

    @property
    def question(self) -> str:
        """All user turns, or a plain text; samples with the same one are the same question."""
        return "\n".join(turn.text for turn in self.turns if turn.role in ("user", "text"))

    @property
    def is_text(self) -> bool:
        """Whether it is a plain text: no template is applied, and every token is a target."""
        return self.turns[0].role == "text"

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the record, unchanged."""
        texts = (*(turn.text for turn in self.turns), *self.steps)
        return texts if self.answer is None else (*texts, self.answer)


def as_text(value: Any) -> str:
    """The value, which must be a string that is not blank. Its characters are left to validation."""
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
    """Refuse what no tokenizer can encode: eval items are not validated elsewhere."""
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("half of a surrogate pair; the file was cut or converted badly")
    if "\x00" in value:
        raise ValueError("a NUL character")
    return value


# PlainValidator: pydantic's own str refuses a lone surrogate, which validation reports with its count.
Text = Annotated[str, PlainValidator(as_text)]
CleanText = Annotated[Text, AfterValidator(_encodable)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TraceStep(Record):
    i: Annotated[int, Field(ge=0, le=10**6, strict=True)]
    """Position, counted from 0."""
    type: Text
    """Kind of step: fact, compute, conclude, or a word of your own."""
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
    """Every line of a JSONL file as `kind`. The first invalid line is an InputError with file and line."""
    records = [_record(line, kind, f"{path}:{number}") for number, line in read_lines(path, version)]
    if not records:
        raise InputError(f"{path} has no rows", fix="give a JSONL file with one record per line")
    return records


def _record(line: bytes, kind: type[AnyRecord], where: str) -> AnyRecord:
    try:
        return kind.model_validate(parse_line(line, where))
    except ValidationError as error:
        field, problem = first_problem(error)
        fix = f"correct line {where.rpartition(':')[2]}; a record has {', '.join(kind.model_fields)}"
        raise InputError(f"{where}: {field}: {problem}", fix=fix) from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Dotted name of the first invalid field, and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])[:200] or "the record"
    return printable(name), first["msg"].removeprefix("Value error, ")[:500]


Fields = Mapping[str, Any]


class Wrong(Exception):
    """An invalid field and what is wrong with it; `to_sample` adds the file and line."""

    rule = "wrong_field"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


class Unsupported(Wrong):
    """A record of a kind that is known and not trained."""

    rule = "unsupported"


# --- columns ---------------------------------------------------------------------------------------------------------

COLUMNS = frozenset((
    "prompt", "completion", "response", "input", "output", "question", "answer", "instruction", "system", "history",
    "messages", "conversations", "text", "steps", "final_answer", "id", "meta",
))  # fmt: skip
"""Columns that some format reads."""
KINDS = frozenset(("chosen", "rejected", "label", "tools", "functions", "image", "images", "audio", "video"))
"""Columns that make a record one of another kind."""
NOT_MAPPED = " (not mapped)"
"""Behind the name of a column that is ours, where another one was chosen for it."""


def known_columns(record: dict[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """The record with the `chosen` columns (ours -> theirs) under our names, and those known in another case in lower case."""
    if not chosen and record.keys() <= COLUMNS:
        return record
    ours = {theirs.strip().casefold(): own for own, theirs in chosen.items()}
    renamed: dict[str, Any] = {}
    for name, value in record.items():
        folded = name.strip().casefold()
        if folded in ours:
            renamed[ours[folded]] = value
        elif name in chosen:
            renamed[f"{name}{NOT_MAPPED}"] = value
        else:
            known = folded in COLUMNS | KINDS and folded not in record and folded not in chosen
            renamed[folded if known else name] = value
    return renamed


# --- fields ----------------------------------------------------------------------------------------------------------


def text_of(value: Any, field: str) -> str:
    """A string that is not blank."""
    try:
        return as_text(value)
    except ValueError as error:
        raise Wrong(field, "missing" if value is None else str(error)) from error


def optional_text(value: Any, field: str) -> str | None:
    """A string, or None where it is missing or blank: an optional field may be left empty."""
    if value is None or (type(value) is str and not value.strip()):
        return None
    return text_of(value, field)


# --- conversations ---------------------------------------------------------------------------------------------------

ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES: Mapping[str, Role] = {**ROLES, "human": "user", "gpt": "assistant", "model": "assistant"}
REASONING = ("reasoning_content", "reasoning", "thinking")
TOOL_ROLES = frozenset(("tool", "function", "function_call", "observation", "ipython"))
NO_TOOLS = "tool calls are not trained: leave the conversation out, or remove every message and key about tools"
_NAMED_KEYS = {
    "tool_calls": Unsupported("", NO_TOOLS),
    "tool_call_id": Unsupported("", NO_TOOLS),
    "function_call": Unsupported("", NO_TOOLS),
    "weight": Unsupported("", "a weight of 0: this message is not to be trained, and every assistant turn is trained; leave the "
                              "conversation out, or remove the key"),
    "name": Wrong("", "the name of a speaker, which no chat template writes: remove the key"),
}  # fmt: skip
"""Keys of OpenAI's messages that a Sample has no place for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    turn: Turn
    reasoning: str | None
    field: str


def _is_empty(value: Any) -> bool:
    """Parquet gives every message every key; null, an empty string, list or object there loses nothing."""
    return value is None or value == "" or value == [] or value == {}


def _message(value: Any, field: str, roles: Mapping[str, Role]) -> Message:
    if type(value) is not dict:
        raise Wrong(field, f"{kind_of(value)}, not an object")
    who, what = ("from", "value") if "from" in value and roles is SHAREGPT_ROLES else ("role", "content")
    role = roles.get(name) if type(name := value.get(who)) is str else None
    if role is None:
        if type(name) is str and name in TOOL_ROLES:
            raise Unsupported(f"{field}.{who}", f"{name!r}: {NO_TOOLS}")
        shown = "missing" if name is None else repr(name)[:60]
        raise Wrong(f"{field}.{who}", f"{shown}; the roles are {', '.join(roles)}")
    reasoning = None
    if len(value) > 2:
        for name in sorted(value.keys() - {who, what, *REASONING}):
            harmless = name == "weight" and value[name] in ((1,) if role == "assistant" else (0, 1))
            if not _is_empty(value[name]) and not harmless:
                known = _NAMED_KEYS.get(name, Wrong("", "an unknown key, which would be lost: remove it"))
                raise type(known)(f"{field}.{name[:60]}", known.problem)
        reasoning = _reasoning(value, field)
    return Message(
        turn=Turn(role=role, text=_content(value.get(what), f"{field}.{what}")), reasoning=reasoning, field=field
    )


def _reasoning(message: Fields, field: str) -> str | None:
    given = [name for name in REASONING if not _is_empty(message.get(name))]
    if not given:
        return None
    if any(message[name] != message[given[0]] for name in given):
        raise Wrong(f"{field}.{given[1]}", f"differs from {given[0]}, which is the reasoning too")
    return text_of(message[given[0]], f"{field}.{given[0]}")


def _content(value: Any, field: str) -> str:
    """The text of a message, which may be a list of parts."""
    if type(value) is not list:
        return text_of(value, field)
    texts = []
    for number, part in enumerate(value):
        place = f"{field}.{number}"
        if type(part) is not dict:
            raise Wrong(place, f"{kind_of(part)}, not an object")
        if part.get("type") != "text":
            raise Unsupported(f"{place}.type", f"{str(part.get('type'))[:60]!r}: only parts of type text are trained")
        for name in part.keys() - {"type", "text"}:
            if not _is_empty(part[name]):
                raise Wrong(f"{place}.{name[:60]}", "an unknown key, which would be lost")
        if type(part.get("text")) is not str:
            raise Wrong(f"{place}.text", f"{kind_of(part.get('text'))}, not text")
        texts.append(part["text"])
    return text_of(whole("".join(texts)), field)


def whole(text: str) -> str:
    """Join the two halves of a surrogate pair that concatenation brought together, as any file does."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def messages_of(value: Any, field: str, roles: Mapping[str, Role] = ROLES) -> list[Message]:
    if type(value) is not list:
        raise Wrong(field, "missing" if value is None else f"{kind_of(value)}, not a list of messages")
    if not value:
        raise Wrong(field, "no message")
    return [_message(message, f"{field}.{number}", roles) for number, message in enumerate(value)]


def conversation(messages: Sequence[Message]) -> Sample:
    """The turns; a last assistant turn with reasoning makes a trace."""
    *before, last = messages
    turns = tuple(message.turn for message in before)
    for message in messages:
        if message.reasoning is not None and (message is not last or last.turn.role != "assistant"):
            raise Wrong(f"{message.field}.reasoning", "only the assistant's last message may have reasoning")
    if last.reasoning is None:
        return Sample(turns=(*turns, last.turn))
    if not turns:
        raise Wrong(last.field, "reasoning without a message before it")
    return Sample(turns=turns, steps=(last.reasoning,), answer=last.turn.text)


def with_system(messages: Sequence[Message], value: Any) -> list[Message]:
    """The messages after the `system` column of the record; a system message of their own must be equal to it."""
    text = optional_text(value, "system")
    own = [message for message in messages if message.turn.role == "system"]
    if text is None or [message.turn.text for message in own] == [text]:
        return list(messages)
    if own:
        raise Wrong(
            "system", f"differs from {own[0].field}, the system message of the conversation: leave one of them out"
        )
    return [Message(turn=Turn(role="system", text=text), reasoning=None, field="system"), *messages]


def history_of(value: Any) -> list[Turn]:
    """Earlier turns, which Alpaca has as pairs of a question and its answer."""
    if value is None:
        return []
    if type(value) is not list:
        raise Wrong("history", f"{kind_of(value)}, not a list of [question, answer] pairs")
    turns = []
    for number, pair in enumerate(value):
        field = f"history.{number}"
        if type(pair) is not list or len(pair) != 2:
            raise Wrong(field, "not a pair [question, answer]")
        turns.append(Turn(role="user", text=text_of(pair[0], f"{field}.0")))
        turns.append(Turn(role="assistant", text=text_of(pair[1], f"{field}.1")))
    return turns


# --- records for other methods than supervised training on text ------------------------------------------------------

_VERDICTS = frozenset((
    "true", "false", "1", "0", "-1", "+1", "1.0", "0.0", "-1.0", "yes", "no", "good", "bad", "positive", "negative",
))  # fmt: skip
_KEEP_TRUE = (
    "python -c \"import json, sys; [print(json.dumps({k: v for k, v in row.items() if k != 'label'})) "
    "for row in map(json.loads, open(0, encoding='utf-8-sig')) if str(row['label']).strip().lower() "
    "in ('true', '1', '+1', '1.0', 'yes', 'good', 'positive')]\" < FILE > GOOD.jsonl"
)


def refuse_other_methods(record: Fields, where: str) -> None:
    """Refuse records for other methods than supervised training on text, by name."""
    has = {name for name in KINDS if record.get(name) not in (None, "", [], {})}
    if {"chosen", "rejected"} <= has:
        own = "completion" if record.get("prompt") else "messages" if type(record["chosen"]) is list else "text"
        raise BadRecord(
            where, "chosen and rejected: a preference pair (DPO), which supervised training cannot use", rule="unsupported",
            fix=f"to train on the chosen answers alone: --map {own}=chosen",
        )  # fmt: skip
    if tools := sorted(has & {"tools", "functions"}):
        raise BadRecord(where, f"{tools[0]}: {NO_TOOLS}", rule="unsupported", fix=f"remove the column {tools[0]}")
    if media := sorted(has & {"image", "images", "audio", "video"}):
        problem = f"{media[0]}: only text is trained"
        raise BadRecord(
            where, problem, rule="unsupported", fix=f"remove the column {media[0]} to train on the text alone"
        )


def refuse_feedback(record: Fields, where: str) -> None:
    """Refuse an answer with a label that judges it; other labels are columns that are not read."""
    label = record.get("label")
    if str(label).strip().lower() in _VERDICTS:
        raise BadRecord(
            where, f"label: {label!r}: feedback on an answer (KTO); those that are false must not be trained as good",
            rule="unsupported", fix=f"keep the records whose label is true, without the column; of JSONL: {_KEEP_TRUE}",
        )  # fmt: skip

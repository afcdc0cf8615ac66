"""The shapes a training record comes in, and the one way from each of them to a Sample. Nothing is dropped in silence.

What the keys of the first records allow decides; two readings, or none, are refused with the ways out. What a text may hold
(control characters, half a surrogate pair) is for the rules to say: it passes here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from tunix_rt.data.containers import kind_of, parse, printable, read_raw
from tunix_rt.data.registry import Dataset
from tunix_rt.data.sample import Role, Sample, Turn
from tunix_rt.data.trace import Trace, first_problem
from tunix_rt.errors import InputError

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One shape of record. `fits` looks at the keys alone; `read` is strict about what is in them."""

    name: str
    needs: str
    """The keys of a record, in words."""
    words: str
    """How a record becomes a conversation, in a sentence or two."""
    example: Fields
    fits: Callable[[Fields], bool]
    read: Callable[[Fields], Sample]
    uses: Callable[[Fields], frozenset[str]]
    """Names of the columns that are read; the others of a record are not used."""


class _Wrong(Exception):
    """A field that is wrong and what is wrong with it; `to_sample` adds where."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(field, words)
        self.field = field
        self.words = words


def detect_format(dataset: Dataset, wanted: str = "auto") -> str:
    """Name of the format to read the dataset in: `wanted`, or the one reading that the first record of every file allows."""
    if wanted in FORMATS:
        return wanted
    if wanted != "auto":
        raise InputError(f"no format is named {wanted!r}", fix=f"use one of: auto, {', '.join(FORMATS)}")
    found: dict[str, str] = {}
    for number, file in enumerate(dataset.files):
        with closing(read_raw(replace(dataset, files=(file,)))) as records:
            raw = next(records)
        where = dataset.place(number, raw.line)
        found.setdefault(_only_reading(parse(raw, where), where), where)
    if len(found) > 1:
        (first, here), (second, there), *_ = found.items()
        raise InputError(
            f"the files are not of one format: {here} is {first}, {there} is {second}",
            fix="give the files of one format; a dataset is read in one",
        )
    return next(iter(found))


def to_sample(record: dict[str, Any], format: str, where: str) -> Sample:
    """The record in its normal form; an InputError names `where` and the field that is wrong."""
    shape = FORMATS[format]
    try:
        return shape.read(record)
    except _Wrong as wrong:
        others = [] if shape.fits(record) else readings(record)
        words = f"; by its keys it is {' or '.join(others)}, not {format}" if others else ""
        alone = "; records of another format need a dataset of their own" if others else ""
        raise InputError(
            f"{where}: {printable(wrong.field)}: {wrong.words}{words}",
            fix=f"correct it: {format} needs {shape.needs}{alone}",
        ) from wrong


def read_samples(dataset: Dataset, format: str = "auto") -> Iterator[tuple[str, Sample]]:
    """Every record of the dataset with the place where it stands."""
    chosen = detect_format(dataset, format)
    for raw in read_raw(dataset):
        where = dataset.place(raw.file, raw.line)
        yield where, to_sample(parse(raw, where), chosen, where)


def readings(record: Fields) -> list[str]:
    """Names of the formats that the keys of the record allow."""
    return [name for name, shape in FORMATS.items() if shape.fits(record)]


def unused_columns(record: Fields, format: str) -> list[str]:
    """Columns of the record that say something and are not read."""
    used = FORMATS[format].uses(record)
    return [name for name, value in record.items() if name not in used and value is not None]


def _only_reading(record: dict[str, Any], where: str) -> str:
    found = readings(record)
    if len(found) == 1:
        return found[0]
    names = [printable(name[:60]) for name in record]
    keys = ", ".join(names[:30]) + (" ..." if len(names) > 30 else "")
    if not found:
        needs = "\n".join(f"    {name}: {shape.needs}" for name, shape in FORMATS.items())
        raise InputError(
            f"{where}: no format fits the keys of the record: {keys or 'it has none'}",
            fix=f"rename the columns to those of a format\n{needs}",
        )
    ways = ", or ".join(f"--format {name} ({FORMATS[name].needs})" for name in found)
    raise InputError(
        f"{where}: the keys of the record can be read as {' and as '.join(found)}: {keys}",
        fix=f"say which: {ways}; outside of an import that is --set data.format=NAME",
    )


# --- fields ----------------------------------------------------------------------------------------------------------


def _has(record: Fields, *names: str) -> bool:
    return all(record.get(name) is not None for name in names)


def _text(value: Any, field: str) -> str:
    """Text that says something."""
    if type(value) is not str:
        raise _Wrong(field, "missing" if value is None else f"{kind_of(value)}, not text")
    if not value or value.isspace():
        raise _Wrong(field, "blank text")
    return value


def _optional_text(value: Any, field: str) -> str | None:
    """Text, or None where there is none or it is blank: what may be left out may be left empty."""
    if value is None or (type(value) is str and not value.strip()):
        return None
    return _text(value, field)


# --- reasoning traces ------------------------------------------------------------------------------------------------


def _read_trace(record: Fields) -> Sample:
    try:
        trace = Trace.model_validate(record)
    except ValidationError as error:
        raise _Wrong(*first_problem(error)) from error
    return Sample(
        turns=(Turn(role="user", text=trace.prompt),),
        steps=tuple(step.content for step in trace.steps),
        answer=trace.final_answer,
    )


# --- conversations ---------------------------------------------------------------------------------------------------

ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES: Mapping[str, Role] = {**ROLES, "human": "user", "gpt": "assistant", "model": "assistant"}
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    turn: Turn
    reasoning: str | None
    field: str


def _says_nothing(value: Any) -> bool:
    """Parquet gives every message every key; a null, an empty text or an empty list there holds nothing to lose."""
    return value is None or value == "" or value == [] or value == {}


def _message(value: Any, field: str, roles: Mapping[str, Role]) -> _Message:
    if type(value) is not dict:
        raise _Wrong(field, f"{kind_of(value)}, not an object")
    who, what = ("from", "value") if "from" in value and roles is SHAREGPT_ROLES else ("role", "content")
    role = roles.get(said) if type(said := value.get(who)) is str else None
    if role is None:
        shown = "missing" if said is None else repr(said)[:60]
        raise _Wrong(f"{field}.{who}", f"{shown}; the roles are {', '.join(roles)}")
    reasoning = None
    if len(value) > 2:
        for name in value.keys() - {who, what, *REASONING}:
            if not _says_nothing(value[name]):
                raise _Wrong(f"{field}.{name[:60]}", "a key that is not understood, and would be lost")
        reasoning = _reasoning(value, field)
    return _Message(
        turn=Turn(role=role, text=_content(value.get(what), f"{field}.{what}")), reasoning=reasoning, field=field
    )


def _reasoning(message: Fields, field: str) -> str | None:
    given = [name for name in REASONING if not _says_nothing(message.get(name))]
    if not given:
        return None
    if any(message[name] != message[given[0]] for name in given):
        raise _Wrong(f"{field}.{given[1]}", f"the reasoning is given twice, and differs from {given[0]}")
    return _text(message[given[0]], f"{field}.{given[0]}")


def _content(value: Any, field: str) -> str:
    """The text of a message, which may come in parts."""
    if type(value) is not list:
        return _text(value, field)
    texts = []
    for number, part in enumerate(value):
        place = f"{field}.{number}"
        if type(part) is not dict:
            raise _Wrong(place, f"{kind_of(part)}, not an object")
        if part.get("type") != "text":
            raise _Wrong(f"{place}.type", f"{str(part.get('type'))[:60]!r}: only parts of type text can be trained on")
        for name in part.keys() - {"type", "text"}:
            if not _says_nothing(part[name]):
                raise _Wrong(f"{place}.{name[:60]}", "a key that is not understood, and would be lost")
        if type(part.get("text")) is not str:
            raise _Wrong(f"{place}.text", f"{kind_of(part.get('text'))}, not text")
        texts.append(part["text"])
    return _text(_whole("".join(texts)), field)


def _whole(text: str) -> str:
    """Two halves of a surrogate pair that joining brought together are one character, as they are in any file."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _messages(value: Any, field: str, roles: Mapping[str, Role] = ROLES) -> list[_Message]:
    if type(value) is not list:
        raise _Wrong(field, "missing" if value is None else f"{kind_of(value)}, not a list of messages")
    if not value:
        raise _Wrong(field, "no message")
    return [_message(message, f"{field}.{number}", roles) for number, message in enumerate(value)]


def _conversation(messages: Sequence[_Message]) -> Sample:
    """The turns as they are; a last turn of the assistant that shows its reasoning makes a trace."""
    *before, last = messages
    turns = tuple(message.turn for message in before)
    for message in messages:
        if message.reasoning is not None and (message is not last or last.turn.role != "assistant"):
            raise _Wrong(f"{message.field}.reasoning", "only the assistant's message at the end may show its reasoning")
    if last.reasoning is None:
        return Sample(turns=(*turns, last.turn))
    if not turns:
        raise _Wrong(last.field, "reasoning about nothing: no message comes before it")
    return Sample(turns=turns, steps=(last.reasoning,), answer=last.turn.text)


def _read_messages(record: Fields) -> Sample:
    return _conversation(_messages(record.get("messages"), "messages"))


def _read_sharegpt(record: Fields) -> Sample:
    return _conversation(_messages(record.get("conversations"), "conversations", SHAREGPT_ROLES))


# --- a prompt and what is to be said ---------------------------------------------------------------------------------

PAIRS = (("prompt", "completion"), ("prompt", "response"), ("input", "output"), ("question", "answer"))


def _pairs(record: Fields) -> list[tuple[str, str]]:
    """The pairs of columns that the record could be read by. `input` beside an instruction is Alpaca's, `####` GSM8K's."""
    found = [pair for pair in PAIRS if _has(record, *pair)]
    if ("input", "output") in found and _has(record, "instruction"):
        found.remove(("input", "output"))
    if ("question", "answer") in found and _fits_gsm8k(record):
        found.remove(("question", "answer"))
    return found


def _read_pair(record: Fields) -> Sample:
    found = _pairs(record)
    if not found:
        raise _no_pair(record)
    if len(found) > 1:
        words = " and ".join(" with ".join(pair) for pair in found)
        raise _Wrong(found[1][1], f"there are two readings, {words}: leave one of them out")
    asked, said = found[0]
    if type(record[asked]) is str and type(record[said]) is str:
        prompt, completion = _text(record[asked], asked), _text(record[said], said)
        return Sample(turns=(Turn(role="user", text=prompt), Turn(role="assistant", text=completion)))
    return _conversation([*_side(record[asked], asked, "user"), *_side(record[said], said, "assistant")])


def _no_pair(record: Fields) -> _Wrong:
    if _fits_gsm8k(record):
        return _Wrong("answer", "it ends in a `####` line, which would be trained as text")
    if _has(record, "instruction", "input", "output"):
        return _Wrong("instruction", "it would be left out")
    begun = next((pair for pair in PAIRS if _has(record, pair[0]) or _has(record, pair[1])), PAIRS[0])
    return _Wrong(begun[1] if _has(record, begun[0]) else begun[0], "missing")


def _side(value: Any, field: str, role: Role) -> list[_Message]:
    """One half of a pair: a text, or messages."""
    if type(value) is list:
        messages = _messages(value, field)
        for message in messages:
            if (message.turn.role == "assistant") != (role == "assistant"):
                wrong = f"a turn of the {message.turn.role} in the {field}: give the chat as `messages` to train on all of it"
                raise _Wrong(message.field, wrong)
        return messages
    return [_Message(turn=Turn(role=role, text=_text(value, field)), reasoning=None, field=field)]


def _read_alpaca(record: Fields) -> Sample:
    instruction = _text(record.get("instruction"), "instruction")
    material = _optional_text(record.get("input"), "input")
    system = _optional_text(record.get("system"), "system")
    asked = instruction if material is None else f"{instruction}\n\n{material}"
    said = Turn(role="assistant", text=_text(record.get("output"), "output"))
    first = () if system is None else (Turn(role="system", text=system),)
    return Sample(turns=(*first, Turn(role="user", text=asked), said))


# --- GSM8K -----------------------------------------------------------------------------------------------------------

_BLANKS = " \t\r\n"
_MARK = re.compile(r"<<([^<>]*)>>")


def _fits_gsm8k(record: Fields) -> bool:
    answer = record.get("answer")
    if type(answer) is not str or record.get("question") is None:
        return False
    return answer.rstrip(_BLANKS).rpartition("\n")[2].lstrip(_BLANKS).startswith("####")


def _gsm8k(record: Fields) -> tuple[str, list[tuple[str, list[str]]], str]:
    """Question, steps with the calculator's marks that stood in each, and answer."""
    question, answer = _text(record.get("question"), "question"), _text(record.get("answer"), "answer")
    if not _fits_gsm8k(record):
        raise _Wrong("answer", "it does not end in a line `#### N`")
    body, _, last = answer.rstrip(_BLANKS).rpartition("\n")
    steps = []
    for line in body.split("\n"):
        marks = _MARK.findall(line) if "<<" in line else []
        sentence = (_whole(_MARK.sub("", line)) if marks else line).strip(_BLANKS)
        if sentence and not sentence.isspace():
            steps.append((sentence, marks))
        elif marks:
            raise _Wrong("answer", "a line holds a calculator's mark and no sentence")
    if not steps:
        raise _Wrong("answer", "no step before the `####` line")
    return question, steps, _text(last.lstrip(_BLANKS).removeprefix("####").strip(_BLANKS), "answer after ####")


def _read_gsm8k(record: Fields) -> Sample:
    question, steps, answer = _gsm8k(record)
    return Sample(turns=(Turn(role="user", text=question),), steps=tuple([text for text, _ in steps]), answer=answer)


def gsm8k_trace(record: Fields) -> dict[str, Any]:
    """A GSM8K record that `to_sample` reads, as a trace of our own. The marks it took out of each step are in `meta`."""
    question, steps, answer = _gsm8k(record)
    return {
        "prompt": question,
        "steps": [
            {"i": number, "type": "compute" if marks else "state", "content": text}
            for number, (text, marks) in enumerate(steps)
        ],
        "final_answer": answer,
        "meta": {"marks": [marks for _, marks in steps]},
    }


# --- all of them -----------------------------------------------------------------------------------------------------


def _always(*names: str) -> Callable[[Fields], frozenset[str]]:
    return lambda record: frozenset(names)


FORMATS: Mapping[str, Format] = {
    shape.name: shape
    for shape in (
        Format(
            name="trace",
            needs="prompt, steps (each with i, type, content) and final_answer; also id and meta, and no other key",
            words="Our own. The steps and the answer are put into the reasoning and answer tags, after the prompt.",
            example={
                "prompt": "Tom has 3 pens and buys 4. How many has he?",
                "steps": [{"i": 0, "type": "compute", "content": "3 + 4 = 7"}],
                "final_answer": "7",
            },
            fits=lambda record: _has(record, "prompt", "steps", "final_answer"),
            read=_read_trace,
            uses=_always(*Trace.model_fields),
        ),
        Format(
            name="prompt_completion",
            needs="prompt and completion (or prompt and response, input and output, question and answer)",
            words="One question of the user, one answer of the assistant; or on both sides a list of messages: no turn of "
            "the assistant in the prompt, and no other in the completion.",
            example={"prompt": "What is the capital of France?", "completion": "Paris."},
            fits=lambda record: bool(_pairs(record)),
            read=_read_pair,
            uses=lambda record: frozenset(name for pair in _pairs(record) for name in pair),
        ),
        Format(
            name="messages",
            needs="messages, each with role (system, user, assistant) and content",
            words="A chat, kept whole. Where the assistant's last message has `reasoning_content` (or `reasoning`, "
            "`thinking`), that is the step of a trace and its content the answer.",
            example={
                "messages": [
                    {"role": "user", "content": "What is 3 + 4?"},
                    {"role": "assistant", "content": "7", "reasoning_content": "3 + 4 = 7"},
                ]
            },
            fits=lambda record: _has(record, "messages"),
            read=_read_messages,
            uses=_always("messages"),
        ),
        Format(
            name="sharegpt",
            needs="conversations, each with from (system, human or user, gpt or assistant or model) and value",
            words="A chat, kept whole; `role` and `content` are read in the place of `from` and `value` too.",
            example={
                "conversations": [{"from": "human", "value": "What is 3 + 4?"}, {"from": "gpt", "value": "7"}],
            },
            fits=lambda record: _has(record, "conversations"),
            read=_read_sharegpt,
            uses=_always("conversations"),
        ),
        Format(
            name="alpaca",
            needs="instruction and output; also input and system",
            words="The user says the instruction and, after an empty line, the input if there is one; the assistant the output.",
            example={"instruction": "Name the largest number.", "input": "3, 9, 4", "output": "9"},
            fits=lambda record: _has(record, "instruction", "output"),
            read=_read_alpaca,
            uses=_always("instruction", "input", "output", "system"),
        ),
        Format(
            name="gsm8k",
            needs="question, and answer with a last line `#### N`",
            words="Every line of the answer is one step, without its `<<3+4=7>>` marks; what follows `####` is the answer.",
            example={
                "question": "Tom has 3 pens and buys 4. How many?",
                "answer": "He has 3+4=<<3+4=7>>7 pens.\n#### 7",
            },
            fits=_fits_gsm8k,
            read=_read_gsm8k,
            uses=_always("question", "answer"),
        ),
    )
}

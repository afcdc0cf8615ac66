"""The formats of training records, and how each becomes a Sample. No column is dropped silently.

The keys of the first record that can be read decide; one that fits two formats, or none, is refused with the ways out.
Control characters and lone surrogates in a text are left to validation.
"""

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pydantic import ValidationError

from tunix_rt.data.containers import printable
from tunix_rt.data.readers import BadRecord, read_raw
from tunix_rt.data.records import (
    KINDS,
    NOT_MAPPED,
    ROLES,
    SHAREGPT_ROLES,
    Fields,
    Message,
    Role,
    Sample,
    Trace,
    Turn,
    Wrong,
    conversation,
    first_problem,
    history_of,
    messages_of,
    optional_text,
    refuse_feedback,
    refuse_other_methods,
    text_of,
    whole,
    with_system,
)
from tunix_rt.data.sources import Dataset
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. `fits` checks the keys alone; `read` is strict about the values."""

    needs: str
    """The keys of a record, for people."""
    fits: Callable[[Fields], bool]
    read: Callable[[Fields], Sample]
    uses: Callable[[Fields], frozenset[str]]
    """Names of the columns that are read."""


FIRST_RECORDS = 100
"""Records of a file in which one that can be read is looked for."""


def detect_format(dataset: Dataset, wanted: str = "auto") -> str:
    """Name of the format of the dataset: `wanted`, or the only one that fits the first readable record of every file."""
    if wanted in FORMATS:
        return wanted
    if wanted != "auto":
        raise InputError(f"no format is named {wanted!r}", fix=f"use one of: auto, {', '.join(FORMATS)}")
    formats: dict[str, str] = {}
    for number, file in enumerate(dataset.files):
        format, line = _format_of_file(replace(dataset, files=(file,)))
        formats.setdefault(format, dataset.place(number, line))
    if len(formats) > 1:
        (first, here), (second, there), *_ = formats.items()
        raise InputError(
            f"the files have different formats: {here} is {first}, {there} is {second}",
            fix="give files of one format",
        )
    return next(iter(formats))


def _format_of_file(dataset: Dataset) -> tuple[str, int]:
    """The format and the line of the first record that has one; without any, the error of the first record."""
    problem: BadRecord | None = None
    with closing(read_raw(dataset)) as records:
        for raw in islice(records, FIRST_RECORDS):
            where = dataset.place(0, raw.line)
            try:
                record = dataset.record(raw)
                _refuse_other_kinds(record, "auto", where)
                return _only_reading(record, where, dataset), raw.line
            except BadRecord as error:
                problem = problem or error
    assert problem is not None, "a dataset has records"
    raise problem


def to_sample(record: dict[str, Any], format: str, where: str) -> Sample:
    """The record in its normal form; a BadRecord names `where` and the wrong field."""
    shape = FORMATS[format]
    _refuse_other_kinds(record, format, where)
    try:
        return shape.read(record)
    except Wrong as wrong:
        others = [] if shape.fits(record) else readings(record)
        instead = f"; by its keys it is {' or '.join(others)}, not {format}" if others else ""
        alone = "; records of another format need a dataset of their own" if others else ""
        raise BadRecord(
            where, f"{printable(wrong.field)}: {wrong.problem}{instead}", rule=wrong.rule,
            fix=f"correct it: {format} needs {shape.needs}{alone}",
        ) from wrong  # fmt: skip


def _refuse_other_kinds(record: Fields, format: str, where: str) -> None:
    """A text may be chosen beside other columns; its label is a class only where it can be read as nothing else."""
    if KINDS.isdisjoint(record):
        return
    if format != "text":
        refuse_other_methods(record, where)
    if readings(record) != ["text"]:
        refuse_feedback(record, where)


def readings(record: Fields) -> list[str]:
    """Names of the formats that the keys of the record allow."""
    return [name for name, shape in FORMATS.items() if shape.fits(record)]


def unused_columns(record: Fields, format: str) -> list[str]:
    """Columns of the record that have a value and are not read."""
    used = FORMATS[format].uses(record)
    return [name for name, value in record.items() if name not in used and value is not None]


_LIKE_QUESTION = ("problem", "query", "instruction", "question", "prompt", "input", "user", "human", "title")
_LIKE_ANSWER = ("solution", "reply", "response", "answer", "completion", "output", "assistant", "target", "body")


def _only_reading(record: dict[str, Any], where: str, dataset: Dataset) -> str:
    fitting, columns = readings(record), dataset.columns
    theirs = {columns.get(name, name.removesuffix(NOT_MAPPED)): value for name, value in record.items()}
    missing = [name for own, name in columns.items() if own not in record]
    near = difflib.get_close_matches(missing[0], sorted(theirs.keys() - {*columns.values()}), n=1) if missing else []
    if near and not (fitting and dataset.files[0].container == "jsonl"):  # there, a record may lack a column
        mapped = ",".join(f"{own}={near[0] if name == missing[0] else name}" for own, name in columns.items())
        problem = f"there is no column {missing[0]!r}; did you mean {near[0]!r}?"
        raise BadRecord(where, problem, rule="wrong_field", fix=f"say so: --map {shlex.quote(mapped)}")
    if len(fitting) == 1:
        return fitting[0]
    names = [printable(name[:60]) for name in record]
    keys = ", ".join(names[:30]) + (" ..." if len(names) > 30 else "")
    if not fitting:
        needs = "\n".join(f"    {name}: {shape.needs}" for name, shape in FORMATS.items())
        mapped = f"there is no column {missing[0]!r}; " if missing else ""
        meant = _mapping(theirs)
        if dataset.files[0].container == "csv":
            meant += "; if the first line is a record, add one above it with the names of the columns"
        raise BadRecord(
            where, f"{mapped}no format fits the keys of the record: {keys or 'it has none'}", rule="wrong_field",
            fix=f"say which columns to train on: {meant}; or rename them to those of a format\n{needs}",
        )  # fmt: skip
    ways = ", or ".join(f"--format {name} ({FORMATS[name].needs})" for name in fitting)
    raise InputError(
        f"{where}: the keys of the record can be read as {' and as '.join(fitting)}: {keys}",
        fix=f"choose one: {ways}; outside of an import that is --set data.format=NAME",
    )


def _mapping(record: Fields) -> str:
    """The `--map` that is likely meant: columns with usual names, else the first two texts."""
    texts = [name for name, value in record.items() if type(value) is str and not set(name) & set(",=")]
    if len(texts) == 1:
        return f"--map {shlex.quote(f'text={texts[0]}')}"
    both = (_LIKE_QUESTION, _LIKE_ANSWER)
    found = {name: "" for of in both for name in [n for like in of for n in texts if like in n.casefold()][:1]}
    first, second = found if len(found) == 2 else [*texts, "COLUMN", "COLUMN"][:2]
    return f"--map {shlex.quote(f'question={first},answer={second}')}"


def _has(record: Fields, *names: str) -> bool:
    return all(record.get(name) is not None for name in names)


# --- reasoning traces ------------------------------------------------------------------------------------------------


def _read_trace(record: Fields) -> Sample:
    try:
        trace = Trace.model_validate(record)
    except ValidationError as error:
        raise Wrong(*first_problem(error)) from error
    return Sample(
        turns=(Turn(role="user", text=trace.prompt),),
        steps=tuple(step.content for step in trace.steps),
        answer=trace.final_answer,
    )


# --- conversations ---------------------------------------------------------------------------------------------------


def _read_chat(record: Fields, field: str, roles: Mapping[str, Role] = ROLES) -> Sample:
    return conversation(with_system(messages_of(record.get(field), field, roles), record.get("system")))


# --- a prompt and its completion -------------------------------------------------------------------------------------

PAIRS = (("prompt", "completion"), ("prompt", "response"), ("input", "output"), ("question", "answer"))


def _pairs(record: Fields) -> list[tuple[str, str]]:
    """The pairs of columns that the record has. `input` beside an instruction is Alpaca's."""
    found = [pair for pair in PAIRS if _has(record, *pair)]
    if ("input", "output") in found and _has(record, "instruction"):
        found.remove(("input", "output"))
    if len(found) > 1 and ("question", "answer") in found and _fits_gsm8k(record):
        found.remove(("question", "answer"))
    return found


def _fits_pair(record: Fields) -> bool:
    """A GSM8K record is read as a pair only where that format is chosen."""
    found = _pairs(record)
    return bool(found) and not (found == [("question", "answer")] and _fits_gsm8k(record))


def _read_pair(record: Fields) -> Sample:
    found = _pairs(record)
    if not found:
        raise _no_pair(record)
    if len(found) > 1:
        both = " and ".join(" with ".join(pair) for pair in found)
        raise Wrong(found[1][1], f"there are two readings, {both}: leave one of them out")
    first, second = found[0]
    if type(record[first]) is str and type(record[second]) is str:
        prompt, completion = text_of(record[first], first), text_of(record[second], second)
        return Sample(turns=(Turn(role="user", text=prompt), Turn(role="assistant", text=completion)))
    return conversation([*_side(record[first], first, "user"), *_side(record[second], second, "assistant")])


def _no_pair(record: Fields) -> Wrong:
    if _has(record, "instruction", "input", "output"):
        return Wrong("instruction", "it would be left out")
    begun = next((pair for pair in PAIRS if _has(record, pair[0]) or _has(record, pair[1])), PAIRS[0])
    return Wrong(begun[1] if _has(record, begun[0]) else begun[0], "missing")


def _side(value: Any, field: str, role: Role) -> list[Message]:
    """One half of a pair: a string, or messages."""
    if type(value) is list:
        messages = messages_of(value, field)
        for message in messages:
            if (message.turn.role == "assistant") != (role == "assistant"):
                wrong = f"a turn of the {message.turn.role} in the {field}: give the chat as `messages` to train on all of it"
                raise Wrong(message.field, wrong)
        return messages
    return [Message(turn=Turn(role=role, text=text_of(value, field)), reasoning=None, field=field)]


def _read_alpaca(record: Fields) -> Sample:
    instruction = text_of(record.get("instruction"), "instruction")
    material = optional_text(record.get("input"), "input")
    system = optional_text(record.get("system"), "system")
    prompt = instruction if material is None else f"{instruction}\n\n{material}"
    reply = Turn(role="assistant", text=text_of(record.get("output"), "output"))
    first = () if system is None else (Turn(role="system", text=system),)
    return Sample(turns=(*first, *history_of(record.get("history")), Turn(role="user", text=prompt), reply))


# --- plain text ------------------------------------------------------------------------------------------------------


def _fits_text(record: Fields) -> bool:
    """Only a text: beside the columns of another format it is their rendering."""
    return _has(record, "text") and not any(shape.fits(record) for name, shape in FORMATS.items() if name != "text")


# --- GSM8K -----------------------------------------------------------------------------------------------------------

_BLANKS = " \t\r\n"
_MARK = re.compile(r"<<([^<>]*)>>")
_BEFORE_NUMBER = r"[ \t\r]*####[ \t]*"
_NUMBER = r"[-+]?[$€£]?[-+]?(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:[ \t]?%)?"
_UNIT = (
    r"(?!(?:is|isn't|are|was|were|not|or|and|at|to|but|plus|minus|times|squared|cubed|factorial)\b)"
    r"(?:(?<=[ \t])a(?= )|[^\W\d_](?:[^\W\d_]|['/-]){0,29}[^\W\d_])(?![^\W_]|['/-])"
)
_STOP = r"[ \t]*\.?"
_NUMBER_LINE = re.compile(f"{_BEFORE_NUMBER}{_NUMBER}{_STOP}")
"""What distinguishes GSM8K from other texts: a bare number. `#### Summary` and `#### 2 Methods` are headings."""
_ANSWER_LINE = re.compile(f"{_BEFORE_NUMBER}(?P<answer>{_NUMBER}(?P<words>[ \\t]?{_UNIT}(?: {_UNIT}){{0,3}})?){_STOP}")
"""The last line of a GSM8K answer: a number with or without a unit, as answers are scored. It is `5 hours`, and not `5 or 6`,
`5 is it`, `2x` or `5 hours 30 minutes`. The full stop is not part of the answer."""


def _fits_gsm8k(record: Fields) -> bool:
    answer = record.get("answer")
    if type(answer) is not str or record.get("question") is None:
        return False
    return _NUMBER_LINE.fullmatch(answer.rstrip(_BLANKS).rpartition("\n")[2]) is not None


def words_behind_number(record: Fields, format: str) -> str | None:
    """The words after the number of a GSM8K answer that `to_sample` reads, such as `hours`; None without them."""
    if format != "gsm8k":
        return None
    found = _ANSWER_LINE.fullmatch(str(record.get("answer")).rstrip(_BLANKS).rpartition("\n")[2])
    return found["words"].strip() if found and found["words"] else None


def _gsm8k(record: Fields) -> tuple[str, list[tuple[str, list[str]]], str]:
    """Question, steps with the calculator annotations of each, and answer."""
    question, answer = text_of(record.get("question"), "question"), text_of(record.get("answer"), "answer")
    body, _, last = answer.rstrip(_BLANKS).rpartition("\n")
    stated = _ANSWER_LINE.fullmatch(last)
    if stated is None:
        raise Wrong("answer", "it does not end in a line `#### N` with a number, with or without a unit")
    steps = []
    for line in body.split("\n"):
        marks = _MARK.findall(line) if "<<" in line else []
        sentence = (whole(_MARK.sub("", line)) if marks else line).strip(_BLANKS)
        if sentence and not sentence.isspace():
            steps.append((sentence, marks))
        elif marks:
            raise Wrong("answer", "a line holds a calculator's mark and no sentence")
    if not steps:
        raise Wrong("answer", "no step before the `####` line")
    return question, steps, stated["answer"]


def _read_gsm8k(record: Fields) -> Sample:
    question, steps, answer = _gsm8k(record)
    return Sample(turns=(Turn(role="user", text=question),), steps=tuple([text for text, _ in steps]), answer=answer)


def gsm8k_trace(record: Fields) -> dict[str, Any]:
    """A GSM8K record that `to_sample` reads, as a trace. The calculator annotations of each step are in `meta`."""
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
    "trace": Format(
        needs="prompt, steps (each with i, type, content) and final_answer; also id and meta, and no other key",
        fits=lambda record: _has(record, "prompt", "steps", "final_answer"),
        read=_read_trace,
        uses=_always(*Trace.model_fields),
    ),
    "prompt_completion": Format(
        needs="prompt and completion (or prompt and response, input and output, question and answer)",
        fits=_fits_pair,
        read=_read_pair,
        uses=lambda record: frozenset(name for pair in _pairs(record) for name in pair),
    ),
    "messages": Format(
        needs="messages, each with role (system or developer, user, assistant) and content; also system",
        fits=lambda record: _has(record, "messages"),
        read=lambda record: _read_chat(record, "messages"),
        uses=_always("messages", "system"),
    ),
    "sharegpt": Format(
        needs="conversations, each with from (system, human or user, gpt or assistant or model) and value; also system",
        fits=lambda record: _has(record, "conversations"),
        read=lambda record: _read_chat(record, "conversations", SHAREGPT_ROLES),
        uses=_always("conversations", "system"),
    ),
    "alpaca": Format(
        needs="instruction and output; also input, system, and history (pairs of a question and its answer)",
        fits=lambda record: _has(record, "instruction", "output"),
        read=_read_alpaca,
        uses=_always("instruction", "input", "output", "system", "history"),
    ),
    "gsm8k": Format(
        needs="question, and answer with a last line `#### N`, where N is a number",
        fits=_fits_gsm8k,
        read=_read_gsm8k,
        uses=_always("question", "answer"),
    ),
    "text": Format(
        needs="text, trained whole",
        fits=_fits_text,
        read=lambda record: Sample(turns=(Turn(role="text", text=text_of(record.get("text"), "text")),)),
        uses=_always("text"),
    ),
}

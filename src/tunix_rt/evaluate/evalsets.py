"""Eval sets by name: a shipped key, a file of questions, or any dataset whose records are questions with a final answer.

`load_evalset` refuses the first record that cannot be scored; `validate_evalset` checks all of them and counts.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from tunix_rt import assets
from tunix_rt.config.load import load_config
from tunix_rt.data.contamination import find_overlap, questions_of
from tunix_rt.data.formats import detect_format, readings, to_sample
from tunix_rt.data.readers import BadRecord, Raw, read_raw
from tunix_rt.data.records import EvalItem, Sample, first_problem
from tunix_rt.data.sources import KEY, Dataset, find_dataset, find_evalset
from tunix_rt.data.text import fold
from tunix_rt.data.validation import RULES as DATA_RULES
from tunix_rt.data.validation import Finding, Tally
from tunix_rt.errors import InputError
from tunix_rt.evaluate.generate import read_predictions
from tunix_rt.runs.folder import RunDir
from tunix_rt.scoring.answers import is_number_as_words
from tunix_rt.scoring.score import TAGS, matches_lenient, matches_strict, read_answer
from tunix_rt.storage import sha256_file

NO_ANSWER = "missing or blank: a question without an answer cannot be scored"
ITEMS = "items"
"""The format of a file of our own, one `EvalItem` a line; the others are those of datasets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Questions in the order of the file. With a `limit` they are a sample of its `rows`, drawn by `seed`."""

    key: str
    format: str
    sha256: str
    """Of the whole file, also of a sample."""
    rows: int
    items: tuple[EvalItem, ...]
    seed: int | None = None
    """None when it has all rows."""

    def describe(self) -> str:
        count = f"{len(self.items):,} question{'s' if len(self.items) != 1 else ''}"
        if self.seed is None:
            return f"{self.key}: all {count}" if len(self.items) > 1 else f"{self.key}: {count}"
        return f"{self.key}: {count} of {self.rows:,}, drawn at random with seed {self.seed}"


def load_evalset(name: str, *, limit: int | None = None, seed: int = 0) -> EvalSet:
    """The eval set or dataset `name`: a key, a path, or any other name of a dataset.

    With a `limit` below the number of rows, that many are drawn: the same ones for the same file, limit and seed. An empty
    set, a repeated id or a record that is not a question with one answer is an InputError with file and line.
    """
    if limit is not None and limit < 1:
        raise InputError(f"a limit of {limit} questions leaves none", fix="give a limit of 1 or more")
    source = _find(name)
    items: list[EvalItem] = []
    seen: dict[str, str] = {}
    for where, item in _rows(source):
        if isinstance(item, InputError):
            raise item
        if (first := seen.setdefault(item.id, where)) != where:
            raise InputError(
                f"{where}: id {item.id!r} is used twice, first at {first}", fix="give every question an id of its own"
            )
        items.append(item)
    return _drawn(items, limit, seed, key=name, format=source.format, sha256=source.dataset.sha256)


def evalset_of_run(name: str, *, limit: int | None = None, seed: int = 0) -> EvalSet:
    """The questions of the run in the folder `name`: its eval set, or the held-out traces that it was evaluated with."""
    run = RunDir(Path(os.path.expanduser(name)))
    if run.config.is_file() and (named := load_config(run.config).evaluation.evalset):
        return load_evalset(named, limit=limit, seed=seed)
    path = run.predictions("before")
    if not path.is_file():
        raise InputError(f"{name} has no questions of its own", fix="name some, as --evalset eval_v2")
    items = [
        EvalItem(
            id=one.id,
            prompt=one.prompt,
            answer=one.expected,
            section=one.section,
            category=one.category,
            difficulty=one.difficulty,
        )
        for one in read_predictions(path)
    ]
    return _drawn(items, limit, seed, key=f"held out of {name}", format=ITEMS, sha256=sha256_file(path))


def _drawn(items: Sequence[EvalItem], limit: int | None, seed: int, **known: Any) -> EvalSet:
    known["rows"] = len(items)
    if limit is None or limit >= len(items):
        return EvalSet(items=tuple(items), **known)
    generator = np.random.Generator(np.random.PCG64([seed, len(items)]))
    chosen = sorted(generator.choice(len(items), size=limit, replace=False).tolist())
    return EvalSet(items=tuple(items[place] for place in chosen), seed=seed, **known)


# --- from a name to records ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    dataset: Dataset
    format: str
    section: str
    """Of items that are made from records of a dataset."""


def _find(name: str) -> _Source:
    """A path is that file. A key is an eval set before it is a dataset."""
    path = os.path.expanduser(name)
    is_key = KEY.fullmatch(name) is not None and not os.path.isfile(path)
    if is_key and assets.find("evalsets", f"{name}.jsonl") is not None:
        return _Source(dataset=find_dataset(str(find_evalset(name).path)), format=ITEMS, section=name)
    if is_key and not os.path.isdir(path) and assets.find("datasets", f"{name}/dataset.jsonl") is None:
        raise _unknown(name)
    dataset = find_dataset(name)
    format = ITEMS if _holds_items(dataset) else detect_format(dataset)
    return _Source(dataset=dataset, format=format, section=name if is_key else _section(dataset))


def _unknown(name: str) -> InputError:
    fixes = []
    for find in (find_evalset, find_dataset):
        try:
            find(name)
        except InputError as error:
            fixes.append(error.fix)
    return InputError(
        f"no eval set and no dataset is named {name!r}", fix=f"an eval set: {fixes[0]}; a dataset: {fixes[-1]}"
    )


def _holds_items(dataset: Dataset) -> bool:
    """By its first record: a prompt that no dataset format reads. So a missing answer is reported as such."""
    with closing(read_raw(dataset)) as records:
        raw = next(records)
    record = dataset.record(raw)
    return "prompt" in record and not readings(record)


def _section(dataset: Dataset) -> str:
    """A section name for a dataset without a key: that of its file, or of the folder of one in our layout."""
    path = dataset.files[0].path if len(dataset.files) == 1 else Path(dataset.key.rpartition(":")[2])
    name = path.parent.name if path.name == "dataset.jsonl" else path.name.split(".")[0]
    return re.sub(r"[^\w-]+", "", name) or "all"


def _rows(source: _Source) -> Iterator[tuple[str, EvalItem | InputError]]:
    """Every record with its file and line: an item, or what is wrong with it."""
    for number, raw in enumerate(read_raw(source.dataset), start=1):
        where = source.dataset.place(raw.file, raw.line)
        try:
            yield where, _item(raw, number, source, where)
        except InputError as error:
            yield where, error


def _item(raw: Raw, number: int, source: _Source, where: str) -> EvalItem:
    record = source.dataset.record(raw)
    field = _ANSWER_FIELD.get(source.format)
    if field is not None and _blank(_stated(record.get(field), source.format)):
        raise InputError(f"{where}: {field}: {NO_ANSWER}", fix="give it its answer, or remove it")
    try:
        return EvalItem.model_validate(record if source.format == ITEMS else _fields(record, number, source, where))
    except ValidationError as error:
        wrong, words = first_problem(error)
        raise InputError(
            f"{where}: {wrong}: {words}", fix=f"correct it; an item has {', '.join(EvalItem.model_fields)}"
        ) from error


_ANSWER_FIELD = {ITEMS: "answer", "trace": "final_answer", "gsm8k": "answer"}


def _fields(record: dict[str, Any], number: int, source: _Source, where: str) -> dict[str, Any]:
    """The fields of an item, from a record of a dataset."""
    sample = to_sample(record, source.format, where)
    answer = _answer(sample)
    if answer is None or [turn.role for turn in sample.turns if turn.role != "assistant"] != ["user"]:
        raise InputError(
            f"{where}: not one question with one final answer, so it cannot be scored",
            fix="name a dataset of traces, of GSM8K records or of completions with an answer block; or an eval set",
        )
    given = record.get("id")
    meta = record.get("meta") if source.format == "trace" else None
    meta = meta if isinstance(meta, dict) else {}
    return {
        "id": f"{source.section}-{number:05d}" if _blank(given) or not isinstance(given, str) else given,
        "prompt": sample.question,
        "answer": answer,
        "section": source.section,
        **{name: meta[name] for name in ("category", "template", "difficulty") if isinstance(meta.get(name), str)},
    }


def _stated(value: object, format: str) -> object:
    """The answer in its field; of GSM8K the text behind the last ####."""
    return value.rpartition("####")[2] if format == "gsm8k" and isinstance(value, str) else value


def _blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _answer(sample: Sample) -> str | None:
    """Of a trace its final answer; of a completion the content of its answer block."""
    if sample.answer is not None:
        return sample.answer
    completions = [turn.text for turn in sample.turns if turn.role == "assistant"]
    tagged = read_answer(completions[0]) if len(completions) == 1 else None
    return None if tagged is None else tagged.answer


# --- the validator ---------------------------------------------------------------------------------------------------

RULES: Mapping[str, tuple[bool, str]] = {
    "unreadable": (True, "a record that is not a question with one answer"),
    "no_answer": (True, "a question whose answer is blank or missing"),
    "duplicate_id": (True, "an id that another question has"),
    "conflicting_answers": (True, "a repeated question with another answer"),
    "unscorable": (True, "an answer that scoring rejects even from a model that gives exactly it"),
    **{name: (True, rule.finds) for name, rule in DATA_RULES.items() if name.startswith("overlap_")},
    "duplicate_prompt": (False, "a repeated question with the same answer: it counts twice"),
    "only_in_tags": (False, "an answer that is right in its tags only, not at the end of a sentence"),
    "read_as_words": (
        False,
        "an answer with a number that is compared as words: the same value in another spelling is wrong",
    ),
    "answer_in_prompt": (
        False,
        "an answer that occurs in the question, by chance or by choice, where it can be copied",
    ),
}
"""Name -> whether it is an error (else a warning), and what it finds."""


class EvalFinding(Finding):
    """A finding by the rules of the validator."""

    __slots__ = ()

    @property
    def refuses(self) -> bool:
        return RULES[self.rule][0]

    def describe(self) -> str:
        word = "error" if self.refuses else "warning"
        return f"{word}: {self.rule}: {self.count:,} x {RULES[self.rule][1]}; first {self.first}: {self.seen}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Findings about an eval set, errors first, and how many questions of each kind it has."""

    key: str
    items: int
    findings: tuple[EvalFinding, ...]
    sections: Mapping[str, int]
    categories: Mapping[str, int]
    difficulties: Mapping[str, int]

    @property
    def good(self) -> bool:
        """No error; there may be warnings."""
        return not any(finding.refuses for finding in self.findings)

    def verdict(self, dataset: str | None) -> str:
        """One line: whether it can be used, and what was compared."""
        errors = sum(finding.refuses for finding in self.findings)
        warnings = len(self.findings) - errors
        beside = f", compared with {dataset}" if dataset else "; --data NAME compares it with training data"
        state = f"refused: {errors} kind(s) of error" if errors else "ready to evaluate with"
        return f"{state}, {warnings} warning(s){beside}"


def validate_evalset(name: str, *, dataset: str | None = None) -> Validation:
    """Every finding about the eval set `name`, and about its overlap with the training dataset `dataset`, if one is named.

    Only an unreadable file and an empty set raise.
    """
    read: list[tuple[str, EvalItem]] = []
    found: list[tuple[str, str, str]] = []
    for where, item in _rows(_find(name)):
        if isinstance(item, InputError):
            rule = "no_answer" if item.problem.endswith(NO_ANSWER) else "unreadable"
            found.append((rule, where, item.problem.removeprefix(f"{where}: ")))
        else:
            read.append((where, item))
    found += _doubled(read)
    for where, item in read:
        found += ((rule, where, seen) for rule, seen in _about_answer(item))
    if dataset is not None and read:
        found += _overlaps(read, dataset)
    items = [item for _, item in read]
    return Validation(
        key=name,
        items=len(items),
        findings=tuple(_counted(found)),
        sections=_counts(item.section for item in items),
        categories=_counts(item.category for item in items),
        difficulties=_counts(item.difficulty for item in items),
    )


def _doubled(read: Sequence[tuple[str, EvalItem]]) -> Iterator[tuple[str, str, str]]:
    """(rule, place, what is there) for repeated ids and questions. Case and punctuation make no other question."""
    ids: dict[str, str] = {}
    prompts: dict[str, tuple[str, EvalItem]] = {}
    for where, item in read:
        if (first := ids.setdefault(item.id, where)) != where:
            yield "duplicate_id", where, f"{item.id!r}, first at {first}"
        before, earlier = prompts.setdefault(fold(item.prompt) or item.prompt, (where, item))
        if before == where:
            continue
        if _accepts(earlier.answer, item.answer):
            yield "duplicate_prompt", where, f"first at {before}"
        else:
            yield "conflicting_answers", where, f"{item.answer!r}, and {earlier.answer!r} at {before}"


def _accepts(expected: str, answer: str) -> bool:
    output = f"<{TAGS.reasoning}>.</{TAGS.reasoning}><{TAGS.answer}>{answer}</{TAGS.answer}>"
    return matches_strict(output, expected)


_SHORT = re.compile(r"[^\W\d_]|\D{0,2}[0-9]{1,2}\D{0,2}")


def _about_answer(item: EvalItem) -> Iterator[tuple[str, str]]:
    if not _accepts(item.answer, item.answer):
        yield "unscorable", repr(item.answer[:60])
    elif not matches_lenient(f"So the answer is {item.answer}", item.answer):
        yield "only_in_tags", repr(item.answer[:60])
    if is_number_as_words(item.answer):
        yield "read_as_words", repr(item.answer[:60])
    answer = re.escape(" ".join(item.answer.split()).casefold())
    # One letter, or a number of one or two digits, is in most questions by chance.
    if not _SHORT.fullmatch(item.answer.strip()) and re.search(
        rf"(?<![\w.,]){answer}(?!\w|[.,]\d)", " ".join(item.prompt.split()).casefold()
    ):
        yield "answer_in_prompt", f"{item.answer[:60]!r} in {json.dumps(item.prompt[:60], ensure_ascii=False)}"


def _overlaps(read: Sequence[tuple[str, EvalItem]], name: str) -> Iterator[tuple[str, str, str]]:
    """Overlap with the training data. A place here is one of the training data."""
    dataset = find_dataset(name)
    format = detect_format(dataset)
    questions = questions_of(item for _, item in read)
    for raw in read_raw(dataset):
        where = dataset.place(raw.file, raw.line)
        try:
            match = find_overlap(to_sample(dataset.record(raw), format, where), questions)
        except BadRecord:
            continue  # `data check` reports it
        if match is not None:
            yield match.rule, where, f"{read[match.item][0]} shares {match.shared!r}"


def _counted(found: Iterable[tuple[str, str, str]]) -> Iterator[EvalFinding]:
    """One finding per rule that was broken, in the order of RULES."""
    tally = Tally()
    for one in found:
        tally.add(*one)
    return (EvalFinding.at(**tally.by_rule[rule]) for rule in RULES if rule in tally.by_rule)


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Most frequent first."""
    return dict(Counter(names).most_common())

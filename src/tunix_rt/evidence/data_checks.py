"""Checks of the data of a run without a model. The recorded answers are judged again: verdicts, scores, comparison and summary
follow from the outputs (L2 checks that the model gives these outputs). Of a dataset and an eval set that the verifier has by
hash: the split into training and held-out traces, the questions, and whether a question was trained on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from pydantic import BaseModel

from tunix_rt.config.settings import Data
from tunix_rt.data.contamination import find_overlap, questions_of
from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.holdout import as_question, hold_out, items_of, question_hash
from tunix_rt.data.readers import BadRecord, read_raw
from tunix_rt.data.records import EvalItem, Sample
from tunix_rt.data.sources import find_datasets, find_evalset, read_items
from tunix_rt.evaluate.comparison import Side, compare, compare_runs
from tunix_rt.evaluate.report import comparison_facts
from tunix_rt.evidence.facts import Inputs, Run
from tunix_rt.evidence.rollout_checks import answer_problems_of_rows
from tunix_rt.runs.checksums import few, shown
from tunix_rt.runs.record import RunRecord
from tunix_rt.scoring.score import TAGS, Prediction, Scores, Tags, judge, score_predictions
from tunix_rt.storage import to_plain

QUESTION = ("prompt", "expected", "section", "category", "difficulty")
_JUDGED_FROM = ("id", *QUESTION, "output", "ended")
OF_RUN = ("before", "after")
OF_EVALUATION = ("base", "answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The two sides of an evaluation, as they are judged now."""

    record: RunRecord
    whens: tuple[str, ...]
    tags: Tags
    models: tuple[str, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)
    """What eval_summary.json repeats of a run's commitment and settings."""


def answered_in(record: RunRecord, run: Run | None) -> Answers | None:
    """The answers of a run, or of the output of `tunix-rt evaluate`; None where nothing was evaluated."""
    if run is not None:
        return Answers(record=record, whens=OF_RUN, tags=run.tags, stated=_stated(run)) if run.answered else None
    whens = tuple(when for when in OF_EVALUATION if f"eval/predictions-{when}.jsonl" in record)
    summary = record.summary
    if summary is None:
        return None
    return Answers(record=record, whens=whens, tags=tags_in(_plain(summary.decoding)), models=tuple(summary.models))


def _stated(run: Run) -> dict[str, Any]:
    committed, config, evalset = run.commitment, run.config, run.commitment.evalset
    decoding = run.record.summary.decoding if run.record.summary else {}
    decided = {"max_new_tokens": config.evaluation.max_new_tokens, "tokenizer": committed.tokenizer_sha256}
    decided |= {"temperature": 0.0, "reasoning_tag": run.tags.reasoning, "answer_tag": run.tags.answer}
    return {
        "models": [committed.base_model.name], "weights": committed.base_model.weights, "device": run.device,
        "dtype": config.training.dtype, "evalset": evalset.key if evalset else "held out",
        "evalset_sha256": evalset.sha256 if evalset else None, "decoding": {**decoding, **decided},
    }  # fmt: skip


def tags_in(decoding: Mapping[str, Any]) -> Tags:
    """The tags under which an evaluation was decoded; ours where it names none."""
    return Tags(
        reasoning=str(decoding.get("reasoning_tag") or TAGS.reasoning),
        answer=str(decoding.get("answer_tag") or TAGS.answer),
    )


def answer_problems(answered: Answers) -> Iterator[str]:
    record, sides = answered.record, {}
    for when in answered.whens:
        lines, file = record.predictions(when), f"{record.where}eval/predictions-{when}.jsonl"
        for number, line in enumerate(lines, start=1):
            yield from (f"{file}:{number}: {problem}" for problem in verdict_problems(line, answered.tags))
        if len({line.id for line in lines}) != len(lines) or not lines:
            yield f"{file}: no answers, or an id twice"
            return
        sides[when] = lines
        yield from _score_problems(record, when, score_predictions(lines, when))
    if len(sides) == 2:
        first, second = ([_question(one) for one in sides[when]] for when in answered.whens)
        if first != second:
            yield f"{record.where}eval: the two sides do not answer the same questions in the same order"
            return
    yield from _summary_problems(answered, sides)


def _question(line: Prediction) -> tuple[Any, ...]:
    return tuple(getattr(line, name) for name in ("id", *QUESTION))


def judged_again(line: Prediction, tags: Tags) -> Prediction:
    return judge(**{name: getattr(line, name) for name in _JUDGED_FROM}, tags=tags)


def verdict_problems(line: Prediction, tags: Tags) -> Iterator[str]:
    """Where a verdict or count is not what the output beside it gives."""
    for name, value in to_plain(judged_again(line, tags)).items():
        if getattr(line, name) != value:
            yield f"{name} is {shown(getattr(line, name))}, the output gives {shown(value)}"


def accuracy_of(scores: Scores) -> str:
    return f"{scores.correct} of {scores.items} ({100 * scores.accuracy:.1f} %)"


def _score_problems(record: RunRecord, when: str, scores: Scores) -> Iterator[str]:
    found, rates = record.scores(when), (record.result.scores or {}).get(when, {}) if record.result else {}  # type: ignore[call-overload]
    if any(rate != getattr(scores, name, None) for name, rate in rates.items()):
        yield f"{record.where}result.json: scores.{when} are not those that the answers give"
    if found is None or not same(_plain(found), to_plain(scores)):
        yield f"{record.where}eval/{when}.json: not the scores that the answers give"


def _summary_problems(answered: Answers, sides: Mapping[str, Sequence[Prediction]]) -> Iterator[str]:
    summary, where = answered.record.summary, answered.record.where
    if summary is None:
        yield f"{where}eval_summary.json: missing"
        return
    recorded = _plain(summary)
    expected: dict[str, Any] = {when: to_plain(score_predictions(side, when)) for when, side in sides.items()}
    expected["questions"] = len(next(iter(sides.values())))
    if len(sides) == 2:
        both = [list(sides[when]) for when in answered.whens]
        if len(answered.models) == 2:
            named = (Side(name=name, predictions=one) for name, one in zip(answered.models, both, strict=True))
            expected["comparison"] = comparison_facts(compare_runs(*named))
        else:
            expected["comparison"] = comparison_facts(compare(*both))
        expected["comparison"].pop("sentence")  # words
        recorded.get("comparison", {}).pop("sentence", None)
    for name, value in expected.items():
        if not same(recorded.get(name), to_plain(value)):
            yield f"{where}eval_summary.json: {name} is not what the answers give"
    for name, value in answered.stated.items():
        if not same(recorded.get(name), value):
            yield f"{where}eval_summary.json: {name} is not that of the run"


def _plain(value: Any) -> Any:
    """As the JSON file has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return to_plain(value)


def same(recorded: Any, expected: Any) -> bool:
    """Equal, and floats equal but for the last bits: roots and logarithms differ between mathematical libraries. An older record
    may lack what this version adds."""
    if isinstance(recorded, dict) and isinstance(expected, dict):
        return recorded.keys() <= expected.keys() and all(same(recorded[key], expected[key]) for key in recorded)
    if isinstance(recorded, list | tuple) and isinstance(expected, list | tuple):
        return len(recorded) == len(expected) and all(map(same, recorded, expected))
    if isinstance(recorded, float) and isinstance(expected, float):
        return math.isclose(recorded, expected, rel_tol=1e-9, abs_tol=1e-12)
    return type(recorded) is type(expected) and bool(recorded == expected)


def question_problems(run: Run, items: Sequence[EvalItem]) -> Iterator[str]:
    """The questions are those of the eval set, all of them, in its order."""
    given = [(one.id, one.prompt, one.answer, one.section, one.category, one.difficulty) for one in items]
    for when in OF_RUN:
        if [_question(line) for line in run.record.predictions(when)] != given:
            yield f"{run.where}eval/predictions-{when}.jsonl: not the questions of the committed eval set"


MOST_CHECKED = 200_000
"""Traces of a dataset that are read at L1; a larger one is prepared whole at L3."""


def data_problems(run: Run, inputs: Inputs) -> Iterator[str]:
    """What can be checked of the data without a tokenizer."""
    committed = run.commitment
    facts, limit = committed.dataset, run.config.data.max_examples
    samples, unread = _samples(run, inputs.dataset(facts.sha256), facts.format, limit)
    validation = facts.validation
    apart = _samples(run, inputs.dataset(validation.sha256), run.config.data.format) if validation else None
    if samples:
        yield from _split_problems(run, (samples, unread), apart)
    path = inputs.evalset(committed.evalset.sha256) if committed.evalset else None
    if committed.evalset is not None and path is not None and run.answered:
        items = read_items(find_evalset(path))
        yield from question_problems(run, items)
        if len(items) != committed.evalset.items:
            yield f"{run.where}precommit.json: evalset.items is {committed.evalset.items}, the eval set has {len(items)}"
        yield from few((f"{run.where}precommit.json: {problem}" for problem in _overlap(samples, items)), 5)


Read = tuple[list[Sample], int]
"""The samples of a dataset, and how many of its records cannot be read."""


def _samples(run: Run, paths: Sequence[str] | None, form: str, limit: int | None = None) -> Read:
    """The samples of a dataset and how many records cannot be read; none where the verifier lacks it, or it is too large."""
    if paths is None:
        return [], 0
    dataset = find_datasets(paths, columns=run.config.data.columns, limit=limit)
    samples: list[Sample] = []
    form, unread = detect_format(dataset, form), 0
    for raw in islice(read_raw(dataset), MOST_CHECKED + 1):
        try:
            samples.append(to_sample(dataset.record(raw), form, dataset.place(raw.file, raw.line)))
        except BadRecord:
            unread += 1
    return (samples, unread) if len(samples) + unread <= MOST_CHECKED else ([], 0)


def _count_problem(of: str, traces: Sequence[int], skipped: int, read: Read, data: Data) -> str | None:
    samples, unread = read
    if skipped < unread or (skipped and not data.skip_bad):
        return f"{skipped} records skipped, {unread} of {of} cannot be read"
    dropped = len(samples) + unread - skipped - sum(traces)
    if dropped < 0 or (dropped and data.on_overflow != "drop"):
        return f"{' + '.join(map(str, traces))} traces, {of} has {len(samples)}"
    return None


def _split_problems(run: Run, own: Read, apart: Read | None) -> Iterator[str]:
    """How many traces are held out and skipped, and which of them were prompted. Where some were dropped as too long, or
    skipped for their tokens, only a tokenizer knows which. `apart` is `data.validation`."""
    facts, data, file = run.commitment.dataset, run.config.data, f"{run.where}precommit.json"
    held, validation = facts.heldout_traces, facts.validation
    counts = [("the dataset", (facts.traces,) if validation else (facts.traces, held), facts.skipped or 0, own)]
    if apart and validation and apart[0]:
        counts.append(("data.validation", (held,), validation.skipped or 0, apart))
    problems = [problem for count in counts if (problem := _count_problem(*count, data))]
    yield from (f"{file}: {problem}" for problem in problems)
    exact = all(skipped == read[1] and sum(traces) == len(read[0]) for _, traces, skipped, read in counts)
    if not exact or (apart and not apart[0]):
        return
    pool = apart[0] if apart else own[0]
    if apart:
        heldout = np.ones(len(pool), dtype=np.bool_)
    else:
        questions = np.array([question_hash(sample) for sample in pool], dtype=np.uint64)
        heldout = hold_out(questions, fraction=data.validation_fraction, seed=run.commitment.seeds.data_seed)
    if int(heldout.sum()) != held:
        if not apart:
            yield f"{file}: {held} traces held out, seed and fraction give {int(heldout.sum())}"
        return
    if run.config.training.samples and not data.names[1:]:
        trained = [sample for sample, out in zip(own[0], heldout, strict=True) if apart or not out]
        answers = [pair and pair[1] for pair in (as_question(sample, data.answer_tag) for sample in trained)]
        yield from few(answer_problems_of_rows(run, answers), 5)
    if run.commitment.evalset is None and run.answered:
        prompts = (as_question(sample, data.answer_tag) for sample, out in zip(pool, heldout, strict=True) if out)
        pairs = [pair for pair in prompts if pair]
        prompted = [(one.id, one.prompt, one.expected) for one in run.record.predictions("after")]
        if prompted != [(item.id, item.prompt, item.answer) for item in items_of(pairs)]:
            yield f"{run.where}eval/predictions-after.jsonl: not the questions that seed and dataset hold out"


def _overlap(samples: Sequence[Sample], items: Sequence[EvalItem]) -> Iterator[str]:
    """Each question that a trace contains."""
    questions = questions_of(list(items))
    for sample in samples:
        if match := find_overlap(sample, questions):
            yield f"the dataset contains the question {shown(items[match.item].prompt)} ({match.rule})"

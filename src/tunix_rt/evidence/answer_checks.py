"""The recorded answers, judged again: verdicts, scores, comparison and summary follow from the outputs. That the model gave these
outputs is shown only from L2 on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tunix_rt.data.trace import EvalItem
from tunix_rt.evaluate.report import Side, compare, compare_runs
from tunix_rt.evaluate.summary import comparison_facts
from tunix_rt.evidence.facts import Run
from tunix_rt.runs.checksums import shown
from tunix_rt.runs.record import RunRecord
from tunix_rt.scoring.score import TAGS, Prediction, Scores, Tags, judge, score_predictions
from tunix_rt.storage import to_plain

QUESTION = ("prompt", "expected", "section", "category", "difficulty")
_JUDGED_FROM = ("id", *QUESTION, "output", "ended")
OF_RUN = ("before", "after")
OF_EVALUATION = ("base", "answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The two sides of an evaluation, as they are judged now."""

    record: RunRecord
    whens: tuple[str, ...]
    tags: Tags
    models: tuple[str, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)
    """What eval_summary.json repeats of a run's commitment and settings."""


def answered_in(record: RunRecord, run: Run | None) -> Answered | None:
    """The answers of a run, or of the output of `tunix-rt evaluate`; None where nothing was evaluated."""
    if run is not None:
        return Answered(record=record, whens=OF_RUN, tags=run.tags, stated=_stated(run)) if run.answered else None
    whens = tuple(when for when in OF_EVALUATION if f"eval/predictions-{when}.jsonl" in record)
    summary = record.summary
    if summary is None:
        return None
    return Answered(record=record, whens=whens, tags=tags_in(_plain(summary.decoding)), models=tuple(summary.models))


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


def answer_problems(answered: Answered) -> Iterator[str]:
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
        first, second = (sides[when] for when in answered.whens)
        asked = [[tuple(getattr(one, name) for name in ("id", *QUESTION)) for one in side] for side in (first, second)]
        if asked[0] != asked[1]:
            yield f"{record.where}eval: the two sides do not answer the same questions in the same order"
            return
    yield from _summary_problems(answered, sides)


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


def _summary_problems(answered: Answered, sides: Mapping[str, Sequence[Prediction]]) -> Iterator[str]:
    summary, where = answered.record.summary, answered.record.where
    if summary is None:
        yield f"{where}eval_summary.json: missing"
        return
    recorded = _plain(summary)
    expected: dict[str, Any] = {when: to_plain(score_predictions(side, when)) for when, side in sides.items()}
    expected["questions"] = len(next(iter(sides.values())))
    if len(sides) == 2:
        first, second = (sides[when] for when in answered.whens)
        if answered.models and len(answered.models) == 2:
            named = (
                Side(name=name, predictions=list(one))
                for name, one in zip(answered.models, (first, second), strict=True)
            )
            expected["comparison"] = comparison_facts(compare_runs(*named))
        else:
            expected["comparison"] = comparison_facts(compare(list(first), list(second)))
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
    return (
        value.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if isinstance(value, BaseModel)
        else to_plain(value)
    )


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
        asked = [tuple(getattr(line, name) for name in ("id", *QUESTION)) for line in run.record.predictions(when)]
        if asked != given:
            yield f"{run.where}eval/predictions-{when}.jsonl: not the questions of the committed eval set"

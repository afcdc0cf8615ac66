"""Recorded answers are judged again: every verdict, score and comparison follows from the outputs, and fast."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.forging.edits import Json, edited, in_json, lines_of, put, put_lines
from tests.forging.sealing import reseal_sums
from tunix_rt.evaluate.comparison import Side, compare_runs
from tunix_rt.evaluate.report import summary_of
from tunix_rt.evidence.data_checks import same, verdict_problems
from tunix_rt.evidence.examine import examine
from tunix_rt.scoring.score import TAGS, Prediction, Tags, judge, score_predictions
from tunix_rt.storage import json_text, to_plain

MANY = 220


def answered(count: int, right: int, tags: Tags = TAGS) -> list[Prediction]:
    """`count` answers of a few sentences, the first `right` of them right."""
    text = "She has 48 / 2 = 24 clips in May. Together that is 48 + 24 = 72 clips. " * 3
    return [
        judge(
            id=f"q-{at}", prompt=f"Question {at}?", expected="72", ended="stop", tags=tags,
            output=f"<{tags.reasoning}>{text}</{tags.reasoning}><{tags.answer}>{72 if at < right else 71}</{tags.answer}>",
        )
        for at in range(count)
    ]  # fmt: skip


def evaluation(folder: Path, base: list[Prediction], answers: list[Prediction], tags: Tags = TAGS) -> Path:
    """The output of `tunix-rt evaluate A --against B --output DIR`."""
    sides = {"base": base, "answers": answers}
    scores = {when: score_predictions(side, when) for when, side in sides.items()}
    for when, side in sides.items():
        put_lines(folder / "eval" / f"predictions-{when}.jsonl", [to_plain(one) for one in side])
        put(folder / "eval" / f"{when}.json", json_text(to_plain(scores[when])))
    decoding = {"max_new_tokens": 8, "temperature": 0.0, "reasoning_tag": tags.reasoning, "answer_tag": tags.answer}
    facts: dict[str, Any] = {
        "models": ["b", "a"], "weights": "pretrained", "evalset": "mine", "evalset_sha256": "ab" * 32, "questions": len(base),
        "device": "cpu", "dtype": "float32", "rows": 4, "decoding": decoding,
    }  # fmt: skip
    comparison = compare_runs(Side(name="b", predictions=base), Side(name="a", predictions=answers))
    put(folder / "eval_summary.json", json_text(to_plain(summary_of(*scores.values(), comparison, **facts))))
    put(folder / "samples.md", "for people\n")
    put(folder / "comparison.md", "for people\n")
    reseal_sums(folder)
    return folder


def problems(folder: Path) -> list[str]:
    reseal_sums(folder)
    return [one.problem for one in examine(folder).findings]


def test_the_output_of_an_evaluation_is_consistent(tmp_path: Path) -> None:
    assert problems(evaluation(tmp_path, answered(5, 1), answered(5, 3))) == []
    assert examine(tmp_path).level == "L1"


def test_answers_are_read_by_the_tags_of_the_run(tmp_path: Path) -> None:
    tags = Tags(reasoning="think", answer="reply")
    folder = evaluation(tmp_path, answered(5, 1, tags), answered(5, 3, tags), tags)
    assert problems(folder) == []
    with edited(folder / "eval_summary.json") as summary:
        summary["decoding"] |= {"answer_tag": "answer"}
    assert "eval/predictions-base.jsonl:1: strict is True, the output gives False" in problems(folder)


def in_answers(change: Callable[[list[Json]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        lines = lines_of(folder / "eval/predictions-answers.jsonl")
        change(lines)
        put_lines(folder / "eval/predictions-answers.jsonl", lines)

    return apply


SCORES, SUMMARY = "eval/answers.json", "eval_summary.json"
TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a verdict": (in_answers(lambda lines: lines[4].update(strict=True)), ":5: strict is True, the output gives False"),
    "an output": (in_answers(lambda lines: lines[4].update(output="72")), ":5: lenient is False, the output gives True"),
    "a question": (in_answers(lambda lines: lines[4].update(prompt="Easier?")), "do not answer the same questions"),
    "an answer less": (in_answers(lambda lines: lines.pop()), "eval/answers.json: not the scores that the answers give"),
    "an answer twice": (in_answers(lambda lines: lines.append(lines[0])), "no answers, or an id twice"),
    "no answers": (in_answers(lambda lines: lines.clear()), "no answers, or an id twice"),
    "a score": (in_json(SCORES, lambda one: one.update(correct=5)), "eval/answers.json: not the scores"),
    "a summary": (in_json(SUMMARY, lambda one: one["answers"].update(correct=5)), "answers is not what"),
    "a gain": (in_json(SUMMARY, lambda one: one["comparison"].update(gain_points=99.0)), "comparison is not what"),
    "a p-value": (in_json(SUMMARY, lambda one: one["comparison"]["mcnemar"].update(p_value=0.0)), "comparison is not what"),
    "a count": (in_json(SUMMARY, lambda one: one.update(questions=500)), "questions is not what the answers give"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_what_the_answers_do_not_give_is_named(name: str, tmp_path: Path) -> None:
    change, problem = TAMPERED[name]
    folder = evaluation(tmp_path, answered(5, 1), answered(5, 3))
    change(folder)
    found = problems(folder)
    assert any(problem in one for one in found), found


def test_each_verdict_is_named_that_its_output_does_not_give() -> None:
    right, wrong = answered(2, 1)
    assert [*verdict_problems(right, TAGS), *verdict_problems(wrong, TAGS)] == []
    assert list(verdict_problems(replace(wrong, strict=True), TAGS)) == ["strict is True, the output gives False"]
    assert list(verdict_problems(replace(right, equations=99), TAGS)) == ["equations is 99, the output gives 6"]
    assert list(verdict_problems(right, Tags(answer="reply")))


def test_only_the_last_bits_of_floats_may_differ() -> None:
    assert same({"a": [0.1 + 0.2]}, {"a": [0.3]}) and not same(0.3, 0.3000001)
    assert not same({"a": 1}, {"a": 1.0}) and not same(True, 1) and not same({"a": 1, "b": 2}, {"a": 1})
    assert same({"a": 1}, {"a": 1, "b": 2})  # what a later version adds, an older record lacks


@pytest.mark.slow
def test_a_sixth_of_gsm8k_is_judged_within_two_seconds(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, answered(MANY, 50), answered(MANY, 150))
    began = time.process_time()
    assert problems(folder) == []
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "output",
    ["<reasoning>" * 20_000, "1 + " * 50_000, "<answer>" + "9" * 200_000, "\0\u202e\ud7ff" * 9_999, "= " * 90_000],
)
def test_no_output_takes_long_to_judge(output: str) -> None:
    began = time.process_time()
    judged = judge(id="q", prompt="?", expected="1", output=output)
    assert list(verdict_problems(judged, TAGS)) == [] and asdict(judged)["output"] == output
    assert time.process_time() - began < 2

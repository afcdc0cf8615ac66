"""Answers judged again: soon enough to be done every time, and whatever bytes lie there."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.program import ROOT
from tunix_rt.evaluate.report import compare, samples_markdown
from tunix_rt.evaluate.score import TAGS, Tags, judge, score_predictions
from tunix_rt.evaluate.summary import summary_of
from tunix_rt.evidence.rescore import answer_problems, rejudged
from tunix_rt.rundir import RunDir, write_json, write_jsonl, write_text

MANY = 1319
STEPS = (
    "Each of the 12 boxes holds 7 pens, so 12 * 7 = 84 pens. 84 - 5 = 79 pens are left. Half of them is 79 / 2 = 39.5. "
)
CONFIG = "model: {model_name_or_path: tiny, weights: random}\ntraining: {dtype: float32}\n"
COMMITTED = {"device": "cpu", "tokenizer_sha256": "ab" * 32}


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Durability is tested elsewhere; here it would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def answered(count, right, tags=TAGS):
    """`count` answers of a few sentences, the first `right` of them right."""
    opening, closing = (f"<{tags.reasoning}>", f"</{tags.reasoning}>")
    return [
        judge(
            id=f"q-{number}", prompt="How many pens?", expected=str(number), ended="stop", tags=tags,
            output=f"{opening}{STEPS}{closing}<{tags.answer}>{number + (number >= right)}</{tags.answer}>",
        )
        for number in range(count)
    ]  # fmt: skip


def make_run(root, before, after, tags=TAGS):
    run = RunDir(root)
    write_text(run.config, f"{CONFIG}data: {{reasoning_tag: {tags.reasoning}, answer_tag: {tags.answer}}}\n")
    write_json(run.precommit, COMMITTED)
    write_json(run.result, {"status": "completed"})
    scores = [score_predictions(before, "before"), score_predictions(after, "after")]
    for side, predictions in zip(scores, (before, after), strict=True):
        write_jsonl(run.predictions(side.when), predictions)
        write_json(run.scores(side.when), side)
    comparison = compare(before, after)
    write_text(run.samples, samples_markdown(before, after, comparison))
    decoding = {
        "max_new_tokens": 0, "temperature": 0.0, "closing": f"</{tags.answer}>", "style": "cd" * 32,
        "tokenizer": "ab" * 32, "reasoning_tag": tags.reasoning, "answer_tag": tags.answer,
    }  # fmt: skip
    facts = {
        "models": ["tiny"], "weights": "random", "evalset": "held out", "questions": len(before), "device": "cpu",
        "dtype": "float32", "decoding": decoding,
    }  # fmt: skip
    write_json(run.eval_summary, summary_of(*scores, comparison, **facts))
    return run


def test_as_many_answers_as_gsm8k_has_are_judged_again_within_two_seconds_a_side(tmp_path):
    run = make_run(tmp_path, answered(MANY, 400), answered(MANY, 700))
    began = time.process_time()
    assert answer_problems(run) == []
    assert time.process_time() - began < 4


def test_answers_under_other_tags_are_read_by_the_tags_of_the_run(tmp_path):
    tags = Tags(reasoning="think", answer="reply")
    run = make_run(tmp_path, answered(5, 1, tags), answered(5, 3, tags), tags)
    assert answer_problems(run) == []
    write_text(run.config, CONFIG)
    assert "eval/predictions-before.jsonl:1: strict is True, its output gives False" in " ".join(answer_problems(run))


def test_a_verdict_of_other_rules_points_to_the_version_that_wrote_it(tmp_path):
    run = make_run(tmp_path, answered(3, 1), answered(3, 2))
    write_json(
        run.precommit, COMMITTED | {"source_sha256": "ef" * 32, "source_files": {"evaluate/score.py": "12" * 32}}
    )
    assert answer_problems(run) == [], "another version that judges alike is no problem"
    lines = [json.loads(line) for line in run.predictions("after").read_text().splitlines()]
    write_jsonl(run.predictions("after"), [lines[0] | {"lenient": False}, *lines[1:]])
    first, *_, last = answer_problems(run)
    assert first == "eval/predictions-after.jsonl:1: lenient is False, its output gives True"
    assert "check with the version that wrote it" in last and "ef" * 32 in last


def test_a_failed_run_may_lack_what_it_did_not_get_to_write(tmp_path):
    run = make_run(tmp_path, answered(3, 1), answered(3, 2))
    run.eval_summary.unlink()
    run.samples.unlink()
    assert answer_problems(run) == ["eval_summary.json is missing", "samples.md is missing"]
    write_json(run.result, {"status": "failed"})
    assert answer_problems(run) == []


def test_the_bundle_of_the_first_schema_is_compared_in_the_fields_it_has():
    run = RunDir(ROOT / "submission_runs" / "m40_v1")
    assert json.loads(run.scores("after").read_text())["schema"] == "tunix-rt/scores/1"
    assert answer_problems(run) == []


def test_rejudged_names_each_verdict_that_its_output_does_not_give():
    right, wrong = answered(3, 2)[1:]
    old = replace(right, ended="unknown", equations=0, equations_right=0, reasoning_words=0)
    assert rejudged([right, wrong, old]) == []
    assert rejudged([right, replace(wrong, strict=True)]) == [
        "question 'q-2': strict is True, its output gives False"
    ]  # fmt: skip
    assert rejudged([replace(right, equations=99)]) != []
    assert rejudged([replace(right)], Tags(answer="reply")) != []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FILES = (
    "eval/predictions-after.jsonl", "eval/after.json", "eval_summary.json", "precommit.json", "result.json", "config.yaml",
    "samples.md",
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("small"), answered(2, 0), answered(2, 1))


@given(name=st.sampled_from(FILES), data=st.binary(max_size=40))
@settings(deadline=None, max_examples=60)
def test_no_bytes_make_it_raise(small, name, data):
    path = small.root / name
    kept = path.read_bytes()
    try:
        path.write_bytes(data)
        assert isinstance(answer_problems(small), list)
    finally:
        path.write_bytes(kept)


@given(name=st.sampled_from(FILES[:5]), which=st.integers(0, 40), value=VALUES)
@settings(deadline=None, max_examples=120)
def test_no_value_in_any_place_makes_it_raise(small, name, which, value):
    path = small.root / name
    kept = path.read_bytes()
    told = json.loads(kept.split(b"\n")[0]) if name.endswith(".jsonl") else json.loads(kept)
    told[sorted(told)[which % len(told)]] = value
    try:
        path.write_text(json.dumps(told) + "\n")
        assert isinstance(answer_problems(small), list)
    finally:
        path.write_bytes(kept)


def test_values_nested_beyond_reason_do_not_make_it_raise(small):
    for name in FILES[:5]:
        path = small.root / name
        kept = path.read_bytes()
        for deep in ('{"decoding": ' + '{"a": ' * 900 + "1" + "}" * 900 + "}\n", "[" * 100_000 + "\n"):
            path.write_text(deep)
            assert isinstance(answer_problems(small), list)
        path.write_bytes(kept)

"""`eval_summary.json`, and the sides of a comparison read back from folders."""

import json
from pathlib import Path

import pytest

from tests.tables import parametrize
from tunix_rt.errors import InputError, TunixError
from tunix_rt.evaluate.comparison import compare, compare_runs
from tunix_rt.evaluate.generate import read_both, read_side
from tunix_rt.evaluate.report import SUMMARY_SCHEMA, comparison_facts, summary_of
from tunix_rt.runs.folder import RunDir
from tunix_rt.scoring.score import judge, score_predictions
from tunix_rt.storage import write_json, write_jsonl

RIGHT, WRONG = (f"<reasoning>so</reasoning><answer>{answer}</answer>" for answer in (4, 5))


def answers(*outputs: str):
    return [
        judge(id=f"q-{number}", prompt=f"question {number}", expected="4", output=output, ended="stop")
        for number, output in enumerate(outputs)
    ]


BEFORE, AFTER = answers(WRONG, RIGHT, ""), answers(RIGHT, WRONG, RIGHT)


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a run leaves: answers of both sides, and how they were asked for."""
    run = RunDir(tmp_path / "mine")
    write_jsonl(run.predictions("before"), BEFORE)
    write_jsonl(run.predictions("after"), AFTER)
    write_json(run.eval_summary, {"decoding": {"max_new_tokens": 32}})
    return run.root


def test_a_summary_of_one_side_has_its_scores_under_its_name_and_the_facts_beside_them():
    scores = score_predictions(BEFORE, when="answers")
    said = summary_of(scores, models=["a"], dtype="float32")
    assert set(said) == {"schema", "models", "dtype", "answers"}
    assert said["schema"] == SUMMARY_SCHEMA and said["answers"]["correct"] == 1 and said["answers"]["items"] == 3
    assert json.loads(json.dumps(said, allow_nan=False)) == said


def test_a_summary_of_both_sides_says_what_became_of_the_answers():
    comparison = compare(BEFORE, AFTER)
    scores = [score_predictions(found, when=when) for found, when in ((BEFORE, "before"), (AFTER, "after"))]
    said = summary_of(*scores, comparison)
    assert said["before"]["correct"] == 1 and said["after"]["correct"] == 2
    changed = said["comparison"]
    assert changed["gained"] == ["q-0", "q-2"] and changed["lost"] == ["q-1"] and changed["items"] == 3
    assert changed["gain_points"] == pytest.approx(100 / 3)
    assert (changed["mcnemar"]["gained"], changed["mcnemar"]["lost"]) == (2, 1)
    assert changed["interval"]["low"] <= 1 / 3 <= changed["interval"]["high"]
    assert changed["sentence"] == comparison.describe()
    assert json.loads(json.dumps(said, allow_nan=False)) == said


def test_a_summary_says_what_became_of_the_answers_by_both_readings():
    before, after = answers(WRONG, RIGHT, "", "so 4"), answers(RIGHT, "so 4", "it is 4", "5")
    comparison = compare(before, after)
    facts = comparison_facts(comparison)
    assert (facts["strict"]["gained"], facts["strict"]["lost"], facts["strict"]["net"]) == (["q-0"], ["q-1"], 0)
    assert (facts["lenient"]["gained"], facts["lenient"]["lost"], facts["lenient"]["net"]) == (
        ["q-0", "q-2"],
        ["q-3"],
        1,
    )
    for name, change in (("strict", comparison.strict), ("lenient", comparison.lenient)):
        assert (
            set(facts[name]) == {"items", "gained", "lost", "net", "interval", "mcnemar"} and facts[name]["items"] == 4
        )
        assert facts[name]["interval"]["high"] == change.interval.high
        assert facts[name]["interval"]["method"] == "bootstrap and score"
        assert facts[name]["mcnemar"]["p_value"] == change.mcnemar.p_value
        assert facts[name]["mcnemar"]["gained"] == len(facts[name]["gained"])
    assert facts["gained"] == facts["strict"]["gained"] and facts["interval"] == facts["strict"]["interval"]
    assert (
        json.loads(json.dumps(facts))
        == facts
        == summary_of(score_predictions(before, "before"), score_predictions(after, "after"), comparison)["comparison"]
    )


def test_a_run_is_compared_with_itself_before_training_in_plain_words(folder):
    before, after = read_both(folder)
    assert (list(before.predictions), list(after.predictions)) == (BEFORE, AFTER)
    assert compare_runs(before, after) == compare(BEFORE, AFTER)
    assert compare_runs(before, after).describe().startswith("1 of 3 more answers right")


@parametrize("summary", "names")
def test_an_evaluation_of_two_models_has_their_names(tmp_path, summary, names):
    run = RunDir(tmp_path / "both")
    write_jsonl(run.predictions("answers"), AFTER)
    write_jsonl(run.predictions("base"), BEFORE)
    write_json(run.eval_summary, {"decoding": {}, **summary})
    sides = read_both(run.root)
    assert [side.name for side in sides] == names and not any(side.is_moment for side in sides)
    assert compare_runs(*sides).describe().startswith(f"{names[1]} against {names[0]}: 1 of 3 more")


def test_a_run_gives_its_answers_after_training_under_its_own_name(folder):
    side = read_side(folder)
    assert side.name == "mine" and list(side.predictions) == AFTER and side.decoding == {"max_new_tokens": 32}


def test_a_run_gives_its_answers_before_training_too(folder):
    side, after = read_both(folder)
    assert after.name == "after" and list(after.predictions) == AFTER
    assert side.name == "before" and list(side.predictions) == BEFORE and side.decoding == {"max_new_tokens": 32}


def test_an_evaluation_gives_its_answers_and_those_of_the_model_it_was_compared_with(tmp_path):
    run = RunDir(tmp_path)
    write_jsonl(run.predictions("answers"), AFTER)
    write_jsonl(run.predictions("base"), BEFORE)
    assert list(read_side(tmp_path).predictions) == AFTER and list(read_both(tmp_path)[0].predictions) == BEFORE


def test_a_folder_from_before_settings_were_written_down_has_none(folder):
    RunDir(folder).eval_summary.unlink()
    assert read_side(folder).decoding == {}


def test_a_folder_without_answers_is_named_with_the_files_that_it_lacks(tmp_path):
    with pytest.raises(InputError, match=r"predictions-after\.jsonl or predictions-answers\.jsonl") as caught:
        read_side(tmp_path)
    assert str(tmp_path) in caught.value.problem and "--output" in caught.value.fix
    with pytest.raises(InputError, match=r"\(no predictions-before\.jsonl\)"):
        read_both(tmp_path)


def test_a_side_knows_its_model_and_how_it_was_computed(tmp_path, folder):
    assert (read_side(folder).model, read_side(folder).computed) == ("", {})
    run = RunDir(tmp_path / "both")
    write_jsonl(run.predictions("answers"), AFTER)
    write_jsonl(run.predictions("base"), BEFORE)
    facts = {"models": ["a-base", "a-tuned"], "dtype": "bfloat16", "device": "cuda", "rows": 4}
    write_json(run.eval_summary, {"decoding": {}, **facts})
    assert [side.model for side in (*read_both(run.root), read_side(run.root))] == ["a-base", "a-tuned", "a-tuned"]
    assert read_side(run.root).computed == {"dtype": "bfloat16", "device": "cuda"}
    write_json(RunDir(folder).eval_summary, {"decoding": {}, "models": ["a-base"], "dtype": None})
    assert (read_side(folder).model, read_side(folder).computed) == ("a-base", {})


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "{}", '{"decoding": 1}', '{"decoding": ["a"]}'])
def test_a_summary_that_is_damaged_is_refused_not_taken_for_an_empty_one(folder, content):
    RunDir(folder).eval_summary.write_text(content)
    with pytest.raises(TunixError, match="eval_summary"):
        read_side(folder)

"""Eval sets by name: what can be asked, a fixed part of it, and what the validator finds wrong with a file."""

import json
from pathlib import Path

import pytest

from tests.conftest import REFERENCE
from tests.tables import parametrize
from tunix_rt.errors import InputError
from tunix_rt.evaluate.evalsets import RULES, load_evalset, validate_evalset
from tunix_rt.scoring.score import matches_lenient, matches_strict

GSM8K = REFERENCE / "data" / "gsm8k" / "train.jsonl"


def item(number, **other):
    known = {"id": f"q{number}", "prompt": f"What is {number} + 1?", "answer": f"{number + 1}", "section": "core"}
    return {name: value for name, value in (known | other).items() if value is not None}


def trace(number, **other):
    known = {
        "prompt": f"What is {number} + 2?",
        "steps": [{"i": 0, "type": "compute", "content": f"{number} + 2 = {number + 2}"}],
        "final_answer": f"{number + 2}",
    }
    return known | other


def gsm8k(number, answer=None):
    total = f"{number} + 1 = <<{number}+1={number + 1}>>{number + 1}.\n#### {number + 1}"
    return {"question": f"Tom has {number} pens and buys one. How many?", "answer": answer or total}


def write(path: Path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_shipped_key_is_the_shipped_file():
    evalset = load_evalset("eval_v2")
    assert (evalset.rows, len(evalset.items), evalset.format, evalset.seed) == (100, 100, "items", None)
    assert evalset.items[0].id == "ev2-001"
    assert evalset.describe() == "eval_v2: all 100 questions"


def test_a_file_of_items_keeps_their_sections_and_kinds(tmp_path):
    path = write(
        tmp_path / "own.jsonl", item(1, section="easy", category="sums", difficulty="low"), item(2, section=None)
    )
    first, second = load_evalset(path).items
    assert (first.section, first.category, first.difficulty) == ("easy", "sums", "low")
    assert (second.section, second.category, second.difficulty) == ("all", "none", "none")


def test_a_dataset_key_asks_the_questions_of_its_traces():
    evalset = load_evalset("dev-reasoning-v2")
    assert evalset.format == "trace"
    first = evalset.items[0]
    assert (first.id, first.answer, first.section) == ("dr2-0001", "1 5 6 8", "dev-reasoning-v2")
    assert (first.category, first.template, first.difficulty) == ("digits", "sort_digits", "medium")


def test_traces_without_an_id_are_numbered_by_their_row(tmp_path):
    evalset = load_evalset(write(tmp_path / "mine.jsonl", trace(1), trace(2, id="own"), trace(3)))
    assert [found.id for found in evalset.items] == ["mine-00001", "own", "mine-00003"]
    assert [found.answer for found in evalset.items] == ["3", "4", "5"]
    assert {found.section for found in evalset.items} == {"mine"}


def test_gsm8k_is_read_as_published(tmp_path):
    path = write(tmp_path / "test.jsonl", gsm8k(4), gsm8k(9, "It is <<1000*1=1000>>1000.\n#### 1,000"))
    evalset = load_evalset(path)
    assert evalset.format == "gsm8k"
    assert [found.answer for found in evalset.items] == ["5", "1,000"]
    assert evalset.items[0].prompt == "Tom has 4 pens and buys one. How many?"


@parametrize("stated", "model_says", "right")
def test_the_answers_of_gsm8k_are_scored_in_every_spelling(tmp_path, stated, model_says, right):
    (found,) = load_evalset(write(tmp_path / "test.jsonl", gsm8k(4, f"So it is.\n#### {stated}"))).items
    assert found.answer == stated
    assert matches_strict(f"<reasoning>So.</reasoning><answer>{model_says}</answer>", found.answer) is right
    assert matches_lenient(f"So it is {model_says}.", found.answer) is right
    assert matches_lenient(f"So.\n#### {model_says}", found.answer) is right


@pytest.mark.parametrize("answer", ["So it is.\n#### ", "So it is.\n####", "#### \n"])
def test_a_record_of_gsm8k_with_a_blank_answer_has_no_answer(tmp_path, answer):
    path = write(tmp_path / "test.jsonl", gsm8k(4), gsm8k(5, answer))
    assert [(one.rule, one.count) for one in validate_evalset(path).findings] == [("no_answer", 1)]
    with pytest.raises(InputError, match="missing or blank"):
        load_evalset(path)


@pytest.mark.reference
@pytest.mark.skipif(not GSM8K.is_file(), reason="the published GSM8K is not beside the repository")
def test_the_published_gsm8k_is_7473_questions_with_answers_that_can_be_scored():
    evalset = load_evalset(str(GSM8K))
    assert evalset.rows == 7_473
    assert (evalset.items[0].answer, evalset.items[0].id) == ("72", "train-00001")
    assert validate_evalset(str(GSM8K)).good


def test_completions_with_an_answer_block_can_be_asked(tmp_path):
    said = "<reasoning>one more</reasoning><answer>8</answer>"
    (found,) = load_evalset(write(tmp_path / "p.jsonl", {"prompt": "7 + 1?", "completion": said})).items
    assert (found.prompt, found.answer) == ("7 + 1?", "8")


def test_a_dataset_folder_and_a_file_in_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "train.jsonl", trace(1), trace(2))
    write(tmp_path / "eval_v2", item(1))
    monkeypatch.chdir(tmp_path)
    assert load_evalset("mine").items[0].section == "mine"
    assert load_evalset("eval_v2").rows == 1, "a path is that file, also when a key has its name"


def test_a_limit_draws_a_fixed_part_and_says_so(tmp_path):
    path = write(tmp_path / "many.jsonl", *map(item, range(50)))
    part = load_evalset(path, limit=10, seed=3)
    assert part == load_evalset(path, limit=10, seed=3)
    assert part.items != load_evalset(path, limit=10, seed=4).items
    order = [int(found.id[1:]) for found in part.items]
    assert len(set(order)) == 10 and order == sorted(order)
    assert order != list(range(10)), "the first ten are no random part"
    assert part.describe() == f"{path}: 10 questions of 50, drawn at random with seed 3"
    assert part.sha256 == load_evalset(path).sha256


def test_a_limit_above_the_rows_asks_all_of_them(tmp_path):
    path = write(tmp_path / "few.jsonl", item(1), item(2))
    assert load_evalset(path, limit=5) == load_evalset(path)


def test_every_row_is_as_likely_to_be_drawn(tmp_path):
    path = write(tmp_path / "ten.jsonl", *map(item, range(10)))
    drawn = [found.id for seed in range(300) for found in load_evalset(path, limit=3, seed=seed).items]
    counts = [drawn.count(f"q{number}") for number in range(10)]
    assert all(60 <= count <= 120 for count in counts), counts  # 90 expected, a standard deviation of 8


# --- what is refused -------------------------------------------------------------------------------------------------


@parametrize("records", "line", "problem")
def test_a_record_that_cannot_be_asked_is_named_with_its_line(tmp_path, records, line, problem):
    path = write(tmp_path / "bad.jsonl", *records)
    with pytest.raises(InputError) as caught:
        load_evalset(path)
    assert caught.value.problem.startswith(f"{path}:{line}: ")
    assert problem in caught.value.problem


def test_an_empty_set_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no rows"):
        load_evalset(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match="has no rows"):
        validate_evalset(str(tmp_path / "empty.jsonl"))


def test_an_unknown_name_tells_the_eval_sets_and_the_datasets_there_are():
    with pytest.raises(InputError) as caught:
        load_evalset("no-such-set")
    assert "'no-such-set'" in caught.value.problem
    assert "eval_v2" in caught.value.fix and "dev-reasoning-v2" in caught.value.fix


def test_a_shipped_set_that_was_changed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "evalsets").mkdir()
    write(tmp_path / "evalsets" / "mine.jsonl", item(1))
    (tmp_path / "evalsets" / "mine.manifest.json").write_text(json.dumps({"sha256": "0" * 64}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="does not match its manifest"):
        load_evalset("mine")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_refused(limit):
    with pytest.raises(InputError, match="leaves none"):
        load_evalset("eval_v2", limit=limit)


# --- the validator ---------------------------------------------------------------------------------------------------


def found_in(path, **settings):
    return {finding.rule: finding for finding in validate_evalset(path, **settings).findings}


def test_the_shipped_set_is_good_and_its_kinds_are_counted():
    validation = validate_evalset("eval_v2", dataset="dev-reasoning-v2")
    assert validation.good
    assert validation.sections == {"core": 60, "trace": 25, "edge": 15}
    assert sum(validation.categories.values()) == validation.items == 100
    assert validation.difficulties["hard"] == 10


def test_a_clean_file_has_no_findings(tmp_path):
    validation = validate_evalset(write(tmp_path / "clean.jsonl", item(1), item(7), item(20, answer="twenty one")))
    assert validation.findings == () and validation.good and validation.items == 3


@parametrize("rule", "records", "line")
def test_every_rule_finds_its_case_and_names_the_line(tmp_path, rule, records, line):
    path = write(tmp_path / "set.jsonl", *records)
    found = found_in(path)
    assert list(found) == [rule]
    assert (found[rule].count, found[rule].first, found[rule].refuses) == (1, f"{path}:{line}", RULES[rule][0])
    assert found[rule].places == (f"{path}:{line}",)
    word = "error" if RULES[rule][0] else "warning"
    assert found[rule].describe().startswith(f"{word}: {rule}: 1 x ")
    assert validate_evalset(path).good is not RULES[rule][0]


@parametrize("prompt", "answer")
def test_part_of_a_number_or_word_and_what_is_short_is_no_answer_in_the_prompt(tmp_path, prompt, answer):
    assert "answer_in_prompt" not in found_in(write(tmp_path / "set.jsonl", item(1, prompt=prompt, answer=answer)))


def test_questions_that_differ_in_a_sign_are_two_questions(tmp_path):
    path = write(tmp_path / "s.jsonl", item(1, prompt="What is 9 + 4?", answer="13"), item(2, prompt="What is 9 - 4?"))
    assert found_in(path) == {}


def test_all_that_is_wrong_is_found_in_one_go_errors_first(tmp_path):
    path = write(
        tmp_path / "bad.jsonl", item(1, prompt="Is it 200?", answer="200"), item(2, answer=""), item(3, prompt=None),
        item(4, id="q1"), item(5, answer=None),
    )  # fmt: skip
    found = found_in(path)
    assert list(found) == ["unreadable", "no_answer", "duplicate_id", "answer_in_prompt"]
    assert (found["no_answer"].count, found["no_answer"].places) == (2, (f"{path}:2", f"{path}:5"))


def test_a_training_set_that_holds_the_questions_is_found(tmp_path):
    long = "Tom walks to the market and buys seven red apples and nine green pears for his aunt Maria today"
    path = write(
        tmp_path / "set.jsonl", item(1, prompt="What is 1 + 2?", answer="3"), item(2, prompt=f"{long}. How many?")
    )
    training = write(
        tmp_path / "train.jsonl",
        trace(5),
        trace(1),
        trace(6, prompt="what is 1 +  2"),
        trace(7, prompt=f"Read: {long}!"),
    )
    found = found_in(path, dataset=training)
    assert {rule: finding.first for rule, finding in found.items()} == {
        "overlap_exact": f"{training}:2",
        "overlap_normalised": f"{training}:3",
        "overlap_ngram": f"{training}:4",
    }
    assert all(finding.refuses for finding in found.values())
    assert f"{path}:2 shares " in found["overlap_ngram"].seen
    assert found_in(path, dataset=write(tmp_path / "other.jsonl", trace(50))) == {}

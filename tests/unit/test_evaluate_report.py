"""Before against after: pairing, the table, and samples that no output can break out of."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.tables import parametrize, tables
from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.evaluate.comparison import Side, compare, compare_runs
from tunix_rt.evaluate.generate import read_predictions, read_scores
from tunix_rt.evaluate.report import (
    Row,
    comparison_markdown,
    computing_remarks,
    headings,
    paragraph,
    remarks,
    samples_markdown,
    table,
)
from tunix_rt.scoring.score import judge, score_predictions
from tunix_rt.storage import write_json, write_jsonl

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "did-it-help.md"

RIGHT = "<reasoning>add</reasoning><answer>37</answer>"
WRONG = "<reasoning>add</reasoning><answer>38</answer>"
BARE = "it is 37"


def answers(outputs, section="core"):
    return [
        judge(id=f"q{number}", prompt=f"Question {number}?", expected="37", output=output, section=section)
        for number, output in enumerate(outputs)
    ]


def test_questions_are_gained_or_lost_in_eval_set_order():
    before = answers([WRONG, RIGHT, RIGHT, WRONG, BARE])
    after = answers([RIGHT, WRONG, RIGHT, BARE, RIGHT])
    comparison = compare(before, after)
    assert comparison.gained == ("q0", "q4")
    assert comparison.lost == ("q1",)
    assert comparison.items == 5
    assert comparison.gain_points == pytest.approx(20.0)  # 2 of 5 right before, 3 after
    assert comparison.gain_points_lenient == pytest.approx(20.0)  # 3 before, 4 after


def test_the_two_gains_differ_when_only_the_format_was_learned():
    comparison = compare(answers([BARE] * 4), answers([RIGHT] * 4))
    assert (comparison.gain_points, comparison.gain_points_lenient) == (100.0, 0.0)


def sides(gained, lost, right, wrong):
    before = [WRONG] * gained + [RIGHT] * lost + [RIGHT] * right + [WRONG] * wrong
    after = [RIGHT] * gained + [WRONG] * lost + [RIGHT] * right + [WRONG] * wrong
    return answers(before), answers(after)


SENTENCES = tables(__file__)["sentences"]


def test_the_sentence_is_one_a_manager_can_read():
    described = [(counts, compare(*sides(*counts)).describe()) for counts, _ in SENTENCES]
    assert described == [(counts, f"{sentence} (lenient: the same)") for counts, sentence in SENTENCES]


def test_no_sentence_claims_a_difference_that_chance_explains():
    for gained, lost in product(range(0, 25, 4), range(0, 25, 6)):
        comparison = compare(*sides(gained, lost, 40, 60 - gained - lost))
        low, high = comparison.strict.ends
        beyond_chance = not low <= 0 <= high and comparison.strict.mcnemar.p_value < 0.05
        sentence = comparison.describe()
        claimed = "could" not in sentence and "any change probably lies" not in sentence
        assert claimed is beyond_chance and low <= gained - lost <= high, (gained, lost)


def test_the_lenient_reading_stands_beside_the_strict_one():
    before, after = answers([BARE] * 40 + [WRONG] * 60), answers([RIGHT] * 70 + [WRONG] * 30)
    assert compare(before, after).describe() == (
        "70 of 100 more answers right, between 60 and 79; none got worse (lenient: 30 more, between 21 and 40)"
    )


def test_where_one_reading_has_other_losses_the_sentence_has_both():
    before, after = answers([WRONG] * 40 + [BARE] * 3 + [WRONG] * 57), answers([RIGHT] * 40 + [WRONG] * 60)
    assert compare(before, after).describe() == (
        "40 of 100 more answers right, between 30 and 50; none got worse (lenient: 37 more, between 26 and 48; 3 got worse)"
    )


@parametrize("before", "right_before", "after", "right_after", "words")
def test_where_the_readings_disagree_the_disagreement_comes_first(before, right_before, after, right_after, words):
    outputs = {"bare": BARE, "right": RIGHT}
    sides = (
        answers([outputs[kind]] * right + [WRONG] * (100 - right))
        for kind, right in ((before, right_before), (after, right_after))
    )
    assert compare(*sides).describe().endswith(f"; {words}")


def test_a_gain_by_both_readings_is_not_called_one_of_format():
    assert "format" not in compare(*sides(40, 2, 20, 38)).describe()


def test_the_paragraph_has_the_method():
    assert paragraph(compare(*sides(40, 2, 20, 38))).endswith(
        "Strict: 40 gained and 2 lost, McNemar's exact test p < 0.0001; the 95 % interval is the union of two: the "
        "paired bootstrap over the questions and Tango's score interval."
    )
    form = paragraph(compare(answers([BARE] * 10), answers([RIGHT] * 10)))
    assert "McNemar's exact test p = 0.002 (lenient p = 1); the 95 % interval is the union of two: Wilson and" in form


def test_an_evaluation_that_is_compared_with_itself_is_noticed():
    before, after = sides(1, 0, 20, 79)
    noticed = "All outputs are identical on both sides: one evaluation was compared with itself"
    assert noticed in paragraph(compare(before, before)) and noticed not in paragraph(compare(before, after))
    assert not compare(answers([WRONG, RIGHT]), answers([BARE + "x", RIGHT])).same_outputs


def test_answers_that_changed_leniently_alone_are_listed_and_shown():
    before, after = answers([WRONG, BARE, WRONG, RIGHT]), answers([BARE, WRONG, WRONG, RIGHT])
    comparison = compare(before, after)
    assert (comparison.gained_lenient, comparison.lost_lenient) == (("q0",), ("q1",))
    rows = table(score_predictions(before, "before"), score_predictions(after, "after"))
    listed = ["Gained: 0 of 4", "Lost: 0 of 4", "Gained, lenient: 1 of 4", "Lost, lenient: 1 of 4"]
    assert re.findall(r"^## (.*)$", comparison_markdown(comparison, rows), re.MULTILINE) == listed
    text = samples_markdown(before, after, comparison)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [*listed, "Unchanged: 2 of 4"]
    assert re.findall(r"^### ` (q\d) `$", text, re.MULTILINE) == ["q0", "q1", "q2", "q3"]
    assert [name for name, _ in compare(*sides(1, 0, 2, 0)).changes] == ["gained", "lost"]


# --- run against run -------------------------------------------------------------------------------------------------


def test_two_runs_are_compared_under_their_names():
    before, after = sides(40, 2, 20, 38)
    decoding = {"max_new_tokens": 128, "do_sample": False}
    comparison = compare_runs(
        Side(name="base", predictions=before, decoding=decoding),
        Side(name="tuned", predictions=after, decoding=dict(decoding)),
    )
    assert comparison.describe().startswith("tuned against base: 38 of 100 more answers right, between 27 and 49")
    assert replace(comparison, names=("before", "after"), of_one_training=True) == compare(before, after)
    level = compare_runs(Side(name="base", predictions=before), Side(name="tuned", predictions=before))
    assert level.describe().startswith("tuned against base: as many answers right as base, 22 of 100")


def test_folders_named_before_and_after_are_not_taken_for_one_training():
    before, after = sides(40, 2, 20, 38)
    comparison = compare_runs(Side(name="before", predictions=before), Side(name="after", predictions=after))
    assert comparison.describe().startswith("after against before: 38 of 100 more")
    text = samples_markdown(before, after, comparison)
    assert text.startswith("# Samples of before and after\n") and "before (wrong):" in text
    assert compare(before, after).describe().startswith("38 of 100 more")


def test_other_decoding_is_refused_and_every_setting_that_differs_is_named():
    before, after = sides(1, 0, 0, 0)
    with pytest.raises(EvidenceError) as caught:
        compare_runs(
            Side(name="base", predictions=before, decoding={"max_new_tokens": 64, "do_sample": False, "top_p": 0.9}),
            Side(name="tuned", predictions=after, decoding={"max_new_tokens": 256, "do_sample": False}),
        )
    assert caught.value.problem == (
        "base and tuned were decoded differently: max_new_tokens is 64 in base, 256 in tuned; "
        "top_p is 0.9 in base, not set in tuned"
    )


HASHES = {"gemma": "9f" * 32, "smollm": "03" * 32}


def test_other_tokenizers_are_named_with_models_short_hashes_and_a_way_out():
    before, after = sides(1, 0, 0, 0)
    first, second = (
        Side(name=name, predictions=found, decoding={"max_new_tokens": 64, "tokenizer": HASHES[model]}, model=model)
        for name, found, model in (("run-1", before, "gemma"), ("smollm", after, "smollm"))
    )
    with pytest.raises(EvidenceError) as caught:
        compare_runs(first, second)
    assert caught.value.problem == (
        "run-1 and smollm were decoded differently: the tokenizers differ: 9f9f9f9f9f9f in run-1 (the model gemma), "
        "030303030303 in smollm"
    )
    assert caught.value.fix.startswith("compare models of one family, a base model and what was trained from it")
    assert "same settings" not in caught.value.fix
    with pytest.raises(EvidenceError) as caught:
        compare_runs(first, replace(second, decoding={"max_new_tokens": 32, "tokenizer": HASHES["smollm"]}))
    assert "max_new_tokens is 64 in run-1, 32 in smollm; the tokenizers" in caught.value.problem
    assert caught.value.fix.startswith(
        "evaluate both with the same settings (--max-new-tokens 32); compare models of one family"
    )


def test_prompts_that_were_rendered_differently_are_refused_in_words():
    before, after = sides(1, 0, 0, 0)
    first, second = (
        Side(name=name, predictions=found, decoding={"style": HASHES[name]})
        for name, found in (("gemma", before), ("smollm", after))
    )
    with pytest.raises(EvidenceError, match=r"the prompts differ .*: 9f9f9f9f9f9f in gemma, 0303") as caught:
        compare_runs(first, second)
    assert max(map(len, re.findall("[0-9a-f]{9,}", caught.value.problem))) == 12
    assert "data.chat_template" in caught.value.fix


def test_answers_that_were_not_computed_alike_are_remarked_on():
    first, second = (
        Side(name=name, predictions=[], computed={"dtype": dtype, "device": device})
        for name, dtype, device in (("base", "float32", "cpu"), ("tuned", "bfloat16", "cuda"))
    )
    assert computing_remarks(first, second) == [
        "computed differently: dtype is float32 in base, bfloat16 in tuned; device is cpu in base, cuda in tuned. That alone "
        "may decide a near tie"
    ]
    (remark,) = computing_remarks(first, replace(second, computed={"dtype": "float32", "device": "cuda"}))
    assert "device is cpu in base, cuda in tuned" in remark and "dtype" not in remark
    assert computing_remarks(first, first) == computing_remarks(first, Side(name="old", predictions=[])) == []


def test_other_questions_are_refused_under_the_names_of_the_runs():
    with pytest.raises(EvidenceError, match="base and tuned have different questions: 1 id"):
        compare_runs(
            Side(name="base", predictions=answers([RIGHT])), Side(name="tuned", predictions=answers([RIGHT] * 2))
        )


def test_the_page_of_a_comparison_has_the_paragraph_the_table_and_every_id_that_changed():
    before, after = sides(7, 2, 3, 8)
    comparison = compare_runs(Side(name="a_b|c", predictions=before), Side(name="<tuned>", predictions=after))
    rows = table(score_predictions(before, "before"), score_predictions(after, "after"))
    text = comparison_markdown(comparison, rows)
    assert text.startswith("# \\<tuned\\> against a\\_b\\|c\n\n\\<tuned\\> against a\\_b\\|c: 5 of 20 more")
    assert (
        "| measure | out of | a\\_b\\|c | \\<tuned\\> | gain, points |\n| --- | ---: | ---: | ---: | ---: |\n" in text
    )
    assert "| accuracy, strict | 20 | 25.0 % | 50.0 % | +25.0 |" in text
    assert "## Gained: 7 of 20\n\n` q0 `, ` q1 `, ` q2 `, ` q3 `, ` q4 `, ` q5 `, ` q6 `\n\n" in text
    assert text.endswith("## Lost: 2 of 20\n\n` q7 `, ` q8 `\n")
    assert "## Lost: 0 of 20\n\nNone.\n" in comparison_markdown(compare(before, before), rows)


def test_the_cells_of_the_table_are_shown_with_their_units():
    rows = [
        Row(measure="accuracy", items=1319, before=0.25, after=0.5, gain_points=25.0),
        Row(measure="words", items=1319, before=9.0, after=41.25, unit="words"),
        Row(measure="equations right", items=5, before=0.2, after=0.2, gain_points=-0.0, items_after=7),
        Row(measure="well-formed", items=1319, before=0.0),
    ]
    assert [row.cells for row in rows] == [
        ("accuracy", "1,319", "25.0 %", "50.0 %", "+25.0"),
        ("words", "1,319", "9.0", "41.2", "+32.2 words"),
        ("equations right", "5 and 7", "20.0 %", "20.0 %", "+0.0"),
        ("well-formed", "1,319", "0.0 %", "", ""),
    ]


LONG = ("runs/gemma3-270m-lora-seed-00001", "runs/gemma3-270m-lora-seed-00002")


def test_long_names_stand_under_the_table():
    assert headings(LONG) == (
        ["measure", "out of", "A", "B", "gain, points"],
        [f"A: {LONG[0]}", f"B: {LONG[1]}"],
    )
    assert headings(("tiny-gemma3", "after")) == (["measure", "out of", "tiny-gemma3", "after", "gain, points"], [])


@pytest.mark.parametrize(
    "names", [LONG, ("tiny-gemma3", "tiny-gemma4")], ids=["long names", "the longest that are shown"]
)
def test_the_table_of_the_shipped_eval_set_has_one_line_a_row_in_a_terminal_of_80_columns(names, monkeypatch, capsys):
    from rich.console import Console

    from tunix_rt.cli.views import text
    from tunix_rt.evaluate.evalsets import load_evalset

    outputs = ("so", "<reasoning>3 + 4 = 7</reasoning><answer>{answer}</answer>")
    scores = [
        score_predictions(
            [
                judge(
                    id=item.id, prompt=item.prompt, expected=item.answer, output=outputs[number % 3 == side].format(
                        answer=item.answer
                    ),
                    section=item.section, category=item.category, difficulty=item.difficulty or "none", ended="stop",
                )
                for number, item in enumerate(load_evalset("eval_v2").items)
            ],
            str(side),
        )
        for side in (0, 1)
    ]  # fmt: skip
    rows = table(*scores)
    assert sum(row.measure.startswith("category ") for row in rows) == 17
    monkeypatch.setattr(text, "_console", lambda: Console(markup=False, emoji=False, highlight=False, width=80))
    text.show_before_after(rows, names)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for row in rows:
        assert any(line.split("  ")[0].strip() == row.measure for line in lines), row.measure
    assert (f"A: {LONG[0]}" in lines) is (names == LONG)
    assert lines[-1] == "Sections, categories, difficulties: strict, unless named lenient."


def test_what_to_know_before_believing_the_table_is_in_the_remarks():
    ended = ["length"] * 9 + ["context"] + ["time"] * 2 + ["stop"] * 1_000
    scores = [score_predictions(sums(["7"] * len(some), some), "x") for some in (ended, ["stop", "tag"], ["length"])]
    assert remarks(scores[0], weights=["random"]) == [
        "9 of 1,012 answers were cut at the most tokens allowed (raise --max-new-tokens); 2 of 1,012 answers were cut at "
        "the time limit (raise --max-seconds); 1 of 1,012 answers were cut, or never begun, because the model's context "
        "was full; the weights are random: these figures do not describe a trained model"
    ]
    assert remarks(scores[1], scores[2], tokens_setting="evaluation.max_new_tokens") == [
        "after: 1 of 1 answer was cut at the most tokens allowed (raise evaluation.max_new_tokens)"
    ]
    assert remarks(scores[1], scores[1], names=("base", "tuned"), weights=("random", "pretrained")) == [
        "base: the weights are random: these figures do not describe a trained model"
    ]
    assert remarks(scores[1]) == []


def test_samples_of_two_runs_go_by_their_names():
    before, after = sides(1, 0, 0, 0)
    comparison = compare_runs(Side(name="base", predictions=before), Side(name="tuned", predictions=after))
    text = samples_markdown(before, after, comparison)
    assert text.startswith("# Samples of base and tuned\n\ntuned against base: 1 of 1 more")
    assert "base (wrong):" in text and "tuned (right):" in text


# --- pairing ---------------------------------------------------------------------------------------------------------


def test_pairing_goes_by_id_and_not_by_order():
    before, after = answers([WRONG, RIGHT, WRONG]), answers([RIGHT, RIGHT, WRONG])
    assert compare(before, after[::-1]) == compare(before, after)


@pytest.mark.parametrize(
    "after",
    [
        answers([RIGHT]),
        answers([RIGHT, RIGHT, RIGHT]),
        [answers([RIGHT])[0], replace(answers([RIGHT, RIGHT])[1], id="other")],
        [answers([RIGHT])[0], replace(answers([RIGHT, RIGHT])[1], prompt="An easier question?")],
        [answers([RIGHT])[0], replace(answers([RIGHT, RIGHT])[1], expected="38")],
    ],
    ids=["fewer", "more", "another id", "another prompt", "another expected answer"],
)
def test_other_questions_after_than_before_are_refused(after):
    with pytest.raises(EvidenceError, match=r"different questions: .*'|'q1' has another prompt or expected answer"):
        compare(answers([WRONG, WRONG]), after)


def test_nothing_to_compare_is_refused():
    with pytest.raises(InputError):
        compare([], [])


def test_the_table_has_both_accuracies_the_format_and_every_section():
    edge = replace(answers([RIGHT])[0], id="e", section="edge")
    before = score_predictions([*answers([WRONG, BARE]), edge], "before")
    after = score_predictions([*answers([RIGHT, RIGHT]), edge], "after")
    rows = [(row.measure, row.items, row.before, row.after, row.gain_points) for row in table(before, after)]
    third = pytest.approx(1 / 3)
    assert rows == [
        ("accuracy, strict", 3, third, 1.0, pytest.approx(200 / 3)),
        ("accuracy, lenient", 3, pytest.approx(2 / 3), 1.0, pytest.approx(100 / 3)),
        ("well-formed", 3, pytest.approx(2 / 3), 1.0, pytest.approx(100 / 3)),
        ("words before the answer", 3, pytest.approx(5 / 3), 1.0, None),
        ("equations per answer", 3, 0.0, 0.0, None),
        ("section core", 2, 0.0, 1.0, 100.0),
        ("section core, lenient", 2, 0.5, 1.0, 50.0),
        ("section edge", 1, 1.0, 1.0, 0.0),
        ("section edge, lenient", 1, 1.0, 1.0, 0.0),
    ]


def test_the_table_of_an_unfinished_run_has_no_after():
    rows = table(score_predictions(answers([WRONG, RIGHT]), "before"))
    assert [row.before for row in rows] == [0.5, 0.5, 1.0, 1.0, 0.0], (
        "one section adds no rows: they would repeat these"
    )
    assert all(row.after is None and row.gain_points is None for row in rows)


def sums(outputs, ended):
    return [
        judge(
            id=f"q{number}",
            prompt="?",
            expected="7",
            output=f"<reasoning>{text}</reasoning><answer>7</answer>",
            ended=end,
        )
        for number, (text, end) in enumerate(zip(outputs, ended, strict=True))
    ]


def test_the_table_has_length_arithmetic_and_how_outputs_ended():
    before = score_predictions(sums(["3 + 4 = 7", "3 + 4 = 8", "seven"], ["stop", "length", "tag"]), "before")
    after = score_predictions(sums(["3 + 4 = 7, 1 + 1 = 2", "3 + 4 = 7", "7"], ["stop", "stop", "unknown"]), "after")
    cells = {row.measure: row.cells[1:] for row in table(before, after)}
    assert cells["words before the answer"] == ("3", "3.7", "5.3", "+1.7 words")
    assert cells["equations per answer"] == ("3", "0.7", "1.0", "+0.3 eq.")
    assert cells["equations right"] == ("2 and 3", "50.0 %", "100.0 %", "+50.0"), (
        "out of the equations, not the questions"
    )
    assert cells["ended by itself"] == ("3 and 2", "66.7 %", "100.0 %", "+33.3"), "of those of which it is known"
    alone = {row.measure: row.cells for row in table(before)}
    assert alone["equations right"] == ("equations right", "2", "50.0 %", "", "")


def test_what_one_side_did_not_count_has_no_row():
    counted = score_predictions(sums(["3 + 4 = 7"], ["stop"]), "after")
    none_stated = score_predictions(sums(["seven"], ["unknown"]), "before")
    assert [row.measure for row in table(none_stated, counted)][3:] == [
        "words before the answer", "equations per answer",
    ]  # fmt: skip

    earlier = replace(counted, ended={}, by_category={}, by_difficulty={}, mean_reasoning_words=0.0, equations=0)
    assert [row.measure for row in table(earlier, counted)][3:] == []


def test_the_table_has_every_category_and_difficulty_where_there_are_several():
    def side(outputs):
        kinds = [("sums", "easy"), ("sums", "hard"), ("letters", "hard")]
        return [
            judge(id=str(number), prompt="?", expected="37", output=output, category=category, difficulty=difficulty)
            for number, (output, (category, difficulty)) in enumerate(zip(outputs, kinds, strict=True))
        ]

    rows = table(
        score_predictions(side([WRONG, WRONG, RIGHT]), "before"),
        score_predictions(side([RIGHT, WRONG, RIGHT]), "after"),
    )
    assert [row.cells for row in rows[5:]] == [
        ("category letters", "1", "100.0 %", "100.0 %", "+0.0"),
        ("category sums", "2", "0.0 %", "50.0 %", "+50.0"),
        ("difficulty easy", "1", "0.0 %", "100.0 %", "+100.0"),
        ("difficulty hard", "2", "50.0 %", "50.0 %", "+0.0"),
    ]


def test_other_sections_after_than_before_are_refused():
    before, after = (
        score_predictions(answers([RIGHT], section), when) for section, when in (("a", "old"), ("b", "new"))
    )
    with pytest.raises(EvidenceError, match="old and new differ in section"):
        table(before, after)


def test_an_accuracy_of_zero_after_training_is_shown_as_a_loss():
    row = table(score_predictions(answers([RIGHT]), "before"), score_predictions(answers([""]), "after"))[0]
    assert (row.after, row.gain_points) == (0.0, -100.0)


def test_samples_show_three_of_each_kind_and_say_how_many_there_are():
    before = answers([WRONG] * 5 + [RIGHT] + [RIGHT, WRONG])
    after = answers([RIGHT] * 5 + [WRONG] + [RIGHT, WRONG])
    comparison = compare(before, after)
    text = samples_markdown(before, after, comparison)
    assert text.startswith(f"# Samples before and after training\n\n{paragraph(comparison)}\n\n## Gained")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Gained: 5 of 8", "Lost: 1 of 8", "Unchanged: 2 of 8"]
    assert re.findall(r"^### ` (q\d) `$", text, re.MULTILINE) == ["q0", "q1", "q2", "q5", "q6", "q7"]
    assert text.count("After (right):") == 4  # three gained, one unchanged
    assert "Before (wrong):" in text and "Question 5?" in text and RIGHT in text


def test_a_kind_without_samples_says_none():
    before = answers([RIGHT])
    assert "## Lost: 0 of 1\n\nNone.\n" in samples_markdown(before, before, compare(before, before))


@pytest.mark.parametrize(
    "output", ["```\n# Fake heading\n```", "````` five", "~~~\nx", "`", "```text\n", "a\n````\n# b"]
)
def test_no_output_can_close_its_fence(output):
    before, after = answers([output]), answers([RIGHT])
    inside, fence, body = [], None, []
    for line in samples_markdown(before, after, compare(before, after)).split("\n"):
        ticks = re.fullmatch(r"(`{3,})(text)?", line)
        if fence is None and ticks and ticks[2]:
            fence, body = ticks[1], []
        elif fence is not None and re.fullmatch(rf" {{0,3}}`{{{len(fence)},}}\s*", line):
            inside.append("\n".join(body))
            fence = None
        elif fence is not None:
            body.append(line)
    assert fence is None
    assert inside == ["Question 0?", output, RIGHT]


def test_an_empty_output_is_named_as_such():
    before, after = answers([""]), answers(["  \n"])
    text = samples_markdown(before, after, compare(before, after))
    assert "*nothing*" in text and "*nothing but white space*" in text


def test_predictions_and_scores_come_back_as_they_were_written(tmp_path):
    predictions = answers([RIGHT, "line\u2028separator \x85 and \r\n more", BARE])
    write_jsonl(tmp_path / "predictions.jsonl", predictions)
    assert read_predictions(tmp_path / "predictions.jsonl") == predictions
    scores = score_predictions(predictions, "after")
    write_json(tmp_path / "after.json", scores)
    assert read_scores(tmp_path / "after.json") == scores


def test_a_bad_line_of_predictions_is_named(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write_jsonl(path, answers([RIGHT, WRONG]))
    path.write_text(path.read_text().replace('"strict": false', '"strict": "no"'))
    with pytest.raises(InputError, match=r"predictions\.jsonl:2: strict"):
        read_predictions(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"when": "before"}', "\xff"])
def test_scores_that_are_no_scores_are_refused(tmp_path, text):
    path = tmp_path / "before.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"before\.json"):
        read_scores(path)


# --- the guide -------------------------------------------------------------------------------------------------------


def example_sides():
    """100 questions: 17 right on both sides, 24 gained, 6 lost. What is wrong is so in one of three ways."""

    def side(right, wrong):
        outputs = [
            f"<reasoning>{number} + 1 = {number + 1}, which is one more.</reasoning><answer>{number + 1}</answer>"
            if number in right
            else wrong[number % len(wrong)].format(number=number, right=number + 1)
            for number in range(100)
        ]
        return [
            judge(
                id=f"q{number}",
                prompt=f"What is {number} + 1?",
                expected=f"{number + 1}",
                output=output,
                ended="length" if output.endswith("then") else "stop",
            )
            for number, output in enumerate(outputs)
        ]

    off = "<reasoning>{number} + 1 = {number}</reasoning><answer>{number}</answer>"
    rambling = "Let us see. We take {number}, and {number}, and then"
    bare = "It is {right}"
    return side({*range(17), *range(41, 47)}, [off, rambling] * 10 + [bare]), side({*range(41)}, [off, off, rambling])


def test_the_guide_shows_what_the_functions_give():
    base, tuned = example_sides()
    comparison = compare_runs(Side(name="base", predictions=base), Side(name="tuned", predictions=tuned))
    rows = table(score_predictions(base, "base"), score_predictions(tuned, "tuned"))
    (written,) = re.findall(
        r"<!-- example:begin -->\n\n(.*?)\n\n<!-- example:end -->", GUIDE.read_text("utf-8"), re.DOTALL
    )
    drawn, _, sentence = written.removeprefix("```text\n").removesuffix("\n```").partition("\n\n")
    shown = [tuple(re.split("  +", line)) for line in drawn.split("\n")]
    assert shown == [tuple(headings(comparison.names)[0]), *(row.cells for row in rows)]
    assert sentence == comparison.describe()


def test_every_form_of_words_in_the_guide_occurs():
    described = {
        "between 7 and 29": compare(*example_sides()).describe(),
        "which could be chance": compare(*sides(8, 5, 40, 47)).describe(),
        "any change probably lies between": compare(*sides(3, 3, 50, 44)).describe(),
        "but it could still be chance": compare(*sides(5, 0, 50, 45)).describe(),
        "too few to exclude chance": compare(*sides(5, 0, 0, 0)).describe(),
        "the gain may be one of format alone": compare(answers([BARE] * 9), answers([RIGHT] * 9)).describe(),
        "the format was learned, and the answers got worse": compare(
            answers([BARE] * 60), answers([RIGHT] * 40 + [WRONG] * 20)
        ).describe(),
        "the answers got better, though the strict reading does not show it": compare(
            answers([WRONG] * 9), answers([BARE] * 9)
        ).describe(),
    }
    for words, sentence in described.items():
        assert words in sentence.lower()
        assert f"| {words} |" in GUIDE.read_text("utf-8")

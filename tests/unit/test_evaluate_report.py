"""Before against after: pairing, the table, and samples that no output can break out of."""

import re
from dataclasses import replace

import pytest

from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.evaluate.report import compare, read_predictions, read_scores, samples_markdown, table
from tunix_rt.evaluate.score import judge, score_predictions
from tunix_rt.rundir import write_json, write_jsonl

RIGHT = "<reasoning>add</reasoning><answer>37</answer>"
WRONG = "<reasoning>add</reasoning><answer>38</answer>"
BARE = "it is 37"


def answers(outputs, section="core"):
    return [
        judge(id=f"q{number}", prompt=f"Question {number}?", expected="37", output=output, section=section)
        for number, output in enumerate(outputs)
    ]


def test_every_question_is_gained_lost_right_or_wrong_exactly_once():
    before = answers([WRONG, RIGHT, RIGHT, WRONG, BARE])
    after = answers([RIGHT, WRONG, RIGHT, BARE, RIGHT])
    comparison = compare(before, after)
    assert comparison.gained == ("q0", "q4")
    assert comparison.lost == ("q1",)
    assert comparison.both_right == ("q2",)
    assert comparison.both_wrong == ("q3",)
    assert comparison.items == 5
    assert comparison.gain_points == pytest.approx(20.0)  # 2 of 5 right before, 3 after
    assert comparison.gain_points_lenient == pytest.approx(20.0)  # 3 before, 4 after


def test_the_two_gains_differ_when_only_the_format_was_learned():
    comparison = compare(answers([BARE] * 4), answers([RIGHT] * 4))
    assert (comparison.gain_points, comparison.gain_points_lenient) == (100.0, 0.0)


def test_the_sentence_tells_gains_and_losses():
    comparison = compare(answers([WRONG, WRONG, RIGHT]), answers([RIGHT, RIGHT, WRONG]))
    assert comparison.sentence.startswith("2 of 3 more answers right; 1 got worse")
    assert "+33.3 points by the tags" in comparison.sentence


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
    with pytest.raises(EvidenceError):
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
        ("accuracy, by the tags", 3, third, 1.0, pytest.approx(200 / 3)),
        ("accuracy, tags apart", 3, pytest.approx(2 / 3), 1.0, pytest.approx(100 / 3)),
        ("well-formed", 3, pytest.approx(2 / 3), 1.0, pytest.approx(100 / 3)),
        ("core, by the tags", 2, 0.0, 1.0, 100.0),
        ("core, tags apart", 2, 0.5, 1.0, 50.0),
        ("edge, by the tags", 1, 1.0, 1.0, 0.0),
        ("edge, tags apart", 1, 1.0, 1.0, 0.0),
    ]


def test_the_table_of_an_unfinished_run_has_no_after():
    rows = table(score_predictions(answers([WRONG, RIGHT]), "before"))
    assert [row.before for row in rows] == [0.5, 0.5, 1.0], (
        "one section adds no rows: they would repeat the first three"
    )
    assert all(row.after is None and row.gain_points is None for row in rows)


def test_an_accuracy_of_zero_after_training_is_shown_as_a_loss():
    row = table(score_predictions(answers([RIGHT]), "before"), score_predictions(answers([""]), "after"))[0]
    assert (row.after, row.gain_points) == (0.0, -100.0)


def test_samples_show_three_of_each_kind_and_say_how_many_there_are():
    before = answers([WRONG] * 5 + [RIGHT] + [RIGHT, WRONG])
    after = answers([RIGHT] * 5 + [WRONG] + [RIGHT, WRONG])
    text = samples_markdown(before, after, compare(before, after))
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

"""Blocks, reasoning and scores. Verdicts on outputs are in `answer_pairs.jsonl` (test_answers.py)."""

import pytest

from tests.tables import tables
from tunix_rt.errors import InputError
from tunix_rt.scoring import score
from tunix_rt.storage import to_plain


def tagged(answer: str, reasoning: str = "12 + 25 = 37") -> str:
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


def test_reading_a_well_formed_output_gives_both_blocks():
    answer = score.read_answer("\n<reasoning>\n12 + 25 = 37\n</reasoning>\n<answer> 37 </answer>\n")
    assert answer is not None
    assert (answer.reasoning, answer.answer) == ("12 + 25 = 37", "37")


MALFORMED = tables(__file__)["malformed"]


def test_anything_but_one_reasoning_and_one_answer_is_not_well_formed():
    assert [text for text in MALFORMED if score.is_well_formed(text)] == []


def test_other_tags_are_read_as_the_usual_ones_are():
    tags = score.Tags(reasoning="think", answer="final-answer")
    output = "<think>\n12 + 25 = 37\n</think>\n\n<final-answer>37</final-answer>"
    assert score.judge(id="a", prompt="?", expected="37", output=output, tags=tags).strict
    assert not score.is_well_formed(output) and not score.matches_strict(output, "37")
    usual = "<think>so</think><final-answer><answer>37</answer> of 40</final-answer>"
    assert (score.matches_lenient(usual, "37"), score.matches_lenient(usual, "37", tags)) == (True, False)
    assert score.matches_lenient(usual, "40", tags)
    assert score.is_well_formed("<think>a</think><final-answer>b</final-answer>", tags)
    assert not score.is_well_formed(tagged("37"), tags)


TAKEN = {  # text -> values that are the last one, values that are not
    "37 at first, and 1,638 in all": (["1,638"], ["37"]),
    "from 37 to 1,638 in all": ([], ["37", "1,638"]),
    "no number": ([], ["37"]),
    "We get d r i": (["d r i"], ["d r i b"]),
    "It is Monday.": (["Monday"], ["Tuesday"]),
}


def test_the_lenient_reading_takes_the_last_value_and_no_other():
    for text, values in TAKEN.items():
        taken = tuple([value for value in side if score.matches_lenient(text, value)] for side in values)
        assert taken == (values[0], []), text


def test_a_long_output_of_open_tags_is_judged_in_reasonable_time():
    output = "<answer>" * 60_000 + "37"  # a model stuck in a loop; quadratic search would take minutes
    assert not score.matches_strict(output, "37")
    assert score.matches_lenient(output, "37")


def predictions():
    return [
        score.judge(
            id="a", prompt="?", expected="37", output=tagged("37"), section="core", category="addition",
            difficulty="easy", ended="tag",
        ),
        score.judge(id="b", prompt="?", expected="5", output="it is 5", section="core", category="addition"),
        score.judge(
            id="c", prompt="?", expected="5", output=tagged("6"), section="core", category="addition", ended="length"
        ),
        score.judge(id="d", prompt="?", expected="5", output="", section="edge", category="zero"),
    ]  # fmt: skip


def test_scores_count_what_the_verdicts_say():
    nothing = {"items": 1, "correct": 0, "accuracy": 0.0, "accuracy_lenient": 0.0, "format_rate": 0.0}
    easy = {"items": 1, "correct": 1, "accuracy": 1.0, "accuracy_lenient": 1.0, "format_rate": 1.0}
    addition = {"items": 3, "correct": 1, "accuracy": 1 / 3, "accuracy_lenient": 2 / 3, "format_rate": 2 / 3}
    scores = to_plain(score.score_predictions(predictions(), "before"))
    length = len(tagged("37")) + len("it is 5") + len(tagged("6"))
    assert scores == {
        "schema": "tunix-rt/scores/2",
        "when": "before",
        "items": 4,
        "accuracy": 0.25,
        "accuracy_lenient": 0.5,
        "format_rate": 0.5,
        "correct": 1,
        "correct_lenient": 2,
        "well_formed": 2,
        "by_section": {
            "core": addition,
            "edge": nothing,
        },
        "mean_output_chars": length / 4,
        "by_category": {"addition": addition, "zero": nothing},
        "by_difficulty": {
            "easy": easy,
            "none": nothing | {"items": 3, "accuracy_lenient": 1 / 3, "format_rate": 1 / 3},
        },
        "ended": {"length": 1, "tag": 1, "unknown": 2},
        "mean_reasoning_words": (5 + 3 + 5 + 0) / 4,
        "equations": 2,
        "equations_right": 2,
    }


REASONINGS = {
    tagged("37"): "12 + 25 = 37", "<reasoning>a b</reasoning><reasoning>c d</reasoning><answer>1</answer>": "c d",
    "We add. <answer>37</answer>": "We add.", "We add.<b>So</b> <answer>37": "We add.\nSo",
    "<reasoning>cut of": "cut of", "it is 37": "it is 37", "": "",
}  # fmt: skip


def test_the_reasoning_is_the_block_or_everything_before_the_answer():
    assert {output: score.reasoning_of(output) for output in REASONINGS} == REASONINGS
    for output, reasoning in REASONINGS.items():
        assert score.judge(id="a", prompt="?", expected="1", output=output).reasoning_words == len(reasoning.split())


def test_equations_are_counted_in_the_reasoning_and_not_in_the_answer():
    item = score.judge(
        id="a", prompt="?", expected="37", output=tagged("1 + 1 = 3", reasoning="12 + 25 = 37, 37 - 5 = 31")
    )
    assert (item.equations, item.equations_right) == (2, 1)


@pytest.mark.parametrize("ended", ["length", "time", "context"])
def test_a_reasoning_that_was_cut_off_is_not_right_by_its_last_number(ended):
    def right(output, how=ended):
        return score.judge(id="a", prompt="?", expected="7", output=output, ended=how).lenient

    cut = "<reasoning>We have 3 + 4 = 7. Then we"
    assert not right(cut) and not right("We have 3 + 4 = 7") and not right("<reasoning>3 + 4 = 7</reasoning>")
    assert not right("<reasoning>Let me see whether the answer is 7. Then we")
    assert right(cut, "stop") and right(cut, "unknown")
    for begun in (
        "<answer>7",
        "<answer>7</answer> and so",
        "#### 7\nThen we",
        "The answer is 7. Then we",
        "\\boxed{7} and",
    ):
        assert right(f"<reasoning>We have 3 + 4 = 7.</reasoning>{begun}")


def test_an_empty_eval_set_is_refused():
    with pytest.raises(InputError, match="empty"):
        score.score_predictions([], "before")


def test_an_id_given_twice_is_refused_by_name():
    with pytest.raises(InputError, match="'a' occurs twice"):
        score.score_predictions([*predictions(), predictions()[0]], "before")

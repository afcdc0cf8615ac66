"""The scorer is the judge of every claim about learning: each row here was written and decided by hand."""

import pytest

from tunix_rt.errors import InputError
from tunix_rt.scoring.score import (
    Tags,
    is_well_formed,
    judge,
    matches_lenient,
    matches_strict,
    read_answer,
    reasoning_of,
    score_predictions,
)
from tunix_rt.storage import to_plain


def tagged(answer: str, reasoning: str = "12 + 25 = 37") -> str:
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


# (output, expected, right by the tags, right with the tags set apart)
JUDGED = [
    # numbers, well-formed
    (tagged("37"), "37", True, True),
    (tagged(" 37\n"), "37", True, True),
    (tagged("37."), "37", True, True),
    (tagged("37.0"), "37", True, True),
    (tagged("37.00"), "37", True, True),
    (tagged("+37"), "37", True, True),
    (tagged("**37**"), "37", True, True),
    (tagged("(37)"), "37", True, True),
    (tagged("$37"), "37", True, True),
    (tagged("$37.00"), "37", True, True),
    (tagged("37%"), "37", True, True),
    (tagged("37 %."), "37", True, True),
    (tagged("$37$"), "37", True, True),
    (tagged("037"), "37", True, True),
    (tagged("thirty-seven"), "37", True, True),
    (tagged("1,600"), "1600", True, True),
    (tagged("1600"), "1,600", True, True),
    (tagged("$1,234,567.50"), "1234567.5", True, True),
    (tagged("-5"), "-5", True, True),
    (tagged("\u22125"), "-5", True, True),
    (tagged("-$5"), "-5", True, True),
    (tagged("0"), "-0", True, True),
    (tagged(".5"), "0.5", True, True),
    (tagged("123456789012345678901"), "123456789012345678901", True, True),
    # numbers, well-formed and wrong
    (tagged("38"), "37", False, False),
    (tagged("-37"), "37", False, False),
    (tagged("5"), "-5", False, False),
    (tagged("3.7"), "37", False, False),
    (tagged(".5"), "5", False, False),
    (tagged("0.5"), "5", False, False),
    (tagged("1.600"), "1600", False, False),
    (tagged("160,0"), "1600", False, False),
    (tagged("370"), "37", False, False),
    (tagged("137"), "37", False, False),
    (tagged("37th1"), "371", False, False),
    (tagged("123456789012345678902"), "123456789012345678901", False, False),
    (tagged("v37"), "37", False, False),
    # the right value, not alone in its block: right only with the tags set apart, and only as the last value
    (tagged("37 apples"), "37", False, True),
    (tagged("So Rosa has 37 apples."), "37", False, True),
    (tagged("12 + 25 = 37"), "37", False, True),
    (tagged("37 or 38"), "37", False, False),
    (tagged("37, no, 38"), "37", False, False),
    (tagged("37-1"), "37", False, False),
    (tagged("40-37"), "-37", False, False),
    (tagged("37 1"), "371", False, False),
    # the block decides, not what stands around it
    (tagged("38", reasoning="It is 37."), "37", False, False),
    ("37 " + tagged("38"), "37", False, False),
    (tagged("38") + " 37", "37", False, False),
    (tagged("37") + " So 38.", "37", False, True),
    ("Sure! " + tagged("37"), "37", False, True),
    # two answers
    ("<reasoning>a</reasoning><answer>37</answer><answer>38</answer>", "37", False, False),
    ("<reasoning>a</reasoning><answer>38</answer><answer>37</answer>", "37", False, True),
    (tagged("37") + tagged("37"), "37", False, True),
    (tagged("37") + tagged("38"), "37", False, False),
    ("<reasoning>a</reasoning><answer>38<answer>37</answer></answer>", "37", False, True),
    # broken tags
    ("<reasoning>12 + 25 = 37</reasoning><answer>37", "37", False, True),
    ("<reasoning>12 + 25 = 37</reasoning><answer>", "37", False, True),
    ("<reasoning>37 - 12 = 25</reasoning><answer>", "37", False, False),
    ("<reasoning>12 + 25 = 37<answer>37</answer>", "37", False, True),
    ("12 + 25 = 37</reasoning><answer>37</answer>", "37", False, True),
    ("<answer>37</answer><reasoning>12 + 25</reasoning>", "37", False, True),
    ("<answer>12</answer><reasoning>is 37</reasoning>", "37", False, False),
    ("</answer>37<answer>", "37", False, True),
    ("<reasoning></reasoning><answer>37</answer>", "37", False, True),
    ("<reasoning>37</reasoning><answer></answer>", "37", False, False),
    ("<reasoning>37</reasoning><answer> \n </answer>", "37", False, False),
    ("<answer>37</answer>", "37", False, True),
    ("<Reasoning>a</Reasoning><Answer>37</Answer>", "37", False, True),
    ("<reasoning>a</reasoning><answer>37</answer", "37", False, True),
    ("<reasoning>a<answer>37</answer></reasoning>", "37", False, True),
    # no tags at all
    ("37", "37", False, True),
    ("The answer is 37.", "37", False, True),
    ("The answer is...37", "37", False, True),
    ("12 + 25 = 37 apples, I think", "37", False, True),
    ("37 apples minus 0 is 37 apples, in 2 baskets", "37", False, False),
    ("37 is where we start, so 38", "37", False, False),
    ("It costs $1,600.", "1600", False, True),
    ("5, 7, 37", "37", False, False),
    ("5, then 7, so 37", "37", False, True),
    ("It fell to -37.", "37", False, False),
    ("It fell to -37.", "-37", False, True),
    ("version 1.2.37", "37", False, False),
    ("<unused37>", "37", False, False),
    ('it is 36 <span id="37">', "37", False, False),
    ("It is 1,2345.", "1234", False, False),
    ("no number here", "37", False, False),
    ("", "37", False, False),
    # letters and digits in a row
    (tagged("d r i b"), "d r i b", True, True),
    (tagged("D R I B"), "d r i b", True, True),
    (tagged(" d  r\ti b. "), "d r i b", True, True),
    (tagged("d, r, i, b"), "d r i b", False, True),
    (tagged("drib"), "d r i b", False, False),
    (tagged("d r i"), "d r i b", False, False),
    (tagged("x d r i b"), "d r i b", False, False),
    (tagged("d r i b x"), "d r i b", False, False),
    (tagged("b i r d"), "d r i b", False, False),
    (tagged("5 7 8 9"), "5 7 8 9", True, True),
    (tagged("5789"), "5 7 8 9", False, False),
    (tagged("5 7 9 8"), "5 7 8 9", False, False),
    ("So the order is 5 7 8 9.", "5 7 8 9", False, True),
    ("The digits are 5 8 9 7. So 5 7 8 9", "5 7 8 9", False, True),
    ("5 7 8 9 sorted the other way is 9 8 7 5", "5 7 8 9", False, False),
    ("We get d r i b as a word", "d r i b", False, True),
    ("We get d r i b. No: d r i", "d r i b", False, False),
    ("The letter is c", "c", False, True),
    ("c comes before d", "c", False, False),
    # words
    (tagged("Tuesday"), "tuesday", True, True),
    (tagged("“Tuesday”!"), "Tuesday", True, True),
    (tagged("New   York"), "new york", True, True),
    (tagged("Mr. Smith"), "Mr. Smith", True, True),
    (tagged("cafe\u0301"), "caf\u00e9", True, True),
    (tagged("It is Tuesday."), "Tuesday", False, True),
    (tagged("Tuesday or Monday"), "Tuesday", False, False),
    (tagged("C"), "C++", False, False),
    (tagged("C++"), "c++", True, True),
    (tagged(">"), ">", True, True),
    (tagged("?"), "?", True, True),
    (tagged("!"), "?", False, False),
    ("The day is Tuesday.", "Tuesday", False, True),
    ("Tuesday is the day", "Tuesday", False, False),
    ("They live in New York", "New York", False, True),
    ("New York is where they live", "New York", False, False),
    # a question without an expected answer is never answered right
    (tagged("37"), "", False, False),
    ("", "", False, False),
    ("<answer></answer>", "", False, False),
]


@pytest.mark.parametrize(("output", "expected", "strict", "lenient"), JUDGED)
def test_every_output_is_judged_as_a_person_judged_it(output, expected, strict, lenient):
    assert (matches_strict(output, expected), matches_lenient(output, expected)) == (strict, lenient)


def test_no_pair_is_in_the_table_twice_and_both_verdicts_occur_often():
    assert len({(output, expected) for output, expected, *_ in JUDGED}) == len(JUDGED) >= 100
    assert min(sum(row[2] for row in JUDGED), sum(not row[2] for row in JUDGED)) >= 30
    assert min(sum(row[3] for row in JUDGED), sum(not row[3] for row in JUDGED)) >= 40


def test_reading_a_well_formed_output_gives_both_blocks():
    answer = read_answer("\n<reasoning>\n12 + 25 = 37\n</reasoning>\n<answer> 37 </answer>\n")
    assert answer is not None
    assert (answer.reasoning, answer.answer) == ("12 + 25 = 37", "37")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "37",
        "<answer>37</answer>",
        "<reasoning>a</reasoning>",
        "<answer>37</answer><reasoning>a</reasoning>",
        "<reasoning>a</reasoning> then <answer>37</answer>",
        "x<reasoning>a</reasoning><answer>37</answer>",
        "<reasoning>a</reasoning><answer>37</answer>.",
        "<reasoning> </reasoning><answer>37</answer>",
        "<reasoning>a</reasoning><answer> </answer>",
        "<reasoning>a<reasoning>b</reasoning></reasoning><answer>37</answer>",
        "<reasoning>a</reasoning><answer>37</answer><answer>37</answer>",
        "<reasoning>a</reasoning><answer>37",
        "<reasoning>a<answer>37</answer></reasoning>",
        "</reasoning>a<reasoning></answer>37<answer>",
    ],
)
def test_anything_but_one_reasoning_and_one_answer_is_not_well_formed(text):
    assert not is_well_formed(text)


def test_other_tags_are_read_as_the_usual_ones_are():
    tags = Tags(reasoning="think", answer="final-answer")
    output = "<think>\n12 + 25 = 37\n</think>\n\n<final-answer>37</final-answer>"
    assert judge(id="a", prompt="?", expected="37", output=output, tags=tags).strict
    assert not is_well_formed(output) and not matches_strict(output, "37")
    usual = "<think>so</think><final-answer><answer>37</answer> of 40</final-answer>"
    assert (matches_lenient(usual, "37"), matches_lenient(usual, "37", tags)) == (True, False)
    assert matches_lenient(usual, "40", tags)
    assert is_well_formed("<think>a</think><final-answer>b</final-answer>", tags)
    assert not is_well_formed(tagged("37"), tags)


@pytest.mark.parametrize(
    ("text", "taken", "not_taken"),
    [
        ("37 at first, and 1,638 in all", ["1,638"], ["37"]),
        ("from 37 to 1,638 in all", [], ["37", "1,638"]),
        ("no number", [], ["37"]),
        ("We get d r i", ["d r i"], ["d r i b"]),
        ("It is Monday.", ["Monday"], ["Tuesday"]),
    ],
)
def test_the_lenient_reading_takes_the_last_value_and_no_other(text, taken, not_taken):
    assert all(matches_lenient(text, value) for value in taken)
    assert not any(matches_lenient(text, value) for value in not_taken)


def test_a_long_output_of_open_tags_is_judged_in_reasonable_time():
    output = "<answer>" * 60_000 + "37"  # a model stuck in a loop; quadratic search would take minutes
    assert not matches_strict(output, "37")
    assert matches_lenient(output, "37")


def predictions():
    return [
        judge(
            id="a",
            prompt="?",
            expected="37",
            output=tagged("37"),
            section="core",
            category="addition",
            difficulty="easy",
            ended="tag",
        ),
        judge(id="b", prompt="?", expected="5", output="it is 5", section="core", category="addition"),
        judge(
            id="c", prompt="?", expected="5", output=tagged("6"), section="core", category="addition", ended="length"
        ),
        judge(id="d", prompt="?", expected="5", output="", section="edge", category="zero"),
    ]


def test_scores_count_what_the_verdicts_say():
    nothing = {"items": 1, "correct": 0, "accuracy": 0.0, "accuracy_lenient": 0.0, "format_rate": 0.0}
    easy = {"items": 1, "correct": 1, "accuracy": 1.0, "accuracy_lenient": 1.0, "format_rate": 1.0}
    addition = {"items": 3, "correct": 1, "accuracy": 1 / 3, "accuracy_lenient": 2 / 3, "format_rate": 2 / 3}
    scores = to_plain(score_predictions(predictions(), "before"))
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


@pytest.mark.parametrize(
    ("output", "reasoning"),
    [
        (tagged("37"), "12 + 25 = 37"),
        ("<reasoning>a b</reasoning><reasoning>c d</reasoning><answer>1</answer>", "c d"),
        ("We add. <answer>37</answer>", "We add."),
        ("We add.<b>So</b> <answer>37", "We add.\nSo"),
        ("<reasoning>cut of", "cut of"),
        ("it is 37", "it is 37"),
        ("", ""),
    ],
)
def test_the_reasoning_is_the_block_or_what_stands_before_the_answer(output, reasoning):
    assert reasoning_of(output) == reasoning
    assert judge(id="a", prompt="?", expected="1", output=output).reasoning_words == len(reasoning.split())


def test_equations_are_counted_in_the_reasoning_and_not_in_the_answer():
    item = judge(id="a", prompt="?", expected="37", output=tagged("1 + 1 = 3", reasoning="12 + 25 = 37, 37 - 5 = 31"))
    assert (item.equations, item.equations_right) == (2, 1)


@pytest.mark.parametrize("ended", ["length", "time", "context"])
def test_a_reasoning_that_was_cut_off_is_not_right_by_its_last_number(ended):
    def right(output, how=ended):
        return judge(id="a", prompt="?", expected="7", output=output, ended=how).lenient

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
        score_predictions([], "before")


def test_an_id_given_twice_is_refused_by_name():
    with pytest.raises(InputError, match="'a' twice"):
        score_predictions([*predictions(), predictions()[0]], "before")

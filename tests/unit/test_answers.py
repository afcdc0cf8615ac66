"""What an answer says: hundreds of pairs judged by hand, and what must hold for any text at all."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REFERENCE
from tests.unit.answer_pairs import AS_OUTPUT, DISAGREEMENTS, IN_BLOCK, tagged
from tunix_rt.scoring.answers import is_number_as_words, same_value
from tunix_rt.scoring.score import matches_lenient, matches_strict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "scoring.md"
RESULT = ROOT / "benchmarks" / "results" / "answers_math_verify.json"
GSM8K = REFERENCE / "data" / "gsm8k" / "train.jsonl"
PAIRS = [*(pair._replace(text=tagged(pair.text)) for pair in IN_BLOCK), *AS_OUTPUT]
OUTPUTS = [pair[:5] for pair in PAIRS]

# Pieces that mean something to the rules, so that random texts reach into all of them.
PIECES = [
    "37", "38", "-", "−", "$", "%", ",", ", ", ".", "/", " ", "\n", "1,600", "1 600", "1.600,50", "1/2", "½", "e9", "10^", "km",
    "miles", "apples", " or ", " and ", "not ", "minus ", "{", "}", "(", "]", "\\boxed{", "\\frac{", "\\text{", "####",
    "answer is ", "No, ", "more than ", "n't ", "twelve", "dozen", "k", " + ", "= ", "- ", "A",
    "<answer>", "</answer>", "<reasoning>", "</reasoning>", "Tuesday",
    "a", "3:30", "pm", "²", "\u200b", "\x00", "٣", "\ud800",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=9).map("".join) | st.text(max_size=30)
quickly = settings(max_examples=150, deadline=None)


@pytest.mark.parametrize(("output", "expected", "strict", "lenient", "reason"), OUTPUTS)
def test_every_pair_is_judged_as_a_person_judged_it(output, expected, strict, lenient, reason):
    assert (matches_strict(output, expected), matches_lenient(output, expected)) == (strict, lenient), reason


@pytest.mark.parametrize(("answer", "expected", "strict", "lenient"), [pair[:4] for pair in DISAGREEMENTS])
def test_a_known_disagreement_is_still_one_and_the_page_tells_it(answer, expected, strict, lenient):
    judged = matches_strict(tagged(answer), expected), matches_lenient(tagged(answer), expected)
    assert judged != (strict, lenient), "the rules agree with the person now: make it a pair"
    assert f"| `{answer}` | `{expected}` |" in PAGE.read_text(encoding="utf-8")


def test_the_pairs_are_many_and_different_and_every_verdict_occurs_often():
    assert len({(output, expected) for output, expected, *_ in OUTPUTS}) == len(OUTPUTS) >= 800
    verdicts = [(strict, lenient) for _, _, strict, lenient, _ in OUTPUTS]
    assert min(verdicts.count(kind) for kind in [(True, True), (False, True), (False, False)]) >= 80
    assert (True, False) not in verdicts


def test_at_least_half_of_the_pairs_are_made_to_mislead():
    misleading = [pair for pair in PAIRS if pair.misleads]
    assert len(misleading) >= max(300, len(PAIRS) / 2)
    assert sum(pair.lenient for pair in misleading) >= 30, "some of them are right"


def test_no_pair_is_judged_twice_and_differently():
    verdicts = {}
    for pair in [*IN_BLOCK, *DISAGREEMENTS]:
        assert verdicts.setdefault(pair[:2], pair) == pair


def test_every_example_of_the_page_is_judged_as_the_page_says():
    rows = re.findall(
        r"^\| `([^`]*)` \| `([^`]*)` \| (yes|no) \| (yes|no) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    judged = [
        (answer, expected, matches_strict(tagged(answer), expected), matches_lenient(tagged(answer), expected))
        for answer, expected, *_ in rows
    ]
    assert judged == [
        (answer, expected, strict == "yes", lenient == "yes") for answer, expected, strict, lenient in rows
    ]
    assert len(rows) >= 40


def test_the_page_tells_how_often_math_verify_agrees_over_these_very_pairs():
    told = json.loads(RESULT.read_text(encoding="utf-8"))
    assert told["pairs"] == len(IN_BLOCK), "run python -m benchmarks.answers_against_math_verify"
    assert f"in {told['agree']} of {told['pairs']} cases" in " ".join(PAGE.read_text(encoding="utf-8").split())
    for row in told["differ"]:
        assert (
            matches_lenient(tagged(row["answer"]), row["expected"])
            == (row["here"] != "wrong")
            == (row["math_verify"] == "wrong")
        )


@pytest.mark.reference
@pytest.mark.skipif(not GSM8K.is_file(), reason="the published GSM8K is not beside the repository")
def test_the_published_solutions_of_gsm8k_end_at_their_answers():
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert all(matches_lenient(answer, answer.rpartition("####")[2]) for answer in answers)
    solutions = [re.sub("<<.*?>>", "", answer).rpartition("####") for answer in answers]
    ended = sum(matches_lenient(solution, value) for solution, _, value in solutions)
    assert f"{ended:,} of the {len(answers):,} solutions" in " ".join(PAGE.read_text(encoding="utf-8").split())


@quickly
@given(texts, texts)
def test_what_strict_accepts_lenient_accepts_and_nothing_raises(answer, expected):
    for output in (answer, tagged(answer)):
        assert matches_lenient(output, expected) or not matches_strict(output, expected)


@quickly
@given(texts)
def test_an_answer_is_the_same_as_itself_unless_it_is_blank(text):
    assert same_value(text, text) == bool(text.strip())


@quickly
@given(texts, texts)
def test_which_of_two_answers_is_expected_does_not_matter_unless_one_is_a_set_an_interval_or_a_percentage(one, other):
    if not any(mark in one + other for mark in "{[(%"):
        assert same_value(one, other) == same_value(other, one)


@quickly
@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_a_number_is_the_same_in_every_spelling(number, places):
    plain = f"{number}" if not places else f"{number}.{'0' * places}"
    for spelled in (
        f"{number:,}",
        f"{number:,}".replace(",", " "),
        f" {plain} ",
        f"{plain}.",
        f"${plain}$",
        f"{2 * number}/2",
    ):
        assert same_value(spelled, str(number)) and same_value(str(number), spelled)
        assert not same_value(spelled, str(number + 1))


@quickly
@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=64))
def test_a_fraction_is_the_same_with_other_terms_and_as_a_mixed_number(value):
    written = f"{value.numerator}/{value.denominator}"
    assert same_value(f"{3 * value.numerator}/{3 * value.denominator}", written)
    whole, rest = divmod(abs(value), 1)
    assert same_value(f"{'-' if value < 0 else ''}{whole} {rest.numerator}/{rest.denominator}", written)


@pytest.mark.parametrize(
    ("answer", "as_words"),
    [
        ("3,5", True), ("1.600.000", True), ("3 or 4", True), ("5 hours 30 minutes", True), ("three cats", True), ("3:30", True),
        ("12", False), ("7 km", False), ("twelve", False), ("3, 5", False), ("{1, 2}", False), ("[1, 2)", False),
        ("5 7 8 9", False), ("Tuesday", False), ("no one", False),
    ],
)  # fmt: skip
def test_a_number_that_is_compared_as_words_is_told(answer, as_words):
    assert is_number_as_words(answer) is as_words


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("zero", "0"), ("ninety-nine", "99"), ("one hundred and five", "105"), ("minus twenty-one", "-21"), ("two thirds", "2/3"),
        ("two thousand three hundred and forty-one", "2341"), ("A hundred", "100"), ("a quarter", "0.25"),
        ("twenty twenty", None),
        ("one two", None), ("hundred", None), ("and", None), ("twenty eleven", None), ("third", None), ("two cats", None),
        ("two hundred hundred", None), ("thousand million", None), ("one and", None), ("ten five", None),
    ],
)  # fmt: skip
def test_a_whole_answer_in_number_words_is_a_number(words, value):
    assert same_value(words, value or words)
    if value is None:
        assert not any(same_value(words, str(number)) for number in range(3_000))


@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000, "1e999999999", "10^100000", "37 " * 300_000, "1," * 300_000, "111" + ",111" * 200_000, "{" * 500_000,
        "\\boxed{" * 100_000, "\\frac{" * 100_000, "answer is " * 100_000, "answer" + " " * 1_000_000 + "37", "1/" * 300_000,
        "1." * 300_000, "1 or " * 200_000, "<a" * 300_000, "\ufdfa" * 50_000, "1," * 1_999, "²" * 3_900, "a\ud800" * 1_000,
        "5 a a a (" * 100_000, "5 apples and " * 100_000, "not " * 200_000 + "37", "5 + " * 200_000, "twenty " * 100_000,
        "answer is 5. No, " * 50_000, "A or " * 100_000, "5 hours " * 100_000, "1" + ",1" * 1_900 + ")", "if " * 200_000,
    ],
    ids=lambda text: text[:8],
)  # fmt: skip
@pytest.mark.parametrize("expected", ["37", "1, 2", "12 km", "a b", "B", "twelve"])
def test_no_text_takes_long(text, expected):
    begun = time.monotonic()
    for output in (text, tagged(text)):
        assert not matches_strict(output, expected)
        matches_lenient(output, expected)
    assert time.monotonic() - begun < 5.0  # a hundredth of it on an idle computer; quadratic would be minutes

"""The value of an answer: a thousand pairs judged by hand, and what must be true of any text."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REFERENCE
from tests.unit.answer_pairs import AS_OUTPUT, DISAGREEMENTS, IN_BLOCK, tagged
from tunix_rt.scoring.answers import is_number_as_words, read_quantity, same_value
from tunix_rt.scoring.score import matches_lenient, matches_strict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "scoring.md"
RESULT = ROOT / "benchmarks" / "results" / "answers_math_verify.json"
GSM8K = REFERENCE / "data" / "gsm8k" / "train.jsonl"
PAIRS = [*(pair._replace(text=tagged(pair.text)) for pair in IN_BLOCK), *AS_OUTPUT]

# Pieces that mean something to the rules, so that random texts reach into all of them.
PIECES = [
    "37", "38", "-", "−", "$", "%", ",", ", ", ".", "/", " ", "\n", "1,600", "1 600", "1.600,50", "1/2", "½", "e9", "10^", "km",
    "miles", "apples", " or ", " and ", "not ", "minus ", "{", "}", "(", "]", "\\boxed{", "\\frac{", "\\text{", "####",
    "answer is ", "No, ", "more than ", "n't ", "twelve", "dozen", "k", " + ", "= ", "- ", "A",
    "<answer>", "</answer>", "<reasoning>", "</reasoning>", "Tuesday",
    "a", "3:30", "pm", "²", "\u200b", "\x00", "٣", "\ud800",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=9).map("".join) | st.text(max_size=30)
quickly = settings(max_examples=150)


def judged(output: str, expected: str) -> tuple[bool, bool]:
    return matches_strict(output, expected), matches_lenient(output, expected)


def test_every_pair_is_judged_as_a_person_judged_it():
    assert [pair for pair in PAIRS if judged(pair.text, pair.expected) != (pair.strict, pair.lenient)] == []


def test_a_known_disagreement_is_still_one_and_on_the_page():
    verdicts = [(pair, judged(tagged(pair.text), pair.expected)) for pair in DISAGREEMENTS]
    assert [pair for pair, verdict in verdicts if verdict == (pair.strict, pair.lenient)] == [], "make them pairs"
    page = PAGE.read_text(encoding="utf-8")
    assert [pair for pair in DISAGREEMENTS if f"| `{pair.text}` | `{pair.expected}` |" not in page] == []


def test_every_example_of_the_page_is_judged_as_the_page_says():
    rows = re.findall(
        r"^\| `([^`]*)` \| `([^`]*)` \| (yes|no) \| (yes|no) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    stated = {(answer, expected): (strict == "yes", lenient == "yes") for answer, expected, strict, lenient in rows}
    assert len(stated) >= 40
    assert {pair: judged(tagged(pair[0]), pair[1]) for pair in stated} == stated


def test_the_page_has_the_agreement_with_math_verify_over_these_pairs():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert result["pairs"] == len(IN_BLOCK), "run python -m benchmarks.answers_against_math_verify"
    assert f"in {result['agree']} of {result['pairs']} cases" in " ".join(PAGE.read_text(encoding="utf-8").split())
    for row in result["differ"]:
        lenient = matches_lenient(tagged(row["answer"]), row["expected"])
        assert lenient == (row["here"] != "wrong") == (row["math_verify"] == "wrong")


@pytest.mark.slow
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


AS_WORDS = ["3,5", "1.600.000", "3 or 4", "5 hours 30 minutes", "three cats", "3:30"]
NOT_AS_WORDS = ["12", "7 km", "twelve", "3, 5", "{1, 2}", "[1, 2)", "5 7 8 9", "Tuesday", "no one"]


def test_a_number_that_is_compared_as_words_is_recognised():
    assert [answer for answer in [*AS_WORDS, *NOT_AS_WORDS] if is_number_as_words(answer)] == AS_WORDS


IN_WORDS = {
    "zero": "0", "ninety-nine": "99", "one hundred and five": "105", "minus twenty-one": "-21", "two thirds": "2/3",
    "two thousand three hundred and forty-one": "2341", "A hundred": "100", "a quarter": "0.25",
}  # fmt: skip
NO_NUMBERS = [
    "twenty twenty", "one two", "hundred", "and", "twenty eleven", "third", "two cats", "two hundred hundred", "thousand million",
    "one and", "ten five",
]  # fmt: skip


def test_a_whole_answer_in_number_words_is_a_number():
    assert [words for words, value in IN_WORDS.items() if not same_value(words, value)] == []
    assert [words for words in NO_NUMBERS if read_quantity(words) is not None or not same_value(words, words)] == []


LONG = [
    "9" * 40_000, "1e999999999", "10^100000", "37 " * 60_000, "1," * 60_000, "111" + ",111" * 40_000, "{" * 100_000,
    "\\boxed{" * 20_000, "\\frac{" * 20_000, "answer is " * 20_000, "answer" + " " * 40_000 + "37", "1/" * 60_000,
    "1." * 60_000, "1 or " * 40_000, "<a" * 60_000, "\ufdfa" * 10_000, "1," * 1_999, "²" * 3_900, "a\ud800" * 1_000,
    "5 a a a (" * 20_000, "5 apples and " * 20_000, "not " * 40_000 + "37", "5 + " * 40_000, "twenty " * 20_000,
    "answer is 5. No, " * 10_000, "A or " * 20_000, "5 hours " * 20_000, "1" + ",1" * 1_900 + ")", "if " * 40_000,
]  # fmt: skip


@pytest.mark.parametrize("expected", ["37", "1, 2", "12 km", "a b", "B", "twelve"])
def test_no_text_takes_long(expected):
    for text in LONG:
        begun = time.process_time()
        for output in (text, tagged(text)):
            assert not matches_strict(output, expected)
            matches_lenient(output, expected)
        assert time.process_time() - begun < 2.0, text[:20]  # a hundredth of it; quadratic would be minutes

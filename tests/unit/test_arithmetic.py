"""The arithmetic in a reasoning: what is parsed, what is checked, and what is skipped because it is no equation."""

import json
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REFERENCE
from tests.tables import tables
from tunix_rt.scoring.equations import ArithmeticCheck, check_arithmetic

GSM8K = REFERENCE / "data" / "gsm8k" / "train.jsonl"

# (text, equations stated, the wrong ones)
CHECKED = [
    (text, stated, tuple(wrong)) for rows in tables(__file__)["checked"].values() for text, stated, wrong in rows
]


def test_every_equation_is_parsed_and_judged_as_it_was_by_hand():
    checked = [(text, check.stated, check.wrong) for text, *_ in CHECKED for check in [check_arithmetic(text)]]
    assert [pair for pair in zip(checked, CHECKED, strict=True) if pair[0] != pair[1]] == []
    assert all(
        check.right == check.stated - len(check.wrong) for check in (check_arithmetic(row[0]) for row in CHECKED)
    )


@pytest.mark.slow
@pytest.mark.reference
def test_the_solutions_of_gsm8k_are_found_right_but_for_a_few():
    if not GSM8K.is_file():
        pytest.skip("GSM8K is not beside this clone (../shared/data/gsm8k)")
    lines = GSM8K.read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"].partition("####")[0] for line in lines]
    around = [check_arithmetic(re.sub("<<.*?>>", "", solution)) for solution in solutions]
    within = [check_arithmetic("\n".join(re.findall("<<.*?>>", solution))) for solution in solutions]
    assert (sum(check.stated for check in around), sum(len(check.wrong) for check in around)) == (23_421, 57)
    assert (sum(check.stated for check in within), sum(len(check.wrong) for check in within)) == (23_350, 0)


def test_a_whole_reasoning_is_read_sentence_by_sentence():
    text = "Tom has 3 boxes with 12 pens each, 3 * 12 = 36 pens.\nHe gives away 10: 36 - 10 = 26.\nHalf of it is 26 / 2 = 14."
    assert check_arithmetic(text) == ArithmeticCheck(stated=3, right=2, wrong=("26 / 2 = 14",))


@settings(max_examples=150)
@given(
    st.integers(-999, 999), st.integers(1, 999), st.integers(1, 999), st.sampled_from("+-*/"), st.sampled_from("+-*/")
)
def test_python_and_the_parser_agree_on_precedence(a, b, c, first, second):
    written = f"{a} {first} {b} {second} {c}"
    value = eval(f"Fraction({a}) {first} Fraction({b}) {second} Fraction({c})", {"Fraction": Fraction})
    assert check_arithmetic(f"{written} = {value.numerator}/{value.denominator}").wrong == ()
    off = value + 1
    assert check_arithmetic(f"{written} = {off.numerator}/{off.denominator}").right == 0


@settings(max_examples=150)
@given(st.text(alphabet="0123456789+-*/^()=x%$., \na≈<>½\\", max_size=40))
def test_no_text_raises_and_the_counts_fit(text):
    check = check_arithmetic(text)
    assert check.stated == check.right + len(check.wrong)


LONG = [
    "1+" * 500_000 + "=1", "(" * 500_000, "1=1=" * 200_000, "9" * 1_000_000 + "+1=2", "1 a " * 200_000, "1." * 300_000,
    "1" + "^9" * 1_000 + "=3",
]  # fmt: skip


def test_no_text_takes_long():
    for text in LONG:
        begun = time.process_time()
        assert check_arithmetic(text).right == 0
        assert time.process_time() - begun < 5.0, text[:20]

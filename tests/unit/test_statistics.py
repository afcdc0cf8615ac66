"""Intervals and p values against scipy and statsmodels, and where there is little data."""

import functools
import importlib.util
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from tunix_rt.errors import InputError
from tunix_rt.evaluate.comparison import change_of, mcnemar, p_text, paired_bootstrap, paired_score, wilson

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "did-it-help.md"

MONTE_CARLO = 5 * math.sqrt(2) * math.sqrt(0.025 * 0.975 / 10_000) / 0.0584
"""Five standard errors between two ends, each found with 10,000 resamples, in standard deviations of the mean: the error
of a quantile is sqrt(q (1 - q) / resamples) over the density there, which for a normal mean is 0.0584 at 2.5 %."""


def random_tables(seed, *, most, count=200):
    """(gained, lost, same) of random sets of questions; few, many, even and lopsided ones."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        shares = generator.dirichlet((0.7, 0.7, 1.0))
        gained, lost, same = generator.multinomial(generator.integers(2, most), shares).tolist()
        yield gained, lost, same


def verdicts(gained, lost, same):
    before = [False] * gained + [True] * lost + [True] * same
    after = [True] * gained + [False] * lost + [True] * same
    return before, after


# --- McNemar ---------------------------------------------------------------------------------------------------------


def test_the_exact_p_value_is_that_of_a_binomial_test():
    for gained, lost, _ in random_tables(1, most=3_000):
        expected = scipy.stats.binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
        assert mcnemar(gained, lost).p_value == pytest.approx(expected, rel=1e-10, abs=1e-300), (gained, lost)


def test_the_exact_p_value_is_the_exact_fraction_rounded_once():
    for gained, lost, _ in random_tables(2, most=400):
        fewer, changed = min(gained, lost), gained + lost
        tail = Fraction(sum(math.comb(changed, heads) for heads in range(fewer + 1)), 2**changed)
        assert mcnemar(gained, lost).p_value == float(min(Fraction(1), 2 * tail)), (gained, lost)


def test_the_chi_square_has_its_p_value():
    for gained, lost, _ in random_tables(3, most=3_000):
        found = mcnemar(gained, lost)
        expected = scipy.stats.chi2.sf(found.chi_square, 1)
        assert found.chi_square_p_value == pytest.approx(expected, rel=1e-11, abs=1e-300), (gained, lost)


def test_mcnemar_is_that_of_statsmodels():
    if importlib.util.find_spec("statsmodels") is None:
        pytest.skip("statsmodels is not installed; it is in the dev extra")
    from statsmodels.stats import contingency_tables

    for gained, lost, same in random_tables(4, most=3_000):
        found, square = mcnemar(gained, lost), [[same, gained], [lost, 0]]
        assert gained != lost
        exact = contingency_tables.mcnemar(square, exact=True)
        corrected = contingency_tables.mcnemar(square, exact=False, correction=True)
        assert found.p_value == pytest.approx(exact.pvalue, rel=1e-12, abs=1e-12)
        assert found.chi_square == pytest.approx(corrected.statistic, rel=1e-12)
        assert found.chi_square_p_value == pytest.approx(corrected.pvalue, rel=1e-12, abs=1e-12)
    # The one difference: at an even split its correction goes past zero.
    even = contingency_tables.mcnemar([[9, 4], [4, 9]], exact=False, correction=True)
    assert (even.statistic, mcnemar(4, 4).chi_square) == (pytest.approx(1 / 8), 0.0)


def test_mcnemar_does_not_care_which_side_is_called_before():
    for gained, lost, _ in random_tables(5, most=1_000, count=50):
        assert mcnemar(gained, lost).p_value == mcnemar(lost, gained).p_value


def test_an_even_split_of_the_changed_answers_is_no_evidence():
    for found in (mcnemar(*split) for split in ((0, 0), (1, 0), (0, 1), (7, 7), (8, 7))):
        assert (found.p_value, found.chi_square, found.chi_square_p_value) == (1.0, 0.0, 1.0)


def test_a_clean_sweep_halves_the_p_value_with_every_answer():
    assert [mcnemar(gained, 0).p_value for gained in (4, 5, 6, 10)] == [0.125, 0.0625, 0.03125, 2**-9]


def test_many_changed_answers_neither_overflow_nor_vanish():
    assert mcnemar(10_000, 10_000).p_value == 1.0
    close = mcnemar(10_100, 9_900)
    assert close.p_value == pytest.approx(scipy.stats.binomtest(9_900, 20_000).pvalue, rel=1e-9)
    assert close.chi_square_p_value == pytest.approx(close.p_value, rel=1e-3)
    assert mcnemar(100_000, 0).p_value == 0.0
    assert 0 < mcnemar(1_000, 0).p_value < 1e-300


def test_counts_below_zero_are_refused():
    with pytest.raises(InputError, match="-1 gained and 3 lost"):
        mcnemar(-1, 3)


# --- the paired bootstrap --------------------------------------------------------------------------------------------


def test_the_interval_of_verdicts_is_that_of_scipy_within_the_monte_carlo_error():
    compared = 0
    for number, table in enumerate(random_tables(6, most=80)):
        before, after = (np.array(side, dtype=float) for side in verdicts(*table))
        if len({*(after - before)}) == 1:
            continue
        found = paired_bootstrap(before, after, seed=number)
        theirs = scipy.stats.bootstrap(
            (before, after), lambda b, a, axis: (a - b).mean(axis=axis), paired=True, method="percentile",
            n_resamples=10_000, rng=np.random.default_rng(number + 1_000),
        ).confidence_interval  # fmt: skip
        # the mean of a resample is a whole number of answers over their count: an end may fall on the next one
        tolerance = MONTE_CARLO * (after - before).std() / math.sqrt(len(before)) + 1 / len(before)
        assert found.low == pytest.approx(theirs.low, abs=tolerance), table
        assert found.high == pytest.approx(theirs.high, abs=tolerance), table
        compared += 1
    assert compared > 150


def test_nineteen_of_twenty_intervals_hold_the_true_gain():
    generator = np.random.default_rng(8)
    shares, items, sets = np.array([0.25, 0.10, 0.65]), 200, 1_000
    held = 0
    for number in range(sets):
        interval = paired_bootstrap(*verdicts(*generator.multinomial(items, shares)), seed=number, resamples=2_000)
        held += interval.low <= 0.15 <= interval.high
    # 0.95 less the little that a percentile interval of 200 questions falls short, and 3 standard errors of 1,000 sets
    assert 0.92 <= held / sets <= 0.97


def test_the_seed_decides_the_interval_and_the_order_of_the_questions_does_not():
    before, after = verdicts(40, 12, 148)
    first = paired_bootstrap(before, after, seed=7)
    assert paired_bootstrap(before, after, seed=7) == first
    assert paired_bootstrap(before[::-1], after[::-1], seed=7) == first
    assert paired_bootstrap(before, after, seed=8) != first


def test_a_hundred_thousand_verdicts_take_the_memory_of_a_hundred():
    import tracemalloc

    generator = np.random.default_rng(0)
    before, after = generator.random(100_000) < 0.4, generator.random(100_000) < 0.41
    tracemalloc.start()
    interval = paired_bootstrap(before, after, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000  # drawing the items would be a billion draws
    normal = 1.96 * (after.astype(float) - before).std() / math.sqrt(100_000)
    assert interval.high - interval.low == pytest.approx(2 * normal, rel=0.06)


ALIKE = {
    (0, 0, 100): (-0.037, 0.037),
    (100, 0, 0): (0.963, 1.0),
    (0, 100, 0): (-1.0, -0.963),
    (1, 0, 0): (0.207, 1.0),
    (0, 0, 1): (-0.793, 0.793),
}


def test_verdicts_that_all_changed_alike_still_have_a_width():
    intervals = {table: paired_bootstrap(*verdicts(*table), seed=0) for table in ALIKE}
    assert {interval.method for interval in intervals.values()} == {"wilson"}
    for table, interval in intervals.items():
        assert (interval.low, interval.high) == pytest.approx(ALIKE[table], abs=1e-3), table


@pytest.mark.parametrize(("before", "after"), [([], []), ([True], [True, False])])
def test_what_is_not_paired_is_refused(before, after):
    with pytest.raises(InputError, match=f"{len(before)} verdicts before and {len(after)} after"):
        paired_bootstrap(before, after, seed=0)


# --- the score interval ----------------------------------------------------------------------------------------------


def test_the_score_interval_is_the_published_one():
    """Complete response before and after a therapy (Cavo and others 2012: 6 and 16 changed of 161 pairs), as worked out in
    Fagerland, Lydersen, Laake: Statistical Analysis of Contingency Tables, chapter 8: -0.1240 to -0.0054."""
    found = paired_score(6, 16, 161)
    assert (round(found.low, 4), round(found.high, 4), found.method) == (-0.1240, -0.0054, "score")


def test_the_score_interval_ends_where_the_likeliest_table_with_that_gain_is_just_refused():
    """The share of lost answers that fits best is searched for here, not computed."""
    generator = np.random.default_rng(12)
    for _ in range(40):
        items = int(generator.integers(5, 120))
        gained, lost = (int(count) for count in generator.multinomial(items, (0.25, 0.15, 0.6))[:2])
        if not gained or not lost or gained + lost == items:
            continue
        found = paired_score(gained, lost, items)
        for gain in (found.low, found.high):
            share = np.linspace(max(0, -gain), (1 - gain) / 2, 200_001)[1:-1]
            chance = (
                gained * np.log(share + gain)
                + lost * np.log(share)
                + (items - gained - lost) * np.log1p(-2 * share - gain)
            )
            best = share[np.argmax(chance)]
            deviation = math.sqrt(items * (2 * best + gain - gain**2))
            assert abs(gained - lost - items * gain) / deviation == pytest.approx(1.959964, abs=1e-3), (
                gained,
                lost,
                items,
            )


def test_the_score_interval_is_that_of_wilson_where_nothing_changed():
    for items in (1, 2, 10, 100, 100_000):
        found = paired_score(0, 0, items)
        assert found.high == -found.low == pytest.approx(wilson(0, items).high, rel=1e-12)


def test_the_score_interval_does_not_care_which_side_is_called_before():
    for gained, lost, same in random_tables(13, most=2_000):
        there, back = (paired_score(*counts, gained + lost + same) for counts in ((gained, lost), (lost, gained)))
        assert (there.low, there.high) == (-back.high, -back.low)
        assert -1 <= there.low <= (gained - lost) / (gained + lost + same) <= there.high <= 1


@pytest.mark.parametrize("counts", [(-1, 0, 5), (0, -1, 5), (3, 3, 5), (0, 0, 0)])
def test_counts_that_are_not_of_one_set_of_questions_are_refused(counts):
    with pytest.raises(InputError, match=f"of {counts[2]}: not possible"):
        paired_score(*counts)


# --- the two together ------------------------------------------------------------------------------------------------

HARD = [
    (100, 0.01, 0.015), (100, 0.005, 0.01), (10, 0.1, 0.05), (28, 0.03, 0.06), (20, 0.05, 0.02), (50, 0.04, 0.02),
    (50, 0.01, 0.03), (12, 0.5, 0.05),
]  # fmt: skip
"""Questions, and the shares that are gained and lost, where the bootstrap alone falls short of its 95 %."""
EASY = [(100, 0.02, 0.02), (10, 0.3, 0.1), (20, 0.2, 0.1), (28, 0.1, 0.05), (40, 0.3, 0.1), (60, 0.3, 0.02)]


@functools.cache
def coverage(items, gained, lost):
    """How often the bootstrap, and the interval of a change, hold the true gain: summed over every outcome, not drawn."""
    drawn = together = 0.0
    for more in range(items + 1):
        for fewer in range(items + 1 - more):
            chance = scipy.stats.multinomial.pmf(
                (more, fewer, items - more - fewer), items, (gained, lost, 1 - gained - lost)
            )
            if chance < 1e-5:
                continue  # counts as missed
            sides = verdicts(more, fewer, items - more - fewer)
            alone, both = paired_bootstrap(*sides, seed=0), change_of(*sides).interval
            drawn += chance * (alone.low - 1e-9 <= gained - lost <= alone.high + 1e-9)
            together += chance * (both.low - 1e-9 <= gained - lost <= both.high + 1e-9)
    return drawn, together


@pytest.mark.parametrize("point", HARD)
def test_the_interval_holds_the_true_gain_where_the_bootstrap_alone_does_not(point):
    drawn, together = coverage(*point)
    assert drawn < 0.925 and together > 0.95


@pytest.mark.parametrize("point", EASY)
def test_the_interval_holds_the_true_gain_elsewhere_too(point):
    assert coverage(*point)[1] > 0.94


def test_the_interval_has_the_outer_ends_of_the_bootstrap_and_of_the_score_interval():
    for gained, lost, same in random_tables(14, most=300, count=60):
        sides = verdicts(gained, lost, same)
        found, drawn, scored = (
            change_of(*sides).interval,
            paired_bootstrap(*sides, seed=0),
            paired_score(gained, lost, len(sides[0])),
        )
        assert (found.low, found.high) == (min(drawn.low, scored.low), max(drawn.high, scored.high))
        assert found.method == f"{drawn.method} and score"


def test_one_answer_that_changed_says_no_less_than_none():
    none, one = (change_of(*verdicts(gained, 0, 100 - gained)).interval for gained in (0, 1))
    assert one.high - one.low > none.high - none.low
    assert one.low < 0 < none.high < one.high


def test_where_many_answers_changed_the_score_interval_costs_next_to_nothing():
    for table in ((100, 50, 350), (264, 132, 923), (900, 800, 8_300)):
        sides = verdicts(*table)
        drawn, both = paired_bootstrap(*sides, seed=0), change_of(*sides).interval
        assert (both.high - both.low) / (drawn.high - drawn.low) < 1.04


# --- Wilson ----------------------------------------------------------------------------------------------------------


def test_the_wilson_interval_is_that_of_scipy():
    generator = np.random.default_rng(9)
    for _ in range(200):
        items = int(generator.integers(1, 3_000))
        right = int(generator.integers(0, items + 1))
        theirs = scipy.stats.binomtest(right, items).proportion_ci(0.95, method="wilson")
        found = wilson(right, items)
        assert found.low == pytest.approx(theirs.low, abs=1e-12)
        assert found.high == pytest.approx(theirs.high, abs=1e-12)


def test_a_rate_of_none_or_all_has_a_width():
    assert wilson(0, 10).low == 0.0 and 0.2 < wilson(0, 10).high < 0.3
    assert wilson(10, 10).high == 1.0


@pytest.mark.parametrize(("right", "items"), [(-1, 5), (6, 5), (0, 0)])
def test_a_rate_that_is_none_is_refused(right, items):
    with pytest.raises(InputError, match=f"{right} correct of {items}"):
        wilson(right, items)


# --- in words --------------------------------------------------------------------------------------------------------


def test_fewer_than_six_questions_can_never_be_beyond_chance():
    for items in range(1, 12):
        assert change_of(*verdicts(items, 0, 0)).clear is (items >= 6)


def test_an_end_in_answers_is_never_nearer_to_the_middle_than_the_interval():
    for gained, lost, same in random_tables(10, most=300, count=60):
        change = change_of(*verdicts(gained, lost, same))
        low, high = change.ends
        assert low <= change.interval.low * change.items + 1e-6 and change.interval.high * change.items - 1e-6 <= high
        assert low <= change.net <= high


def test_a_p_value_is_seen_to_be_below_or_above_the_border_and_a_small_one_is_not_spelled_out():
    assert [p_text(value) for value in (1.0, 0.0625, 0.0001, 0.00009, 0.0)] == [
        "p = 1", "p = 0.062", "p = 0.0001", "p < 0.0001", "p < 0.0001",
    ]  # fmt: skip
    assert [p_text(value) for value in (0.0498, 0.04997, 0.05, 0.0502, 0.0494)] == [
        "p = 0.0498", "p = 0.04997", "p = 0.05", "p = 0.0502", "p = 0.049",
    ]  # fmt: skip


def sizes_block():
    lines = [
        "| questions | gained | lost | net | 95 % interval, in points | p value | verdict |",
        "|" + "---:|" * 6 + "---|",
    ]
    for items in (20, 100, 500, 1_319):
        gained, lost = round(0.2 * items), round(0.1 * items)
        change = change_of(*verdicts(gained, lost, items - gained - lost))
        ends = " to ".join(f"{100 * end:+.1f}" for end in (change.interval.low, change.interval.high))
        verdict = "clear" if change.clear else "could be chance"
        p_value = p_text(change.mcnemar.p_value).removeprefix("p = ").removeprefix("p ")
        lines.append(f"| {items:,} | {gained} | {lost} | {change.net:+d} | {ends} | {p_value} | {verdict} |")
    return "\n".join(lines)


def coverage_block():
    lines = ["| questions | truly gained | truly lost | bootstrap alone | the interval |", "|---:|---:|---:|---:|---:|"]
    for items, gained, lost in GUIDE_POINTS:
        held = " | ".join(f"{100 * share:.1f} %" for share in coverage(items, gained, lost))
        lines.append(f"| {items} | {100 * gained:g} % | {100 * lost:g} % | {held} |")
    return "\n".join(lines)


GUIDE_POINTS = [
    (10, 0.1, 0.05), (28, 0.03, 0.06), (50, 0.04, 0.02), (100, 0.01, 0.015), (100, 0.005, 0.01), (40, 0.3, 0.1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "block"), [("coverage", coverage_block), ("sizes", sizes_block)])
def test_the_guide_has_the_coverage_and_the_widths_that_the_functions_give(name, block):
    (written,) = re.findall(rf"<!-- {name}:begin -->\n\n(.*?)\n\n<!-- {name}:end -->", GUIDE.read_text("utf-8"), re.S)
    assert written == block()

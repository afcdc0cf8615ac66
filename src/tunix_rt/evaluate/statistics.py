"""How much of a difference chance alone could make: pure functions from verdicts to intervals, p values and words.

Both sides answered the same questions, so everything is paired. Chance here is which questions were asked: another seed of
the training, or of sampling, is not in these figures.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tunix_rt.errors import InputError

LEVEL = 0.95
RESAMPLES = 10_000
MOST_DISTINCT = 256
"""Up to so many different differences, their counts are drawn and not the items."""
DRAWN_AT_ONCE = 2**21
"""Items, where those are drawn: it bounds the memory at some tens of megabytes."""
CHANCE = 0.05
"""A p value from here on is called chance."""
FEWEST_QUESTIONS = 6
"""With fewer, not even all of them gained is beyond chance: 2 x 0.5**6 is 0.03, 2 x 0.5**5 is 0.06."""
_FRACTION_BITS = 200

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `low` to `high`, at confidence `level`. `method` is bootstrap, wilson or score; two with `and` between them are
    the outer ends of both."""

    low: float
    high: float
    level: float = LEVEL
    method: str = "bootstrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemar:
    """McNemar's test on the answers that changed. `p_value` is the exact one; the chi-square's is an approximation."""

    gained: int
    lost: int
    p_value: float
    chi_square: float
    chi_square_p_value: float


def mcnemar(gained: int, lost: int) -> McNemar:
    """How likely so lopsided a split of the changed answers is, if each was as likely to be gained as lost.

    Two-sided. With as many gained as lost, or with nothing changed, both p values are 1 and the chi-square is 0; a p value
    below the smallest float is 0.
    """
    if gained < 0 or lost < 0:
        raise InputError(f"{gained} gained and {lost} lost answers cannot be counted", fix="give counts from 0 on")
    changed = gained + lost
    # The continuity correction never goes past zero: an even split is no evidence at all.
    apart = max(abs(gained - lost) - 1, 0)
    chi_square = apart**2 / changed if changed else 0.0
    return McNemar(
        gained=gained,
        lost=lost,
        p_value=_exact_p_value(min(gained, lost), changed),
        chi_square=chi_square,
        chi_square_p_value=math.erfc(math.sqrt(chi_square / 2)),
    )


def _exact_p_value(fewer: int, changed: int) -> float:
    """Twice the chance of at most `fewer` heads in `changed` throws of a fair coin, at most 1.

    In whole numbers, so that nothing overflows and the result is right to the last digit of a float: the largest term is
    an exact binomial, the others are its multiples in `_FRACTION_BITS` bits.
    """
    if 2 * fewer >= changed:
        return 1.0
    term = 1 << _FRACTION_BITS
    total = 0
    for below in range(fewer + 1):
        total += term
        term = term * (fewer - below) // (changed - fewer + below + 1)
        if not term:
            break
    # `int / int` is rounded once, however large both are.
    return min(1.0, math.comb(changed, fewer) * total / (1 << (changed - 1 + _FRACTION_BITS)))


def wilson(right: int, items: int, *, level: float = LEVEL) -> Interval:
    """Wilson's interval of a rate, 0..1. With nothing or everything right it still has a width; for no item it is 0..1."""
    if not 0 <= right <= items:
        raise InputError(f"{right} right of {items} is no rate", fix="give counts from 0 to the number of items")
    squared = _normal_quantile(level) ** 2
    if not items:
        return Interval(low=0.0, high=1.0, level=level, method="wilson")
    middle = (right + squared / 2) / (items + squared)
    spread = math.sqrt(squared * (right * (items - right) / items + squared / 4)) / (items + squared)
    low = 0.0 if right == 0 else middle - spread
    high = 1.0 if right == items else middle + spread
    return Interval(low=low, high=high, level=level, method="wilson")


def paired_score(gained: int, lost: int, items: int, *, level: float = LEVEL) -> Interval:
    """Tango's score interval of the gain as a share of `items`: the gains that a score test at `level` does not refuse.

    Tango, Statistics in Medicine 17 (1998) 891-908. Unlike drawing again, it has a width where hardly an answer changed.
    """
    if min(gained, lost) < 0 or not 0 < items >= gained + lost:
        raise InputError(
            f"{gained} gained and {lost} lost of {items} cannot be", fix="give counts of the same questions"
        )
    squared = _normal_quantile(level) ** 2
    low = _score_low(gained, lost, items, squared)
    return Interval(low=low, high=-_score_low(lost, gained, items, squared), level=level, method="score")


def _score_low(gained: int, lost: int, items: int, squared: float) -> float:
    """Halved until no float lies between the gains that are refused and those that are not."""
    refused, kept = -1.0, (gained - lost) / items
    while refused < (middle := (refused + kept) / 2) < kept:
        if (gained - lost - items * middle) ** 2 > squared * _score_variance(gained, lost, items, middle):
            refused = middle
        else:
            kept = middle
    return refused


def _score_variance(gained: int, lost: int, items: int, gain: float) -> float:
    """Of gained less lost, if the true gain is `gain` and the share of lost answers is what then fits the counts best."""
    slope = (2 * items - gained + lost) * gain - gained - lost
    root = math.sqrt(max(0.0, slope**2 + 8 * items * lost * gain * (1 - gain)))
    return (root - slope) / 2 + items * gain * (1 - gain)


def paired_bootstrap(
    before: Sequence[bool | float],
    after: Sequence[bool | float],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """The percentile interval of the mean of `after - before`, questions drawn with replacement. Equal seeds, equal ends.

    Drawing n questions with replacement and counting the differences is one draw from a multinomial, so verdicts cost the
    same for a hundred questions as for a hundred thousand. Where all verdicts changed alike (none changed, all were gained,
    there is one question), drawing shows no spread, though the next question may differ: the ends are Wilson's then, for
    the share of questions that may yet behave differently. Measurements (anything but 0 and 1) that all changed alike have
    no width.
    """
    earlier, later = _pairs(before, after)
    if resamples < 1:
        raise InputError(f"{resamples} resamples cannot be drawn", fix="draw at least 1; 10,000 is usual")
    _normal_quantile(level)  # refuses a level that is none
    values, counts = np.unique(later - earlier, return_counts=True)
    if len(values) == 1:
        verdicts = bool(np.isin(earlier, (0, 1)).all() and np.isin(later, (0, 1)).all())
        return _alike(float(values[0]), len(earlier) if verdicts else None, level)
    generator = np.random.Generator(np.random.PCG64(seed))
    if len(values) <= MOST_DISTINCT:
        drawn = generator.multinomial(counts.sum(), counts / counts.sum(), size=resamples)
        means = drawn @ values / counts.sum()
    else:
        means = _drawn_means(np.repeat(values, counts), generator, resamples)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(low), high=float(high), level=level)


def _pairs(before: Sequence[bool | float], after: Sequence[bool | float]) -> tuple[Numbers, Numbers]:
    if len(before) != len(after):
        raise InputError(f"{len(before)} values before and {len(after)} after are no pairs", fix="give one of each")
    if not len(before):
        raise InputError("there are no pairs to compare", fix="name an eval set with at least one question")
    earlier, later = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not (np.isfinite(earlier).all() and np.isfinite(later).all()):
        raise InputError("a value before or after is not a finite number", fix="leave out what was not measured")
    return earlier, later


def _alike(difference: float, verdicts: int | None, level: float) -> Interval:
    """Around a difference that all pairs have. `verdicts` is their number; without it they are measurements."""
    if verdicts is None:
        return Interval(low=difference, high=difference, level=level)
    other = wilson(0, verdicts, level=level).high
    low = difference if difference < 0 else difference - other
    high = difference if difference > 0 else difference + other
    return Interval(low=low, high=high, level=level, method="wilson")


def _drawn_means(values: Numbers, generator: np.random.Generator, resamples: int) -> Numbers:
    means = np.empty(resamples)
    at_once = max(1, DRAWN_AT_ONCE // len(values))
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        places = generator.integers(len(values), size=(rows, len(values)), dtype=np.int32)
        means[start : start + rows] = values[places].mean(axis=1)
    return means


def _normal_quantile(level: float) -> float:
    """How many standard deviations either side hold the share `level` of a normal distribution."""
    if not 0 < level < 1:
        raise InputError(f"a confidence level of {level} is none", fix="give one between 0 and 1; 0.95 is usual")
    return NormalDist().inv_cdf((1 + level) / 2)


# --- in words --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of the answers by one of the two readings. `interval` is of the gain as a share of all questions."""

    items: int
    right: int
    """On the second side."""
    interval: Interval
    mcnemar: McNemar

    @property
    def net(self) -> int:
        """Answers right on the second side less those on the first."""
        return self.mcnemar.gained - self.mcnemar.lost

    @property
    def ends(self) -> tuple[int, int]:
        """The interval in whole answers, rounded away from its middle."""
        low, high = (round(end * self.items, 6) for end in (self.interval.low, self.interval.high))
        return math.floor(low), math.ceil(high)

    @property
    def clear(self) -> bool:
        """Whether chance is no good explanation: the interval leaves zero out, and McNemar's exact test agrees."""
        low, high = self.ends
        return self.items >= FEWEST_QUESTIONS and not low <= 0 <= high and self.mcnemar.p_value < CHANCE

    @property
    def direction(self) -> int:
        """1 for a clear gain, -1 for a clear loss, 0 where chance may explain it."""
        return (1 if self.net > 0 else -1) if self.clear else 0

    def words(self, first: str = "before", *, by: str = "") -> str:
        """`38 of 100 more answers right, between 27 and 49; 2 got worse`.

        `first` names the side compared with, `by` the reading (`by the tags `), where the other one has other losses.
        """
        if self.net:
            said = f"{abs(self.net):,} of {self.items:,} {_direction(self.net)} answers right"
        else:
            said = f"as many answers right as {first}, {self.right:,} of {self.items:,}"
        worse = f"{by}{self.worse}"
        if self.items < FEWEST_QUESTIONS:
            few = "1 question is" if self.items == 1 else f"{self.items} questions are"
            return f"{said}; {worse}; {few} too few to say whether that is chance"
        return f"{said}, {self._between}; {worse}"

    @property
    def short_words(self) -> str:
        """`12 more, between 5 and 19`, for a place beside the words of the other reading."""
        said = f"{abs(self.net):,} {_direction(self.net)}" if self.net else "as many"
        return said if self.items < FEWEST_QUESTIONS else f"{said}, {self._between}"

    @property
    def worse(self) -> str:
        return f"{self.mcnemar.lost:,} got worse" if self.mcnemar.lost else "none got worse"

    @property
    def _between(self) -> str:
        low, high = self.ends
        if not self.net:
            return f"any change probably lies between {_signed(low)} and {_signed(high)}"
        if low <= 0 <= high:
            return f"which could be chance: between {_signed(low)} and {_signed(high)}"
        near, far = sorted((abs(low), abs(high)))
        doubt = "" if self.clear else f", but it could still be chance: {p_words(self.mcnemar.p_value)}"
        return f"between {near:,} and {far:,}{doubt}"


def readings_in_words(strict: Change, lenient: Change, first: str = "before") -> str:
    """What became of the answers by the tags, and tags apart. Where the two say different things, that comes first."""
    by = "" if strict.mcnemar.lost == lenient.mcnemar.lost else "by the tags "
    said = strict.words(first, by=by)
    if verdict := _DISAGREEING.get((strict.direction, lenient.direction)):
        return f"{said}. {verdict}; tags apart: {lenient.words(first)}"
    if strict.mcnemar == lenient.mcnemar:
        return f"{said} (tags apart: the same)"
    return f"{said} (tags apart: {lenient.short_words}{f'; {lenient.worse}' if by else ''})"


_DISAGREEING = {
    (1, 0): "The gain may be one of form alone",
    (1, -1): "The form was learned, and the answers got worse",
    (-1, 0): "The loss may be one of form alone",
    (-1, 1): "The form was lost, and the answers got better",
    (0, 1): "The answers got better, though by the tags that cannot be said",
    (0, -1): "The answers got worse, though by the tags that cannot be said",
}
"""By the directions of both readings, strict first."""


def _direction(count: int) -> str:
    return "more" if count > 0 else "fewer"


def _signed(count: int) -> str:
    return f"{abs(count):,} {_direction(count)}" if count else "none"


def p_words(p_value: float) -> str:
    """Two digits, and as many more as it takes to see on which side of 0.05 it lies."""
    if p_value < 0.0001:
        return "p < 0.0001"
    digits = 2
    while p_value != CHANCE == float(f"{p_value:.{digits}g}"):
        digits += 1
    return f"p = {p_value:.{digits}g}"


def change_of(before: Sequence[bool], after: Sequence[bool], *, seed: int = 0) -> Change:
    """Verdicts on the same questions, in the same order. The seed is fixed: the same answers give the same words.

    The interval has the outer ends of the paired bootstrap and of the score interval. The bootstrap alone holds the true gain
    in 83 to 93 of 100 cases, and not in 95, where fewer than ten answers change; with many, the two hardly differ.
    """
    drawn = paired_bootstrap(before, after, seed=seed)
    pairs = Counter(zip(before, after, strict=True))
    gained, lost = pairs[False, True], pairs[True, False]
    scored = paired_score(gained, lost, len(before))
    interval = Interval(
        low=min(drawn.low, scored.low), high=max(drawn.high, scored.high), method=f"{drawn.method} and {scored.method}"
    )
    return Change(items=len(before), right=sum(after), interval=interval, mcnemar=mcnemar(gained, lost))

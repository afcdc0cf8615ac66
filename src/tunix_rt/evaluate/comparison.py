"""Paired comparison of two sides that generated from the same prompts: gained, lost, and how much chance alone could explain.

Everything is paired by question. Chance here is which questions are in the eval set: another training or sampling seed is not
in these figures.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.scoring.score import Prediction, require_distinct_ids

LEVEL = 0.95
Z_SQUARED = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
RESAMPLES = 10_000
CHANCE = 0.05
"""A p value from here on is called chance."""
FEWEST_QUESTIONS = 6
"""With fewer, not even all of them gained is beyond chance: 2 x 0.5**6 is 0.03, 2 x 0.5**5 is 0.06."""
NAMES = ("before", "after")

# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `low` to `high`, at confidence `level`. `method` is bootstrap, wilson or score; `a and b` is the union of both."""

    low: float
    high: float
    level: float = LEVEL
    method: str = "bootstrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemar:
    """McNemar's test on the verdicts that changed. `p_value` is exact; `chi_square` is continuity-corrected."""

    gained: int
    lost: int
    p_value: float
    chi_square: float
    chi_square_p_value: float


def mcnemar(gained: int, lost: int) -> McNemar:
    """Two-sided. Of an even split, or where nothing changed, both p values are 1 and the chi-square is 0."""
    if gained < 0 or lost < 0:
        raise InputError(f"{gained} gained and {lost} lost: counts are negative", fix="give counts from 0 on")
    changed, fewer = gained + lost, min(gained, lost)
    # The tail of the binomial in whole numbers: `int / int` is rounded once, however large both are.
    tail, term = 0, 1
    for heads in range(fewer + 1):
        tail += term
        term = term * (changed - heads) // (heads + 1)
    apart = max(abs(gained - lost) - 1, 0)
    chi_square = apart**2 / changed if changed else 0.0
    return McNemar(
        gained=gained,
        lost=lost,
        p_value=1.0 if 2 * fewer >= changed else min(1.0, 2 * tail / 2**changed),
        chi_square=chi_square,
        chi_square_p_value=math.erfc(math.sqrt(chi_square / 2)),
    )


def wilson(right: int, items: int) -> Interval:
    """Wilson's score interval of a rate, 0..1. With nothing or everything right it still has a width."""
    if not 0 <= right <= items or not items:
        raise InputError(
            f"{right} correct of {items} is not a valid accuracy", fix="give a count from 0 to the number of items"
        )
    middle = (right + Z_SQUARED / 2) / (items + Z_SQUARED)
    half = math.sqrt(Z_SQUARED * (right * (items - right) / items + Z_SQUARED / 4)) / (items + Z_SQUARED)
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == items else middle + half
    return Interval(low=low, high=high, method="wilson")


def paired_score(gained: int, lost: int, items: int) -> Interval:
    """Tango's score interval of the gain as a share of `items`: the gains that a score test does not reject.

    Tango, Statistics in Medicine 17 (1998) 891-908. Unlike the bootstrap, it has a width where hardly a verdict changed.
    """
    if min(gained, lost) < 0 or not 0 < items >= gained + lost:
        raise InputError(
            f"{gained} gained and {lost} lost of {items}: not possible", fix="give counts of the same questions"
        )
    low, high = _score_low(gained, lost, items), -_score_low(lost, gained, items)
    return Interval(low=low, high=high, method="score")


def _score_low(gained: int, lost: int, items: int) -> float:
    """Bisection until no float lies between the gains that are rejected and those that are not."""
    rejected, kept = -1.0, (gained - lost) / items
    while rejected < (gain := (rejected + kept) / 2) < kept:
        # The variance of gained less lost, with the share of lost that fits the counts best if the true gain is `gain`.
        slope = (2 * items - gained + lost) * gain - gained - lost
        root = math.sqrt(max(0.0, slope**2 + 8 * items * lost * gain * (1 - gain)))
        variance = (root - slope) / 2 + items * gain * (1 - gain)
        if (gained - lost - items * gain) ** 2 > Z_SQUARED * variance:
            rejected = gain
        else:
            kept = gain
    return rejected


def paired_bootstrap(
    before: Sequence[bool], after: Sequence[bool], *, seed: int, resamples: int = RESAMPLES
) -> Interval:
    """The percentile interval of the mean of `after - before`, questions drawn with replacement. Equal seeds, equal ends.

    One resample is one draw from a multinomial over the values of the difference, so the cost does not grow with the number of
    questions. Where all verdicts changed alike, resampling shows no variance, though the next question may differ: the ends
    are then Wilson's, for the share of questions that may yet behave differently.
    """
    if len(before) != len(after) or not len(before):
        raise InputError(f"{len(before)} verdicts before and {len(after)} after are not pairs", fix="give one of each")
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    values, counts = np.unique(differences, return_counts=True)
    if len(values) == 1:
        gain, other = float(values[0]), wilson(0, len(before)).high
        low, high = (gain if gain < 0 else gain - other), (gain if gain > 0 else gain + other)
        return Interval(low=low, high=high, method="wilson")
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.multinomial(counts.sum(), counts / counts.sum(), size=resamples)
    low, high = np.quantile(drawn @ values / counts.sum(), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(low=float(low), high=float(high))


def p_text(p_value: float) -> str:
    """Two digits, and as many more as it takes to see on which side of 0.05 it lies."""
    if p_value < 0.0001:
        return "p < 0.0001"
    digits = 2
    while p_value != CHANCE == float(f"{p_value:.{digits}g}"):
        digits += 1
    return f"p = {p_value:.{digits}g}"


# --- the change of one reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How the verdicts of one reading (strict or lenient) changed. `interval` is of the gain as a share of all questions."""

    items: int
    right: int
    """On the second side."""
    interval: Interval
    mcnemar: McNemar

    @property
    def net(self) -> int:
        return self.mcnemar.gained - self.mcnemar.lost

    @property
    def ends(self) -> tuple[int, int]:
        """The interval in whole answers, rounded outwards."""
        low, high = (round(end * self.items, 6) for end in (self.interval.low, self.interval.high))
        return math.floor(low), math.ceil(high)

    @property
    def clear(self) -> bool:
        """Whether chance is no good explanation: the interval excludes zero, and McNemar's exact test agrees."""
        low, high = self.ends
        return self.items >= FEWEST_QUESTIONS and not low <= 0 <= high and self.mcnemar.p_value < CHANCE

    @property
    def direction(self) -> int:
        """1 for a clear gain, -1 for a clear loss, 0 where chance may explain it."""
        return (1 if self.net > 0 else -1) if self.clear else 0

    def describe(self, first: str = "before") -> str:
        """`38 of 100 more answers right, between 27 and 49; 2 got worse`. `first` names the side compared with."""
        net = f"as many answers right as {first}, {self.right:,} of {self.items:,}"
        if self.net:
            net = f"{abs(self.net):,} of {self.items:,} {_direction(self.net)} answers right"
        if self.items < FEWEST_QUESTIONS:
            few = "1 question is" if self.items == 1 else f"{self.items} questions are"
            return f"{net}; {self.worse}; {few} too few to exclude chance"
        return f"{net}, {self._between}; {self.worse}"

    @property
    def short(self) -> str:
        """`12 more, between 5 and 19`, to stand beside the description of the other reading."""
        net = f"{abs(self.net):,} {_direction(self.net)}" if self.net else "as many"
        return net if self.items < FEWEST_QUESTIONS else f"{net}, {self._between}"

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
        doubt = "" if self.clear else f", but it could still be chance: {p_text(self.mcnemar.p_value)}"
        return f"between {near:,} and {far:,}{doubt}"


def _direction(count: int) -> str:
    return "more" if count > 0 else "fewer"


def _signed(count: int) -> str:
    return f"{abs(count):,} {_direction(count)}" if count else "none"


def change_of(before: Sequence[bool], after: Sequence[bool], *, seed: int = 0) -> Change:
    """Verdicts on the same questions, in the same order. The seed is fixed: equal verdicts give equal figures.

    The interval is the union of the paired bootstrap and the score interval. Where fewer than ten verdicts change, the
    bootstrap alone covers the true gain in 83 to 93 of 100 cases; where many change, the two hardly differ.
    """
    drawn = paired_bootstrap(before, after, seed=seed)
    pairs = Counter(zip(before, after, strict=True))
    gained, lost = pairs[False, True], pairs[True, False]
    scored = paired_score(gained, lost, len(before))
    interval = Interval(
        low=min(drawn.low, scored.low), high=max(drawn.high, scored.high), method=f"{drawn.method} and {scored.method}"
    )
    return Change(items=len(before), right=sum(after), interval=interval, mcnemar=mcnemar(gained, lost))


_DISAGREEMENT = {
    (1, 0): "The gain may be one of format alone",
    (1, -1): "The format was learned, and the answers got worse",
    (-1, 0): "The loss may be one of format alone",
    (-1, 1): "The format was lost, and the answers got better",
    (0, 1): "The answers got better, though the strict reading does not show it",
    (0, -1): "The answers got worse, though the strict reading does not show it",
}
"""By the directions of both readings, strict first."""

# --- two sides --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: its name, its predictions, and how they were decoded (`max_new_tokens` and the like).

    `is_moment`: the name is `before` or `after` the one training, and not that of a run, which may have that name too.
    """

    name: str
    predictions: Sequence[Prediction]
    decoding: Mapping[str, object] = field(default_factory=dict)
    is_moment: bool = False
    model: str = ""
    """The model, where it is recorded."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """`dtype` and `device` of the computation, where they are recorded."""

    @property
    def with_model(self) -> str:
        """The name, and the model behind it where that has another."""
        return f"{self.name} (the model {self.model})" if self.model not in ("", self.name) else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ids that were gained and lost, in the order of the eval set, and what the change amounts to; strict unless named lenient.

    `names` are those of the two sides; the gains are in percentage points.
    """

    gained: tuple[str, ...]
    lost: tuple[str, ...]
    gain_points: float
    gain_points_lenient: float
    strict: Change
    lenient: Change
    gained_lenient: tuple[str, ...] = ()
    lost_lenient: tuple[str, ...] = ()
    names: tuple[str, str] = NAMES
    of_one_training: bool = False
    """The names are moments of it, and not those of two runs."""
    same_outputs: bool = False
    """Every one of them, character by character."""

    @property
    def items(self) -> int:
        return self.strict.items

    @property
    def changes(self) -> list[tuple[str, tuple[str, ...]]]:
        """Ids that were gained and lost; and the lenient ones, where no strict verdict changed."""
        listed = [("gained", self.gained), ("lost", self.lost)]
        if not (self.gained or self.lost) and (self.gained_lenient or self.lost_lenient):
            listed += [("gained, lenient", self.gained_lenient), ("lost, lenient", self.lost_lenient)]
        return listed

    def describe(self) -> str:
        """One line, without a full stop: the strict reading, then the lenient one. It claims no more than chance allows."""
        first, second = self.names
        strict, lenient = self.strict, self.lenient
        text = ("" if self.of_one_training else f"{second} against {first}: ") + strict.describe(first)
        if verdict := _DISAGREEMENT.get((strict.direction, lenient.direction)):
            return f"{text}. {verdict}; lenient: {lenient.describe(first)}"
        if strict.mcnemar == lenient.mcnemar:
            return f"{text} (lenient: the same)"
        worse = "" if strict.mcnemar.lost == lenient.mcnemar.lost else f"; {lenient.worse}"
        return f"{text} (lenient: {lenient.short}{worse})"


def compare(before: Sequence[Prediction], after: Sequence[Prediction]) -> Comparison:
    """Before against after training, decoded in the same way. See `compare_runs`."""
    first, second = (
        Side(name=name, predictions=side, is_moment=True) for name, side in zip(NAMES, (before, after), strict=True)
    )
    return compare_runs(first, second)


def compare_runs(first: Side, second: Side) -> Comparison:
    """Both sides paired by id. EvidenceError unless questions, expected answers and decoding are the same."""
    _refuse_other_decoding(first, second)
    later = _paired(first, second)
    pairs = [(old, later[old.id]) for old in first.predictions]
    if not pairs:
        raise InputError("there are no predictions to compare", fix="name an eval set with at least one question")
    strict = change_of([old.strict for old, _ in pairs], [new.strict for _, new in pairs])
    lenient = change_of([old.lenient for old, _ in pairs], [new.lenient for _, new in pairs])
    return Comparison(
        gained=tuple(old.id for old, new in pairs if new.strict and not old.strict),
        lost=tuple(old.id for old, new in pairs if old.strict and not new.strict),
        gain_points=100 * strict.net / len(pairs),
        gain_points_lenient=100 * lenient.net / len(pairs),
        strict=strict,
        lenient=lenient,
        gained_lenient=tuple(old.id for old, new in pairs if new.lenient and not old.lenient),
        lost_lenient=tuple(old.id for old, new in pairs if old.lenient and not new.lenient),
        names=(first.name, second.name),
        of_one_training=first.is_moment and second.is_moment,
        same_outputs=all(old.output == new.output for old, new in pairs),
    )


HASHED = {
    "style": "the prompts differ in chat template, system instruction or tags",
    "tokenizer": "the tokenizers differ",
}
"""Settings that are recorded as a hash, and what a difference means."""


def _refuse_other_decoding(first: Side, second: Side) -> None:
    both = first.decoding, second.decoding
    differing = [key for key in sorted({*both[0], *both[1]}) if both[0].get(key) != both[1].get(key)]
    if not differing:
        return
    listed = "; ".join(_difference(key, first, second) for key in differing)
    how = f" (--max-new-tokens {both[1].get('max_new_tokens')})" if "max_new_tokens" in differing else ""
    fixes = [f"evaluate both with the same settings{how}"] if {*differing} - {*HASHED} else []
    if "tokenizer" in differing:
        fixes.append(
            "compare models of one family, a base model and what was trained from it; of models with different tokenizers "
            "only the accuracies over the same questions can be compared"
        )
    elif "style" in differing:
        fixes.append("evaluate both with the same data.chat_template, data.system_instruction and tags (--set)")
    raise EvidenceError(f"{first.name} and {second.name} were decoded differently: {listed}", fix="; ".join(fixes))


def _difference(key: str, first: Side, second: Side) -> str:
    one, other = (str(side.decoding.get(key, "not set")) for side in (first, second))
    if key not in HASHED:
        return f"{key} is {one} in {first.name}, {other} in {second.name}"
    one, other = (text[:12] if re.fullmatch("[0-9a-f]{40,}", text) else text for text in (one, other))
    return f"{HASHED[key]}: {one} in {first.with_model}, {other} in {second.with_model}"


def _paired(first: Side, second: Side) -> dict[str, Prediction]:
    """The second side by id."""
    require_distinct_ids(first.predictions)
    require_distinct_ids(second.predictions)
    later = {item.id: item for item in second.predictions}
    if alone := sorted({item.id for item in first.predictions} ^ later.keys()):
        raise EvidenceError(
            f"{first.name} and {second.name} have different questions: {len(alone)} id(s) on one side only, "
            f"first {alone[0]!r}",
            fix="evaluate both with the same eval set",
        )
    for item in first.predictions:
        if (item.prompt, item.expected) != (later[item.id].prompt, later[item.id].expected):
            raise EvidenceError(
                f"question {item.id!r} has another prompt or expected answer in {second.name} than in {first.name}",
                fix="evaluate both with the same eval set",
            )
    return later

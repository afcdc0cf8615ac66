"""Before against after, or one run against another, question by question: what was gained, what was lost, what it means."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.evaluate.statistics import Change, Interval, McNemar, change_of, p_words, readings_in_words
from tunix_rt.scoring.score import Prediction, Scores, SectionScores, require_distinct_ids

SAMPLES_OF_EACH = 3
NAMES = ("before", "after")
LONGEST_NAME = 11
"""A longer one would not leave the other columns their place in a terminal of 80."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ids by what became of them (by the tags, unless said), in the order of the eval set, and what the change amounts to.

    `names` are those of the two sides; the gains are in points of 100.
    """

    gained: tuple[str, ...]
    lost: tuple[str, ...]
    both_right: tuple[str, ...]
    both_wrong: tuple[str, ...]
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
    """Every one of them, letter by letter."""

    @property
    def items(self) -> int:
        return len(self.gained) + len(self.lost) + len(self.both_right) + len(self.both_wrong)

    @property
    def interval(self) -> Interval:
        """Of the gain by the tags, as a share of all questions."""
        return self.strict.interval

    @property
    def mcnemar(self) -> McNemar:
        return self.strict.mcnemar

    @property
    def changes(self) -> list[tuple[str, tuple[str, ...]]]:
        """Ids that were gained and lost; and those tags apart, where none was by the tags."""
        found = [("gained", self.gained), ("lost", self.lost)]
        if not (self.gained or self.lost) and (self.gained_lenient or self.lost_lenient):
            found += [("gained, tags apart", self.gained_lenient), ("lost, tags apart", self.lost_lenient)]
        return found

    @property
    def sentence(self) -> str:
        """One line for a person, without a full stop: by the tags, and tags apart. It claims no more than chance allows."""
        first, second = self.names
        against = "" if self.of_one_training else f"{second} against {first}: "
        return against + readings_in_words(self.strict, self.lenient, first)

    @property
    def paragraph(self) -> str:
        """The sentence, and how it was found."""
        test, apart = self.mcnemar, self.lenient.mcnemar
        p_apart = "" if test == apart else f" ({p_words(apart.p_value)} tags apart)"
        drawn = (
            "Wilson's formula"
            if self.interval.method.startswith("wilson")
            else "the paired bootstrap over the questions"
        )
        said = (
            f"{self.sentence}. By the tags {test.gained:,} gained and {test.lost:,} lost, McNemar's exact test "
            f"{p_words(test.p_value)}{p_apart}; the {100 * self.interval.level:g} % interval has the outer ends of two: "
            f"{drawn} and Tango's score interval."
        )
        if not self.same_outputs:
            return said
        return (
            f"{said} All outputs are the same on both sides, letter by letter: one evaluation was compared with itself, or "
            "nothing that matters here was changed."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: its name, what it answered, and how it was asked (`max_new_tokens` and the like).

    `is_moment` says that the name is `before` or `after` the one training, and not that of a run, which may be named so too.
    """

    name: str
    predictions: Sequence[Prediction]
    decoding: Mapping[str, object] = field(default_factory=dict)
    is_moment: bool = False
    model: str = ""
    """What was asked, where that was written down."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """`dtype` and `device` that the answers were computed in and on, where they were written down."""

    @property
    def with_model(self) -> str:
        """The name, and the model behind it where that has another."""
        return f"{self.name} (the model {self.model})" if self.model not in ("", self.name) else self.name


def compare(before: Sequence[Prediction], after: Sequence[Prediction]) -> Comparison:
    """Before against after training, asked in the same way. See `compare_runs`."""
    first, second = (
        Side(name=name, predictions=found, is_moment=True) for name, found in zip(NAMES, (before, after), strict=True)
    )
    return compare_runs(first, second)


def compare_runs(first: Side, second: Side) -> Comparison:
    """Both sides paired by id. EvidenceError unless they were asked the same questions, with the same expected answers,
    in the same way."""
    _refuse_other_decoding(first, second)
    later = _paired(first, second)
    before = first.predictions
    if not before:
        raise InputError("there are no predictions to compare", fix="name an eval set with at least one question")
    after = [later[item.id] for item in before]
    pairs = list(zip(before, after, strict=True))

    def ids(was: bool, became: bool) -> tuple[str, ...]:
        return tuple(old.id for old, new in pairs if (old.strict, new.strict) == (was, became))

    by_tags = change_of([item.strict for item in before], [item.strict for item in after])
    tags_apart = change_of([item.lenient for item in before], [item.lenient for item in after])
    return Comparison(
        gained=ids(False, True),
        lost=ids(True, False),
        both_right=ids(True, True),
        both_wrong=ids(False, False),
        gain_points=100 * by_tags.net / len(before),
        gain_points_lenient=100 * tags_apart.net / len(before),
        strict=by_tags,
        lenient=tags_apart,
        gained_lenient=tuple(old.id for old, new in pairs if new.lenient and not old.lenient),
        lost_lenient=tuple(old.id for old, new in pairs if old.lenient and not new.lenient),
        names=(first.name, second.name),
        of_one_training=first.is_moment and second.is_moment,
        same_outputs=all(old.output == new.output for old, new in pairs),
    )


HASHED = {
    "style": "the prompts are written in another way (chat template, system instruction or tags)",
    "tokenizer": "the tokenizers are not the same",
}
"""Settings that are kept as a hash, in words for where they differ."""
SHORT_HASH = 12


def _refuse_other_decoding(first: Side, second: Side) -> None:
    keys = sorted({*first.decoding, *second.decoding})
    differing = [key for key in keys if first.decoding.get(key) != second.decoding.get(key)]
    if not differing:
        return
    told = "; ".join(_difference(key, first, second) for key in differing)
    fixes = ["evaluate both with the same settings"] if {*differing} - {*HASHED} else []
    if "tokenizer" in differing:
        fixes.append(
            "compare models of one family, a base model and what was trained from it: models with tokenizers of their own "
            "are never asked the same, so only the accuracies of each, over the same questions, can be set side by side"
        )
    elif "style" in differing:
        fixes.append("evaluate both with the same data.chat_template, data.system_instruction and tags (--set)")
    raise EvidenceError(f"{first.name} and {second.name} were not asked in the same way: {told}", fix="; ".join(fixes))


def _difference(key: str, first: Side, second: Side) -> str:
    one, other = (str(side.decoding.get(key, "not set")) for side in (first, second))
    if key not in HASHED:
        return f"{key} is {one} in {first.name}, {other} in {second.name}"
    return f"{HASHED[key]}: {_short(one)} in {first.with_model}, {_short(other)} in {second.with_model}"


def _short(told: str) -> str:
    return told[:SHORT_HASH] if re.fullmatch("[0-9a-f]{40,}", told) else told


def _paired(first: Side, second: Side) -> dict[str, Prediction]:
    """The second side by id."""
    require_distinct_ids(first.predictions)
    require_distinct_ids(second.predictions)
    earlier = {item.id: item for item in first.predictions}
    later = {item.id: item for item in second.predictions}
    if alone := sorted(earlier.keys() ^ later.keys()):
        raise EvidenceError(
            f"{first.name} and {second.name} were asked different questions: {len(alone)} id(s) on one side only, "
            f"first {alone[0]!r}",
            fix="evaluate both with the same eval set",
        )
    for key, item in earlier.items():
        if (item.prompt, item.expected) != (later[key].prompt, later[key].expected):
            raise EvidenceError(
                f"question {key!r} has another prompt or expected answer in {second.name} than in {first.name}",
                fix="evaluate both with the same eval set",
            )
    return later


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the before/after table. Without a `unit`, values are rates 0..1 and the gain is in points of 100.

    `items` is what the values are out of; where the second side has another number of them, that is `items_after`.
    """

    measure: str
    items: int
    before: float
    after: float | None = None
    gain_points: float | None = None
    unit: str | None = None
    items_after: int | None = None

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Measure, what it is out of, both values and the gain, as they are shown; what is not there is empty."""
        of = f"{self.items:,}" if self.items_after is None else f"{self.items:,} and {self.items_after:,}"
        gain = "" if self.gain_points is None else f"{round(self.gain_points, 1) + 0.0:+.1f}"  # never -0.0
        if self.unit is not None and self.after is not None:
            gain = f"{round(self.after - self.before, 1) + 0.0:+.1f} {self.unit}"
        return self.measure, of, self._shown(self.before), self._shown(self.after), gain

    def _shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{100 * value:.1f} %" if self.unit is None else f"{value:.1f}"


def table(before: Scores, after: Scores | None = None) -> list[Row]:
    """Accuracy by the tags, tags apart, format rate; what was counted in the outputs; then the accuracy of every section,
    category and difficulty, where there are several (by the tags, unless the row says otherwise). What one side did not
    count has no row."""
    sides = [before] if after is None else [before, after]
    rows = [
        _row("accuracy, by the tags", before.items, [side.accuracy for side in sides]),
        _row("accuracy, tags apart", before.items, [side.accuracy_lenient for side in sides]),
        _row("well-formed", before.items, [side.format_rate for side in sides]),
        *_counted(sides),
    ]
    for name, groups in _groups(sides, "section", [side.by_section for side in sides]):
        rows.append(_row(f"section {name}", groups[0].items, [group.accuracy for group in groups]))
        rows.append(_row(f"section {name}, tags apart", groups[0].items, [group.accuracy_lenient for group in groups]))
    for kind, by_name in (
        ("category", [side.by_category for side in sides]),
        ("difficulty", [side.by_difficulty for side in sides]),
    ):
        for name, groups in _groups(sides, kind, by_name):
            rows.append(_row(f"{kind} {name}", groups[0].items, [group.accuracy for group in groups]))
    return rows


def _counted(sides: Sequence[Scores]) -> Iterator[Row]:
    """What the outputs were like. Scores written before this was counted have no `ended`."""
    if not all(side.ended for side in sides):
        return
    items = sides[0].items
    # Not "reasoning": where there is no such block, all that stands before the answer is counted.
    yield _row("words before the answer", items, [side.mean_reasoning_words for side in sides], unit="words")
    yield _row("equations per answer", items, [side.equations / side.items for side in sides], unit="eq.")
    if all(side.equations for side in sides):
        yield _share("equations right", [(side.equations_right, side.equations) for side in sides])
    known = [side.items - side.ended.get("unknown", 0) for side in sides]
    if all(known):
        by_itself = [side.ended.get("stop", 0) + side.ended.get("tag", 0) for side in sides]
        yield _share("ended by itself", list(zip(by_itself, known, strict=True)))


def _share(measure: str, counts: Sequence[tuple[int, int]]) -> Row:
    """Of so many out of so many, which need not be the same number on both sides."""
    row = _row(measure, counts[0][1], [count / of for count, of in counts])
    return row if counts[0][1] == counts[-1][1] else replace(row, items_after=counts[-1][1])


def _groups(
    sides: Sequence[Scores], kind: str, by_name: Sequence[Mapping[str, SectionScores]]
) -> Iterator[tuple[str, list[SectionScores]]]:
    """Each name with its scores on every side. None where there is one name only: it would repeat the first rows."""
    if not all(by_name):
        return
    if any(groups.keys() != by_name[0].keys() for groups in by_name):
        names = " and ".join(side.when for side in sides)
        raise EvidenceError(f"{names} differ in {kind}", fix="evaluate both with the same eval set")
    for name in by_name[0] if len(by_name[0]) > 1 else ():
        yield name, [groups[name] for groups in by_name]


def _row(measure: str, items: int, values: Sequence[float], *, unit: str | None = None) -> Row:
    """`values` is before, or before and after."""
    before, after = values[0], values[1] if len(values) > 1 else None
    gain = None if after is None or unit is not None else 100 * (after - before)
    return Row(measure=measure, items=items, before=before, after=after, gain_points=gain, unit=unit)


def headings(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of the columns, and the lines under the table that explain them. Long names become A and B."""
    long = any(len(name) > LONGEST_NAME for name in names)
    letters = "AB"[: len(names)]
    legend = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=True)] if long else []
    return ["measure", "out of", *(letters if long else names), "gain, points"], legend


def rows_markdown(rows: Sequence[Row], names: tuple[str, str] = NAMES) -> str:
    """The table for a Markdown file."""
    cells = [("measure", "out of", *names, "gain, points"), ("---", *["---:"] * 4), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in cells)


def _cell(text: str) -> str:
    """Without a bar that would end the cell; one that is escaped already stays so."""
    return re.sub(r"(?<!\\)\|", r"\|", " ".join(text.split()))


def remarks(
    *scores: Scores,
    names: Sequence[str] = NAMES,
    weights: Sequence[str] = (),
    tokens_setting: str = "--max-new-tokens",
    time_setting: str = "--max-seconds",
) -> list[str]:
    """What to know before the table is believed, one line for each side that needs one. `weights` are those of the sides."""
    lines = []
    for side, name, kind in zip_longest(scores, names[: len(scores)], weights[: len(scores)]):
        cut, late, full = (side.ended.get(end, 0) for end in ("length", "time", "context"))
        found = []
        if cut:
            found.append(f"{_answers(cut, side.items)} cut at the most tokens allowed (raise {tokens_setting})")
        if late:
            found.append(f"{_answers(late, side.items)} cut when the time was over (raise {time_setting})")
        if full:
            found.append(f"{_answers(full, side.items)} cut, or never begun, because the model's context was full")
        if kind == "random":
            found.append("the weights are random, so these figures say nothing about a trained model")
        if found:
            lines.append(f"{name}: " * (len(scores) > 1) + "; ".join(found))
    return lines


def computing_remarks(first: Side, second: Side) -> list[str]:
    """One line where both say in which type, or on which device, they were computed, and it is not the same."""
    told = "; ".join(
        f"{key} is {first.computed[key]} in {first.name}, {second.computed[key]} in {second.name}"
        for key in ("dtype", "device")
        if key in first.computed and key in second.computed and first.computed[key] != second.computed[key]
    )
    return [f"not computed alike: {told}. A near tie may fall the other way for that alone"] if told else []


def _answers(count: int, items: int) -> str:
    return f"{count:,} of {items:,} answer{'s were' if items > 1 else ' was'}"


def comparison_markdown(comparison: Comparison, rows: Sequence[Row]) -> str:
    """A page of its own: the paragraph, the table, and every id that was gained or lost."""
    comparison = _in_markdown(comparison)
    first, second = comparison.names
    parts = [f"# {second} against {first}", comparison.paragraph, rows_markdown(rows, comparison.names)]
    for title, ids in comparison.changes:
        parts += [
            f"## {title.capitalize()}: {len(ids):,} of {comparison.items:,}",
            ", ".join(map(_code, ids)) or "None.",
        ]
    return "\n\n".join(parts) + "\n"


def samples_markdown(before: Sequence[Prediction], after: Sequence[Prediction], comparison: Comparison) -> str:
    """The text of `samples.md`: the first three gained, lost and unchanged answers. Not chosen: eval set order."""
    earlier, later = {item.id: item for item in before}, {item.id: item for item in after}
    changed = {key for _, ids in comparison.changes for key in ids}
    kinds = [*comparison.changes, ("unchanged", tuple(item.id for item in before if item.id not in changed))]
    comparison = _in_markdown(comparison)
    title = "before and after training" if comparison.of_one_training else f"of {' and '.join(comparison.names)}"
    parts = [f"# Samples {title}", comparison.paragraph]
    names = [name.capitalize() if comparison.of_one_training else name for name in comparison.names]
    for kind, ids in kinds:
        parts.append(f"## {kind.capitalize()}: {len(ids):,} of {comparison.items:,}")
        parts += [_sample(earlier[key], later[key], names) for key in ids[:SAMPLES_OF_EACH]] or ["None."]
    return "\n\n".join(parts) + "\n"


def _sample(before: Prediction, after: Prediction, names: Sequence[str]) -> str:
    first, second = names
    return "\n\n".join(
        [
            f"### {_code(before.id)}",
            _fenced(before.prompt),
            f"Expected: {_code(before.expected)}",
            f"{first} ({_verdict(before)}):",
            _fenced(before.output),
            f"{second} ({_verdict(after)}):",
            _fenced(after.output),
        ]
    )


def _in_markdown(comparison: Comparison) -> Comparison:
    """With names on one line, in which nothing is taken for Markdown."""
    first, second = (re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(name.split())) for name in comparison.names)
    return replace(comparison, names=(first, second))


def _verdict(item: Prediction) -> str:
    if item.strict:
        return "right"
    return "right value, wrong form" if item.lenient else "wrong"


def _fenced(text: str) -> str:
    """`text` as a code block; the fence is longer than any run of backticks inside, so nothing can close it early."""
    if not text.strip():
        return "*nothing but white space*" if text else "*nothing*"
    fence = "`" * max(3, 1 + _longest_backticks(text))
    return f"{fence}text\n{text}\n{fence}"


def _code(text: str) -> str:
    mark = "`" * (1 + _longest_backticks(text))
    return f"{mark} {' '.join(text.split())} {mark}"


def _longest_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)

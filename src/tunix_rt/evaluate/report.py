"""Scores and comparisons for a reader: the table, the remarks under it, the Markdown pages, `eval_summary.json`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from tunix_rt.errors import EvidenceError
from tunix_rt.evaluate.comparison import LEVEL, NAMES, Change, Comparison, Side, p_text
from tunix_rt.scoring.score import Prediction, Scores, SectionScores
from tunix_rt.storage import to_plain

SUMMARY_SCHEMA = "tunix-rt/eval-summary/1"
SAMPLES_OF_EACH = 3
LONGEST_NAME = 11
"""A longer one leaves the other columns too little room in a terminal of 80."""

# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the before/after table. Without a `unit`, values are rates 0..1 and the gain is in percentage points.

    `items` is the denominator; where the second side has another one, that is `items_after`.
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
        """Measure, denominator, both values and the gain as they are shown; a missing one is empty."""
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
    """Strict and lenient accuracy, format rate; counts over the outputs; then the accuracy of every section, category and
    difficulty, where there are several (strict, unless the row is named lenient). What one side did not count has no row."""
    sides = [before] if after is None else [before, after]
    rows = [
        _row("accuracy, strict", before.items, [side.accuracy for side in sides]),
        _row("accuracy, lenient", before.items, [side.accuracy_lenient for side in sides]),
        _row("well-formed", before.items, [side.format_rate for side in sides]),
        *_counted(sides),
    ]
    for kind in ("section", "category", "difficulty"):
        for name, groups in _groups(sides, kind):
            items = groups[0].items
            rows.append(_row(f"{kind} {name}", items, [group.accuracy for group in groups]))
            if kind == "section":
                rows.append(_row(f"section {name}, lenient", items, [group.accuracy_lenient for group in groups]))
    return rows


def _counted(sides: Sequence[Scores]) -> Iterator[Row]:
    """Counts over the outputs. Scores of the first schema have no `ended`."""
    if not all(side.ended for side in sides):
        return
    items = sides[0].items
    # Not "reasoning": where there is no such block, everything before the answer is counted.
    yield _row("words before the answer", items, [side.mean_reasoning_words for side in sides], unit="words")
    yield _row("equations per answer", items, [side.equations / side.items for side in sides], unit="eq.")
    if all(side.equations for side in sides):
        yield _share("equations right", [(side.equations_right, side.equations) for side in sides])
    known = [side.items - side.ended.get("unknown", 0) for side in sides]
    if all(known):
        by_itself = [side.ended.get("stop", 0) + side.ended.get("tag", 0) for side in sides]
        yield _share("ended by itself", list(zip(by_itself, known, strict=True)))


def _share(measure: str, counts: Sequence[tuple[int, int]]) -> Row:
    """From (numerator, denominator) of each side."""
    row = _row(measure, counts[0][1], [count / of for count, of in counts])
    return row if counts[0][1] == counts[-1][1] else replace(row, items_after=counts[-1][1])


def _groups(sides: Sequence[Scores], kind: str) -> Iterator[tuple[str, list[SectionScores]]]:
    """Each name with its scores on every side. None where there is one name only: it would repeat the first rows."""
    by_name: list[Mapping[str, SectionScores]] = [getattr(side, f"by_{kind}") for side in sides]
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
    """The names of the columns, and the legend under the table. Long names become A and B."""
    long = any(len(name) > LONGEST_NAME for name in names)
    letters = "AB"[: len(names)]
    legend = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=True)] if long else []
    return ["measure", "out of", *(letters if long else names), "gain, points"], legend


# --- remarks ----------------------------------------------------------------------------------------------------------


def paragraph(comparison: Comparison) -> str:
    """The description of a comparison, and how it was computed."""
    test, other = comparison.strict.mcnemar, comparison.lenient.mcnemar
    p_lenient = "" if test == other else f" (lenient {p_text(other.p_value)})"
    alike = comparison.strict.interval.method.startswith("wilson")
    text = (
        f"{comparison.describe()}. Strict: {test.gained:,} gained and {test.lost:,} lost, McNemar's exact test "
        f"{p_text(test.p_value)}{p_lenient}; the {100 * LEVEL:g} % interval is the union of two: "
        f"{'Wilson' if alike else 'the paired bootstrap over the questions'} and Tango's score interval."
    )
    if not comparison.same_outputs:
        return text
    return (
        f"{text} All outputs are identical on both sides: one evaluation was compared with itself, or nothing that matters "
        "here was changed."
    )


def remarks(
    *scores: Scores,
    names: Sequence[str] = NAMES,
    weights: Sequence[str] = (),
    tokens_setting: str = "--max-new-tokens",
) -> list[str]:
    """What to know before believing the table, one line for each side that needs one. `weights` are those of the sides."""
    lines = []
    for side, name, kind in zip_longest(scores, names[: len(scores)], weights[: len(scores)]):
        limits = {
            "length": f"cut at the most tokens allowed (raise {tokens_setting})",
            "time": "cut at the time limit (raise --max-seconds)",
            "context": "cut, or never begun, because the model's context was full",
        }
        cut = {how: side.ended.get(how, 0) for how in limits}
        plural = "s were" if side.items > 1 else " was"
        parts = [f"{count:,} of {side.items:,} answer{plural} {limits[how]}" for how, count in cut.items() if count]
        if kind == "random":
            parts.append("the weights are random: these figures do not describe a trained model")
        if parts:
            lines.append(f"{name}: " * (len(scores) > 1) + "; ".join(parts))
    return lines


def computing_remarks(first: Side, second: Side) -> list[str]:
    """One line where dtype or device of both sides are recorded and differ."""
    differing = "; ".join(
        f"{key} is {first.computed[key]} in {first.name}, {second.computed[key]} in {second.name}"
        for key in ("dtype", "device")
        if key in first.computed and key in second.computed and first.computed[key] != second.computed[key]
    )
    return [f"computed differently: {differing}. That alone may decide a near tie"] if differing else []


# --- eval_summary.json ------------------------------------------------------------------------------------------------


def summary_of(
    before: Scores, after: Scores | None = None, comparison: Comparison | None = None, **facts: Any
) -> dict[str, Any]:
    """Scores of one side or of both, their comparison, and the facts that decide whether it can be compared with others."""
    summary: dict[str, Any] = {"schema": SUMMARY_SCHEMA, **facts, before.when: to_plain(before)}
    if after is not None and comparison is not None:
        summary[after.when] = to_plain(after)
        summary["comparison"] = comparison_facts(comparison)
    return summary


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """A comparison as `eval_summary.json` has it: nothing in it that the predictions of both sides do not give again.

    The values beside `strict` and `lenient` repeat the strict ones, unless named lenient.
    """
    strict = _change_facts(comparison.strict, comparison.gained, comparison.lost)
    return {
        "sentence": comparison.describe(),
        **{key: strict[key] for key in ("items", "gained", "lost", "interval", "mcnemar")},
        "gain_points": comparison.gain_points,
        "gain_points_lenient": comparison.gain_points_lenient,
        "strict": strict,
        "lenient": _change_facts(comparison.lenient, comparison.gained_lenient, comparison.lost_lenient),
    }


def _change_facts(change: Change, gained: Sequence[str], lost: Sequence[str]) -> dict[str, Any]:
    return {
        "items": change.items,
        "gained": list(gained),
        "lost": list(lost),
        "net": change.net,
        "interval": to_plain(change.interval),
        "mcnemar": to_plain(change.mcnemar),
    }


# --- Markdown ---------------------------------------------------------------------------------------------------------


def rows_markdown(rows: Sequence[Row], names: tuple[str, str] = NAMES) -> str:
    """The table for a Markdown file."""
    cells = [("measure", "out of", *names, "gain, points"), ("---", *["---:"] * 4), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in cells)


def _cell(text: str) -> str:
    """With bars escaped, once."""
    return re.sub(r"(?<!\\)\|", r"\|", " ".join(text.split()))


def comparison_markdown(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The text of `comparison.md`: the paragraph, the table, and every id that was gained or lost."""
    comparison = _escaped(comparison)
    first, second = comparison.names
    parts = [f"# {second} against {first}", paragraph(comparison), rows_markdown(rows, comparison.names)]
    for title, ids in comparison.changes:
        parts += [
            f"## {title.capitalize()}: {len(ids):,} of {comparison.items:,}",
            ", ".join(map(_code, ids)) or "None.",
        ]
    return "\n\n".join(parts) + "\n"


def samples_markdown(before: Sequence[Prediction], after: Sequence[Prediction], comparison: Comparison) -> str:
    """The text of `samples.md`: the first three gained, lost and unchanged answers, in eval set order."""
    earlier, later = {item.id: item for item in before}, {item.id: item for item in after}
    changed = {key for _, ids in comparison.changes for key in ids}
    kinds = [*comparison.changes, ("unchanged", tuple(item.id for item in before if item.id not in changed))]
    comparison = _escaped(comparison)
    title = "before and after training" if comparison.of_one_training else f"of {' and '.join(comparison.names)}"
    parts = [f"# Samples {title}", paragraph(comparison)]
    names = [name.capitalize() if comparison.of_one_training else name for name in comparison.names]
    for kind, ids in kinds:
        parts.append(f"## {kind.capitalize()}: {len(ids):,} of {comparison.items:,}")
        parts += [_sample(earlier[key], later[key], names) for key in ids[:SAMPLES_OF_EACH]] or ["None."]
    return "\n\n".join(parts) + "\n"


def _sample(before: Prediction, after: Prediction, names: Sequence[str]) -> str:
    parts = [f"### {_code(before.id)}", _fenced(before.prompt), f"Expected: {_code(before.expected)}"]
    for name, item in zip(names, (before, after), strict=True):
        verdict = "right" if item.strict else "right value, wrong format" if item.lenient else "wrong"
        parts += [f"{name} ({verdict}):", _fenced(item.output)]
    return "\n\n".join(parts)


def _escaped(comparison: Comparison) -> Comparison:
    """With names on one line, in which nothing is taken for Markdown."""
    first, second = (re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(name.split())) for name in comparison.names)
    return replace(comparison, names=(first, second))


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

"""Before against after, question by question: what was gained, what was lost, and samples a person can read."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.evaluate.score import Prediction, Scores, require_distinct_ids

SAMPLES_OF_EACH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ids by what became of them (by the tags), in the order of the eval set, and the gain in points of 100."""

    gained: tuple[str, ...]
    lost: tuple[str, ...]
    both_right: tuple[str, ...]
    both_wrong: tuple[str, ...]
    gain_points: float
    gain_points_lenient: float

    @property
    def items(self) -> int:
        return len(self.gained) + len(self.lost) + len(self.both_right) + len(self.both_wrong)

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return (
            f"{len(self.gained)} of {self.items} more answers right; {len(self.lost)} got worse "
            f"({self.gain_points:+.1f} points by the tags, {self.gain_points_lenient:+.1f} tags apart)"
        )


def compare(before: Sequence[Prediction], after: Sequence[Prediction]) -> Comparison:
    """Both sets paired by id. EvidenceError unless they ask the same questions with the same expected answers."""
    later = _paired(before, after)
    if not before:
        raise InputError("there are no predictions to compare", fix="name an eval set with at least one question")
    fates: dict[tuple[bool, bool], list[str]] = {}
    for item in before:
        fates.setdefault((item.strict, later[item.id].strict), []).append(item.id)
    return Comparison(
        gained=tuple(fates.get((False, True), ())),
        lost=tuple(fates.get((True, False), ())),
        both_right=tuple(fates.get((True, True), ())),
        both_wrong=tuple(fates.get((False, False), ())),
        gain_points=_points(item.strict for item in after) - _points(item.strict for item in before),
        gain_points_lenient=_points(item.lenient for item in after) - _points(item.lenient for item in before),
    )


def _paired(before: Sequence[Prediction], after: Sequence[Prediction]) -> dict[str, Prediction]:
    """`after` by id."""
    require_distinct_ids(before)
    require_distinct_ids(after)
    earlier, later = {item.id: item for item in before}, {item.id: item for item in after}
    if alone := sorted(earlier.keys() ^ later.keys()):
        raise EvidenceError(
            f"before and after were asked different questions: {len(alone)} id(s) on one side only, first {alone[0]!r}",
            fix="evaluate both with the same eval set",
        )
    for key, item in earlier.items():
        if (item.prompt, item.expected) != (later[key].prompt, later[key].expected):
            raise EvidenceError(
                f"question {key!r} has another prompt or expected answer after than before",
                fix="evaluate both with the same eval set",
            )
    return later


def _points(verdicts: Iterable[bool]) -> float:
    judged = list(verdicts)
    return 100 * sum(judged) / len(judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the before/after table. Rates are 0..1; without an `after`, neither it nor the gain is there."""

    measure: str
    items: int
    before: float
    after: float | None = None
    gain_points: float | None = None


def table(before: Scores, after: Scores | None = None) -> list[Row]:
    """Accuracy by the tags, tags apart, format rate; then both accuracies of every section, if there are several."""
    rows = [
        _row("accuracy, by the tags", before.items, before.accuracy, after.accuracy if after else None),
        _row("accuracy, tags apart", before.items, before.accuracy_lenient, after.accuracy_lenient if after else None),
        _row("well-formed", before.items, before.format_rate, after.format_rate if after else None),
    ]
    if after is not None and before.by_section.keys() != after.by_section.keys():
        raise EvidenceError("before and after have different sections", fix="evaluate both with the same eval set")
    for name, old in before.by_section.items() if len(before.by_section) > 1 else ():
        new = after.by_section[name] if after is not None else None
        rows.append(_row(f"{name}, by the tags", old.items, old.accuracy, new.accuracy if new else None))
        rows.append(_row(f"{name}, tags apart", old.items, old.accuracy_lenient, new.accuracy_lenient if new else None))
    return rows


def _row(measure: str, items: int, before: float, after: float | None) -> Row:
    gain = None if after is None else 100 * (after - before)
    return Row(measure=measure, items=items, before=before, after=after, gain_points=gain)


def samples_markdown(before: Sequence[Prediction], after: Sequence[Prediction], comparison: Comparison) -> str:
    """The text of `samples.md`: the first three gained, lost and unchanged answers. Not chosen: eval set order."""
    earlier, later = {item.id: item for item in before}, {item.id: item for item in after}
    changed = {*comparison.gained, *comparison.lost}
    kinds = {
        "Gained": comparison.gained,
        "Lost": comparison.lost,
        "Unchanged": tuple(item.id for item in before if item.id not in changed),
    }
    parts = ["# Samples before and after training", f"{comparison.sentence}."]
    for title, ids in kinds.items():
        parts.append(f"## {title}: {len(ids)} of {comparison.items}")
        parts += [_sample(earlier[key], later[key]) for key in ids[:SAMPLES_OF_EACH]] or ["None."]
    return "\n\n".join(parts) + "\n"


def _sample(before: Prediction, after: Prediction) -> str:
    return "\n\n".join(
        [
            f"### {_code(before.id)}",
            _fenced(before.prompt),
            f"Expected: {_code(before.expected)}",
            f"Before ({_verdict(before)}):",
            _fenced(before.output),
            f"After ({_verdict(after)}):",
            _fenced(after.output),
        ]
    )


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


def read_predictions(path: Path) -> list[Prediction]:
    """The lines of an `eval/predictions-*.jsonl`; a bad line is an InputError that names it."""
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(Prediction)
    predictions = []
    try:
        # Not `splitlines`: an output may hold U+2028, which JSON leaves as it is.
        lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", fix="evaluate again") from error
    for number, line in enumerate(lines, start=1):
        try:
            predictions.append(adapter.validate_json(line, strict=True))
        except ValidationError as error:
            raise InputError(f"{path}:{number}: {_first_mistake(error)}", fix="evaluate again") from error
    return predictions


def read_scores(path: Path) -> Scores:
    """The scores in an `eval/before.json` or `eval/after.json`; InputError when they are no such thing."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Scores).validate_python(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise InputError(f"{path}: {_first_mistake(error)}", fix="evaluate again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}", fix="evaluate again") from error


def _first_mistake(error: Any) -> str:
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])

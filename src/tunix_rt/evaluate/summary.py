"""`eval_summary.json`: scores before and after training; predictions and scores read back from a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError, TunixError
from tunix_rt.evaluate.report import NAMES, Comparison, Side
from tunix_rt.evaluate.statistics import Change
from tunix_rt.runs.folder import RunDir
from tunix_rt.scoring.score import Prediction, Scores
from tunix_rt.storage import read_json, to_plain


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


SUMMARY_SCHEMA = "tunix-rt/eval-summary/1"


def summary_of(
    before: Scores, after: Scores | None = None, comparison: Comparison | None = None, **facts: Any
) -> dict[str, Any]:
    """Scores of one side or of both, what became of the answers, and the facts that decide whether it can be compared."""
    said: dict[str, Any] = {"schema": SUMMARY_SCHEMA, **facts, before.when: to_plain(before)}
    if after is not None and comparison is not None:
        said[after.when] = to_plain(after)
        said["comparison"] = comparison_facts(comparison)
    return said


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """A comparison as `eval_summary.json` has it: nothing in it that the predictions of both sides do not give again.

    What stands beside `strict` and `lenient` is by the tags, where it does not say otherwise.
    """
    return {
        "sentence": comparison.sentence,
        "items": comparison.items,
        "gained": list(comparison.gained),
        "lost": list(comparison.lost),
        "gain_points": comparison.gain_points,
        "gain_points_lenient": comparison.gain_points_lenient,
        "interval": to_plain(comparison.interval),
        "mcnemar": to_plain(comparison.mcnemar),
        "strict": _change_facts(comparison.strict, comparison.gained, comparison.lost),
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


def read_side(folder: Path) -> Side:
    """The answers in the folder of a run (those after training) or of `tunix-rt evaluate`, under the folder's name."""
    return _side(folder, folder.name or str(folder), "after", "answers")


def read_both(folder: Path) -> tuple[Side, Side]:
    """The two sides that one folder holds: before and after training, or the two models of `tunix-rt evaluate --against`."""
    if not RunDir(folder).predictions("base").is_file():
        before, after = NAMES
        return (
            _side(folder, before, "before", is_moment=True),
            _side(folder, after, "after", is_moment=True),
        )
    first, second = _models(RunDir(folder)) or ("base", folder.name or str(folder))
    return _side(folder, first, "base"), _side(folder, second, "answers")


def _side(folder: Path, name: str, *whens: str, is_moment: bool = False) -> Side:
    run = RunDir(folder)
    path = next((path for when in whens if (path := run.predictions(when)).is_file()), None)
    if path is None:
        raise InputError(
            f"{folder} holds no answers to compare (no {' or '.join(run.predictions(when).name for when in whens)})",
            fix="name the folder of a finished `tunix-rt train`, or the --output of `tunix-rt evaluate`",
        )
    return Side(
        name=name,
        predictions=read_predictions(path),
        decoding=_decoding(run),
        is_moment=is_moment,
        model=_model(run, first=whens[0] == "base"),
        computed=_computed(run),
    )


def _models(run: RunDir) -> tuple[str, str] | None:
    """The names of the two that were asked, where they were written down and differ."""
    match _summary(run):
        case {"models": [str(first), str(second)]} if first != second:
            return first, second
    return None


def _model(run: RunDir, *, first: bool) -> str:
    """What was asked: of two models the one that was compared against is the first. A run names the model it began with."""
    match _summary(run):
        case {"models": [str(only)]}:
            return only
        case {"models": [str(base), str(model)]}:
            return base if first else model
    return ""


def _computed(run: RunDir) -> dict[str, str]:
    """The type and the device of the answers, as far as they were written down; those of two models are the same."""
    summary = _summary(run)
    return {key: value for key in ("dtype", "device") if isinstance(value := summary.get(key), str)}


def _summary(run: RunDir) -> dict[str, Any]:
    found = read_json(run.eval_summary) if run.eval_summary.is_file() else {}
    return found if isinstance(found, dict) else {}


def _decoding(run: RunDir) -> dict[str, Any]:
    """How the model was asked; nothing is known of a run from before that was written down."""
    if not run.eval_summary.is_file():
        return {}
    summary = read_json(run.eval_summary)
    try:
        return dict(summary["decoding"])
    except (KeyError, TypeError, ValueError) as error:
        raise TunixError(f"{run.eval_summary} does not say how the model was asked", fix="evaluate again") from error

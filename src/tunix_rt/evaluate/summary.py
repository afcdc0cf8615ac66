"""`eval_summary.json`: what an evaluation found, in one file; and the sides of a comparison, read back from folders."""

from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError, TunixError
from tunix_rt.evaluate.report import Comparison, Side, read_predictions
from tunix_rt.evaluate.score import Scores
from tunix_rt.rundir import RunDir, read_json, to_plain

SUMMARY_SCHEMA = "tunix-rt/eval-summary/1"


def summary_of(
    before: Scores, after: Scores | None = None, comparison: Comparison | None = None, **facts: Any
) -> dict[str, Any]:
    """Scores of one side or of both, what became of the answers, and the facts that decide whether it can be compared."""
    said: dict[str, Any] = {"schema": SUMMARY_SCHEMA, **facts, before.when: to_plain(before)}
    if after is not None and comparison is not None:
        said[after.when] = to_plain(after)
        said["comparison"] = {
            "sentence": comparison.sentence,
            "items": comparison.items,
            "gained": list(comparison.gained),
            "lost": list(comparison.lost),
            "gain_points": comparison.gain_points,
            "gain_points_lenient": comparison.gain_points_lenient,
            "interval": to_plain(comparison.interval),
            "mcnemar": to_plain(comparison.mcnemar),
        }
    return said


def read_side(folder: Path) -> Side:
    """The answers in the folder of a run (those after training) or of `tunix-rt evaluate`, under the folder's name."""
    return _side(folder, folder.name or str(folder), "after", "answers")


def read_before(folder: Path) -> Side:
    """What the base model answered: before training, or as the one compared against."""
    return _side(folder, "before", "before", "base")


def _side(folder: Path, name: str, *whens: str) -> Side:
    run = RunDir(folder)
    path = next((path for when in whens if (path := run.predictions(when)).is_file()), None)
    if path is None:
        raise InputError(
            f"{folder} holds no answers to compare (no {' or '.join(run.predictions(when).name for when in whens)})",
            fix="name the folder of a finished `tunix-rt train`, or the --output of `tunix-rt evaluate`",
        )
    return Side(name=name, predictions=read_predictions(path), decoding=_decoding(run))


def _decoding(run: RunDir) -> dict[str, Any]:
    """How the model was asked; nothing is known of a run from before that was written down."""
    if not run.eval_summary.is_file():
        return {}
    summary = read_json(run.eval_summary)
    try:
        return dict(summary["decoding"])
    except (KeyError, TypeError, ValueError) as error:
        raise TunixError(f"{run.eval_summary} does not say how the model was asked", fix="evaluate again") from error

"""Predictions and scores, read back from the files of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError
from tunix_rt.evaluate.score import Prediction, Scores


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

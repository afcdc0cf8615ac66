"""Rows of inputs and expected values: those of `test_x.py` are in `test_x.json` beside it."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@functools.cache
def tables(file: str) -> dict[str, Any]:
    """Every table of a test file by its name; call it with `__file__`."""
    return json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))


def parametrize(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrise a test by the table of its name (without `test_`): a list of rows, or lists of them under headings."""

    def parametrised(test: Callable[..., None]) -> Callable[..., None]:
        rows = tables(test.__code__.co_filename)[test.__name__.removeprefix("test_")]
        if isinstance(rows, dict):
            rows = [row for group in rows.values() for row in group]
        return pytest.mark.parametrize(names if len(names) > 1 else names[0], rows)(test)

    return parametrised

"""Look for the questions of an eval set in a whole dataset, in several processes; what was found is kept beside the tokens."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tunix_rt.data.containers import Raw, parse
from tunix_rt.data.formats import to_sample
from tunix_rt.data.overlap import Questions, find_overlap, questions_of
from tunix_rt.data.registry import Dataset, FileRef
from tunix_rt.data.rules import PLACES, Finding
from tunix_rt.data.store import Progress, Reading, processes_for
from tunix_rt.data.tokenise import Recipe
from tunix_rt.data.trace import EvalItem
from tunix_rt.data.workers import in_order

logger = logging.getLogger(__name__)

VERSION = 2
"""Of the comparison in `overlap.py`; what an older one found is not used."""
Found = list[tuple[int, int, str, int, str]]
"""(file, line, rule, item, the words that are shared)"""


def find_leaks(
    recipe: Recipe, kept_in: Path, items: Sequence[EvalItem], evalset: FileRef, progress: Progress
) -> list[Finding]:
    """What the dataset holds of the eval set, one Finding per kind of overlap."""
    kept = kept_in / f"overlap-{VERSION}-{evalset.sha256[:32]}.json"
    matches = _kept(kept)
    if matches is None:
        matches = _look(recipe, items, progress)
        _keep(matches, kept)
    return [
        Finding(
            rule=match["rule"],
            count=match["count"],
            first=recipe.dataset.place(*match["places"][0]),
            seen=f"{evalset.path}:{match['item'] + 1} asks it too ({match['shared']!r})",
            places=tuple(recipe.dataset.place(*place) for place in match["places"]),
        )
        for match in matches
    ]


def _kept(path: Path) -> list[dict[str, Any]] | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return [{name: match[name] for name in ("rule", "count", "places", "item", "shared")} for match in known]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not looked for yet, or damaged: look again


def _keep(matches: list[dict[str, Any]], path: Path) -> None:
    """Write down what was found, by a name of our own first: two programs may do so at once, and with the same result."""
    own = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        own.write_text(json.dumps(matches), encoding="utf-8")
        own.replace(path)
    except OSError as error:  # a cache that can only be read: it is looked for again next time
        logger.info("What was found of the eval set cannot be kept beside the tokens: %s", error)


def _look(recipe: Recipe, items: Sequence[EvalItem], progress: Progress) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    read = Reading(recipe.dataset)
    for part in in_order(
        _look_in,
        read.batches(),
        processes=processes_for(recipe.dataset),
        begin=_begin,
        settings=(recipe.dataset, recipe.format, questions_of(items)),
    ):
        for file, line, rule, item, shared in part:
            first = {"rule": rule, "count": 0, "places": [], "item": item, "shared": shared}
            known = found.setdefault(rule, first)
            known["count"] += 1
            if len(known["places"]) < PLACES:
                known["places"].append([file, line])
        read.tell(progress, "look for evaluation questions", "")
    return list(found.values())


_worker: tuple[Dataset, str, Questions] | None = None


def _begin(dataset: Dataset, format: str, questions: Questions) -> None:
    global _worker
    _worker = (dataset, format, questions)


def _look_in(batch: Iterable[Raw]) -> Found:
    assert _worker is not None, "begun"
    dataset, format, questions = _worker
    found: Found = []
    for raw in batch:
        where = dataset.place(raw.file, raw.line)
        match = find_overlap(to_sample(parse(raw, where), format, where), questions)
        if match is not None:
            found.append((raw.file, raw.line, match.rule, match.item, match.shared))
    return found

"""Contamination: evaluation questions in the training data, verbatim, up to case and punctuation, or as a 13-gram.

Invisible characters and look-alike letters of other alphabets are normalized first."""

import json
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tunix_rt.data.formats import to_sample
from tunix_rt.data.readers import BadRecord, Raw
from tunix_rt.data.records import EvalItem, Sample
from tunix_rt.data.sources import Dataset, FileRef
from tunix_rt.data.text import OVERLAP_WORDS, SHORT_WORDS, Hashes, fold, runs_of, words
from tunix_rt.data.token_cache import Reading, processes_for
from tunix_rt.data.tokenize import Recipe, in_order
from tunix_rt.data.validation import Finding, Tally, findings_of
from tunix_rt.progress import Progress

ZERO_WIDTH_SPACE = "\u200b"
"""Occurs inside a word or between two words."""
_LOOK_ALIKE = dict(
    zip(
        "авеіјкӏмнорԛѕстухѵԁԝһү" + "αβεζηικνορτυχϳ" + "ıɑɡ",
        "abeijklmhopqsctyxvdwhy" + "abezhikvoptyxj" + "iag",
        strict=True,
    )
)
"""Lower-case Cyrillic, Greek and other letters -> the Latin letter that they, or their capitals, look like."""


class _Visible(dict[int, str | None]):
    """Character -> what is visible of it; None for format characters, joiners, variation selectors and fillers."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        hidden = unicodedata.category(character) == "Cf" or code in (0x034F, 0x115F, 0x1160, 0x3164)
        hidden = hidden or 0xFE00 <= code <= 0xFE0F
        seen = character if character == ZERO_WIDTH_SPACE or not hidden else None
        self[code] = seen
        return seen


_VISIBLE = _Visible({ord(foreign): latin for foreign, latin in _LOOK_ALIKE.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of an eval set, indexed for the search. Item numbers count from 0."""

    exact: dict[str, int]
    folded: dict[str, int]
    runs: dict[str, int]
    """13-grams that occur in few questions: one that occurs in many is their common instruction."""
    short: dict[str, list[tuple[str, int]]]
    """First 5 words of a short question -> all questions that begin with them."""
    run_hashes: Hashes
    short_hashes: Hashes
    """Sorted, as a filter in front of the dictionaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One training sample that contains (part of) an evaluation question."""

    rule: str
    item: int
    shared: str


def questions_of(items: Iterable[EvalItem]) -> Questions:
    exact: dict[str, int] = {}
    folded: dict[str, int] = {}
    first_with: dict[str, int] = {}
    how_many: Counter[str] = Counter()
    short: dict[str, list[tuple[str, int]]] = {}
    for number, item in enumerate(items):
        prompt = _as_seen(item.prompt)
        listed = words(prompt)
        whole = fold(prompt)
        exact.setdefault(item.prompt.strip(), number)
        if folded.setdefault(whole, number) != number:
            continue  # a repeated question
        runs = {" ".join(listed[start : start + OVERLAP_WORDS]) for start in range(len(listed) - OVERLAP_WORDS + 1)}
        how_many.update(runs)
        for run in runs:
            first_with.setdefault(run, number)
        if SHORT_WORDS <= len(listed) < OVERLAP_WORDS:
            short.setdefault(" ".join(listed[:SHORT_WORDS]), []).append((whole, number))
    most = max(2, len(folded) // 50)
    runs_kept = {run: number for run, number in first_with.items() if how_many[run] <= most}
    return Questions(
        exact=exact,
        folded=folded,
        runs=runs_kept,
        short=short,
        run_hashes=_hashes(runs_kept, OVERLAP_WORDS),
        short_hashes=_hashes(short, SHORT_WORDS),
    )


def _hashes(runs: Iterable[str], length: int) -> Hashes:
    return np.unique(np.concatenate([runs_of([], length), *(runs_of(run.split(), length) for run in runs)]))


def find_overlap(sample: Sample, questions: Questions) -> Match | None:
    """The strongest match between a sample and an eval set; None without one."""
    prompts = [turn.text for turn in sample.turns if turn.role == "user"]
    for text in prompts:
        if (item := questions.exact.get(text.strip())) is not None:
            return Match(rule="overlap_exact", item=item, shared=text.strip()[:60])
    for whole in (fold(reading) for text in prompts for reading in _readings(text)):
        if (item := questions.folded.get(whole)) is not None:
            return Match(rule="overlap_normalised", item=item, shared=whole[:60])
    runs = (_shared_runs(words(reading), questions) for reading in _readings(" ".join(sample.texts)))
    return next(chain.from_iterable(runs), None)


def _readings(text: str) -> Iterator[str]:
    """The visible `text`; zero-width spaces once as spaces and once removed."""
    seen = _as_seen(text)
    yield seen
    if ZERO_WIDTH_SPACE in seen:
        yield seen.replace(ZERO_WIDTH_SPACE, "")


def _as_seen(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text).casefold().translate(_VISIBLE)


def _shared_runs(listed: list[str], questions: Questions) -> Iterator[Match]:
    for start in _among(runs_of(listed, OVERLAP_WORDS), questions.run_hashes):
        shared = " ".join(listed[start : start + OVERLAP_WORDS])
        if (item := questions.runs.get(shared)) is not None:  # hashes may collide
            yield Match(rule="overlap_ngram", item=item, shared=shared)
    for start in _among(runs_of(listed, SHORT_WORDS), questions.short_hashes):
        for whole, item in questions.short.get(" ".join(listed[start : start + SHORT_WORDS]), ()):
            if " ".join(listed[start : start + len(whole.split())]) == whole:
                yield Match(rule="overlap_ngram", item=item, shared=whole)


def _among(runs: Hashes, known: Hashes) -> list[int]:
    """Indices of `runs` whose hash is in the sorted `known`."""
    if not len(known):
        return []
    nearest = np.minimum(np.searchsorted(known, runs), len(known) - 1)
    return [int(place) for place in np.flatnonzero(known[nearest] == runs)]


logger = logging.getLogger(__name__)

VERSION = 4
"""Version of the comparison; cached matches of another version are not used."""
Found = list[tuple[str, list[int], str]]
"""(rule, [file, line], item and shared words)"""


def find_leaks(
    recipe: Recipe, folder: Path, items: Sequence[EvalItem], evalset: FileRef, progress: Progress
) -> list[Finding]:
    """The overlap of the dataset with the eval set, one Finding per rule. Matches are cached in `folder`."""
    cache = folder / f"overlap-{VERSION}-{evalset.sha256[:32]}.json"
    matches = _read_cache(cache)
    if matches is None:
        matches = _search(recipe, items, progress)
        _write_cache(matches, cache)
    return [*findings_of(matches, recipe.dataset, f"{evalset.path}:")]


def _read_cache(path: Path) -> list[dict[str, Any]] | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return [{name: match[name] for name in ("rule", "count", "places", "seen", "each")} for match in known]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not searched yet, or corrupt


def _write_cache(matches: list[dict[str, Any]], path: Path) -> None:
    """Written under a name of this process and renamed: two processes may write the same matches at once."""
    own = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        own.write_text(json.dumps(matches), encoding="utf-8")
        own.replace(path)
    except OSError as error:  # a read-only cache: the next run searches again
        logger.info("Matches with the eval set are not cached: %s", error)


def _search(recipe: Recipe, items: Sequence[EvalItem], progress: Progress) -> list[dict[str, Any]]:
    tally, read = Tally(), Reading(recipe.dataset)
    state = (recipe.dataset, recipe.format, questions_of(items))
    for part in in_order(_matches_in, state, read.batches(), processes=processes_for(recipe.dataset)):
        for match in part:
            tally.add(*match)
        read.report(progress, "search for evaluation questions", "")
    return list(tally.by_rule.values())


def _matches_in(state: tuple[Dataset, str, Questions], batch: Iterable[Raw]) -> Found:
    dataset, format, questions = state
    found: Found = []
    for raw in batch:
        try:
            sample = to_sample(dataset.record(raw), format, dataset.place(raw.file, raw.line))
        except BadRecord:
            continue  # tokenization reports it
        if (match := find_overlap(sample, questions)) is not None:
            found.append((match.rule, [raw.file, raw.line], f"{match.item + 1} shares {match.shared!r}"))
    return found

"""Evaluation questions that the training data holds: letter by letter, but for case and marks, or 13 words in a row."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tunix_rt.data.sample import Sample
from tunix_rt.data.trace import EvalItem
from tunix_rt.data.words import Hashes, fold, runs_of, words

RUN_WORDS = 13
"""The length that is usual for this since GPT-3; below it, common phrases are found."""
SHORT_WORDS = 5
"""A question of fewer than 13 words, but at least so many, is looked for whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of an eval set, ready to be looked for. Item numbers count from 0."""

    exact: dict[str, int]
    folded: dict[str, int]
    runs: dict[str, int]
    """Runs of 13 words that few questions have: what stands in many is their common instruction."""
    short: dict[str, list[tuple[str, int]]]
    """First 5 words of each short question -> those questions, whole."""
    run_hashes: Hashes
    short_hashes: Hashes
    """Sorted: what is not among them need not be looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One training sample that holds (part of) an evaluation question."""

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
        listed = words(item.prompt)
        whole = fold(item.prompt)
        exact.setdefault(item.prompt.strip(), number)
        if folded.setdefault(whole, number) != number:
            continue  # the same question again
        runs = {" ".join(listed[start : start + RUN_WORDS]) for start in range(len(listed) - RUN_WORDS + 1)}
        how_many.update(runs)
        for run in runs:
            first_with.setdefault(run, number)
        if SHORT_WORDS <= len(listed) < RUN_WORDS:
            short.setdefault(" ".join(listed[:SHORT_WORDS]), []).append((whole, number))
    most = max(2, len(folded) // 50)
    runs_kept = {run: number for run, number in first_with.items() if how_many[run] <= most}
    return Questions(
        exact=exact,
        folded=folded,
        runs=runs_kept,
        short=short,
        run_hashes=_hashes(runs_kept, RUN_WORDS),
        short_hashes=_hashes(short, SHORT_WORDS),
    )


def _hashes(runs: Iterable[str], length: int) -> Hashes:
    return np.unique(np.concatenate([runs_of([], length), *(runs_of(run.split(), length) for run in runs)]))


def find_overlap(sample: Sample, questions: Questions) -> Match | None:
    """The strongest match between a sample and an eval set; None when they share nothing."""
    asked = [turn.text for turn in sample.turns if turn.role == "user"]
    for text in asked:
        if (item := questions.exact.get(text.strip())) is not None:
            return Match(rule="overlap_exact", item=item, shared=text.strip()[:60])
    for text in asked:
        if (item := questions.folded.get(fold(text))) is not None:
            return Match(rule="overlap_normalised", item=item, shared=fold(text)[:60])
    return next(_shared_runs(words(" ".join(sample.texts)), questions), None)


def _shared_runs(listed: list[str], questions: Questions) -> Iterator[Match]:
    for start in _among(runs_of(listed, RUN_WORDS), questions.run_hashes):
        shared = " ".join(listed[start : start + RUN_WORDS])
        if (item := questions.runs.get(shared)) is not None:  # a hash may be shared by chance
            yield Match(rule="overlap_ngram", item=item, shared=shared)
    for start in _among(runs_of(listed, SHORT_WORDS), questions.short_hashes):
        for whole, item in questions.short.get(" ".join(listed[start : start + SHORT_WORDS]), ()):
            if " ".join(listed[start : start + len(whole.split())]) == whole:
                yield Match(rule="overlap_ngram", item=item, shared=whole)


def _among(runs: Hashes, known: Hashes) -> list[int]:
    """Where in `runs` a hash stands that is among the sorted `known`."""
    if not len(known):
        return []
    nearest = np.minimum(np.searchsorted(known, runs), len(known) - 1)
    return [int(place) for place in np.flatnonzero(known[nearest] == runs)]

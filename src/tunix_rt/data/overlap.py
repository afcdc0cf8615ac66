"""Evaluation questions that the training data holds: letter by letter, but for case and marks, or 13 words in a row."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tunix_rt.data.sample import Sample
from tunix_rt.data.trace import EvalItem
from tunix_rt.data.words import Hashes, fold, runs_of, words

RUN_WORDS = 13
"""The length that is usual for this since GPT-3; below it, common phrases are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of an eval set, ready to be looked for. Item numbers count from 0."""

    exact: dict[str, int]
    folded: dict[str, int]
    runs: dict[str, int]
    """Every run of 13 words of a question, folded."""
    hashes: Hashes
    """Of the runs, sorted: what is not among them need not be looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One training sample that holds (part of) an evaluation question."""

    rule: str
    item: int
    shared: str


def questions_of(items: Iterable[EvalItem]) -> Questions:
    exact: dict[str, int] = {}
    folded: dict[str, int] = {}
    runs: dict[str, int] = {}
    hashes: list[Hashes] = []
    for number, item in enumerate(items):
        listed = words(item.prompt)
        exact.setdefault(item.prompt.strip(), number)
        folded.setdefault(fold(item.prompt), number)
        for start in range(len(listed) - RUN_WORDS + 1):
            runs.setdefault(" ".join(listed[start : start + RUN_WORDS]), number)
        hashes.append(runs_of(listed, RUN_WORDS))
    return Questions(
        exact=exact, folded=folded, runs=runs, hashes=np.unique(np.concatenate(hashes or [runs_of([], RUN_WORDS)]))
    )


def find_overlap(sample: Sample, questions: Questions) -> Match | None:
    """The strongest match between a sample and an eval set; None when they share nothing."""
    asked = [turn.text for turn in sample.turns if turn.role == "user"]
    for text in asked:
        if (item := questions.exact.get(text.strip())) is not None:
            return Match(rule="overlap_exact", item=item, shared=text.strip()[:60])
    for text in asked:
        if (item := questions.folded.get(fold(text))) is not None:
            return Match(rule="overlap_normalised", item=item, shared=fold(text)[:60])
    return next(_shared_runs(sample, questions), None)


def _shared_runs(sample: Sample, questions: Questions) -> Iterator[Match]:
    listed = words(" ".join(sample.texts))
    runs = runs_of(listed, RUN_WORDS)
    if not len(questions.hashes):
        return
    nearest = np.minimum(np.searchsorted(questions.hashes, runs), len(questions.hashes) - 1)
    for start in np.flatnonzero(questions.hashes[nearest] == runs):
        shared = " ".join(listed[start : start + RUN_WORDS])
        if (item := questions.runs.get(shared)) is not None:  # a hash may be shared by chance
            yield Match(rule="overlap_ngram", item=item, shared=shared)

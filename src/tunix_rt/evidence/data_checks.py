"""The dataset and the eval set of a run, where the verifier has them by hash: the split into training and held-out traces, the
questions, and whether a question was trained on."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from tunix_rt.data.contamination import find_overlap, questions_of
from tunix_rt.data.formats import to_sample
from tunix_rt.data.readers import parse, read_raw
from tunix_rt.data.sources import find_dataset, find_evalset, read_items
from tunix_rt.data.split import askable, hold_out, items_of, question_hash
from tunix_rt.data.trace import EvalItem, Sample
from tunix_rt.evidence.answer_checks import question_problems
from tunix_rt.evidence.facts import Run
from tunix_rt.evidence.inputs import Inputs
from tunix_rt.runs.checksums import few, shown

MOST_CHECKED = 200_000
"""Traces of a dataset that are read at L1; a larger one is prepared whole at L3."""


def data_problems(run: Run, inputs: Inputs) -> Iterator[str]:
    """What can be checked of the data without a tokenizer."""
    committed = run.commitment
    found = inputs.dataset(committed.dataset.sha256)
    samples = _samples(found, committed.dataset.format) if found is not None else []
    if samples:
        yield from _split_problems(run, samples)
    if (
        committed.evalset is not None
        and (path := inputs.evalset(committed.evalset.sha256)) is not None
        and run.answered
    ):
        items = read_items(find_evalset(path))
        yield from question_problems(run, items)
        if len(items) != committed.evalset.items:
            yield f"{run.where}precommit.json: evalset.items is {committed.evalset.items}, the eval set has {len(items)}"
        yield from few((f"{run.where}precommit.json: {problem}" for problem in _overlap(samples, items)), 5)


def _samples(path: str, form: str) -> list[Sample]:
    dataset = find_dataset(path)
    places = ((raw, dataset.place(raw.file, raw.line)) for raw in islice(read_raw(dataset), MOST_CHECKED + 1))
    samples = [to_sample(parse(raw, where), form, where) for raw, where in places]
    return samples if len(samples) <= MOST_CHECKED else []


def _split_problems(run: Run, samples: Sequence[Sample]) -> Iterator[str]:
    """How many traces are held out, and which of them were asked. Where some were dropped as too long, only a tokenizer
    knows which."""
    facts, data = run.commitment.dataset, run.config.data
    if facts.traces + facts.heldout_traces != len(samples):
        if data.on_overflow != "drop" or facts.traces + facts.heldout_traces > len(samples):
            yield f"{run.where}precommit.json: {facts.traces} + {facts.heldout_traces} traces, the dataset has {len(samples)}"
        return
    questions = np.array([question_hash(sample) for sample in samples], dtype=np.uint64)
    heldout = hold_out(questions, fraction=data.validation_fraction, seed=run.commitment.seeds.data_seed)
    if int(heldout.sum()) != facts.heldout_traces:
        yield f"{run.where}precommit.json: {facts.heldout_traces} traces held out, seed and fraction give {int(heldout.sum())}"
    elif run.commitment.evalset is None and run.answered:
        pairs = [
            pair
            for sample, out in zip(samples, heldout, strict=True)
            if out and (pair := askable(sample, data.answer_tag))
        ]
        asked = [(one.id, one.prompt, one.expected) for one in run.record.predictions("after")]
        if asked != [(item.id, item.prompt, item.answer) for item in items_of(pairs)]:
            yield f"{run.where}eval/predictions-after.jsonl: not the questions that seed and dataset hold out"


def _overlap(samples: Sequence[Sample], items: Sequence[EvalItem]) -> Iterator[str]:
    """Each question that a trace contains."""
    questions = questions_of(list(items))
    for sample in samples:
        if match := find_overlap(sample, questions):
            yield f"the dataset contains the question {shown(items[match.item].prompt)} ({match.rule})"

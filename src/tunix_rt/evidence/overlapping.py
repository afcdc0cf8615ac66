"""The data that ship with tunix-rt, looked up: a run that names one must have had its bytes, and must not have been asked
what it was trained on. Only what is shipped is opened; a bundle cannot name a file of the reader's."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tunix_rt import assets
from tunix_rt.data.containers import parse, read_raw
from tunix_rt.data.formats import to_sample
from tunix_rt.data.holding_out import askable, hold_out, items_of, question_hash
from tunix_rt.data.overlap import find_overlap, questions_of
from tunix_rt.data.registry import KEY, find_dataset
from tunix_rt.data.sample import Sample
from tunix_rt.data.trace import EvalItem
from tunix_rt.evidence.claims import value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import Noted
from tunix_rt.rundir import RunDir


def shipped(kind: str, key: object) -> Path | None:
    """The file of a dataset or eval set of that key among those shipped; None for one that is somebody's own."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        return None
    name = f"{key}/dataset.jsonl" if kind == "datasets" else f"{key}.jsonl"
    path = assets.shipped_folder(kind) / name
    return path if path.is_file() else None


def dataset_problems(noted: Noted) -> Iterator[str]:
    """A shipped dataset or eval set has one content under its name."""
    for kind, name in (("datasets", "dataset"), ("evalsets", "evalset")):
        key, told = (value_at(noted.run.precommit, f"{name}.{one}") for one in ("key", "sha256"))
        path = shipped(kind, key)
        if path is not None and (digest := _sha256(path)) != told:
            yield f"{noted.run.where}precommit.json: the {name} {key} has the hash {shown(told)}, the one shipped {digest}"


def overlap_problems(noted: Noted) -> Iterator[str]:
    """The questions that were asked, looked for in the dataset that was trained on, where that is shipped. Those held out
    of the dataset itself are drawn again, and must be the ones."""
    run = noted.run
    key = value_at(run.precommit, "dataset.key")
    path = shipped("datasets", key)
    if path is None or not dataset_is_shipped(noted, path):
        return
    form = run.need("precommit.json", "dataset.format", str)
    yield from _split_problems(noted, path, form)
    asked = _asked(noted)
    if "evalset" in run.precommit and asked:
        prompts = tuple(sorted({one.get("prompt", "") for one in asked}))
        for rule, prompt in _found(path, form, prompts):
            yield f"{run.where}eval/predictions-after.jsonl: the dataset {key} holds the question {shown(prompt)} ({rule})"


def dataset_is_shipped(noted: Noted, path: Path) -> bool:
    """Whether the run had the bytes that are shipped; where it had not, `dataset` says so."""
    return bool(_sha256(path) == value_at(noted.run.precommit, "dataset.sha256"))


def _asked(noted: Noted) -> list[dict[str, Any]]:
    path = RunDir(noted.run.folder).predictions("after")
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _split_problems(noted: Noted, path: Path, form: str) -> Iterator[str]:
    """How many traces are held out, and which of them were asked. Where some were dropped as too long, only a tokenizer
    knows which."""
    run = noted.run
    told = [run.need("precommit.json", f"dataset.{name}", int) for name in ("traces", "heldout_traces")]
    samples = _samples(path, form)
    if sum(told) != len(samples):
        if value_at(run.config, "data.on_overflow") != "drop":
            yield f"{run.where}precommit.json: {told[0]} and {told[1]} traces, the dataset has {len(samples)}"
        return
    fraction = run.need("config.yaml", "data.validation_fraction", float)
    questions = np.array([question_hash(sample) for sample in samples], dtype=np.uint64)
    heldout = hold_out(questions, fraction=fraction, seed=run.need("precommit.json", "seeds.data_seed", int))
    if int(heldout.sum()) != told[1]:
        yield f"{run.where}precommit.json: {told[1]} traces held out, seed and share give {int(heldout.sum())}"
    if "evalset" in run.precommit or value_at(run.config, "evaluation.enabled") is False:
        return
    tag = run.need("config.yaml", "data.answer_tag", str)
    pairs = [pair for sample, out in zip(samples, heldout, strict=True) if out and (pair := askable(sample, tag))]
    given = [(item.id, item.prompt, item.answer) for item in items_of(pairs)]
    said = [(one.get("id"), one.get("prompt"), one.get("expected")) for one in _asked(noted)]
    if said and said != given:
        yield f"{run.where}eval/predictions-after.jsonl: not the questions that were held out of the training data"


@lru_cache(maxsize=4)
def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=2)
def _samples(path: Path, form: str) -> tuple[Sample, ...]:
    dataset = find_dataset(str(path))
    places = ((raw, dataset.place(raw.file, raw.line)) for raw in read_raw(dataset))
    return tuple(to_sample(parse(raw, where), form, where) for raw, where in places)


@lru_cache(maxsize=8)
def _found(path: Path, form: str, asked: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(rule, question) of the first that the shipped dataset holds."""
    questions = questions_of(
        [EvalItem(id=str(number), prompt=prompt, answer="-") for number, prompt in enumerate(asked)]
    )
    matches = (find_overlap(sample, questions) for sample in _samples(path, form))
    return tuple((match.rule, asked[match.item]) for match in islice((one for one in matches if one), 1))

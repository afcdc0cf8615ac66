"""The data that ship with tunix-rt, looked up: a run that names one must have had its bytes, and must not have been asked
what it was trained on. Only what is shipped is opened; a bundle cannot name a file of the reader's."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tunix_rt import assets
from tunix_rt.data.containers import parse, read_raw
from tunix_rt.data.formats import to_sample
from tunix_rt.data.overlap import find_overlap, questions_of
from tunix_rt.data.registry import KEY, find_dataset
from tunix_rt.data.trace import EvalItem
from tunix_rt.evidence.claims import value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import Noted
from tunix_rt.rundir import RunDir

MOST_TRACES = 20_000
"""Of a shipped dataset that is looked through."""


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
        if path is not None and (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != told:
            yield f"{noted.run.where}precommit.json: the {name} {key} has the hash {shown(told)}, the one shipped {digest}"


def overlap_problems(noted: Noted) -> Iterator[str]:
    """The questions that were asked, looked for in the dataset that was trained on, where that is shipped. Those held out
    of the dataset itself are in its file, and are left to a replay."""
    run = noted.run
    key = value_at(run.precommit, "dataset.key")
    if "evalset" not in run.precommit or shipped("datasets", key) is None:
        return
    path = RunDir(run.folder).predictions("after")
    if not path.exists():
        return
    asked = tuple(sorted({str(json.loads(line)["prompt"]) for line in path.read_bytes().splitlines()}))
    for rule, prompt in _found(str(key), str(value_at(run.precommit, "dataset.format")), asked):
        yield f"{run.where}eval/predictions-after.jsonl: the dataset {key} holds the question {shown(prompt)} ({rule})"


@lru_cache(maxsize=8)
def _found(key: str, form: str, asked: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(rule, question) of the first that the shipped dataset holds."""
    items = [EvalItem(id=str(number), prompt=prompt, answer="-") for number, prompt in enumerate(asked)]
    questions = questions_of(items)
    path = shipped("datasets", key)
    dataset = find_dataset(str(path))
    for number, raw in enumerate(read_raw(dataset)):
        where = dataset.place(raw.file, raw.line)
        match = find_overlap(to_sample(parse(raw, where), form, where), questions)
        if match is not None:
            return ((match.rule, asked[match.item]),)
        if number > MOST_TRACES:
            break
    return ()

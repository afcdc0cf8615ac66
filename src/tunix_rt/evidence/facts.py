"""What a run was given and a verifier has to supply: dataset, eval set, base model, tokenizer. Each is looked up by hash among
what ships with tunix-rt and what the reviewer names; a name or path in a bundle is never opened."""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal

from tunix_rt import assets
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.mixture import MixedDataset
from tunix_rt.data.packing import total_steps
from tunix_rt.data.sources import Dataset, find_dataset, join_datasets
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import InputError, TunixError
from tunix_rt.models.resolve import preset_names, resolve_model
from tunix_rt.runs import schemas
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.schemas import Commitment
from tunix_rt.scoring.score import Tags
from tunix_rt.storage import sha256_file
from tunix_rt.train.commitment import model_hashes

logger = logging.getLogger(__name__)

MOST_JOINED = 8
"""Named datasets of which every selection is tried as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the reviewer names beside what ships: files, folders or patterns of data; a folder, file or hub id of a model."""

    data: tuple[str, ...] = ()
    model: str | None = None
    tokenizer: str | None = None

    def absolute(self) -> "Inputs":
        """The same for a process with another working folder and little memory: a GGUF file is converted here."""
        model, tokenizer = (_absolute(name) for name in (self.model, self.tokenizer))
        if model is not None and os.path.isfile(model):
            model = str(resolve_model(model).folder)
        if missing := [path for path in self.data if "*" not in path and not os.path.exists(path)]:
            raise InputError(f"--data {missing[0]}: no such file", fix="name a file, a folder or a pattern with *")
        return Inputs(data=tuple(map(os.path.abspath, self.data)), model=model, tokenizer=tokenizer)

    def files(self) -> list[str]:
        """What the reviewer supplies and a process has to read as a whole."""
        folders = [folder for folder in (self.model, self.tokenizer) if folder is not None]
        return [*self.data, *(os.path.join(folder, "tokenizer.json") for folder in folders)]

    def dataset(self, sha256: str) -> tuple[str, ...] | None:
        """The path of the dataset with this hash, or the paths of several that have it together, in the order given."""
        single = [(path,) for path in (*_shipped("datasets", "*/dataset.jsonl"), *self.data)]
        several = (
            some for count in range(2, len(self.data) + 1) for some in combinations(self.data[:MOST_JOINED], count)
        )
        return next((paths for paths in chain(single, several) if _hash_of_dataset(paths) == sha256), None)

    def evalset(self, sha256: str) -> str | None:
        files = (*_shipped("evalsets", "*.jsonl"), *(path for path in self.data if os.path.isfile(path)))
        return next((path for path in files if _hash_of_file(path) == sha256), None)

    def base_model(self, files: Mapping[str, str], weights: str) -> str | None:
        """The name of the model whose files have these hashes."""
        presets = assets.shipped_folder("models").with_name("presets")
        architectures = [str(presets / name) for name in preset_names()] if weights == "random" else []
        names = (*([self.model] if self.model else []), *_shipped("models", "*/"), *architectures)
        return next((name for name in names if _has_files(name, files, weights)), None)

    def tokenizer_folder(self, sha256: str, model_type: str) -> str | None:
        for name in (self.tokenizer, self.model, *_shipped("models", "*/")):
            if name is not None and os.path.isfile(os.path.join(name, "tokenizer.json")):
                try:
                    if load_tokenizer(Path(name), model_type).sha256 == sha256:
                        return name
                except TunixError as error:
                    logger.warning("%s: %s", name, error.problem)
        return None


def _absolute(name: str | None) -> str | None:
    return os.path.abspath(os.path.expanduser(name)) if name and os.path.exists(os.path.expanduser(name)) else name


def _shipped(kind: str, pattern: str) -> list[str]:
    return sorted(map(str, assets.shipped_folder(kind).glob(pattern)))


@lru_cache(maxsize=256)
def _hash_of_file(path: str) -> str:
    return sha256_file(Path(path))


@lru_cache(maxsize=256)
def _dataset_at(path: str) -> Dataset | None:
    """What a file, a folder or a pattern means, hashed once; None where it means no dataset."""
    try:
        return find_dataset(path)
    except TunixError as error:
        logger.warning("%s: %s", path, error.problem)
        return None


def _hash_of_dataset(paths: tuple[str, ...]) -> str:
    """Of one dataset, or of several together; empty where one of them is none."""
    found = [dataset for dataset in map(_dataset_at, paths) if dataset is not None]
    return join_datasets(found).sha256 if len(found) == len(paths) else ""


@lru_cache(maxsize=64)
def _hashes_of_model(name: str, weights: str) -> Mapping[str, str]:
    try:
        return model_hashes(resolve_model(name, weights=weights))
    except TunixError as error:
        logger.warning("%s: %s", name, error.problem)
        return {}


def _has_files(name: str, files: Mapping[str, str], weights: str) -> bool:
    config, expected = os.path.join(name, "config.json"), files.get("config.json")
    if os.path.isfile(config) and _hash_of_file(config) != expected:
        return False  # the weights need not be read
    return _hashes_of_model(name, weights) == dict(files)


def needed(committed: Commitment) -> Iterator[tuple[str, str, str]]:
    """(kind, name, description of its hashes) of every input of the run."""
    model = committed.base_model
    hashes = ", ".join(f"{name} sha256 {digest}" for name, digest in sorted(model.files.items()))
    origin = f", converted from {model.converted_from}" if model.converted_from else ""
    yield "base model", model.name, f"{model.weights} weights, {hashes}{origin}"
    named = "of the base model or model.tokenizer_name_or_path"
    yield "tokenizer", named, f"hash by tunix-rt {committed.tokenizer_sha256}"
    commits = "".join(f", {name} at commit {commit}" for name, commit in (committed.dataset.commits or {}).items())
    yield "dataset", committed.dataset.key, f"sha256 {committed.dataset.sha256}{commits}"
    if committed.dataset.validation is not None:
        yield "validation", committed.dataset.validation.key, f"sha256 {committed.dataset.validation.sha256}"
    if committed.evalset is not None:
        yield "eval set", committed.evalset.key, f"sha256 {committed.evalset.sha256}"


Level = Literal["none", "L0", "L1", "L2", "L3", "L4"]
LEVELS: tuple[Level, ...] = ("none", "L0", "L1", "L2", "L3", "L4")
MEANINGS: dict[Level, str] = dict(
    zip(LEVELS, ("not readable", "readable", "consistent", "regenerated", "replayed", "reproduced"), strict=True)
)
NOT_SHOWN: dict[Level, str] = {
    "none": "anything about the run",
    "L0": "anything about the run",
    "L1": "that any step was taken: a careful forger can rewrite all files",
    "L2": "that training made the weights; the answers before training",
    "L3": "segments that were not drawn",
    "L4": "how long it took, on what hardware, and how many other runs there were",
}
"""What does not follow from a level."""
Label = Literal["recomputed", "consistent", "self-reported", "not checked"]
LABELS: dict[Label, str] = {
    "recomputed": "the verifier computed the value itself",
    "consistent": "it follows from settings, seed and rows, or was looked up outside the bundle: a dataset or base model by "
    "hash, a commit in your clone",
    "self-reported": "only the run states it",
    "not checked": "the check needs something that was not given",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One failed check. `level` is the level that it denies."""

    level: Level
    check: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the run and how far it was checked."""

    name: str
    value: str
    label: Label
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of `verify`."""

    folder: str
    level: Level
    required: Level
    findings: tuple[Finding, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for people: what was drawn, how it compared, what a sample can miss, what is not part of the run."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: segments, nonce, comparison, seconds."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found and the required level is reached."""
        return not self.findings and LEVELS.index(self.level) >= LEVELS.index(self.required)

    def describe(self) -> str:
        if not self.findings:
            return f"level {self.level} ({MEANINGS[self.level]})"
        failed = min((finding.level for finding in self.findings), key=LEVELS.index)
        return f"FAILED at {failed} ({MEANINGS[failed]}), level {self.level} ({MEANINGS[self.level]})"


def level_of(findings: Sequence[Finding], passed: Sequence[Level]) -> Level:
    """The highest of the `passed` levels below every level that a finding denies."""
    denied = min((LEVELS.index(finding.level) for finding in findings), default=len(LEVELS))
    return max((level for level in passed if LEVELS.index(level) < denied), key=LEVELS.index, default="none")


ALWAYS = (
    "config.yaml", "precommit.json", "doctor.json", "plan.json", "memory.json", "result.json", "metrics.jsonl", "rows.jsonl",
    "checkpoints.json", "processes.json", "final_model/config.json", "training_log.txt", "env_info.txt", "torch_version.txt",
)  # fmt: skip
ON_A_GPU = ("cuda_check.txt", "nvidia_smi.txt")
ANSWERED = (
    "eval/predictions-before.jsonl", "eval/predictions-after.jsonl", "eval/before.json", "eval/after.json",
    "eval_summary.json", "samples.md",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The facts of one completed run."""

    record: RunRecord
    config: RunConfig
    commitment: schemas.Commitment
    result: schemas.Result
    doctor: schemas.Doctor
    run_id: str
    """Hash of precommit.json."""
    metric_lines: tuple[bytes, ...]

    @property
    def where(self) -> str:
        return self.record.where

    @property
    def metrics(self) -> tuple[schemas.StepLine, ...]:
        return self.record.metrics

    @property
    def total(self) -> int:
        return len(self.metrics)

    @property
    def ends(self) -> tuple[int, ...]:
        """Steps that the run was planned for: at first, by its settings and rows, and by each extension."""
        rows, training = len(self.record.rows), self.config.training
        steps = total_steps(rows, self.rows_per_step, epochs=training.num_train_epochs, max_steps=training.max_steps)
        return (steps, *(one.max_steps for one in self.record.extensions))

    @property
    def mixture(self) -> tuple[MixedDataset, ...]:
        return tuple(MixedDataset(**part.model_dump()) for part in self.commitment.dataset.mixture or ())

    @property
    def device(self) -> str:
        return self.commitment.device

    @property
    def backend(self) -> str:
        return self.config.training.backend

    @property
    def tags(self) -> Tags:
        return Tags(reasoning=self.config.data.reasoning_tag, answer=self.config.data.answer_tag)

    @property
    def heads(self) -> list[str]:
        """The head of the metrics chain after each step; at 0 the hash of the commitment."""
        return [self.run_id, *(hashlib.sha256(line).hexdigest() for line in self.metric_lines)]

    @property
    def rows_per_step(self) -> int:
        """A JAX run shards its micro-batch over all devices, and committed to its number of rows."""
        batch = self.commitment.batch
        rows = batch.rows if batch is not None else self.config.training.per_device_train_batch_size
        return self.config.training.rows_per_step(rows)

    @property
    def answered(self) -> bool:
        """Whether the model was evaluated before and after training."""
        return "eval/predictions-after.jsonl" in self.record

    @property
    def final_model(self) -> dict[str, str]:
        """Hashes of the files of the final model."""
        start, sums = "final_model/", self.record.run_sums
        return {name.removeprefix(start): digest for name, digest in sums.items() if name.startswith(start)}

    def machines(self, after: int, up_to: int) -> list[schemas.Machine]:
        """Of the processes that took the steps after `after` up to `up_to`. A later process may have taken steps again."""
        processes = self.record.processes
        ends = [process.first_step for process in processes[1:]] + [self.total + 1]
        return [
            process.machine
            for process, end in zip(processes, ends, strict=True)
            if process.first_step <= up_to and end > after + 1 and end > process.first_step
        ]


def missing_files(record: RunRecord) -> Iterator[str]:
    """What a completed run always leaves behind and this folder lacks; and files of a GPU beside a run that had none."""
    result, config, commitment = record.result, record.config, record.commitment
    needed = list(ALWAYS)
    if result is not None and result.device == "cuda":
        needed += ON_A_GPU
    elif extra := [name for name in ON_A_GPU if name in record]:
        yield f"{record.where}{extra[0]}: in a run on {result.device if result else 'no device'}"
    if commitment is not None and commitment.dataset.heldout_traces:
        needed.append("eval/heldout.jsonl")
    if (config is not None and config.evaluation.enabled) or any(name in record for name in ANSWERED):
        needed += ANSWERED
    yield from (f"{record.where}{name}: missing" for name in needed if name not in record)


def completed_run(record: RunRecord) -> Run | None:
    """The run in `record` once L0 has found nothing; None where it did not complete."""
    config, commitment, result, doctor = record.config, record.commitment, record.result, record.doctor
    if config is None or commitment is None or result is None or doctor is None or result.status != "completed":
        return None
    data = record.data("precommit.json", 2 * 2**20) or b""
    return Run(
        record=record,
        config=config,
        commitment=commitment,
        result=result,
        doctor=doctor,
        run_id=hashlib.sha256(data).hexdigest(),
        metric_lines=tuple(record.raw_lines("metrics.jsonl")),
    )

"""What a verifier concludes: findings, a level, and a table of claims, each with how far it was checked. Pure values."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tunix_rt.config.settings import RunConfig
from tunix_rt.runs import schemas
from tunix_rt.runs.record import RunRecord
from tunix_rt.scoring.score import Tags

Level = Literal["none", "L0", "L1", "L2", "L3", "L4"]
LEVELS: tuple[Level, ...] = ("none", "L0", "L1", "L2", "L3", "L4")
MEANINGS: dict[Level, str] = {
    "none": "not readable",
    "L0": "readable",
    "L1": "consistent",
    "L2": "regenerated",
    "L3": "replayed",
    "L4": "reproduced",
}
Label = Literal["recomputed", "consistent", "self-reported", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One failed check. `level` is the level that it denies."""

    level: Level
    check: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the run and how far it was checked.

    recomputed: the verifier computed the value itself. consistent: it follows from facts that were looked up outside of the
    bundle or from settings, seed and rows. self-reported: only the run states it. not checked: an input of the check is missing.
    """

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
        return rows * self.config.training.gradient_accumulation_steps

    @property
    def answered(self) -> bool:
        """Whether the model was evaluated before and after training."""
        return "eval/predictions-after.jsonl" in self.record

    @property
    def final_model(self) -> dict[str, str]:
        """Hashes of the files of the final model."""
        inside = {
            name.removeprefix("final_model/"): name for name in self.record.run_sums if name.startswith("final_model/")
        }
        return {name: self.record.run_sums[whole] for name, whole in inside.items()}

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

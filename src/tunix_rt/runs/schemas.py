"""The shape of every JSON and JSONL file of a run folder, of a bundle and of the output of `tunix-rt evaluate`.

Where a file has a dataclass written out, that dataclass is its schema. A later version may add optional keys. `format` in
`precommit.json` rises when a meaning changes.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from tunix_rt.doctor.nvidia import GpuMemory
from tunix_rt.runs import fields as f
from tunix_rt.runs import schemas_host
from tunix_rt.runs.schemas_host import Doctor, Footprint, Machine, MemoryReport, Plan, Process, Processes, Profile
from tunix_rt.runs.schemas_rollouts import AlongLine, RolloutColumns, RolloutGroup, negative_with_rollouts
from tunix_rt.scoring.score import Prediction as PredictionLine
from tunix_rt.scoring.score import Scores as ScoresFile

__all__ = ["Doctor", "Machine", "MemoryReport", "Plan", "PredictionLine", "Process", "Processes", "Profile"]
__all__ += ["ScoresFile"]

problems_of = f.problems_of

# --- precommit.json ---------------------------------------------------------------------------------------------------


class EvalsetFacts(f.Facts):
    key: f.Name
    sha256: f.Digest
    items: f.Count


class ValidationFacts(EvalsetFacts):
    skipped: f.Maybe[f.Positive] = None


class MixedFacts(f.Facts):  # a dataset with a weight; the rows of the datasets follow each other in rows.jsonl
    key: f.Name
    sha256: f.Digest
    weight: Annotated[float, Field(gt=0, le=10**6)]
    rows: f.Positive


class DatasetFacts(f.Facts):
    key: f.Name
    sha256: f.Digest
    traces: f.Positive
    heldout_traces: f.Count
    rows: f.Positive
    format: f.Name
    template: f.Name
    style_sha256: f.Digest
    merkle_root: f.Digest
    today: f.Maybe[f.Day] = None
    """The day that the chat template writes, where it writes one."""
    skipped: f.Maybe[f.Positive] = None
    """Records that `data.skip_bad` left out."""
    validation: f.Maybe[ValidationFacts] = None
    """`data.validation`, whose traces are held out."""
    mixture: Annotated[f.Maybe[f.Many[MixedFacts]], Field(min_length=2, max_length=256)] = None
    """The datasets of `data.dataset` with weights, in order."""
    commits: f.Maybe[f.Commits] = None


class ModelInput(f.Facts):
    name: f.Name
    revision: f.Name
    files: f.Digests
    converted_from: f.Maybe[f.Text] = None


class BaseModelFacts(ModelInput):
    weights: f.Weights


class Seeds(f.Facts):
    seed: f.Count
    data_seed: f.Count


class Batch(f.Facts):
    """The micro-batch that a run began with: its rows, all devices together, and over how many they were split."""

    rows: f.Positive
    devices: f.Positive


class Commitment(f.Facts):
    """`precommit.json`: what determines the run, written before its first step."""

    schema_: Literal["tunix-rt/precommit/1"] = Field(alias="schema")
    format: f.Positive
    numerics: f.Count
    created: f.Moment
    device: f.Device
    versions: Annotated[dict[f.Name, f.Installed], Field(max_length=64)]
    config_sha256: f.Digest
    source_sha256: f.Digest
    source_files: f.Digests
    dataset: DatasetFacts
    base_model: BaseModelFacts
    tokenizer_sha256: f.Digest
    seeds: Seeds
    batch: f.Maybe[Batch] = None
    fitting: f.Maybe[f.Figures] = None
    evalset: f.Maybe[EvalsetFacts] = None


# --- metrics.jsonl, rows.jsonl, eval/heldout.jsonl, checkpoints -------------------------------------------------------


class StepLine(RolloutColumns):
    """A line of `metrics.jsonl`. `states` are hashes of checkpoints that were committed since the line before that has any."""

    step: f.Positive
    loss: Annotated[float, AfterValidator(negative_with_rollouts)]
    loss_hex: f.FloatHex
    lr: f.Amount
    grad_norm: f.Amount
    target_tokens: f.Count
    tokens: f.Count
    seconds: f.Amount
    peak_bytes: f.Count
    batch: f.Digest
    prev: f.Digest
    states: f.Maybe[dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,15}$")], f.Digest]] = None


class RowLine(f.Facts):
    row: f.Count
    sha256: f.Digest
    targets: f.Count
    tokens: f.Count


class HeldoutLine(f.Facts):
    step: f.Count
    loss: f.Amount
    loss_hex: f.FloatHex
    target_tokens: f.Count


class CheckpointFile(f.Facts):
    sha256: f.Digest
    bytes: f.Count


class CheckpointManifest(f.Facts):
    """`checkpoints/step-*/MANIFEST.json`."""

    schema_: Literal["tunix-rt/checkpoint/1"] = Field(alias="schema")
    step: f.Positive
    files: dict[f.Name, CheckpointFile]


class CheckpointState(f.Facts):
    """`checkpoints/step-*/state.json`. `code` names what computed the layers, the head and the update."""

    schema_: Literal["tunix-rt/state/1"] = Field(alias="schema")
    attention: f.Name
    code: dict[f.Name, f.Name]
    step: f.Positive
    loss_hex: f.FloatHex
    metrics_head: f.Digest
    random: f.Text
    data: f.Text
    batch: f.Maybe[Batch] = None


class CheckpointEntry(f.Facts):
    step: f.Positive
    manifest_sha256: f.Digest
    metrics_head: f.Digest
    files: dict[f.Name, CheckpointFile]


class Checkpoints(f.Facts):
    """`checkpoints.json`: every checkpoint that was committed, those included that are deleted since."""

    schema_: Literal["tunix-rt/checkpoints/1"] = Field(alias="schema")
    checkpoints: Annotated[f.Many[CheckpointEntry], Field(max_length=100_000)]


# --- result.json ------------------------------------------------------------------------------------------------------


class SkippedCheckpoint(f.Facts):
    name: f.Text
    problems: Annotated[f.Many[str], Field(max_length=1_000)]


class Result(f.Facts):
    """`result.json`: how the run ended. How far it came decides which keys there are."""

    schema_: Literal["tunix-rt/result/1"] = Field(alias="schema")
    status: f.Status
    exit_code: Annotated[int, Field(ge=0, le=255)]
    reason: str
    started: f.Moment
    finished: f.Moment
    seconds: f.Amount
    device: f.Maybe[f.Device] = None
    parameters: f.Maybe[f.Count] = None
    run_id: f.Maybe[f.Digest] = None
    memory: f.Maybe[Footprint] = None
    oom_attempt: f.Maybe[Footprint] = None
    steps_planned: f.Maybe[f.Count] = None
    steps_completed: f.Maybe[f.Count] = None
    resumed_from: f.Maybe[f.Count] = None
    skipped_checkpoints: f.Maybe[Annotated[f.Many[SkippedCheckpoint], Field(max_length=1_000)]] = None
    final_loss: f.Maybe[float] = None
    final_loss_hex: f.Maybe[f.FloatHex] = None
    metrics_head: f.Maybe[f.Digest] = None
    final_state: f.Maybe[f.Digest] = None
    best_step: f.Maybe[f.Positive] = None
    best_heldout_loss: f.Maybe[f.Amount] = None
    answering_seconds: f.Maybe[f.Amount] = None
    scores: f.Maybe[dict[Literal["before", "after"], dict[f.Name, f.Share]]] = None
    gpu_memory: f.Maybe[Annotated[f.Many[GpuMemory], Field(max_length=64)]] = None
    final_model: f.Maybe[f.Figures] = None
    warnings: f.Maybe[Annotated[f.Many[f.Text], Field(max_length=50)]] = None


# --- the files of an evaluation ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLine(PredictionLine):
    """A line of `eval/samples.jsonl`: a generation during training."""

    step: f.Count


class EvalSummary(f.Facts):
    """`eval_summary.json`. `rows` is the batch size of `tunix-rt evaluate`; questions held out have no eval set to hash.

    `decoding` is what decides a generation. `comparison` follows from the predictions of both sides."""

    schema_: Literal["tunix-rt/eval-summary/1"] = Field(alias="schema")
    models: Annotated[f.Many[f.Name], Field(min_length=1, max_length=2)]
    weights: f.Weights
    evalset: f.Name
    evalset_sha256: f.Maybe[f.Digest] = None
    questions: f.Positive
    device: f.Device
    dtype: f.Name
    rows: f.Maybe[f.Positive] = None
    decoding: f.Figures
    before: f.Maybe[ScoresFile] = None
    after: f.Maybe[ScoresFile] = None
    base: f.Maybe[ScoresFile] = None
    answers: f.Maybe[ScoresFile] = None
    comparison: f.Maybe[f.Figures] = None


# --- run_manifest.json ------------------------------------------------------------------------------------------------


class NamedInput(f.Facts):
    name: f.Name
    sha256: f.Digest


class Inputs(f.Facts):
    dataset: NamedInput
    validation: f.Maybe[NamedInput] = None
    evalset: f.Maybe[NamedInput] = None
    base_model: ModelInput
    tokenizer_sha256: f.Digest


class PeakSample(f.Facts):  # the largest of the `samples` of GPU memory
    samples: f.Positive
    by: Literal["nvml", "device"]
    step: f.Count
    pid: f.Count
    used_bytes: f.Count


class Outcome(f.Facts):
    items: f.Positive
    correct: f.Count
    well_formed: f.Count
    accuracy: f.Share


class Speeds(f.Facts):  # tokens per second; `ratio`: how many times as fast as the CPU the device is
    device: f.Amount
    device_with_first_step: f.Amount
    cpu: f.Maybe[f.Amount] = None
    cpu_with_first_step: f.Maybe[f.Amount] = None
    ratio: f.Maybe[f.Amount] = None


class Seconds(f.Facts):
    run: f.Amount
    steps: f.Amount


class CpuRun(f.Facts):
    """The same configuration on the CPU, in `cpu/`; `sums_sha256` is the hash of its SHA256SUMS."""

    precommit_sha256: f.Digest
    versions: f.Versions
    host: schemas_host.HostFacts
    sums_sha256: f.Digest


class Manifest(f.Facts):
    """`run_manifest.json`: the one fact file of a bundle."""

    format: f.Positive
    run_id: f.Name
    precommit_sha256: f.Digest
    commit: f.Maybe[Annotated[str, Field(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]] = None
    source_sha256: f.Digest
    numerics: f.Count
    backend: f.Engine
    device: f.Device
    model: f.Name
    weights: f.Weights
    dataset: f.Name
    steps_completed: f.Positive
    resumed_from: f.Count
    final_loss: float
    heldout_loss: f.Maybe[dict[Literal["first", "last"], dict[Literal["step", "loss"], f.Amount]]] = None
    scores: f.Maybe[dict[Literal["before", "after"], Outcome]] = None
    versions: f.Versions
    hardware: schemas_host.Hardware
    gpu_memory: f.Maybe[PeakSample] = None
    configuration: f.Figures
    configuration_left_open: f.Maybe[Annotated[f.Many[f.Name], Field(max_length=1_000)]] = None
    tokens_per_second: Speeds
    seconds: Seconds
    peak_bytes: f.Count
    inputs: Inputs
    left_out: f.Digests
    cpu_run: f.Maybe[CpuRun] = None


# --- which file has which ---------------------------------------------------------------------------------------------


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    """Inside a union, a dataclass takes the configuration that is given here; it has none of its own."""
    return TypeAdapter(model | None, config=f.Facts.model_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The shape of a file, or of each line in it, and its limit in bytes."""

    pattern: re.Pattern[str]
    model: Any
    lines: bool = False
    most_bytes: int
    kept: bool = True  # by a record that has read it

    def validate(self, data: bytes) -> Any:
        """The JSON object in `data` as `model`; a ValidationError where it has another shape."""
        return _adapter(self.model).validate_json(data, strict=True)


def _file(pattern: str, model: Any, most_mib: int = 1, **more: bool) -> Schema:
    return Schema(pattern=re.compile(pattern), model=model, most_bytes=most_mib * 2**20, **more)


SCHEMAS = (
    _file(r"precommit\.json", Commitment, 2),
    _file(r"doctor\.json", Doctor),
    _file(r"plan\.json", Plan),
    _file(r"memory\.json", MemoryReport),
    _file(r"processes\.json", Processes, 2),
    _file(r"checkpoints\.json", Checkpoints, 16),
    _file(r"extensions\.json", schemas_host.Extensions),
    _file(r"result\.json", Result),
    _file(r"run_manifest\.json", Manifest, 2),
    _file(r"eval_summary\.json", EvalSummary, 2),
    _file(r"eval/(before|after|base|answers)\.json", ScoresFile, 2),
    _file(r"profile/profile\.json", Profile),
    _file(r"checkpoints/step-[0-9]{6,18}/state\.json", CheckpointState),
    _file(r"checkpoints/step-[0-9]{6,18}/MANIFEST\.json", CheckpointManifest),
    _file(r"metrics\.jsonl", StepLine, 256, lines=True),
    _file(r"rows\.jsonl", RowLine, 80, lines=True),
    _file(r"eval/heldout\.jsonl", HeldoutLine, 64, lines=True),
    _file(r"eval/samples\.jsonl", SampleLine, 256, lines=True),
    _file(r"eval/along\.jsonl", AlongLine, 64, lines=True),
    _file(r"rollouts/step-[0-9]{6,18}\.jsonl", RolloutGroup, 256, lines=True, kept=False),
    _file(r"eval/predictions-(before|after|base|answers)\.jsonl", PredictionLine, 256, lines=True),
)


@lru_cache(maxsize=256)
def schema_of(name: str) -> Schema | None:
    """The schema of the file with this path in the run folder; None for a file that has none."""
    return next((schema for schema in SCHEMAS if schema.pattern.fullmatch(name)), None)

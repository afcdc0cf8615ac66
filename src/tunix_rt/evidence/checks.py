"""The checks of L1: everything that follows from recorded facts, computed again without a model. Pure functions of a `Run`;
each yields one line per problem."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from tunix_rt.config.optimizers import learning_rate, total_at
from tunix_rt.data.packing import rows_of_step
from tunix_rt.doctor.wheels import MISFIT_WORDS
from tunix_rt.errors import TunixError
from tunix_rt.evidence.facts import Run
from tunix_rt.evidence.rollout_checks import rollouts
from tunix_rt.models.multimodal import text_config
from tunix_rt.models.safetensors import parts_of
from tunix_rt.plan.shape import Outline, outline_of
from tunix_rt.runs.checksums import is_weights, parse_object, shown
from tunix_rt.runs.folder import checkpoint_name
from tunix_rt.runs.ledger import MODEL, is_checkpoint, state_hash
from tunix_rt.runs.schemas import CheckpointEntry
from tunix_rt.runs.source import combined_hash
from tunix_rt.storage import merkle_root
from tunix_rt.train.alarms import alarm_stop
from tunix_rt.train.checkpointer import early_stop

RATE_TOLERANCE = 1e-12
"""Cosines differ in the last bits between mathematical libraries."""
MOST_DRAWN = 2**28
"""Rows drawn in all epochs together, beyond which a bundle only means to keep its reader busy."""
MOST_CONFIG = 2**20

Check = Callable[[Run], Iterator[str]]


def differs(file: str, name: str, recorded: Any, expected: Any) -> Iterator[str]:
    if recorded != expected or type(recorded) is not type(expected):
        yield f"{file}: {name} is {shown(recorded)}, expected {shown(expected)}"


# --- what the run committed to ----------------------------------------------------------------------------------------


def commitment(run: Run) -> Iterator[str]:
    """The settings, seeds and source that precommit.json names are those in the files."""
    committed, config, file = run.commitment, run.config, f"{run.where}precommit.json"
    data = run.record.data("config.yaml", MOST_CONFIG) or b""
    yield from differs(file, "config_sha256", committed.config_sha256, hashlib.sha256(data).hexdigest())
    training = config.training
    seeds = {"seed": training.seed, "data_seed": training.resolved_data_seed}
    yield from differs(file, "seeds", committed.seeds.model_dump(), seeds)
    yield from differs(file, "dataset.key", committed.dataset.key, config.data.key)
    validation = committed.dataset.validation.key if committed.dataset.validation else None
    yield from differs(file, "dataset.validation", validation, config.data.validation)
    yield from differs(file, "base_model.name", committed.base_model.name, config.model.model_name_or_path)
    yield from differs(file, "base_model.weights", committed.base_model.weights, config.model.weights)
    evalset = committed.evalset.key if committed.evalset else None
    yield from differs(file, "evalset.key", evalset, config.evaluation.evalset)
    if training.device not in ("auto", committed.device):
        yield f"{file}: device is {committed.device}, config.yaml has {training.device}"
    if run.doctor.choice is not None:
        yield from differs(f"{run.where}doctor.json", "choice.device", run.doctor.choice.device, committed.device)
    batch, each = committed.batch, training.per_device_train_batch_size
    if batch is not None and batch.rows != each * batch.devices:
        yield f"{file}: batch.rows is not training.per_device_train_batch_size on each device"
    if combined_hash(committed.source_files) != committed.source_sha256:
        yield f"{file}: source_sha256 is not the hash of source_files"
    with_weights = any(name.endswith((".safetensors", ".gguf")) for name in committed.base_model.files)
    if with_weights != (committed.base_model.weights == "pretrained"):
        yield f"{file}: {committed.base_model.weights} weights {'with' if with_weights else 'without'} a weights file"


def result(run: Run) -> Iterator[str]:
    """result.json states the end of the chain, and the same run, device and parameters as the other files."""
    last = run.metrics[-1]
    expected = {
        "run_id": run.run_id, "device": run.commitment.device, "steps_completed": run.total, "steps_planned": run.ends[-1],
        "final_loss": last.loss, "final_loss_hex": last.loss_hex, "metrics_head": run.heads[-1], "exit_code": 0,
    }  # fmt: skip
    if (parameters := _parameters(run)) is not None:
        expected["parameters"] = parameters
    for name, value in expected.items():
        yield from differs(f"{run.where}result.json", name, getattr(run.result, name), value)


def _parameters(run: Run) -> int | str | None:
    """By the row of the model's family; None where it has none."""
    data = run.record.data("final_model/config.json", MOST_CONFIG)
    config = parse_object(data or b"")
    try:
        if not isinstance(config, dict):
            return config
        found = outline_of(text_config(config))
        return None if isinstance(found, Outline) else found.parameters
    except (TunixError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        return f"final_model/config.json describes no model: {shown(str(error))}"


# --- the steps --------------------------------------------------------------------------------------------------------


def chain(run: Run) -> Iterator[str]:
    """Each line carries the hash of the line before it, the first that of precommit.json; steps count from 1."""
    file, heads = f"{run.where}metrics.jsonl", run.heads
    for number, line in enumerate(run.metrics, start=1):
        if line.step != number:
            yield f"{file}:{number}: step is {line.step}"
        if line.prev != heads[number - 1]:
            yield f"{file}:{number}: prev is not the hash of {'precommit.json' if number == 1 else 'the line before'}"
        if line.loss.hex() != line.loss_hex:
            yield f"{file}:{number}: loss {line.loss!r} is not loss_hex {shown(line.loss_hex)}"


def schedule(run: Run) -> Iterator[str]:
    """Number of steps and learning rate of each, from the settings and the number of rows; extensions of a complete run and an
    early stop where the held-out losses give it."""
    config, rows, ends = run.config, len(run.record.rows), run.ends
    yield from differs(f"{run.where}precommit.json", "dataset.rows", run.commitment.dataset.rows, rows)
    training = config.training
    for extension, before in zip(run.record.extensions, ends, strict=False):
        if not extension.after_step == before < extension.max_steps:
            added = f"from step {extension.after_step} to {extension.max_steps}"
            yield f"{run.where}extensions.json: {added}, the run ended at {before}"
    stopped = early_stop((line.loss for line in run.record.heldout), training.patience)
    steps = run.record.heldout[stopped - 1].step if stopped else ends[-1]
    steps = alarm_stop(run.record.along, stops=training.stops_on_alarm) or steps
    if steps != run.total:
        yield f"{run.where}metrics.jsonl has {run.total:,} steps, settings, rows and held-out losses give {steps:,}"
    for number, line in enumerate(run.metrics, start=1):
        expected = learning_rate(number, total=total_at(number, ends, ends[-1]), training=training)
        if not math.isclose(line.lr, expected, rel_tol=RATE_TOLERANCE, abs_tol=1e-300):
            yield f"{run.where}metrics.jsonl:{number}: lr is {line.lr!r}, the schedule gives {expected!r}"


def batches(run: Run) -> Iterator[str]:
    """The rows have the committed Merkle root; seed and rows give the batch, tokens and targets of every step."""
    rows, per_step, seed = run.record.rows, run.rows_per_step, run.commitment.seeds.data_seed
    for number, row in enumerate(rows):
        if row.row != number or row.targets >= row.tokens or row.tokens > run.config.data.max_length:
            yield f"{run.where}rows.jsonl:{number + 1}: not row {number}, or longer than data.max_length"
    identities = [bytes.fromhex(row.sha256) for row in rows]
    data, mixture = run.config.data, run.mixture
    recorded = [(part.key, part.weight) for part in mixture]
    if recorded != list(zip(data.names if data.weights else (), data.weights, strict=True)):
        yield f"{run.where}precommit.json: dataset.mixture is not that of the settings"
        return
    if mixture and sum(part.rows for part in mixture) != len(rows):
        yield f"{run.where}precommit.json: dataset.mixture has other rows than rows.jsonl"
        return
    if merkle_root(identities) != run.commitment.dataset.merkle_root:
        yield f"{run.where}rows.jsonl: the Merkle root of the rows is not the committed one"
    if len(rows) * (1 + run.total * per_step // max(len(rows), 1)) > MOST_DRAWN:
        yield f"{run.where}metrics.jsonl: {run.total:,} steps over {len(rows):,} rows are too many to draw again"
        return
    if run.config.training.samples:  # `rollouts` draws the questions of each step
        return
    lengths = [row.tokens for row in rows] if run.config.data.group_by_length else None
    for number, line in enumerate(run.metrics, start=1):
        chosen = rows_of_step(
            number, row_count=len(rows), rows_per_step=per_step, seed=seed, lengths=lengths, mixture=mixture
        )
        batch = hashlib.sha256(b"".join(identities[index] for index in chosen)).hexdigest()
        tokens, targets = (sum(getattr(rows[index], name) for index in chosen) for name in ("tokens", "targets"))
        if (line.batch, line.tokens, line.target_tokens) != (batch, tokens, targets):
            yield f"{run.where}metrics.jsonl:{number}: batch, tokens or targets are not those that seed and rows give"


def heldout(run: Run) -> Iterator[str]:
    """A held-out loss at each step where one was due, over the same tokens; the best of the checkpoints in the result."""
    lines, file = run.record.heldout, f"{run.where}eval/heldout.jsonl"
    found, heldout_traces = run.result, run.commitment.dataset.heldout_traces
    due = [0, *sorted(_due(run, run.config.training.eval_steps))] if heldout_traces else []
    if [line.step for line in lines] != due:
        yield f"{file}: steps {shown(str([line.step for line in lines][:9]))}, due are {shown(str(due[:9]))}"
    for line in lines:
        if line.loss.hex() != line.loss_hex or line.target_tokens != lines[0].target_tokens:
            yield f"{file}: step {line.step}: loss is not loss_hex, or over other tokens"
    losses = {line.step: line.loss for line in lines}
    saved = [entry.step for entry in run.record.checkpoints if entry.step in losses]
    best = min(saved, key=lambda step: losses[step], default=None)
    lowest, file = None if best is None else losses[best], f"{run.where}result.json"
    yield from differs(file, "best_step", found.best_step, best)
    yield from differs(file, "best_heldout_loss", found.best_heldout_loss, lowest)


def _due(run: Run, *intervals: int | None) -> set[int]:
    """The ends of the run, and each of the `intervals` that is set."""
    ends = {run.total, *(end for end in run.ends if end < run.total)}
    return ends.union(*(range(every, run.total, every) for every in intervals if every))


# --- checkpoints and processes ----------------------------------------------------------------------------------------


def checkpoints(run: Run) -> Iterator[str]:
    """Checkpoints are at the steps of the settings, or where a process stopped, unless they are saved by time, at any step; each
    matches its line and the run's hashes."""
    entries, file, training = run.record.checkpoints, f"{run.where}checkpoints.json", run.config.training
    steps = [entry.step for entry in entries]
    due = _due(run, training.save_steps, training.eval_steps)
    stopped = {process.first_step - 1 for process in run.record.processes}
    by_time = training.save_steps is None or training.save_minutes is not None
    possible = set(range(1, run.total + 1)) if by_time else due | stopped
    if steps != sorted(set(steps)) or not due <= set(steps) or not set(steps) <= possible:
        yield f"{file}: checkpoints at {shown(str(steps[:9]))}, due are {shown(str(sorted(due)[:9]))}"
        return
    for entry in entries:
        yield from (f"{file}: step {entry.step}: {problem}" for problem in _entry_problems(run, entry))
    for first, second in pairwise(entries):
        if _weights(first) == _weights(second) and _moved(run, first.step, second.step):
            yield f"{file}: the weights at step {second.step} are those at step {first.step}"
    listed = {f"checkpoints/{checkpoint_name(step)}" for step in steps}
    inside = (name for name in run.record.run_sums if name.startswith("checkpoints/"))
    if extra := min((name for name in inside if name.rpartition("/")[0] not in listed), default=""):
        yield f"{file}: no entry for {shown(extra)}"


def _weights(entry: CheckpointEntry) -> list[str]:
    return [entry.files[name].sha256 for name in parts_of(MODEL, entry.files)]


def _entry_problems(run: Run, entry: CheckpointEntry) -> Iterator[str]:
    folder = f"checkpoints/{checkpoint_name(entry.step)}"
    if entry.metrics_head != run.heads[entry.step]:
        yield "metrics_head is not the hash of its line in metrics.jsonl"
    if not is_checkpoint(entry.files):
        yield "other files than a checkpoint has"
        return
    hashes = {f"{folder}/{name}": file.sha256 for name, file in entry.files.items()}
    hashes[f"{folder}/MANIFEST.json"] = entry.manifest_sha256
    ended = {name: digest for name, digest in run.record.run_sums.items() if name.startswith(f"{folder}/")}
    if ended and ended != hashes:
        yield "other files or hashes than the run ended with"
    for name, file in entry.files.items():
        if (size := run.record.listing.files.get(f"{folder}/{name}", file.bytes)) != file.bytes:
            yield f"{name} has {size:,} bytes, recorded are {file.bytes:,}"


def _moved(run: Run, after: int, up_to: int) -> bool:
    """Whether a step must have changed the weights: Adam moves each by about its lr, unless that is lost in rounding."""
    adam = run.config.training.optim.startswith("adam")
    return adam and any(line.lr >= 1e-6 and line.grad_norm > 0 for line in run.metrics[after:up_to])


def states(run: Run) -> Iterator[str]:
    """The state hash of every checkpoint is in the metrics chain, or in the result that closes it."""
    files = {entry.step: entry.files.items() for entry in run.record.checkpoints}
    hashes = {step: state_hash({name: file.sha256 for name, file in inside}) for step, inside in files.items()}
    carried: dict[int, str] = {}
    for line in run.metrics:
        for step, digest in (line.states or {}).items():
            if not step.isdecimal() or int(step) >= line.step or int(step) in carried:
                yield f"{run.where}metrics.jsonl:{line.step}: the state of step {shown(step)} does not belong here"
            else:
                carried[int(step)] = digest
    if run.result.final_state is not None:
        carried[run.total] = run.result.final_state
    if carried != hashes:
        odd = sorted(step for step in carried.keys() | hashes.keys() if carried.get(step) != hashes.get(step))
        yield f"{run.where}checkpoints.json: the states of steps {odd[:5]} are not those in metrics.jsonl and result.json"


def processes(run: Run) -> Iterator[str]:
    """The processes start at step 1 or after a checkpoint; each ran the committed versions on the committed device."""
    file, found = f"{run.where}processes.json", run.record.processes
    firsts, listed = [process.first_step for process in found], {entry.step for entry in run.record.checkpoints}
    if not found or firsts[0] != 1 or firsts[-1] != (run.result.resumed_from or 0) + 1:
        yield f"{file}: processes start at steps {shown(str(firsts[:9]))}, result.json: resumed_from is {run.result.resumed_from}"
    for number, first in enumerate(firsts):
        dropped = any(later <= first for later in firsts[number + 1 :])
        if first > 1 and first - 1 not in listed and not dropped:
            yield f"{file}: a process resumed after step {first - 1}, of which there is no checkpoint"
    for process in found:
        machine, versions = process.machine, run.commitment.versions
        if (machine.backend, machine.device) != (run.backend, run.device):
            yield f"{file}: {machine.backend} on {machine.device}, committed is {run.backend} on {run.device}"
        other = [
            name
            for name, version in machine.versions.items()
            if name in versions and _plain(version) != _plain(versions[name])
        ]
        if other or run.backend not in machine.versions:
            yield f"{file}: {', '.join(map(shown, other)) or run.backend} has another version than precommit.json"
        on_gpu = machine.gpu is not None
        if machine.deterministic != run.config.training.deterministic or on_gpu != (run.device == "cuda"):
            yield f"{file}: deterministic or gpu is not as the settings and the device have it"


def _plain(version: str) -> str:
    """Without the packaging of a wheel: `+cu130`."""
    return version.partition("+")[0]


def gpu(run: Run) -> Iterator[str]:
    """A run on a GPU passed its kernel self-test there, saw memory allocated under its process id, and no misfit warning."""
    if run.device != "cuda":
        return
    proof, samples = run.doctor.proof, run.result.gpu_memory or ()
    if proof is None or not proof.ok or not all(one.ok for one in proof.results) or proof.device != run.device:
        yield f"{run.where}doctor.json: the kernel self-test on the GPU is missing or failed"
    pids = {process.pid for process in run.record.processes}
    if not any(sample.pid in pids and sample.used_bytes > 0 for sample in samples):
        yield f"{run.where}result.json: no sample of GPU memory under a process id of the run"
    for warning in run.result.warnings or ():
        if any(phrase.casefold() in warning.casefold() for phrase in MISFIT_WORDS):
            yield f"{run.where}result.json: a warning about the compute capability: {shown(warning)}"


CHECKS: Mapping[str, Check] = {
    "commitment": commitment, "chain": chain, "result": result, "schedule": schedule, "batches": batches, "held-out": heldout,
    "checkpoints": checkpoints, "states": states, "processes": processes, "gpu": gpu,
    "rollouts": rollouts,
}  # fmt: skip
"""By the name that the documentation has. `answers`, `data` and `manifest` need more than the run."""


def left_out(run: Run) -> dict[str, str]:
    """Files that the run ended with and that a bundle need not carry, by hash."""
    present = run.record.listing.files
    return {name: digest for name, digest in run.record.run_sums.items() if name not in present}


def may_stay_out(name: str) -> bool:
    """Weights, what belongs to them, and the trace of the profiler, which names the computer and its folders."""
    belongs = name.startswith(("checkpoints/", "final_model/")) and name != "final_model/config.json"
    return is_weights(name) or belongs or name == "profile/trace.json.gz"

"""Everything about the steps that follows from the settings, the seed and the rows: how many, which learning rate, which
rows, how many tokens. Nothing is computed by a model."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunix_rt import config as settings
from tunix_rt.backends.schedule import learning_rate
from tunix_rt.config import RunConfig, Training, dump_yaml
from tunix_rt.data.merkle import merkle_root
from tunix_rt.data.pack import rows_of_step, total_steps
from tunix_rt.evidence.claims import RunFiles, require, value_at
from tunix_rt.evidence.doubtful import read_bytes, shown
from tunix_rt.evidence.gathered import Noted, few
from tunix_rt.evidence.precommit import settled_config
from tunix_rt.rundir import RunDir

KEYS = (
    "batch", "grad_norm", "loss", "loss_hex", "lr", "peak_bytes", "prev", "seconds", "step", "target_tokens", "tokens",
)  # fmt: skip
SCHEDULES = ("linear", "cosine", "constant")
RATE_TOLERANCE = 1e-12
"""Cosines differ in the last bits between mathematical libraries."""
MOST_DRAWN = 2**31
"""Rows drawn in all epochs together, beyond which a bundle only means to keep its reader busy."""


def setting_problems(noted: Noted) -> Iterator[str]:
    """What the run committed to against its settings."""
    run, config, committed = noted.run, noted.run.config, noted.run.precommit
    seed = run.need("config.yaml", "training.seed", int)
    data_seed = value_at(config, "training.data_seed")
    wanted = {
        "device": value_at(config, "training.device"),
        "seeds": {"seed": seed, "data_seed": seed if data_seed is None else data_seed},
        "dataset.key": value_at(config, "data.dataset"),
        "base_model.name": value_at(config, "model.model_name_or_path"),
        "base_model.weights": value_at(config, "model.weights"),
        "evalset.key": value_at(config, "evaluation.evalset"),
    }
    for name, value in wanted.items():
        told = value_at(committed, name)
        if value != told and not (name == "device" and value == "auto"):
            yield f"{run.where}precommit.json: {name} is {_shown(told)}, config.yaml gives {_shown(value)}"

    torch, seen = value_at(committed, "versions.torch"), value_at(run.doctor, "facts.torch.version")
    if torch is not None and str(torch).partition("+")[0] != str(seen).partition("+")[0]:
        yield f"{run.where}precommit.json: torch is {shown(torch)}, doctor.json has {shown(seen)}"
    yield from _form_problems(run)


def _form_problems(run: RunFiles) -> Iterator[str]:
    """`config.yaml` as it is written, where the source that wrote it has the same settings as this one."""
    ours = hashlib.sha256(Path(settings.__file__).read_bytes()).hexdigest()
    if run.need("precommit.json", "source_files", dict).get("config.py") != ours:
        return
    try:
        text = dump_yaml(settled_config(RunConfig.model_validate(dict(run.config))))
    except ValidationError as error:
        yield f"{run.where}config.yaml: {error.error_count()} setting(s) that no run is given, first {shown(_place(error))}"
        return
    if read_bytes(RunDir(run.folder).config)[0] != text.encode():
        yield f"{run.where}config.yaml is not as tunix-rt writes these settings"


def _place(error: ValidationError) -> str:
    return ".".join(map(str, error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]))


def _shown(value: Any) -> str:
    return shown(value) if not isinstance(value, Mapping) else ascii(dict(value))[:80]


def heldout_problems(noted: Noted) -> Iterator[str]:
    """The held-out losses: a line where one was due, and the best of them in the result."""
    run, every = noted.run, value_at(noted.run.config, "training.eval_steps")
    if not noted.heldout:
        if "best_heldout_loss" in run.result:
            yield f"{run.where}result.json: best_heldout_loss without eval/heldout.jsonl"
        held = value_at(run.precommit, "dataset.heldout_traces")
        if noted.rows is not None and type(held) is int and held > 0:
            yield f"{run.where}eval/heldout.jsonl is missing: precommit.json has {held:,} traces held out"
        return
    losses: dict[int, float] = {}
    targets = set()
    for number, line in enumerate(noted.heldout, start=1):
        where = f"{run.where}eval/heldout.jsonl:{number}"
        step, loss = require(where, line, "step", int), require(where, line, "loss", float)
        targets.add(require(where, line, "target_tokens", int))
        if loss.hex() != line.get("loss_hex") or loss < 0:
            yield f"{where}: loss {loss!r} is not loss_hex {shown(line.get('loss_hex'))}"
        if losses and step <= max(losses):
            yield f"{where}: step {step} after step {max(losses)}"
        losses[step] = loss
    if len(targets) > 1:
        yield f"{run.where}eval/heldout.jsonl: not always over the same tokens"
    if noted.rows is not None:
        total, every = noted.total, every if type(every) is int and every > 0 else noted.total
        due = {0, total, *range(every, total, every)}
        if losses.keys() != due:
            odd = sorted(losses.keys() ^ due)
            yield f"{run.where}eval/heldout.jsonl: not one line at each step that was due, first at step {odd[0]}"
    best = run.result.get("best_step")
    if best is not None and (best not in losses or losses[best] != run.result.get("best_heldout_loss")):
        yield f"{run.where}result.json: best_heldout_loss is not that of step {shown(best)} in eval/heldout.jsonl"
    listed = [entry.get("step") for entry in noted.checkpoints or ()]
    saved = [step for step in losses if step in listed]
    if saved and best != (lowest := min(saved, key=lambda step: losses[step])):
        yield f"{run.where}result.json: best_step is {shown(best)}, the lowest held-out loss of a checkpoint is at {lowest}"


def number_problems(noted: Noted) -> Iterator[str]:
    """Each line of the metrics has the known figures, and none that no step can have."""
    yield from few(_number_problems(noted.run), f"{noted.run.where}metrics.jsonl")


def _number_problems(run: RunFiles) -> Iterator[str]:
    for number, line in enumerate(run.metrics, start=1):
        where = f"{run.where}metrics.jsonl:{number}"
        if tuple(sorted(line)) != KEYS:
            yield f"{where} does not have the figures of a step: {shown(', '.join(map(str, sorted(line))))}"
            continue
        for name in ("loss", "lr", "grad_norm", "seconds"):
            if require(where, line, name, float) < 0:
                yield f"{where}: {name} is {line[name]!r}"
        counts = [require(where, line, name, int) for name in ("target_tokens", "tokens", "peak_bytes")]
        if not 0 < counts[0] <= counts[1]:
            yield f"{where}: {counts[0]} targets in {counts[1]} tokens"


def count_problems(noted: Noted) -> Iterator[str]:
    """How many steps the settings and the rows give."""
    run, rows = noted.run, noted.run.need("precommit.json", "dataset.rows", int)
    if noted.rows is not None and len(noted.rows) != rows:
        yield f"{run.where}rows.jsonl has {len(noted.rows):,} rows, precommit.json {rows:,}"
    if rows == 0:
        yield f"{run.where}precommit.json: a dataset of no rows"
        return
    epochs = run.need("config.yaml", "training.num_train_epochs", float)
    most = value_at(run.config, "training.max_steps")
    given = total_steps(
        rows, _rows_per_step(run), epochs=epochs, max_steps=most if type(most) is int and most > 0 else None
    )
    if noted.total != given:
        yield f"{run.where}result.json: steps_planned is {noted.total}, the settings and rows give {given}"


def _rows_per_step(run: RunFiles) -> int:
    """JAX spreads its micro-batch over the devices it sees, and committed to how many rows that makes."""
    of_jax = run.need("config.yaml", "training.backend", str) == "jax"
    file, name = ("precommit.json", "batch.rows") if of_jax else ("config.yaml", "training.per_device_train_batch_size")
    rows = run.need(file, name, int) * run.need("config.yaml", "training.gradient_accumulation_steps", int)
    if rows == 0:
        raise run.fault(f"{file}: {name} gives steps of no rows")
    return rows


def learning_rate_problems(noted: Noted) -> Iterator[str]:
    """The rate of every step is a function of the settings and the step."""
    yield from few(_rate_problems(noted), f"{noted.run.where}metrics.jsonl")


def _rate_problems(noted: Noted) -> Iterator[str]:
    run, total = noted.run, noted.total
    schedule = run.need("config.yaml", "training.lr_scheduler_type", str)
    if schedule not in SCHEDULES:
        yield f"{run.where}config.yaml: training.lr_scheduler_type is {shown(schedule)}"
        return
    training = Training.model_construct(
        learning_rate=run.need("config.yaml", "training.learning_rate", float),
        warmup_steps=run.need("config.yaml", "training.warmup_steps", float),
        lr_scheduler_type=schedule,
    )
    for number, line in enumerate(run.metrics, start=1):
        told = require(f"{run.where}metrics.jsonl:{number}", line, "lr", float)
        given = learning_rate(number, total=total, training=training)
        if not math.isclose(told, given, rel_tol=RATE_TOLERANCE, abs_tol=1e-300):
            yield f"{run.where}metrics.jsonl:{number}: lr is {told!r}, the schedule gives {given!r}"


def row_problems(noted: Noted) -> Iterator[str]:
    """The rows against the hash over them that the run committed to, and against the longest there may be."""
    run, rows = noted.run, noted.rows or ()
    if (root := merkle_root(bytes.fromhex(row.sha256) for row in rows)) != value_at(
        run.precommit, "dataset.merkle_root"
    ):
        yield f"{run.where}rows.jsonl: the hash over its rows is {root}, precommit.json committed to another"
    longest = run.need("config.yaml", "data.max_length", int)
    if over := sum(row.tokens > longest for row in rows):
        yield f"{run.where}rows.jsonl: {over} rows are longer than data.max_length, {longest}"


def batch_problems(noted: Noted) -> Iterator[str]:
    """Hash, tokens and targets of the batch of every step, which seed and rows determine."""
    yield from few(_batch_problems(noted), f"{noted.run.where}metrics.jsonl")


def _batch_problems(noted: Noted) -> Iterator[str]:
    run, rows = noted.run, noted.rows or ()
    seed, per_step = run.need("precommit.json", "seeds.data_seed", int), _rows_per_step(run)
    if len(rows) * (1 + len(run.metrics) * per_step // max(len(rows), 1)) > MOST_DRAWN:
        yield f"{run.where}metrics.jsonl: {len(run.metrics):,} steps over {len(rows):,} rows are too many to draw again"
        return
    identities = [bytes.fromhex(row.sha256) for row in rows]
    for number, line in enumerate(run.metrics, start=1):
        chosen = rows_of_step(number, row_count=len(rows), rows_per_step=per_step, seed=seed)
        given = {
            "batch": hashlib.sha256(b"".join(identities[index] for index in chosen)).hexdigest(),
            "tokens": sum(rows[index].tokens for index in chosen),
            "target_tokens": sum(rows[index].targets for index in chosen),
        }
        for name, value in given.items():
            if line.get(name) != value:
                told = shown(line.get(name))
                yield f"{run.where}metrics.jsonl:{number}: {name} is {told}, seed and rows give {shown(value)}"

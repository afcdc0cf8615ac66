"""Where a run begins: at step 0, or after the newest checkpoint that verifies."""

import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.config.settings import RunConfig
from tunix_rt.engines.base import Engine
from tunix_rt.errors import ConfigError, StorageError, TunixError
from tunix_rt.progress import phase
from tunix_rt.runs.checksums import UNLISTED, UNREAD, plain
from tunix_rt.runs.folder import EXTRA_FILE, RunDir, checkpoint_problems, checkpoint_step, list_checkpoints
from tunix_rt.runs.journal import RunJournal
from tunix_rt.runs.ledger import (
    MetricsLog,
    chain_heads,
    is_checkpoint_file,
    lost_states,
    repair_checkpoint_ledger,
    unchained_states,
)
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.schemas_host import Extension
from tunix_rt.storage import CHECK_VOLUME, read_json, sha256_file, storage, write_text
from tunix_rt.train.alarms import alarm_stop
from tunix_rt.train.checkpointer import early_stop, heldout_losses, whole_lines
from tunix_rt.train.commitment import read_precommit, refuse_another_config, refuse_another_format
from tunix_rt.train.memory_report import Phases

logger = logging.getLogger(__name__)


def refuse_occupied(run: RunDir, config: RunConfig) -> tuple[RunConfig, bool, tuple[Extension, ...]]:
    """The configuration that the run began with, whether it is resumed, and its extensions. Refuses a folder that contains a
    run, unless it is this run, unfinished or to be extended, and `--resume` is set.

    A folder whose run was refused before it began contains none, so that the same command can be repeated.
    """
    if not run.holds_a_run():
        _refuse_foreign(run)
        return config, False, ()
    status = _status(run)
    if not run.holds_work() and (status == "refused" or not run.precommit.exists()):
        stale = (run.rows, run.processes, run.checkpoint_list, run.result, run.hashes, run.precommit, run.memory)
        with storage(run.root):
            for path in stale:
                path.unlink(missing_ok=True)
        return config, False, ()
    if config.training.resume_from_checkpoint is None:
        fix = (
            "choose another --output"
            if status == "completed"
            else "add --resume to continue it, or choose another --output"
        )
        raise ConfigError(f"{run.root} already contains a run ({status})", fix=fix)
    if not run.precommit.exists():
        raise ConfigError(f"{run.root} contains a run without its precommit.json", fix="choose another --output")
    committed = read_precommit(run)
    refuse_another_format(committed, run.root)
    began, extensions = _extended(run, config, complete=status == "completed")
    refuse_another_config(committed, began, run.root)
    return began, True, extensions


def _refuse_foreign(run: RunDir) -> None:
    """A finished run verifies every file of its folder: what was there before would make it fail."""
    record = RunRecord(run.root)
    if foreign := [name for name in record.listing.files if record.is_foreign(name)]:
        more = f" and {len(foreign) - 1} more files" if len(foreign) > 1 else ""
        problem = f"{run.root} already contains {plain(foreign[0])}{more}, which no run writes"
        raise ConfigError(problem, fix="choose another --output, or move it out of the folder")


def _extended(run: RunDir, config: RunConfig, *, complete: bool) -> tuple[RunConfig, tuple[Extension, ...]]:
    """The extensions of the run, with the new one that `max_steps` makes of a complete run; and `config` with the `max_steps`
    that the run began with, where its own is that of the last extension."""
    record, wanted = RunRecord(run.root), config.training.max_steps
    extensions, began = _read_extensions(record), record.config
    if complete:
        done = record.result.steps_completed if record.result else None
        if done is None:
            raise TunixError(f"{run.result} is corrupt", fix="restore it from a copy, or choose another --output")
        if wanted is None or wanted <= done:
            fix = f"extend it: --resume --max-steps N with N above {done}, or choose another --output"
            raise ConfigError(f"the run in {run.root} is complete", fix=fix)
        patience = began.training.patience if began else None
        if began and alarm_stop(record.along, stops=began.training.stops_on_alarm):
            raise ConfigError(
                f"the run in {run.root} was stopped by an alarm at step {done}: it cannot be extended",
                fix="look at the alarms in result.json; train its final model further with another --output",
            )
        if early_stop(heldout_losses(run).values(), patience):
            raise ConfigError(
                f"the run in {run.root} ended at step {done} without a lower held-out loss for training.patience="
                f"{patience}: it cannot be extended",
                fix=f"train its final model further: --model {run.final_model} and another --output",
            )
        extensions = (*extensions, Extension(after_step=done, max_steps=wanted))
    if began is None or not extensions or extensions[-1].max_steps != wanted:
        return config, extensions
    training = config.training.model_copy(update={"max_steps": began.training.max_steps})
    return config.model_copy(update={"training": training}), extensions


def _read_extensions(record: RunRecord) -> tuple[Extension, ...]:
    """A corrupt file ends the run: the learning rates of its steps are unknown."""
    extensions = record.extensions
    if problems := record.problems.get("extensions.json"):
        raise TunixError(
            f"{record.root}: {problems[0]}", fix="restore extensions.json from a copy, or choose another --output"
        )
    return extensions


def _status(run: RunDir) -> str:
    """As the result has it. A run whose last extension is not in the result was killed as it began."""
    if not run.result.exists():
        return "unfinished"
    try:
        result, extensions = read_json(run.result), _read_extensions(RunRecord(run.root))
        newer = extensions and result["steps_planned"] != extensions[-1].max_steps
        return "unfinished" if newer else str(result["status"])
    except (TunixError, KeyError, TypeError):
        return "broken"


def earlier_answering_seconds(run: RunDir) -> float | None:
    """How long the evaluation before training took, as the previous process recorded it; None where it did not."""
    try:
        seconds = read_json(run.result)["answering_seconds"]
    except (TunixError, KeyError, TypeError):
        return None
    return float(seconds) if isinstance(seconds, int | float) and 0 <= seconds < math.inf else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Training continues after `step`, from `checkpoint`. Step 0 has no checkpoint."""

    step: int
    checkpoint: Path | None
    facts: dict[str, Any]
    """Fields of `result.json` about the steps that are kept."""
    seconds: float
    peak_bytes: int
    heldout_steps: frozenset[int]
    verified: set[Path]
    """Checkpoints whose files this process has hashed: the one it resumes from, then those it commits."""

    @property
    def saved_state(self) -> str:
        return f"step {self.step} is saved" if self.step else "nothing was trained yet"


@phase("find the checkpoint")
def find_start(run: RunDir, *, resume: bool) -> Start:
    """Step 0, or the newest checkpoint that verifies when `resume`. Only reads; see `truncate_to`."""
    skipped: dict[str, list[str]] = {}
    checkpoint, done = newest_checkpoint(run, skipped) if resume else (None, 0)
    lines = _metrics_lines(run)[:done]
    steps = [json.loads(line) for line in lines]
    head = chain_heads(sha256_file(run.precommit), lines)[-1]
    facts = step_facts(done, float.fromhex(steps[-1]["loss_hex"]), head) if steps else {}
    if skipped:
        facts["skipped_checkpoints"] = [{"name": name, "problems": found} for name, found in skipped.items()]
    return Start(
        step=done,
        checkpoint=checkpoint,
        facts=facts,
        seconds=sum(step["seconds"] for step in steps),
        peak_bytes=max((step["peak_bytes"] for step in steps), default=0),
        heldout_steps=frozenset(step for step, _ in _lines_up_to(run.heldout, done)),
        verified=set() if checkpoint is None else {checkpoint},
    )


def truncate_to(run: RunDir, start: Start) -> MetricsLog:
    """Truncate metrics of the steps after `start`, which are repeated. Returns the log that continues there."""
    metrics = MetricsLog.open(run, keep_steps=start.step)
    lines = _metrics_lines(run)[: start.step]
    repair_checkpoint_ledger(run, chain_heads(sha256_file(run.precommit), lines), verified=start.checkpoint)
    metrics.states = unchained_states(run, _chained(lines))
    again = start.step not in start.heldout_steps  # this step is evaluated again before training continues
    for file in run.rollouts.glob("*.jsonl") if run.rollouts.is_dir() else ():
        if file not in {run.rollouts_of(step) for step in range(1, start.step + 1)}:
            file.unlink()
    along = (run.samples_along, start.step - again), (run.questions_along, start.step - again)
    for path, last in ((run.heldout, start.step), *along):
        if path.exists():
            kept = [line for _, line in _lines_up_to(path, last)]
            write_text(path, b"".join(line + b"\n" for line in kept).decode("utf-8"))
    return metrics


def resume_at(journal: RunJournal, start: Start, phases: Phases) -> MetricsLog:
    """Nothing more can refuse this run: accept a resumed one as it is up to `start`, and continue there."""
    if journal.continued:
        phases.take_up(journal.run.memory)
        journal.accept()
        journal.training_began = True  # by an earlier process: an error from here on is not a refusal
    journal.result.set(**start.facts, resumed_from=start.step)
    journal.seconds_before = start.seconds
    journal.verified = start.verified
    phases.before_bytes = start.peak_bytes
    return truncate_to(journal.run, start)


def _metrics_lines(run: RunDir) -> list[bytes]:
    """Without a torn last one, which no checkpoint needs."""
    record = RunRecord(run.root)
    lines = record.raw_lines(run.metrics.name)
    _refuse_unreadable(record)
    return [line + b"\n" for line in lines]


def _refuse_unreadable(record: RunRecord) -> None:
    """What the disk does not give is neither missing nor corrupt."""
    problems = itertools.chain(record.listing.problems, *record.problems.values())
    if found := next((problem for problem in problems if UNLISTED in problem or UNREAD in problem), None):
        raise StorageError(f"{record.root}: {found}", fix=CHECK_VOLUME)


def _chained(lines: list[bytes]) -> dict[str, str]:
    """State hashes of checkpoints, by step, that the metrics carry."""
    carried = (json.loads(line)["states"] for line in lines if b'"states"' in line)
    return {step: digest for states in carried for step, digest in states.items()}


def newest_checkpoint(run: RunDir, skipped: dict[str, list[str]] | None = None) -> tuple[Path | None, int]:
    """The newest checkpoint that verifies. Corrupt ones are logged, and listed in `skipped` with their problems.

    A valid one is never skipped because of another file: where its metrics are missing, or an unlisted file lies beside its
    own, the run is refused. So is one that saved steps before and has no valid checkpoint left, which would start at 0."""
    lines = _metrics_lines(run)
    heads = chain_heads(sha256_file(run.precommit), lines)
    skipped = {} if skipped is None else skipped
    for checkpoint in list_checkpoints(run.checkpoints):
        problems = checkpoint_problems(checkpoint) or _state_problems(checkpoint)
        if not problems:
            _refuse_lost_metrics(run, checkpoint, heads)
            return checkpoint, checkpoint_step(checkpoint)
        if all(map(_is_foreign_file, problems)):
            fix = f"move it out of {checkpoint}, then resume"
            raise TunixError(f"{checkpoint.name} is valid, but has a file {problems[0]}", fix=fix)
        logger.warning("Checkpoint %s is corrupt, skipped: %s", checkpoint.name, "; ".join(problems))
        skipped[checkpoint.name] = problems
    if skipped or _chained(lines[: len(heads) - 1]) or unchained_states(run, {}):
        missing = "no checkpoint is valid" if skipped else f"{run.checkpoints} contains no checkpoint"
        raise StorageError(
            f"{run.root} saved steps before, and now {missing}",
            fix="mount or restore `checkpoints`; to train again from step 0, delete it with checkpoints.json and metrics.jsonl",
        )
    logger.warning("No checkpoint to resume from: starting at step 0")
    return None, 0


def _is_foreign_file(problem: str) -> bool:
    """Whether a problem of a checkpoint is a file beside its own."""
    kind, _, name = problem.partition(": ")
    return kind == EXTRA_FILE and not is_checkpoint_file(name)


def _state_problems(checkpoint: Path) -> list[str]:
    try:
        named = isinstance(read_json(checkpoint / "state.json")["metrics_head"], str)
    except StorageError:
        raise
    except (TunixError, KeyError, TypeError):
        named = False
    return [] if named else ["state.json does not name its line of metrics.jsonl"]


def _refuse_lost_metrics(run: RunDir, checkpoint: Path, heads: list[str]) -> None:
    """The line of its last step must be the one the checkpoint knows, with an unbroken chain before it."""
    step = checkpoint_step(checkpoint)
    if step < len(heads) and read_json(checkpoint / "state.json")["metrics_head"] == heads[step]:
        return
    where = f"{run.metrics}:{min(step, len(heads))}"
    raise _lost(
        f"{where} is missing or breaks the hash chain, and the valid {checkpoint.name} was saved after it", checkpoint
    )


def _lost(problem: str, checkpoint: Path) -> TunixError:
    another = f"move {checkpoint.name} out of the run folder to continue from the checkpoint before it"
    return TunixError(problem, fix=f"restore the file from a copy; or {another}; or choose another --output")


def refuse_lost_records(run: RunDir, start: Start, *, evaluated: int | None, ends: Sequence[int]) -> None:
    """Refuse to continue a run whose records of earlier steps are not whole and cannot be made again: trained to its end, it
    would not verify. The held-out loss was due every `evaluated` steps and at the `ends` before extensions; None: it is not
    measured."""
    record, step, checkpoint = RunRecord(run.root), start.step, start.checkpoint
    if checkpoint is None:
        return
    held = {line.step for line in record.heldout or () if line.loss.hex() == line.loss_hex}
    processes = record.processes
    _refuse_unreadable(record)
    due = set() if evaluated is None else {0, *range(evaluated, step, evaluated), *(end for end in ends if end < step)}
    if lacking := sorted(due - held):
        raise _lost(f"{run.heldout}: the held-out loss of step {lacking[0]} is missing or corrupt", checkpoint)
    if not processes or processes[0].first_step != 1:
        raise _lost(f"{run.processes} is missing or corrupt", checkpoint)
    lines = _metrics_lines(run)[:step]
    heads = chain_heads(sha256_file(run.precommit), lines)
    if lost := lost_states(run, heads, _chained(lines), verified=checkpoint):
        raise _lost(f"{run.checkpoint_list}: the checkpoint of step {lost[0]} is missing or is another", checkpoint)


# --- the same code ----------------------------------------------------------------------------------------------------


def refuse_other_kernels(engine: Engine, checkpoint: Path | None) -> None:
    """A compiler that is missing now, or was then, changes the attention, and with it the bits of every step."""
    if checkpoint is None:
        return
    then, now = read_json(checkpoint / "state.json").get("attention", engine.attention.name), engine.attention.name
    if then != now:
        raise ConfigError(
            f"{checkpoint.name} was trained with {then} attention, here it would be {now}: {engine.attention.why}",
            fix="continue where the run began, or choose another --output",
        )


def code_of(checkpoint: Path | None) -> dict[str, str]:
    """What computed the steps of `checkpoint`: compiled layers or plain ones, kernels or plain operations."""
    return {} if checkpoint is None else read_json(checkpoint / "state.json").get("code", {})


def refuse_other_code(code: Mapping[str, str], then: Mapping[str, str]) -> None:
    """They differ in the last bits."""
    for name in sorted(code.keys() & then.keys()):
        if code[name] != then[name]:
            raise ConfigError(
                f"the run was trained with {name}: {then[name]}, here it would be {name}: {code[name]}",
                fix="continue where the run began, with the same software, or choose another --output",
            )


def step_facts(step: int, loss: float, head: str) -> dict[str, Any]:
    return {"steps_completed": step, "final_loss": loss, "final_loss_hex": loss.hex(), "metrics_head": head}


def _lines_up_to(path: Path, last: int) -> list[tuple[int, bytes]]:
    """(step, line) of what was measured up to step `last`, without torn lines."""
    measured = ((record.get("step"), line) for record, line in whole_lines(path))
    return [(step, line) for step, line in measured if isinstance(step, int) and step <= last]

"""Where a run begins: at step 0, or after the newest checkpoint that verifies."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import ConfigError, StorageError, TunixError
from tunix_rt.runs.folder import RunDir, checkpoint_problems, checkpoint_step, list_checkpoints
from tunix_rt.runs.ledger import MetricsLog, _step_and_prev, chain_heads, mend_checkpoint_list, unchained_states
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import read_json, sha256_file, storage, write_text

# --- where to begin ---------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Training goes on after `step`, from `checkpoint`. Step 0 has no checkpoint."""

    step: int
    checkpoint: Path | None
    facts: dict[str, Any]
    """What `result.json` says of the steps that are kept."""
    seconds: float
    peak_bytes: int
    heldout_steps: frozenset[int]
    sound: set[Path]
    """Checkpoints whose files this process has hashed: the one it goes on from, then those it commits."""

    @property
    def kept(self) -> str:
        return f"step {self.step} is saved" if self.step else "nothing was trained yet"


def find_start(run: RunDir, *, resume: bool) -> Start:
    """Where to begin: at step 0, or after the newest good checkpoint when `resume`. Only reads; see `cut_back`."""
    passed_over: dict[str, list[str]] = {}
    checkpoint, done = newest_checkpoint(run, passed_over) if resume else (None, 0)
    lines = _metrics_lines(run)[:done]
    steps = [json.loads(line) for line in lines]
    head = chain_heads(sha256_file(run.precommit), lines)[-1]
    facts = _facts(done, float.fromhex(steps[-1]["loss_hex"]), head) if steps else {}
    if passed_over:
        facts["skipped_checkpoints"] = [{"name": name, "problems": found} for name, found in passed_over.items()]
    return Start(
        step=done,
        checkpoint=checkpoint,
        facts=facts,
        seconds=sum(step["seconds"] for step in steps),
        peak_bytes=max((step["peak_bytes"] for step in steps), default=0),
        heldout_steps=frozenset(step for step, _ in _lines_up_to(run.heldout, done)),
        sound=set() if checkpoint is None else {checkpoint},
    )


def cut_back(run: RunDir, start: Start) -> MetricsLog:
    """Drop what was measured after `start`, which will be taken again; the log that goes on there."""
    metrics = MetricsLog.open(run, keep_steps=start.step)
    lines = _metrics_lines(run)[: start.step]
    mend_checkpoint_list(run, chain_heads(sha256_file(run.precommit), lines), sound=start.checkpoint)
    chained = [step for line in lines if b'"states"' in line for step in json.loads(line)["states"]]
    metrics.states = unchained_states(run, frozenset(chained))
    again = start.step not in start.heldout_steps  # what belongs to this step is asked again, before training goes on
    for path, last in ((run.heldout, start.step), (run.samples_along, start.step - again)):
        if path.exists():
            kept = [line for _, line in _lines_up_to(path, last)]
            write_text(path, b"".join(line + b"\n" for line in kept).decode("utf-8"))
    return metrics


def _metrics_lines(run: RunDir) -> list[bytes]:
    """Without a torn last one, which no checkpoint needs."""
    record = RunRecord(run.root)
    lines = record.raw_lines(run.metrics.name)
    if problems := record.problems.get(run.metrics.name):
        raise StorageError(problems[0], fix="check the volume and the permissions, or restore the file from a copy")
    return [line + b"\n" for line in lines]


def newest_checkpoint(run: RunDir, passed_over: dict[str, list[str]] | None = None) -> tuple[Path | None, int]:
    """The newest checkpoint that verifies and whose steps are all in the metrics; others are passed over aloud, and into
    `passed_over` with their problems. A sound one is not given up for a line that is wrong in the middle of the metrics: a
    crash tears only the last."""
    lines = _metrics_lines(run)
    heads = chain_heads(sha256_file(run.precommit), lines)
    for checkpoint in list_checkpoints(run.checkpoints):
        problems = checkpoint_problems(checkpoint)
        if not problems and len(heads) <= checkpoint_step(checkpoint) and _broken_inside(heads, lines):
            raise TunixError(
                f"{run.metrics}:{len(heads)} does not continue the line before it; {checkpoint.name}, which is sound, needs it",
                fix="restore metrics.jsonl from a copy, or start a new run with another --output",
            )
        if problems := problems or _metrics_problems(checkpoint, heads):
            logger.warning("checkpoint %s is damaged and passed over: %s", checkpoint.name, "; ".join(problems))
            if passed_over is not None:
                passed_over[checkpoint.name] = problems
            continue
        return checkpoint, int(read_json(checkpoint / "MANIFEST.json")["step"])
    logger.warning("there is no checkpoint to continue from: starting at step 0")
    return None, 0


def _broken_inside(heads: list[str], lines: list[bytes]) -> bool:
    """Whether the chain ends before the lines do, and not because the last of them is torn."""
    wrong = lines[len(heads) - 1 :]
    return len(wrong) > 1 or (len(wrong) == 1 and wrong[0].endswith(b"\n") and _step_and_prev(wrong[0]) != (None, None))


def _metrics_problems(checkpoint: Path, heads: list[str]) -> list[str]:
    """Whether the line of its last step is the one the checkpoint knows, with an unbroken chain before it."""
    step = int(read_json(checkpoint / "MANIFEST.json")["step"])
    if step >= len(heads):
        return [f"metrics.jsonl is whole only up to step {len(heads) - 1}"]
    try:
        known = read_json(checkpoint / "state.json")["metrics_head"]
    except (TunixError, KeyError, TypeError):
        return ["state.json does not name its line of metrics.jsonl"]
    return [] if known == heads[step] else [f"metrics.jsonl:{step} is not the line it knows"]


def refuse_other_kernels(engine: Any, checkpoint: Path | None) -> None:
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


def _facts(step: int, loss: float, head: str) -> dict[str, Any]:
    return {"steps_completed": step, "final_loss": loss, "final_loss_hex": loss.hex(), "metrics_head": head}


def _lines_up_to(path: Path, last: int) -> list[tuple[int, bytes]]:
    """(step, line) of what was measured up to step `last`, without torn lines."""
    if not path.exists():
        return []
    kept: list[tuple[int, bytes]] = []
    with storage(path):
        for line in path.read_bytes().splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(step, int) and step <= last:
                kept.append((step, line))
    return kept

"""The training stage: iterate the engine's steps, write every step down, save, measure, stop when asked.

The loop itself is `optimizer_steps` in `backends/torch_backend.py` and `backends/jax_backend.py`.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunix_rt.backends import Progress, Step
from tunix_rt.config import RunConfig, Training
from tunix_rt.data.pack import StepBatch, batch_of_step
from tunix_rt.data.prepare import Prepared
from tunix_rt.errors import ConfigError, Preempted, StorageError, TunixError
from tunix_rt.ledgers import list_checkpoint, mend_checkpoint_list, unchained_states
from tunix_rt.profiling.record import Recording, choose_first
from tunix_rt.rundir import (
    RunDir,
    append_jsonl,
    checkpoint_problems,
    checkpoint_step,
    json_line,
    list_checkpoints,
    read_json,
    sha256_file,
    storage,
    sync_folder,
    write_text,
)
from tunix_rt.runs.record import RunRecord
from tunix_rt.saving import Saver
from tunix_rt.stopping import RESUME, StopRequest

logger = logging.getLogger(__name__)


class MetricsLog:
    """`metrics.jsonl`: one flushed line per step, each carrying the hash of the line before it.

    `states` are the hashes of checkpoints that no line carries yet, by step. A line written where a checkpoint is saved
    carries them, so that the chain covers every state but the last, which `result.json` has.
    """

    def __init__(self, path: Path, head: str) -> None:
        self._path = path
        self.head = head
        self.states: dict[str, str] = {}

    @classmethod
    def open(cls, run: RunDir, *, keep_steps: int) -> "MetricsLog":
        """Start after `keep_steps` lines that are already there; later lines belong to steps that will be taken again."""
        head = sha256_file(run.precommit)
        kept: list[bytes] = []
        if keep_steps:
            with storage(run.metrics):
                kept = run.metrics.read_bytes().splitlines(keepends=True)[:keep_steps]
        heads = chain_heads(head, kept)
        if len(heads) <= len(kept):
            raise TunixError(f"{run.metrics}:{len(heads)} does not continue the line before it", fix="start a new run")
        head = heads[-1]
        if len(kept) != keep_steps:
            raise TunixError(f"{run.metrics} ends before step {keep_steps}", fix="start a new run")
        if run.metrics.exists():  # cut in place: the kept lines are never unwritten
            with storage(run.metrics), run.metrics.open("ab") as file:
                file.truncate(sum(map(len, kept)))
        return cls(run.metrics, head)

    def sync(self) -> None:
        """Make the lines durable, and the name of their file. A checkpoint that outlived its lines in a power cut could not
        be continued from."""
        with storage(self._path):
            with self._path.open("ab") as file:
                os.fsync(file.fileno())
            sync_folder(self._path.parent)

    def append(self, step: Step, *, saved: bool = False) -> None:
        """Write the line of `step`. Where a checkpoint of it is `saved` next, the line carries the states before it."""
        states = {"states": self.states} if saved and self.states else {}
        line = json_line(
            {
                **states,
                "step": step.step,
                "loss": step.loss,
                "loss_hex": step.loss.hex(),
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "target_tokens": step.target_tokens,
                "tokens": step.tokens,
                "seconds": step.seconds,
                "peak_bytes": step.peak_bytes,
                "batch": step.batch,
                "prev": self.head,
            }
        )
        with storage(self._path), self._path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line)
        self.head = hashlib.sha256(line.rstrip("\n").encode()).hexdigest()
        if states:
            self.states = {}


def _step_and_prev(line: bytes) -> tuple[object, object]:
    try:
        record = json.loads(line)
        return record["step"], record["prev"]
    except (ValueError, KeyError, TypeError):
        return None, None


def chain_heads(first: str, lines: list[bytes]) -> list[str]:
    """The hash each step's line must hold in `prev`: `first`, then that of every line up to the first that is wrong."""
    heads = [first]
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n") or _step_and_prev(line) != (number, heads[-1]):
            break
        heads.append(hashlib.sha256(line.rstrip(b"\n")).hexdigest())
    return heads


# --- where to begin ---------------------------------------------------------------------------------------------------


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


# --- the loop ---------------------------------------------------------------------------------------------------------


def train_run(
    backend: Any,
    engine: Any,
    *,
    run: RunDir,
    config: RunConfig,
    data: Prepared,
    pad_id: int,
    total: int,
    start: Start,
    metrics: MetricsLog,
    stop: StopRequest,
    progress: Progress,
    note: Callable[[dict[str, Any]], None],
    eval_rows: int,
    rows: int | None = None,
    read_along: Callable[[int], None] | None = None,
    profile: int = 0,
    ended: Callable[[str], None] = lambda phase: None,
    layers: str | None = None,
) -> float:
    """Train to step `total` from `start`; the tokens per second, 0 when no step was left to take. Micro-batches have
    `rows` rows: those that one device is given, where none are named.

    Every step is in `metrics.jsonl`, and what `result.json` will say of it is told to `note`, before the next begins.
    `read_along` is called where the held-out loss is measured, and a checkpoint is written before either. With `profile`, so
    many steps are recorded. `ended` is told the name of each phase whose memory is measured by itself. `layers` are computed
    as the plan says, or, of a run that is continued, as before.
    """
    training, done = config.training, start.step
    optimizer = backend.make_optimizer(engine, training)

    def measure(step: int) -> float:
        began = time.monotonic()
        if read_along is not None:
            read_along(step)
            ended("samples")
        if data.heldout_rows:  # last: its line says that all was measured
            _measure_heldout(backend, engine, run, data, pad_id, eval_rows, step)
            ended("held-out")
        return time.monotonic() - began

    if start.checkpoint is not None:
        backend.restore_state(engine, optimizer, start.checkpoint, step=done)
        logger.info("Resumed from %s", start.checkpoint.name)
        ended("resume")
    stop.raise_if_asked(start.kept, starting=True)
    tokens, seconds, slowest, measuring = 0, 0.0, 0.0, 0.0
    if done not in start.heldout_steps and (not done or _due(done, training.eval_steps, total)):
        measuring = measure(done)  # before the first step; or a run that was stopped between a step and its measure
        stop.raise_if_asked(start.kept)
    rows = rows or training.per_device_train_batch_size
    batch_of = batches_of(training, data, pad_id, rows)
    code, then = {}, code_of(start.checkpoint)
    if done < total:
        code = backend.prepare_steps(
            engine,
            batch_of,
            training,
            total=total,
            longest_row=data.longest_row,
            as_before=then.get("layers"),
            planned=layers,
        )
        refuse_other_code(code, then)
    spread = {"batch": {"rows": rows, "devices": len(engine.devices)}} if training.backend == "jax" else {}
    steps = backend.optimizer_steps(engine, optimizer, batch_of, training, first=done + 1, total=total)
    if profile:
        recording = Recording(
            run=run, engine=engine, training=training, rows=data.rows, seed=_data_seed(training), batch_of=batch_of,
            count=profile, done=done, first=_first_recorded(profile, training, done, total),
        )  # fmt: skip
        steps = recording.over(steps)
    saver = Saver(
        backend,
        engine,
        optimizer,
        run=run,
        keep=training.save_total_limit,
        start=done,
        sync_metrics=metrics.sync,
        sound=start.sound,
        stop=stop,
        published=lambda checkpoint: metrics.states.update(list_checkpoint(run, checkpoint)),
    )
    with contextlib.closing(steps), saver, _tensorboard(config, run) as chart:
        for step in steps:
            measured = _due(step.step, training.eval_steps, total)
            saved = measured or _due(step.step, training.save_steps, total)
            if saved:  # its line carries the state of the save under way
                saver.wait()
            with stop.unbroken():  # the result must not know another last step than the metrics
                metrics.append(step, saved=saved)
                stop.step = step.step
                note(_facts(step.step, step.loss, metrics.head))
            chart(step)
            tokens, seconds, slowest = tokens + step.tokens, seconds + step.seconds, max(slowest, step.seconds)
            progress("train", step.step, total, f"loss {step.loss:.4f}, {tokens / seconds:,.0f} tokens/s")
            if step.step % training.logging_steps == 0 or step.step in (1, total):
                _log_step(step, total)
            saver.raise_if_failed()
            state = _state(step, metrics.head, engine.attention.name, code) | spread
            if saved or step.step == done + 1:
                ended("steps" if step.step > done + 1 else "first_step")
            if saved:  # before an evaluation too: nothing that goes wrong in it costs a step
                saver.save(step.step, state)
                ended("checkpoint")
            # After the last step the final model is saved, which takes as long.
            next_step = (slowest if step.step < total else 0.0) + saver.longest_seconds
            _stop_if_asked(stop, saver, state, needed_seconds=next_step + measured * measuring)
            if measured:
                saver.wait()
                measuring = max(measuring, measure(step.step))
                _stop_if_asked(stop, saver, state, needed_seconds=next_step)
        saver.finish()
    if saver.committed != total:
        raise TunixError(f"no step was taken: {done} of {total} are done", fix="set training.max_steps above that")
    return tokens / seconds if seconds else 0.0


def batches_of(training: Training, data: Prepared, pad_id: int, rows: int) -> Callable[[int], StepBatch]:
    """The batch of a step, a function of the seed and the step."""
    return partial(
        batch_of_step,
        data.rows,
        micro_batch_size=rows,
        accumulation=training.gradient_accumulation_steps,
        seed=_data_seed(training),
        pad_id=pad_id,
    )


def _data_seed(training: Training) -> int:
    return training.seed if training.data_seed is None else training.data_seed


def _first_recorded(count: int, training: Training, done: int, total: int) -> int:
    """Of `count` steps to record, the first: between two of them nothing is saved or measured where that can be had."""
    return choose_first(
        count,
        done=done,
        total=total,
        is_busy=lambda step: any(_due(step, every, total) for every in (training.save_steps, training.eval_steps)),
    )


def _log_step(step: Step, total: int) -> None:
    logger.info(
        "step %d/%d  loss %.4f  lr %.2e  grad norm %.2f  %s tokens/s  peak %.2f GiB",
        step.step, total, step.loss, step.lr, step.grad_norm,
        f"{step.tokens / step.seconds:,.0f}", step.peak_bytes / 2**30,
    )  # fmt: skip


def _stop_if_asked(stop: StopRequest, saver: Saver, state: dict[str, Any], *, needed_seconds: float) -> None:
    """Keep the step that was taken and end, when a signal came or the time left is shorter than what comes next."""
    if why := stop.why(needed_seconds=needed_seconds):
        if saver.asked != state["step"]:
            saver.save(state["step"], state)
        saver.wait()
        raise Preempted(f"{why}; {saver.kept()}", fix=RESUME)


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


def _state(step: Step, metrics_head: str, attention: str, code: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "schema": "tunix-rt/state/1",
        "attention": attention,
        "code": dict(code),
        "step": step.step,
        "loss_hex": step.loss.hex(),
        "metrics_head": metrics_head,
        "random": "a function of (training.seed, step)",
        "data": "a function of (data seed, step)",
    }


def _facts(step: int, loss: float, head: str) -> dict[str, Any]:
    return {"steps_completed": step, "final_loss": loss, "final_loss_hex": loss.hex(), "metrics_head": head}


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def _measure_heldout(
    backend: Any, engine: Any, run: RunDir, data: Prepared, pad_id: int, batch_size: int, step: int
) -> None:
    """Write the held-out loss down."""
    loss, targets = backend.heldout_loss(engine, data.heldout_rows, batch_size=batch_size, pad_id=pad_id)
    logger.info("step %d  held-out loss %.4f over %s tokens", step, loss, f"{targets:,}")
    append_jsonl(run.heldout, [{"step": step, "loss": loss, "loss_hex": loss.hex(), "target_tokens": targets}])


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


def require_charts(config: RunConfig) -> None:
    """Refuse `report_to: tensorboard` where it is not installed; called before anything that takes time."""
    if config.training.report_to == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "training.report_to: tensorboard is not installed",
            fix="pip install tensorboard, or set it to none",
        )


@contextlib.contextmanager
def _tensorboard(config: RunConfig, run: RunDir) -> Iterator[Any]:
    """A function that charts one step, or does nothing when `report_to` is none."""
    if config.training.report_to == "none":
        yield lambda step: None
        return
    from tensorboard.summary import Writer

    writer = Writer(str(run.tensorboard))
    try:
        yield lambda step: [
            writer.add_scalar(f"train/{name}", getattr(step, name), step.step) for name in ("loss", "lr", "grad_norm")
        ]
    finally:
        writer.close()

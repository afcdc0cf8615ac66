"""The training stage: iterate the engine's steps, write every step down, save, measure, stop when asked.

The loop itself is `optimizer_steps` in `backends/torch_backend.py`.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tunix_rt.backends import Progress, Step
from tunix_rt.config import RunConfig
from tunix_rt.data.pack import batch_of_step
from tunix_rt.data.prepare import Prepared
from tunix_rt.errors import ConfigError, Preempted, TunixError
from tunix_rt.rundir import (
    RunDir,
    checkpoint_problems,
    commit_checkpoint,
    json_line,
    list_checkpoints,
    prune_checkpoints,
    read_json,
    sha256_file,
    storage,
    write_json,
    write_text,
)

logger = logging.getLogger(__name__)


class StopRequest:
    """Set by SIGTERM or SIGINT; looked at between steps, so that a step is finished and kept."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        def note(number: int, frame: FrameType | None) -> None:
            if self.signal_name:  # asked twice: the person means now
                raise Preempted(
                    f"stopped at once by a second {signal.Signals(number).name}; what was saved before is kept",
                    fix="run the same command with --resume to continue from the newest checkpoint",
                )
            self.signal_name = signal.Signals(number).name

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def raise_if_asked(self, kept: str, *, fix: str = "run the same command with --resume to continue") -> None:
        if self.signal_name:
            raise Preempted(f"stopped by {self.signal_name}; {kept}", fix=fix)


class MetricsLog:
    """`metrics.jsonl`: one flushed line per step, each carrying the hash of the line before it."""

    def __init__(self, path: Path, head: str) -> None:
        self._path = path
        self.head = head

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
        """Make the lines durable. A checkpoint that outlived its lines in a power cut could not be continued from."""
        with storage(self._path), self._path.open("ab") as file:
            os.fsync(file.fileno())

    def append(self, step: Step) -> None:
        line = json_line(
            {
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
    """Training goes on after `step`, from `checkpoint`, with the metrics cut to that step. Step 0 has no checkpoint."""

    step: int
    checkpoint: Path | None
    metrics: MetricsLog
    facts: dict[str, Any]
    """What `result.json` says of the steps that are kept."""
    seconds: float
    peak_bytes: int
    heldout_steps: frozenset[int]

    @property
    def kept(self) -> str:
        return f"step {self.step} is saved" if self.step else "nothing was trained yet"


def find_start(run: RunDir, *, resume: bool) -> Start:
    """Where to begin: at step 0, or after the newest good checkpoint when `resume`. Cuts what will be taken again."""
    checkpoint, done = newest_checkpoint(run) if resume else (None, 0)
    metrics = MetricsLog.open(run, keep_steps=done)
    steps = [json.loads(line) for line in run.metrics.read_bytes().splitlines()] if done else []
    return Start(
        step=done,
        checkpoint=checkpoint,
        metrics=metrics,
        facts=_facts(done, float.fromhex(steps[-1]["loss_hex"]), metrics.head) if steps else {},
        seconds=sum(step["seconds"] for step in steps),
        peak_bytes=max((step["peak_bytes"] for step in steps), default=0),
        heldout_steps=_keep_heldout_lines(run, done),
    )


def newest_checkpoint(run: RunDir) -> tuple[Path | None, int]:
    """The newest checkpoint that verifies and whose steps are all in the metrics; others are passed over aloud."""
    lines = []
    if run.metrics.exists():
        with storage(run.metrics):
            lines = run.metrics.read_bytes().splitlines(keepends=True)
    heads = chain_heads(sha256_file(run.precommit), lines)
    for checkpoint in list_checkpoints(run.checkpoints):
        if problems := checkpoint_problems(checkpoint) or _metrics_problems(checkpoint, heads):
            logger.warning("checkpoint %s is damaged and passed over: %s", checkpoint.name, "; ".join(problems))
            continue
        return checkpoint, int(read_json(checkpoint / "MANIFEST.json")["step"])
    logger.warning("there is no checkpoint to continue from: starting at step 0")
    return None, 0


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
    stop: StopRequest,
    progress: Progress,
    note: Callable[[dict[str, Any]], None],
) -> float:
    """Train to step `total` from `start`; the tokens per second, 0 when no step was left to take.

    Every step is in `metrics.jsonl`, and what `result.json` will say of it is told to `note`, before the next begins.
    """
    training = config.training
    optimizer = backend.make_optimizer(engine, training)
    done, metrics = start.step, start.metrics
    if start.checkpoint is not None:
        backend.restore_state(engine, optimizer, start.checkpoint, step=done)
        logger.info("Resumed from %s", start.checkpoint.name)
    if done and done not in start.heldout_steps and data.heldout_rows and _due(done, training.eval_steps, total):
        _measure_heldout(backend, engine, run, config, data, done, pad_id)  # stopped between the step and its measure
    batch_of = partial(
        batch_of_step,
        data.rows,
        micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        seed=training.seed if training.data_seed is None else training.data_seed,
        pad_id=pad_id,
    )
    committed, tokens, seconds = done, 0, 0.0
    with _tensorboard(config, run) as chart:
        for step in backend.optimizer_steps(engine, optimizer, batch_of, training, first=done + 1, total=total):
            metrics.append(step)
            note(_facts(step.step, step.loss, metrics.head))
            chart(step)
            tokens, seconds = tokens + step.tokens, seconds + step.seconds
            progress("train", step.step, total, f"loss {step.loss:.4f}, {tokens / seconds:,.0f} tokens/s")
            if step.step % training.logging_steps == 0 or step.step in (1, total):
                logger.info(
                    "step %d/%d  loss %.4f  lr %.2e  grad norm %.2f  %s tokens/s  peak %.2f GiB",
                    step.step, total, step.loss, step.lr, step.grad_norm,
                    f"{step.tokens / step.seconds:,.0f}", step.peak_bytes / 2**30,
                )  # fmt: skip
            if _due(step.step, training.save_steps, total) or stop.signal_name:
                metrics.sync()
                _checkpoint(backend, engine, optimizer, run, step, metrics.head)
                prune_checkpoints(run.checkpoints, training.save_total_limit, newest=step.step, previous=committed)
                committed = step.step
            stop.raise_if_asked(f"step {committed} is saved")
            if data.heldout_rows and _due(step.step, training.eval_steps, total):
                _measure_heldout(backend, engine, run, config, data, step.step, pad_id)
    if committed != total:
        raise TunixError(f"no step was taken: {done} of {total} are done", fix="set training.max_steps above that")
    return tokens / seconds if seconds else 0.0


def _facts(step: int, loss: float, head: str) -> dict[str, Any]:
    return {"steps_completed": step, "final_loss": loss, "final_loss_hex": loss.hex(), "metrics_head": head}


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def _checkpoint(backend: Any, engine: Any, optimizer: Any, run: RunDir, step: Step, metrics_head: str) -> None:
    def write(folder: Path) -> None:
        backend.save_state(engine, optimizer, folder)
        state = {
            "schema": "tunix-rt/state/1",
            "step": step.step,
            "loss_hex": step.loss.hex(),
            "metrics_head": metrics_head,
            "random": "a function of (training.seed, step)",
            "data": "a function of (data seed, step)",
        }
        write_json(folder / "state.json", state)

    commit_checkpoint(run.checkpoints, step.step, write)


def _measure_heldout(
    backend: Any, engine: Any, run: RunDir, config: RunConfig, data: Prepared, step: int, pad_id: int
) -> None:
    batch_size = config.evaluation.per_device_eval_batch_size
    loss, targets = backend.heldout_loss(engine, data.heldout_rows, batch_size=batch_size, pad_id=pad_id)
    logger.info("step %d  held-out loss %.4f over %s tokens", step, loss, f"{targets:,}")
    with storage(run.heldout):
        run.heldout.parent.mkdir(parents=True, exist_ok=True)
        with run.heldout.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json_line({"step": step, "loss": loss, "loss_hex": loss.hex(), "target_tokens": targets}))


def _keep_heldout_lines(run: RunDir, done: int) -> frozenset[int]:
    """Drop held-out losses of steps that will be taken again, and torn lines; the steps of those that are kept."""
    if not run.heldout.exists():
        return frozenset()
    kept: dict[int, bytes] = {}
    with storage(run.heldout):
        for line in run.heldout.read_bytes().splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(step, int) and step <= done:
                kept[step] = line
        write_text(run.heldout, b"".join(line + b"\n" for line in kept.values()).decode("utf-8"))
    return frozenset(kept)


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

"""The training stage: iterate the engine's steps, write every step down, save, measure, stop when asked.

The loop itself is `optimizer_steps` in `backends/torch_backend.py`.
"""

import contextlib
import hashlib
import json
import logging
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
from tunix_rt.errors import Preempted, TunixError
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
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What training left behind besides its metrics. `resumed_from` is 0 for a run that was never interrupted."""

    resumed_from: int
    tokens_per_second: float


class StopRequest:
    """Set by SIGTERM or SIGINT; looked at between steps, so that a step is finished and kept."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        def note(number: int, frame: FrameType | None) -> None:
            if self.signal_name:  # asked twice: the person means now
                raise KeyboardInterrupt
            self.signal_name = signal.Signals(number).name

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def raise_if_asked(self, kept: str) -> None:
        if self.signal_name:
            raise Preempted(
                f"stopped by {self.signal_name}; {kept}", fix="run the same command with --resume to continue"
            )


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
        for number, line in enumerate(kept, start=1):
            if not line.endswith(b"\n") or _step_and_prev(line) != (number, head):
                raise TunixError(f"{run.metrics}:{number} does not continue the line before it", fix="start a new run")
            head = hashlib.sha256(line.rstrip(b"\n")).hexdigest()
        if len(kept) != keep_steps:
            raise TunixError(f"{run.metrics} ends before step {keep_steps}", fix="start a new run")
        with storage(run.metrics):
            run.metrics.write_bytes(b"".join(kept))
        return cls(run.metrics, head)

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


def newest_checkpoint(run: RunDir) -> tuple[Path | None, int]:
    """The newest checkpoint that verifies and its step; damaged ones are passed over aloud."""
    for checkpoint in list_checkpoints(run.checkpoints):
        if problems := checkpoint_problems(checkpoint):
            logger.warning("checkpoint %s is damaged and passed over: %s", checkpoint.name, "; ".join(problems))
            continue
        return checkpoint, int(read_json(checkpoint / "MANIFEST.json")["step"])
    return None, 0


def train_run(
    backend: Any,
    engine: Any,
    *,
    run: RunDir,
    config: RunConfig,
    data: Prepared,
    pad_id: int,
    total: int,
    resume: bool,
    stop: StopRequest,
    progress: Progress,
    note: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Train to step `total`, from the newest good checkpoint when `resume`.

    Every step is in `metrics.jsonl`, and what `result.json` will say of it is told to `note`, before the next begins.
    """
    training = config.training
    optimizer = backend.make_optimizer(engine, training)
    checkpoint, done = newest_checkpoint(run) if resume else (None, 0)
    if checkpoint is not None:
        backend.restore_state(engine, optimizer, checkpoint, step=done)
        logger.info("Resumed from %s", checkpoint.name)
    metrics = MetricsLog.open(run, keep_steps=done)
    if done:
        note(_last_line(run, metrics.head))
    _keep_heldout_lines(run, done)
    batch_of = partial(
        batch_of_step,
        data.rows,
        micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        seed=training.seed if training.data_seed is None else training.data_seed,
        pad_id=pad_id,
    )
    step: Step | None = None
    tokens, seconds = 0, 0.0
    committed = done
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
                _checkpoint(backend, engine, optimizer, run, step, metrics.head, keep=training.save_total_limit)
                committed = step.step
            stop.raise_if_asked(f"step {committed} is saved")
            if data.heldout_rows and _due(step.step, training.eval_steps, total):
                _measure_heldout(backend, engine, run, config, data, step.step, pad_id)
    if step is None and done != total:
        raise TunixError(f"no step was taken: {done} of {total} are done", fix="set training.max_steps above that")
    return Outcome(resumed_from=done, tokens_per_second=tokens / seconds if seconds else 0.0)


def _facts(step: int, loss: float, head: str) -> dict[str, Any]:
    return {"steps_completed": step, "final_loss": loss, "final_loss_hex": loss.hex(), "metrics_head": head}


def _last_line(run: RunDir, head: str) -> dict[str, Any]:
    last = json.loads(run.metrics.read_bytes().splitlines()[-1])
    return _facts(last["step"], float.fromhex(last["loss_hex"]), head)


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def _checkpoint(
    backend: Any, engine: Any, optimizer: Any, run: RunDir, step: Step, metrics_head: str, *, keep: int
) -> None:
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
    prune_checkpoints(run.checkpoints, keep)


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


def _keep_heldout_lines(run: RunDir, done: int) -> None:
    """Drop held-out losses of steps that will be taken again."""
    if not run.heldout.exists():
        return
    with storage(run.heldout):
        lines = [line for line in run.heldout.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        kept = [line for line in lines if json.loads(line)["step"] <= done]
        run.heldout.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8", newline="\n")


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

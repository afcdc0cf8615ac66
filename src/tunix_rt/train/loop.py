"""The training stage: iterate the engine's steps, write metrics, save checkpoints, evaluate, stop when requested.

The loop over batches is `optimizer_steps` in `engines/torch/loop.py` and `engines/jax/loop.py`.
"""

import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.data.packing import StepBatch, batch_of_step
from tunix_rt.data.prepare import Prepared
from tunix_rt.engines.base import Progress, Step
from tunix_rt.errors import ConfigError, Preempted, TunixError
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.ledger import MetricsLog, list_checkpoint
from tunix_rt.storage import append_jsonl
from tunix_rt.train.checkpointer import Saver
from tunix_rt.train.preemption import RESUME, StopRequest
from tunix_rt.train.profiling import Recording, choose_first
from tunix_rt.train.resume import Start, _facts, code_of, refuse_other_code

logger = logging.getLogger(__name__)


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


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def _measure_heldout(
    backend: Any, engine: Any, run: RunDir, data: Prepared, pad_id: int, batch_size: int, step: int
) -> None:
    """Write the held-out loss down."""
    loss, targets = backend.heldout_loss(engine, data.heldout_rows, batch_size=batch_size, pad_id=pad_id)
    logger.info("step %d  held-out loss %.4f over %s tokens", step, loss, f"{targets:,}")
    append_jsonl(run.heldout, [{"step": step, "loss": loss, "loss_hex": loss.hex(), "target_tokens": targets}])


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

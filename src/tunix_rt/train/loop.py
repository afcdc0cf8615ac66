"""The training stage: iterate the engine's steps, write metrics, save checkpoints, evaluate, stop when requested.

The loop over batches is `optimizer_steps` in `engines/torch/loop.py` and `engines/jax/loop.py`.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.settings import SAVE_MINUTES, RunConfig, Training
from tunix_rt.data.packing import StepBatch, batch_of_step
from tunix_rt.data.prepare import Prepared
from tunix_rt.engines.base import Engine, Step
from tunix_rt.errors import Preempted, TunixError
from tunix_rt.progress import duration, phase
from tunix_rt.runs.ledger import MetricsLog, list_checkpoint, note_process
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import append_jsonl, write_text
from tunix_rt.train.alarms import DESCRIPTION, alarm_stop
from tunix_rt.train.checkpointer import Checkpointer, FinishedStep, best_checkpoint, early_stop, heldout_losses
from tunix_rt.train.context import RunContext, load_engine
from tunix_rt.train.device import sample_gpu
from tunix_rt.train.evaluation import evaluate_along
from tunix_rt.train.memory_report import explaining_load
from tunix_rt.train.preemption import LEAVE_SHARE, RESUME, Preemption
from tunix_rt.train.profiling import Recording, choose_first
from tunix_rt.train.resume import code_of, refuse_other_code, refuse_other_kernels, resume_at, step_facts
from tunix_rt.train.rollouts import RolloutSource
from tunix_rt.train.trackers import NO_TRACKERS, Trackers

logger = logging.getLogger(__name__)

Sample = Callable[[int], None] | None
"""Generates samples after a step."""
MOST_SAVING_SHARE = 0.02
"""Of the time, for checkpoints that are saved by time."""


def load_run(context: RunContext, loaded: Engine | None = None) -> tuple[Engine, MetricsLog]:
    """Load the weights, unless they are `loaded`. Nothing can refuse the run afterwards: a resumed one is accepted here."""
    stop, start, journal = context.stop, context.start, context.journal
    try:
        stop.check(start.saved_state, starting=True)
        backend = context.backend  # imports torch or jax
        stop.check(start.saved_state, starting=True)
        with explaining_load(context.plan, context.device):
            engine = loaded or load_engine(
                backend, context.model, context.shape, context.config, context.device, context.step_shape(),
                attempt=context.options.oom_attempt,
            )  # fmt: skip
        context.phases.step_parts = engine.step_parts()
        context.phases.end(engine, "load")
        refuse_other_kernels(engine, start.checkpoint)
    except Preempted:
        resume_at(journal, start, context.phases)
        raise
    metrics = resume_at(journal, start, context.phases)
    facts = backend.machine_facts(engine)
    note_process(context.run, facts, first_step=start.step + 1, started=journal.began[0], first=not journal.continued)
    stop.check(start.saved_state, starting=True)
    return engine, metrics


def train_run(
    context: RunContext, engine: Engine, metrics: MetricsLog, sample: Sample = None, trackers: Trackers = NO_TRACKERS
) -> float:
    """Train to the last step. Returns tokens per second, 0 when no step was left.

    Every step is in `metrics.jsonl` and in the result before the next begins. A checkpoint is written before each
    evaluation, in which `sample` generates and the held-out loss is measured.
    """
    training, start, total, stop = context.config.training, context.start, context.total, context.stop
    optimizer = _open_optimizer(context, engine)
    stop.check(start.saved_state, starting=True)
    evaluate = partial(_evaluate, context, engine, sample, trackers)
    pace = Pace()
    if start.step not in start.heldout_steps and (not start.step or _evaluated(context, start.step)):
        # Before the first step, or in a run that stopped between a step and its evaluation.
        pace.evaluated(evaluate(start.step))
        stop.check(start.saved_state)
    saver = _open_checkpointer(context, engine, optimizer, metrics)
    schedule = SaveSchedule.of(training)
    # The plan has no room for a snapshot beside a step that `save_steps` does not announce.
    finished = FinishedStep(saver, direct=engine.device_type == "cpu" and training.save_steps is None)
    steps, code = _open_steps(context, engine, optimizer, finished.before_update, metrics)
    _log_saving(context, schedule, saver.longest_seconds)
    bar = phase("train", total, done=start.step)
    with bar, contextlib.closing(steps), saver, stop.while_training(finished):
        early = _stops_early(context, start.step)
        for step in steps if not early else ():
            evaluated = _evaluated(context, step.step)
            saved = schedule.due(step, total, saver.blocked_seconds, anyway=evaluated)
            if saved:  # the line of this step carries the state hash of the save in progress
                saver.wait()
            with stop.deferring_signals():  # result and metrics must have the same last step
                metrics.append(step, saved=saved)
                _record_step(context, step, metrics.head)
            trackers.step(step)
            _show_step(context, step, pace.took(step))
            saver.raise_if_failed()
            state = _state(context, engine, step, metrics.head, code)
            finished.finished(state)
            if saved or step.step == start.step + 1:
                context.phases.end(engine, "steps" if step.step > start.step + 1 else "first_step")
            if saved:  # before an evaluation too: an error there costs no step
                saver.save(step.step, state, direct=finished.direct)
                context.phases.end(engine, "checkpoint")
            # After the last step the final model is saved, which takes as long.
            next_step = (pace.slowest if step.step < total else 0.0) + saver.longest_seconds
            _stop_if_requested(stop, saver, finished, needed_seconds=next_step + evaluated * pace.evaluation)
            if evaluated:
                saver.wait()
                pace.evaluated(evaluate(step.step))
                if early := _stops_early(context, step.step):
                    break
                _stop_if_requested(stop, saver, finished, needed_seconds=next_step)
        saver.finish()
    if saver.committed != total and not early:
        problem = f"nothing to train: {start.step} of {total} steps are done"
        raise TunixError(problem, fix=f"set training.max_steps above {start.step}")
    if context.gpus and context.journal.result.gpu_memory is None:  # every step was taken by an earlier process
        sample_gpu(context.journal, context.gpus, total)
    return pace.tokens_per_second


@dataclass(slots=True)
class Pace:
    """Time that the steps and evaluations of this process take."""

    tokens: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    evaluation: float = 0.0

    def took(self, step: Step) -> "Pace":
        self.tokens += step.tokens
        self.seconds += step.seconds
        self.slowest = max(self.slowest, step.seconds)
        return self

    def evaluated(self, seconds: float) -> None:
        self.evaluation = max(self.evaluation, seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True, kw_only=True)
class SaveSchedule:
    """When a checkpoint is due: every so many steps, after so many seconds of training, or both; always at the end."""

    steps: int | None
    seconds: float | None
    trained: float = 0.0
    """Seconds of training since the last checkpoint that was due."""
    stretched: bool = False

    @classmethod
    def of(cls, training: Training) -> "SaveSchedule":
        minutes = training.save_minutes
        if training.save_steps is None and minutes is None:
            minutes = SAVE_MINUTES
        return cls(steps=training.save_steps, seconds=None if minutes is None else 60 * minutes)

    def due(self, step: Step, total: int, save_seconds: float, *, anyway: bool) -> bool:
        """Whether the step is saved. The last save held training up for `save_seconds`; by time, saves take at most 2 %."""
        self.trained += step.seconds
        by_time = self.seconds is not None and self.trained >= self.interval(save_seconds)
        if not (anyway or by_time or _due(step.step, self.steps, total)):
            return False
        self.trained = 0.0
        return True

    def interval(self, save_seconds: float) -> float:
        least = save_seconds / MOST_SAVING_SHARE
        if self.seconds is None or least <= self.seconds:
            return self.seconds or 0.0
        if not self.stretched:
            share = f"{MOST_SAVING_SHARE:.0%}"
            logger.info(
                "A checkpoint holds training up for %s: saving every %s, so that it stays below %s",
                duration(save_seconds), duration(least), share,
            )  # fmt: skip
        self.stretched = True
        return least


def _log_saving(context: RunContext, schedule: SaveSchedule, save_seconds: float) -> None:
    """When checkpoints are saved, and what a short grace period puts at risk."""
    training, often = context.config.training, []
    often += [f"every {training.save_steps} steps"] if training.save_steps else []
    often += [f"every {schedule.seconds / 60:g} min of training"] if schedule.seconds else []
    often += [f"at each evaluation (every {training.eval_steps} steps)"] if training.eval_steps else []
    logger.info("Checkpoints: %s, and at the end", ", ".join(often))
    grace = training.grace_seconds
    if grace is not None and save_seconds > grace * LEAVE_SHARE:
        logger.warning(
            "SIGTERM may cost the steps since the last checkpoint (%s): writing one takes about %s, and "
            "training.grace_seconds=%g leaves %.1f s for it. Set it to %.0f or more, or save more often",
            often[0], duration(save_seconds), grace, grace * LEAVE_SHARE, save_seconds / LEAVE_SHARE + 1,
        )  # fmt: skip


def _open_optimizer(context: RunContext, engine: Engine) -> object:
    """At the state of the checkpoint that a run resumes from."""
    optimizer, start = context.backend.make_optimizer(engine, context.config.training), context.start
    if start.checkpoint is not None:
        with phase("restore the checkpoint"):
            context.backend.restore_state(engine, optimizer, start.checkpoint, step=start.step)
        logger.info("Resumed from %s", start.checkpoint.name)
        context.phases.end(engine, "resume")
    return optimizer


@phase("prepare the steps")
def _open_steps(
    context: RunContext, engine: Engine, optimizer: object, before_update: Callable[[], None], metrics: MetricsLog
) -> tuple[Generator[Step, None, None], dict[str, str]]:
    """The generator of steps, and the code that computes them, which a resumed run must have had."""
    training, data, done, total = context.config.training, context.data, context.start.step, context.total
    batch_of = batches_of(context.config, data, context.tokenizer.pad_id, context.batch.rows)
    source = rollouts_of(context, engine) if training.samples else None
    code: dict[str, str] = {}
    if done < total:
        then = code_of(context.start.checkpoint)
        code = context.backend.prepare_steps(
            engine, batch_of, training, total=total, longest_row=data.longest_row, as_before=then.get("layers"),
            planned=context.plan.layers,
        )  # fmt: skip
        refuse_other_code(code, then)
    if source is not None:
        logger.info("Alarms, at which the run %s: %s", "stops" if training.stops_on_alarm else "goes on", DESCRIPTION)
        batch_of, metrics.columns = source.batch_of, source.columns
    steps = context.backend.optimizer_steps(
        engine, optimizer, batch_of, training, first=done + 1, total=total, before_update=before_update,
        ends=context.ends,
    )  # fmt: skip
    if count := context.options.profile:
        recording = Recording(
            run=context.run, engine=engine, training=training, rows=data.rows, seed=training.resolved_data_seed,
            batch_of=batch_of, lengths=_grouped_lengths(context.config, data), mixture=data.mixture, count=count, done=done,
            first=_first_recorded(count, training, done, total),
        )  # fmt: skip
        steps = recording.over(steps)
    return steps, code


def _open_checkpointer(context: RunContext, engine: Engine, optimizer: object, metrics: MetricsLog) -> Checkpointer:
    run = context.run
    return Checkpointer(
        context.backend, engine, optimizer, run=run, keep=context.config.training.save_total_limit,
        start=context.start.step, sync_metrics=metrics.sync, verified=context.start.verified, stop=context.stop,
        published=lambda checkpoint: metrics.states.update(list_checkpoint(run, checkpoint)),
    )  # fmt: skip


def _record_step(context: RunContext, step: Step, metrics_head: str) -> None:
    """The result of the run so far; GPU memory after the first and the last step of this process."""
    context.stop.step = step.step
    context.journal.result.set(**step_facts(step.step, step.loss, metrics_head))
    if context.gpus and step.step in (context.start.step + 1, context.total):
        sample_gpu(context.journal, context.gpus, step.step)


def _evaluate(context: RunContext, engine: Engine, sample: Sample, trackers: Trackers, step: int) -> float:
    """Samples and the held-out loss after `step`. Returns the seconds it took."""
    began, data = time.monotonic(), context.data
    evaluate_along(context, engine, step)
    if sample is not None:
        sample(step)
        context.phases.end(engine, "samples")
    if data.heldout_rows:  # last: its line marks the evaluation as complete
        with phase("held-out loss", len(data.heldout_rows)) as report:
            loss, targets = context.backend.heldout_loss(
                engine,
                data.heldout_rows,
                batch_size=context.plan.eval_rows,
                pad_id=context.tokenizer.pad_id,
                report=report,
            )
        logger.info("step %d  held-out loss %.4f over %s tokens", step, loss, f"{targets:,}")
        line = {"step": step, "loss": loss, "loss_hex": loss.hex(), "target_tokens": targets}
        append_jsonl(context.run.heldout, [line])
        trackers.heldout(step, loss)
        context.phases.end(engine, "held-out")
    return time.monotonic() - began


def batches_of(config: RunConfig, data: Prepared, pad_id: int, rows: int) -> Callable[[int], StepBatch]:
    """The batch of a step, a function of the seed and the step."""
    seed, accumulation = config.training.resolved_data_seed, config.training.gradient_accumulation_steps
    return partial(
        batch_of_step, data.rows, micro_batch_size=rows, accumulation=accumulation, seed=seed, pad_id=pad_id,
        lengths=_grouped_lengths(config, data), mixture=data.mixture,
    )  # fmt: skip


def rollouts_of(context: RunContext, engine: Engine) -> RolloutSource:
    """The rollouts of each step, written into the run folder before they are trained."""
    return RolloutSource(
        backend=context.backend, engine=engine, config=context.config, data=context.data, tokenizer=context.tokenizer,
        rows=context.batch.rows, generation_rows=context.plan.generation_rows,
        record=lambda step, text: write_text(context.run.rollouts_of(step), text),
    )  # fmt: skip


def _grouped_lengths(config: RunConfig, data: Prepared) -> Sequence[int] | None:
    return data.row_facts.tokens if config.data.group_by_length else None


def _first_recorded(count: int, training: Training, done: int, total: int) -> int:
    """The first of `count` steps to profile, chosen so that nothing is saved or evaluated between them if possible."""

    def is_busy(step: int) -> bool:
        return any(_due(step, every, total) for every in (training.save_steps, training.eval_steps))

    return choose_first(count, done=done, total=total, is_busy=is_busy)


def _show_step(context: RunContext, step: Step, pace: Pace) -> None:
    """Progress after every step, a log line every `logging_steps`; and the callback of the caller."""
    total = context.total
    note = f"loss {step.loss:.4f}, {pace.tokens_per_second:,.0f} tokens/s"
    context.options.progress("train", step.step, total, note)
    if step.step % context.config.training.logging_steps == 0 or step.step in (1, total):
        logger.info(
            "step %d/%d  loss %.4f  lr %.2e  grad norm %.2f  %s tokens/s  peak %.2f GiB",
            step.step, total, step.loss, step.lr, step.grad_norm,
            f"{step.tokens / step.seconds:,.0f}", step.peak_bytes / 2**30,
        )  # fmt: skip
    context.options.on_step(step)


def _stop_if_requested(stop: Preemption, saver: Checkpointer, finished: FinishedStep, *, needed_seconds: float) -> None:
    """Save the step that was taken and stop, on a signal or when less time is left than the next step needs."""
    if why := stop.why(needed_seconds=needed_seconds):
        finished.save()
        raise Preempted(f"{why}; {saver.saved_state()}", fix=RESUME)


def _state(
    context: RunContext, engine: Engine, step: Step, metrics_head: str, code: Mapping[str, str]
) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    state: dict[str, Any] = {
        "schema": "tunix-rt/state/1",
        "attention": engine.attention.name,
        "code": dict(code),
        "step": step.step,
        "loss_hex": step.loss.hex(),
        "metrics_head": metrics_head,
        "random": "a function of (training.seed, step)",
        "data": "a function of (data seed, step)",
    }
    if CAPABILITIES[context.config.training.backend].multi_device or len(engine.devices) > 1:
        state["batch"] = {"rows": context.batch.rows, "devices": len(engine.devices)}
    return state


def _stops_early(context: RunContext, step: int) -> bool:
    """Whether the held-out losses up to `step` stop the run by `training.patience`, also when it is resumed there."""
    training = context.config.training
    along = RunRecord(context.run.root).along if training.samples else ()
    if alarm_stop(along, stops=training.stops_on_alarm) is not None and step < context.total:
        context.journal.reason = f"stopped by an alarm at step {step} of {context.total}"
        logger.info("Stopped by an alarm at step %d of %d", step, context.total)
        return True
    losses, patience = heldout_losses(context.run), training.patience
    if step == context.total or early_stop(losses.values(), patience) is None:
        return False
    best, root = min(losses, key=lambda at: losses[at]), context.run.root
    count = f"{patience} evaluation{'s' * (patience != 1)}"
    why = f"held-out loss has not fallen for {count} (best {losses[best]:.4f} at step {best})"
    context.journal.reason = f"stopped early at step {step} of {context.total}: {why}"
    logger.info("Stopped early at step %d of %d: %s", step, context.total, why)
    if (saved := best_checkpoint(context.run).get("best_step", step)) != step:
        logger.info(
            "final_model is of step %d; for step %d: tunix-rt export %s --best --output FOLDER", step, saved, root
        )
    return True


def _evaluated(context: RunContext, step: int) -> bool:
    """Whether an evaluation is due: also where an extended run ended before."""
    return step in context.ends or _due(step, context.config.training.eval_steps, context.total)


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)

"""doctor, plan, data, train, evaluate, evidence: one run from configuration to hashed folder, in this order."""

import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.backends import Progress, load_backend
from tunix_rt.config import RunConfig, dump_yaml, require_runnable
from tunix_rt.data.limits import ModelFacts
from tunix_rt.data.pack import total_steps
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.template import OURS as NAMED_TEMPLATES
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.device import note_step, prove_device, sample_gpu, settle_device
from tunix_rt.doctor.choose import DeviceChoice
from tunix_rt.errors import ConfigError, DoesNotFitError, InputError, Preempted, StorageError, TunixError
from tunix_rt.evaluate.report import Comparison, compare, read_predictions, read_scores, samples_markdown
from tunix_rt.evaluate.run import evaluate_model, stop_ids
from tunix_rt.evaluate.score import Prediction, Scores
from tunix_rt.evidence.precommit import (
    began_on,
    build_precommit,
    read_precommit,
    refuse_another_config,
    refuse_another_run,
    settled_config,
)
from tunix_rt.evidence.record import Record
from tunix_rt.models import ModelSource, refuse_addresses, resolve_model, resolve_tokenizer
from tunix_rt.plan.fit import disk_needed_bytes, estimate_time, explain_out_of_memory, judge, refuse_if_too_big
from tunix_rt.plan.memory import MemoryPlan, predict
from tunix_rt.plan.recipe import recipe_of
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.rundir import RunDir, bytes_below, read_json, require_space, sha256_file, storage, write_json, write_text
from tunix_rt.saving import best_checkpoint
from tunix_rt.stopping import StopRequest
from tunix_rt.train import MetricsLog, Start, cut_back, find_start, refuse_other_kernels, require_charts, train_run

logger = logging.getLogger(__name__)

GIB = 2**30
LOUD_PARAMETERS = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class Report(Record):
    """The record of the run, with the scores and the memory measured so far."""

    scores: dict[str, Scores] = field(default_factory=dict)
    comparison: Comparison | None = None
    phases: dict[str, int] = field(default_factory=dict)
    began: tuple[datetime, float] = field(default_factory=lambda: (datetime.now(UTC), time.monotonic()))

    def end_at_once(self, error: Preempted) -> None:
        """Write the ending from another thread: the one that runs is in a call that does not return."""
        self.note_best()
        self._end("preempted", error.exit_code, error.problem, *self.began)

    def note_best(self) -> None:
        """Which checkpoint is the best; on a disk that cannot be read nothing is said, and no other error is hidden."""
        with contextlib.suppress(StorageError):
            self.facts |= best_checkpoint(self.run)

    def note_peak(self, phase: str, peak_bytes: int) -> None:
        """The highest memory up to the end of `phase`; of a continued run, that of earlier processes too."""
        self.phases[phase] = max(peak_bytes, *self.phases.values(), 0)

    def note_scores(self, when: str, scores: Scores) -> None:
        self.scores[when] = scores
        self.facts.setdefault("scores", {})[when] = {
            "accuracy": scores.accuracy, "accuracy_lenient": scores.accuracy_lenient, "format_rate": scores.format_rate,
        }  # fmt: skip
        logger.info(
            "Evaluation %s: %d of %d right by the tags (%d leniently), %.0f %% well-formed",
            when, scores.correct, scores.items, scores.correct_lenient, 100 * scores.format_rate,
        )  # fmt: skip


def run_pipeline(config: RunConfig, output: Path, *, progress: Progress) -> Report:
    """Run everything into the folder `output`. Raises what went wrong after writing it into `result.json`."""
    require_runnable(config)
    refuse_addresses(config.model_dump())
    run = RunDir(output)
    with run.locked():
        stop = StopRequest(grace_seconds=config.training.grace_seconds, time_budget=config.training.time_budget)
        report = Report(run=run, continued=_refuse_occupied(run, config), ending=stop.ending)
        stop.last_acts.append(report.end_at_once)
        with report.logged(), stop.listening(), report.ended():
            _run_stages(run, config, report, stop, progress)
        return report


def _run_stages(run: RunDir, config: RunConfig, report: Report, stop: StopRequest, progress: Progress) -> None:
    logger.info("tunix-rt %s, run folder %s", tunix_rt.__version__, run.root)
    if config.training.time_budget is not None:
        logger.info("Time budget: %s, counted from the start of the program", _minutes(config.training.time_budget))
    require_charts(config)
    _require_peft(config)
    if not report.continued:
        if config.training.resume_from_checkpoint is not None:
            logger.warning("there is no run in %s to continue: starting at step 0", run.root)
        stop.kept = lambda: "nothing was trained yet"
        write_text(run.config, dump_yaml(settled_config(config)))
    seen, choice = settle_device(report, config)
    report.facts["device"] = choice.device
    stop.raise_if_asked(stop.kept(), starting=True)
    model, shape = _find_model(config, choice)
    report.facts["parameters"] = shape.parameters
    upper = _plan(config, shape, choice)
    uuids = prove_device(report, config, model, shape, seen, choice) if choice.device != "cpu" else frozenset()
    stop.raise_if_asked(stop.kept(), starting=True)
    tokenizer, facts = _tokenizer_of(config, model, shape)
    today = began_on(read_precommit(run)) if report.continued else None
    data = prepare(config, tokenizer, facts, stoppable(progress, stop, starting=True), today=today)
    logger.info("Data: %s", data.sentence)
    plan = _plan_for_data(report, config, shape, choice, data, upper)
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes}
    total = _say_how_long(config, shape, data, choice)
    report.facts["steps_planned"] = total
    _commit(run, build_precommit(config, model, tokenizer, data, device=choice.device), report)
    start = find_start(run, resume=report.continued)
    stop.kept = lambda: start.kept
    try:
        stop.raise_if_asked(start.kept, starting=True)
        backend = load_backend(config.training.backend)
        stop.raise_if_asked(start.kept, starting=True)
        engine = _load(backend, model, shape, config, choice)
        refuse_other_kernels(engine, start.checkpoint)
    except Preempted:
        _go_on(report, start)
        raise
    metrics = _go_on(report, start)
    with _memory_explained(engine, plan, choice, shape, config):
        _train_and_ask(
            backend, engine, report, config=config, data=data, tokenizer=tokenizer, total=total, start=start,
            metrics=metrics, stop=stop, progress=progress, uuids=uuids,
        )  # fmt: skip
    _account_for_memory(run, report, plan)


def _require_peft(config: RunConfig) -> None:
    """Refuse adapters where peft is not installed; called before anything that takes time."""
    if config.training.lora_rank is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "training.lora_rank: peft is not installed",
            fix="pip install 'tunix-rt[lora]', or leave the setting out to train every parameter",
        )


@contextlib.contextmanager
def _memory_explained(
    engine: Any, plan: MemoryPlan, choice: DeviceChoice, shape: ModelShape, config: RunConfig
) -> Iterator[None]:
    """Let an engine that runs out of memory end with the planner's words: what was in memory, and what to change."""
    try:
        yield
    except DoesNotFitError as error:
        problem, fix = explain_out_of_memory(plan, engine.peak_bytes(), choice, shape, config)
        raise DoesNotFitError(f"{error.problem}\n  {problem}", fix=fix) from error


def _train_and_ask(
    backend: Any,
    engine: Any,
    report: Report,
    *,
    config: RunConfig,
    data: Prepared,
    tokenizer: Tokenizer,
    total: int,
    start: Start,
    metrics: MetricsLog,
    stop: StopRequest,
    progress: Progress,
    uuids: frozenset[str],
) -> None:
    """Everything that needs the loaded model: answers before, the steps, the final model, answers after."""
    run = report.run
    before = _earlier_answers(report) if report.continued and data.items else []
    report.note_peak("load", engine.peak_bytes())
    stop.raise_if_asked(start.kept, starting=True)
    asking = {"items": data.items, "tokenizer": tokenizer, "style": data.style, "config": config, "run": run}
    asking["progress"] = progress
    if data.items and not before:
        look = partial(stop.raise_if_asked, start.kept, starting=True)
        before = _evaluate(backend, engine, report, "before", look, asking)
        stop.raise_if_asked(start.kept)  # the answers are kept, so that a continuation gets further
    report.training_began = True
    try:
        speed = train_run(
            backend, engine, run=run, config=config, data=data, pad_id=tokenizer.pad_id, total=total, start=start,
            metrics=metrics, stop=stop, progress=progress, note=partial(note_step, report, uuids, (start.step + 1, total)),
        )  # fmt: skip
    finally:
        report.note_best()
    if uuids and "gpu_memory" not in report.facts:  # every step was taken by an earlier process
        sample_gpu(report, uuids, total)
    if speed:
        logger.info("Trained at %s tokens/s", f"{speed:,.0f}")
    report.note_peak("train", max(start.peak_bytes, engine.peak_bytes()))
    template = data.style.template
    backend.save(
        engine, run.final_model, tokenizer_folder=tokenizer.folder, stop_ids=stop_ids(tokenizer, data.style),
        chat_template=template.jinja if template.name in NAMED_TEMPLATES else None,  # it was trained with it
    )  # fmt: skip
    report.note_peak("save", engine.peak_bytes())
    if data.items:
        kept = f"all {total} steps are saved"
        after = _evaluate(backend, engine, report, "after", partial(stop.raise_if_asked, kept), asking)
        report.comparison = compare(before, after)
        write_text(run.samples, samples_markdown(before, after, report.comparison))


def _refuse_occupied(run: RunDir, config: RunConfig) -> bool:
    """Whether `run` is continued. Refuses a folder that holds a run, unless it is this run, unfinished, and asked for.

    A folder whose run was refused before it began holds none, so that the same command can be given again.
    """
    if not run.holds_a_run():
        return False
    status = _status(run)
    if not run.holds_work() and (status == "refused" or not run.precommit.exists()):
        with storage(run.root):
            for stale in (run.result, run.hashes, run.precommit):
                stale.unlink(missing_ok=True)
        return False
    if config.training.resume_from_checkpoint is None:
        raise ConfigError(
            f"{run.root} already holds a run ({status})", fix="add --resume to continue it, or choose another --output"
        )
    if status == "completed":
        raise ConfigError(f"the run in {run.root} is complete", fix="choose another --output for a new run")
    if not run.precommit.exists():
        raise ConfigError(
            f"{run.root} holds a run without the precommit.json it began with", fix="choose another --output"
        )
    refuse_another_config(read_precommit(run), config, run.root)
    return True


def _status(run: RunDir) -> str:
    if not run.result.exists():
        return "unfinished"
    try:
        return str(read_json(run.result)["status"])
    except (TunixError, KeyError, TypeError):
        return "broken"


def _find_model(config: RunConfig, choice: DeviceChoice) -> tuple[ModelSource, ModelShape]:
    model = resolve_model(
        config.model.model_name_or_path or "", revision=config.model.revision, weights=config.model.weights
    )
    shape = shape_of(model.config)
    logger.info(
        "Preflight: model=%s revision=%s parameters=%s device=%s dtype=%s weights=%s",
        model.name, model.revision, f"{shape.parameters:,}", choice.device, config.training.dtype, model.weights,
    )  # fmt: skip
    logger.info("Precision: %s", recipe_of(config.training).words)
    if model.converted_from is not None:
        logger.info(
            "Converted from %s: its values as they were quantised, not those of the original", model.converted_from
        )
    if model.weights == "random":
        logger.warning("The weights are random: nothing this run shows is evidence of learning from a pretrained model")
    return model, shape


def find_tokenizer(config: RunConfig) -> tuple[Tokenizer, ModelFacts]:
    """The tokenizer of a configuration, and what the data stage must know of its model. Needs no weights."""
    model = resolve_model(config.model.model_name_or_path or "", revision=config.model.revision, weights="random")
    return _tokenizer_of(config, model, shape_of(model.config))


def _tokenizer_of(config: RunConfig, model: ModelSource, shape: ModelShape) -> tuple[Tokenizer, ModelFacts]:
    named = config.model.tokenizer_name_or_path
    folder = resolve_tokenizer(named) if named else model.folder
    model_type = str(model.config["model_type"])
    facts = ModelFacts(vocabulary=shape.vocab, positions=shape.max_positions, model_type=model_type)
    return load_tokenizer(folder, model_type), facts


def stoppable(progress: Progress, stop: StopRequest, *, fix: str = "run it again", starting: bool = False) -> Progress:
    """`progress` that ends the work once a stop was asked for: making the tokens of a large dataset takes a while."""

    def tell(what: str, done: int, total: int, note: str) -> None:
        progress(what, done, total, note)
        kept = "the data was being prepared, and nothing half-made is kept"
        stop.raise_if_asked(kept, fix=fix, starting=starting)

    return tell


def _plan(config: RunConfig, shape: ModelShape, choice: DeviceChoice) -> MemoryPlan:
    """The prediction for rows of `max_length`, made before any data is read; refuses what cannot fit."""
    plan = predict(shape, config, device=choice.device, capability=choice.capability)
    if choice.device == "cuda" and shape.parameters > LOUD_PARAMETERS:
        logger.warning(
            "OVER 1B PARAMETERS ON A GPU: %s parameters, %.1f GiB predicted; the TPU configuration is submission_tpu.yaml",
            f"{shape.parameters:,}", plan.peak_bytes / GIB,
        )  # fmt: skip
    refuse_if_too_big(plan, choice, shape, config)
    return plan


def _plan_for_data(
    report: Report, config: RunConfig, shape: ModelShape, choice: DeviceChoice, data: Prepared, upper: MemoryPlan
) -> MemoryPlan:
    """The prediction for the longest row there really is: the one that is held against the measurement."""
    share = data.trained_tokens / data.tokens
    plan = predict(
        shape,
        config,
        device=choice.device,
        row_tokens=data.longest_row,
        target_share=share,
        capability=choice.capability,
    )
    fit = judge(plan, choice)
    disk = disk_needed_bytes(shape, config)
    held = bytes_below(report.run.checkpoints) + bytes_below(report.run.final_model)
    require_space(report.run.root, disk - held, what="the run", keep=config.training.save_total_limit)
    report.write(
        write_json,
        report.run.plan,
        {
            "schema": "tunix-rt/plan/1",
            "peak_bytes": plan.peak_bytes,
            "peak_bytes_at_max_length": upper.peak_bytes,
            "longest_row_tokens": data.longest_row,
            "memory": plan,
            "fit": fit,
            "disk_bytes": disk,
        },
    )
    logger.info(
        "Fits: %.2f GiB predicted for rows of up to %d tokens, %.1f GiB free; up to %.2f GiB on disk",
        plan.peak_bytes / GIB, data.longest_row, fit.available_bytes / GIB, disk / GIB,
    )  # fmt: skip
    return plan


def _say_how_long(config: RunConfig, shape: ModelShape, data: Prepared, choice: DeviceChoice) -> int:
    training = config.training
    rows_per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    total = total_steps(len(data.rows), rows_per_step, epochs=training.num_train_epochs, max_steps=training.max_steps)
    tokens = round(data.tokens / len(data.rows) * min(rows_per_step, len(data.rows)))
    said = f"Steps: {total:,} of {min(rows_per_step, len(data.rows)):,} rows (about {tokens:,} tokens a step)"
    if choice.device == "cpu":
        time_needed = estimate_time(shape, config, tokens_per_step=tokens, steps=total, eval_items=len(data.items))
        said += f"; it will take about {_minutes(time_needed.seconds_low)} to {_minutes(time_needed.seconds_high)}"
    logger.info("%s", said)
    if rows_per_step > len(data.rows):
        logger.warning(
            "A step was asked to take %d rows; the data has %d, so each step takes all of them",
            rows_per_step,
            len(data.rows),
        )
    return total


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _commit(run: RunDir, committed: dict[str, Any], report: Report) -> None:
    """Write `precommit.json` before the first step, or hold a continued run to the one it wrote."""
    if run.precommit.exists():
        refuse_another_run(read_precommit(run), committed, run.root)
    else:
        write_json(run.precommit, committed)
    report.facts["run_id"] = sha256_file(run.precommit)


def _go_on(report: Report, start: Start) -> MetricsLog:
    """Nothing more can refuse this run: a continued one is taken as it was up to `start`, and goes on there."""
    if report.continued:
        report.accept()
        report.training_began = True  # by an earlier process: what goes wrong from here on is no refusal
    report.facts |= start.facts
    report.facts["resumed_from"] = start.step
    report.seconds_before = start.seconds
    report.sound = start.sound
    return cut_back(report.run, start)


def _load(backend: Any, model: ModelSource, shape: ModelShape, config: RunConfig, choice: DeviceChoice) -> Any:
    engine = backend.load(model, device=choice.device, training=config.training)
    if engine.parameters != shape.parameters:
        raise TunixError(
            f"the plan counted {shape.parameters:,} parameters, the loaded model has {engine.parameters:,}",
            fix="this is a defect of the planner; please report it with the model's config.json",
        )
    return engine


def _earlier_answers(report: Report) -> list[Prediction]:
    """What the untrained model answered when the run began; none when it was stopped before that, or they are damaged."""
    run = report.run
    if not (run.scores("before").exists() and run.predictions("before").exists()):
        return []
    try:
        predictions, scores = read_predictions(run.predictions("before")), read_scores(run.scores("before"))
    except InputError as error:
        logger.warning("the answers before training are asked for again: %s", error.problem)
        return []
    report.note_scores("before", scores)
    return predictions


def _evaluate(
    backend: Any, engine: Any, report: Report, when: str, stop: Callable[[], None], asking: dict[str, Any]
) -> list[Prediction]:
    predictions, scores = evaluate_model(backend, engine, when=when, stop=stop, **asking)
    report.note_scores(when, scores)
    report.note_peak(when, engine.peak_bytes())
    return predictions


def _account_for_memory(run: RunDir, report: Report, plan: MemoryPlan) -> None:
    """Hold the prediction against the measurement, per run, in the open."""
    measured = max(report.phases.values())
    error = plan.peak_bytes / max(1, measured) - 1  # in a process that had room from before, nothing rises
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes, "measured_bytes": measured}
    write_json(
        run.memory,
        {
            "schema": "tunix-rt/memory/1",
            "predicted_bytes": plan.peak_bytes,
            "predicted_parts": plan,
            "measured_bytes": measured,
            "measured_peak_after_phase": report.phases,
            "error": error,
        },
    )
    logger.info(
        "Memory: predicted %.3f GiB, measured %.3f GiB (prediction %+.0f %%)",
        plan.peak_bytes / GIB, measured / GIB, 100 * error,
    )  # fmt: skip

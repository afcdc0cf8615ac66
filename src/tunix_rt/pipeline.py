"""doctor, plan, data, train, evaluate, evidence: one run from configuration to hashed folder, in this order."""

import contextlib
import logging
import math
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.config.load import dump_yaml
from tunix_rt.config.settings import RunConfig, require_runnable
from tunix_rt.data.length_checks import ModelFacts
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.render import Style
from tunix_rt.data.template import OURS as NAMED_TEMPLATES
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Progress, StepShape, load_backend
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.errors import (
    ConfigError,
    EvidenceError,
    HardwareError,
    InputError,
    Preempted,
    StorageError,
    TunixError,
)
from tunix_rt.evaluate.generate import Questions, decoding_of, evaluate_model, read_along, stop_ids
from tunix_rt.evaluate.report import Comparison, compare, samples_markdown
from tunix_rt.evaluate.summary import read_predictions, read_scores, summary_of
from tunix_rt.export.roundtrip import prove_reload
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.models.secrets import refuse_addresses, refuse_secrets
from tunix_rt.plan.jax_limits import refuse_dropout, refuse_for_jax, refuse_profile
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import Record
from tunix_rt.runs.ledger import MetricsLog, final_state, has_rows, note_process, write_rows
from tunix_rt.scoring.score import Prediction, Scores
from tunix_rt.storage import read_json, sha256_file, storage, to_plain, write_json, write_text
from tunix_rt.train.checkpointer import best_checkpoint
from tunix_rt.train.commitment import (
    Batch,
    began_on,
    build_precommit,
    read_precommit,
    refuse_another_config,
    refuse_another_format,
    refuse_another_run,
    settled_config,
)
from tunix_rt.train.device import note_step, prove_device, sample_gpu, settle_device
from tunix_rt.train.loop import require_charts, train_run
from tunix_rt.train.memory_report import Phases, account_for_memory, loading_explained, memory_explained, write_account
from tunix_rt.train.preemption import StopRequest
from tunix_rt.train.preflight import (
    fit_settings,
    micro_batch,
    minutes,
    plan_for_data,
    plan_worst,
    require_peft,
    say_how_long,
    step_shape,
    with_copies_that_fit,
    within_limit,
)
from tunix_rt.train.profiling import refuse_too_many
from tunix_rt.train.resume import Start, cut_back, find_start, refuse_other_kernels

logger = logging.getLogger(__name__)


PROOF_SECONDS = 20.0
"""Time that the proof of a small model takes, with some to spare; it is left out where a time budget has less."""


@dataclass(slots=True, kw_only=True)
class Report(Record):
    """The record of the run, with the scores and the memory measured so far."""

    scores: dict[str, Scores] = field(default_factory=dict)
    comparison: Comparison | None = None
    phases: Phases = field(default_factory=Phases)
    plan: MemoryPlan | None = None
    """What `phases` are held against, once a model is loaded."""
    began: tuple[datetime, float] = field(default_factory=lambda: (datetime.now(UTC), time.monotonic()))

    def end_at_once(self, error: Preempted) -> None:
        """Write the ending from another thread: the one that runs is in a call that does not return."""
        self.note_checkpoints()
        self._end("preempted", error.exit_code, error.problem, *self.began)

    def _end(self, status: str, exit_code: int, reason: str, started: datetime, clock: float) -> None:
        """Write what was measured until now beside the ending; of a completed run all of it is written already. A disk that
        does not take it hides no other error."""
        if status != "completed" and self.plan is not None and (self.accepted or not self.continued):
            with contextlib.suppress(StorageError):
                write_account(self, self.plan, self.phases, status)
        Record._end(self, status, exit_code, reason, started, clock)

    def note_checkpoints(self) -> None:
        """The best checkpoint, and the state of the last. A disk that cannot be read hides no other error."""
        with contextlib.suppress(StorageError):
            self.facts |= final_state(self.run) | best_checkpoint(self.run)

    def note_scores(self, when: str, scores: Scores) -> None:
        self.scores[when] = scores
        self.facts.setdefault("scores", {})[when] = {
            "accuracy": scores.accuracy, "accuracy_lenient": scores.accuracy_lenient, "format_rate": scores.format_rate,
        }  # fmt: skip
        logger.info(
            "Evaluation %s: %d of %d right by the tags (%d leniently), %.0f %% well-formed",
            when, scores.correct, scores.items, scores.correct_lenient, 100 * scores.format_rate,
        )  # fmt: skip


def run_pipeline(
    config: RunConfig,
    output: Path,
    *,
    progress: Progress,
    profile: int = 0,
    oom_attempt: bool = False,
    stop_after: int | None = None,
) -> Report:
    """Run everything into the folder `output`. Raises what went wrong after writing it into `result.json`.

    With `profile`, so many steps are recorded, to see where their time goes; no result depends on it. An `oom_attempt` goes on
    where the plan finds that the run does not fit. `stop_after` that step the run is preempted."""
    require_runnable(config)
    refuse_for_jax(config)
    refuse_profile(config.training.backend, profile)
    refuse_addresses(config.model_dump())
    refuse_secrets(config.model_dump())
    run = RunDir(output)
    with run.locked():
        run.refuse_links()
        stop = StopRequest(
            grace_seconds=config.training.grace_seconds,
            time_budget=config.training.time_budget,
            after_step=stop_after,
        )
        report = Report(run=run, continued=_refuse_occupied(run, config), ending=stop.ending)
        stop.last_acts.append(report.end_at_once)
        with report.logged(), stop.listening(), report.ended():
            _run_stages(run, config, report, stop, progress, profile, oom_attempt)
        return report


def _run_stages(
    run: RunDir,
    config: RunConfig,
    report: Report,
    stop: StopRequest,
    progress: Progress,
    profile: int,
    oom_attempt: bool,
) -> None:
    _begin(run, config, report, stop)
    seen, found = settle_device(report, config)
    choice = within_limit(found, config.training)
    report.facts["device"] = choice.device
    report.facts |= _timed_before(run) if report.continued else {}
    stop.raise_if_asked(stop.kept(), starting=True)
    model, shape = find_model(config)
    report.facts["parameters"] = shape.parameters
    fitted = fit_settings(report, config, shape, choice)
    if fitted.config != config and not report.continued:
        write_text(run.config, dump_yaml(settled_config(fitted.config)))
    config = fitted.config
    _say_preflight(config, model, shape, choice)
    batch = micro_batch(report, config, choice)
    here = with_copies_that_fit(config, choice.count, continued=report.continued)
    upper = plan_worst(report, here, shape, choice, batch.rows, attempt=oom_attempt)
    uuids = prove_device(report, config, model, shape, seen, choice) if choice.device != "cpu" else frozenset()
    stop.raise_if_asked(stop.kept(), starting=True)
    tokenizer, facts = tokenizer_of(config, model, shape)
    today = began_on(read_precommit(run)) if report.continued else None
    data = prepare(config, tokenizer, facts, stoppable(progress, stop, starting=True), today=today)
    logger.info("Data: %s", data.sentence)
    plan = plan_for_data(report, here, shape, choice, data, upper, batch.rows, fitted.fitting)
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes}
    total = say_how_long(config, shape, data, choice, rows=batch.rows, eval_rows=plan.eval_rows)
    report.facts["steps_planned"] = total
    told: dict[str, Any] = {"device": choice.device, "batch": batch, "fitting": fitted.fitting}
    _commit(run, build_precommit(config, model, tokenizer, data, **told), data, report)
    start = find_start(run, resume=report.continued)
    stop.refuse_if_never(done=start.step, total=total)
    if profile:
        refuse_too_many(profile, done=start.step, total=total)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks to the terminal; read at its import
    stop.kept = lambda: start.kept
    try:
        stop.raise_if_asked(start.kept, starting=True)
        backend = load_backend(config.training.backend)
        stop.raise_if_asked(start.kept, starting=True)
        step = step_shape(config, data, batch)
        with loading_explained(plan, choice):
            engine = load_engine(backend, model, shape, here, choice, step, attempt=oom_attempt)
        report.phases.end(engine, "load")
        report.plan = plan
        refuse_other_kernels(engine, start.checkpoint)
    except Preempted:
        _go_on(report, start)
        raise
    metrics = _go_on(report, start)
    note_process(
        run,
        backend.machine_facts(engine),
        first_step=start.step + 1,
        started=report.began[0],
        first=not report.continued,
    )
    with memory_explained(engine, report.phases, plan, choice, shape, here):
        _train_and_ask(
            backend, engine, report, config=config, data=data, tokenizer=tokenizer, total=total, start=start,
            metrics=metrics, stop=stop, progress=progress, uuids=uuids, plan=plan, batch=batch,
            profile=profile,
        )  # fmt: skip
    account_for_memory(report, plan, report.phases, choice, here)


def _begin(run: RunDir, config: RunConfig, report: Report, stop: StopRequest) -> None:
    """Say what begins, and refuse what needs no look at the computer."""
    logger.info("tunix-rt %s, run folder %s", tunix_rt.__version__, run.root)
    if config.training.time_budget is not None:
        logger.info("Time budget: %s, counted from the start of the program", minutes(config.training.time_budget))
    require_charts(config)
    require_peft(config)
    if not report.continued:
        if config.training.resume_from_checkpoint is not None:
            logger.warning("there is no run in %s to continue: starting at step 0", run.root)
        stop.kept = lambda: "nothing was trained yet"
        write_text(run.config, dump_yaml(settled_config(config)))


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
    plan: MemoryPlan,
    batch: Batch,
    profile: int,
) -> None:
    """Everything that needs the loaded model: answers before, the steps, the final model, answers after, its proof."""
    run = report.run
    before = _earlier_answers(report) if report.continued and data.items else []
    ended = partial(report.phases.end, engine)
    stop.raise_if_asked(start.kept, starting=True)
    decoding = decoding_of(data.style, max_new_tokens=config.evaluation.max_new_tokens)
    questions = Questions(items=data.items, tokenizer=tokenizer, style=data.style, decoding=decoding)
    eval_rows = plan.eval_rows
    asking: dict[str, Any] = {"rows_at": lambda length: eval_rows, "progress": progress}
    if data.items and not before:
        before = _answers_before(backend, engine, report, questions, start.kept, stop, **asking)
    report.training_began = True
    few = replace(questions, items=data.items[: config.evaluation.asked_along])
    try:
        speed = train_run(
            backend, engine, run=run, config=config, data=data, pad_id=tokenizer.pad_id, total=total, start=start,
            metrics=metrics, stop=stop, progress=progress, note=partial(note_step, report, uuids, (start.step + 1, total)),
            eval_rows=eval_rows, layers=plan.layers,
            read_along=partial(read_along, backend, engine, few, run, eval_rows) if few.items else None,
            rows=batch.rows, profile=profile, ended=ended,
        )  # fmt: skip
    finally:
        report.note_checkpoints()
    if uuids and "gpu_memory" not in report.facts:  # every step was taken by an earlier process
        sample_gpu(report, uuids, total)
    if speed:
        logger.info("Trained at %s tokens/s", f"{speed:,.0f}")
    dtype = config.training.save_dtype
    save_final(backend, engine, run.final_model, tokenizer=tokenizer, style=data.style, dtype=dtype)
    ended("export")
    if data.items:
        saved = f"all {total} steps are saved"
        answering = report.facts.get("answering_seconds", 0.0)
        stop.raise_if_too_long(answering, "the answers after training", saved, in_vain=start.step == total)
        kept = partial(stop.raise_if_asked, saved)
        after = _evaluate(backend, engine, report, questions, "after", stop=kept, **asking)
        report.comparison = compare(before, after)
        write_text(run.samples, samples_markdown(before, after, report.comparison))
        _write_summary(report, config, data, questions)
    stop.raise_if_asked(f"all {total} steps are saved")
    if stop.why(needed_seconds=PROOF_SECONDS):
        logger.warning("The final model is not proven: no time is left for it; `tunix-rt export` on this run proves it")
        report.facts["final_model"] = {"proven": False}
    else:
        _prove_final_model(backend, engine, report, questions)


def save_final(
    backend: Any, engine: Any, folder: Path, *, tokenizer: Tokenizer, style: Style, dtype: str | None
) -> None:
    """The trained model with its tokenizer, as others load it. With `dtype`, the weights of `engine` are rounded to it first:
    what it generates afterwards is what the saved model generates."""
    if dtype is not None:
        backend.round_weights(engine, dtype)
        logger.info("Final model: weights rounded to %s", dtype)
    template = style.template
    backend.save(
        engine, folder, tokenizer_folder=tokenizer.folder, stop_ids=stop_ids(tokenizer, style),
        chat_template=template.jinja if template.name in NAMED_TEMPLATES else None,  # it was trained with it
    )  # fmt: skip


def _answers_before(
    backend: Any, engine: Any, report: Report, questions: Questions, kept: str, stop: StopRequest, **asking: Any
) -> list[Prediction]:
    """What the untrained model answers.

    How long that took is written down: the answers after training are to the same questions, asked in the same way, so they
    are taken to last as long, also by a continuation, which does not ask again.
    """
    began = time.monotonic()
    look = partial(stop.raise_if_asked, kept, starting=True)
    before = _evaluate(backend, engine, report, questions, "before", stop=look, **asking)
    report.facts["answering_seconds"] = round(time.monotonic() - began, 3)
    if stop.has_budget:
        logger.info(
            "The answers after training will take about %s, as those before did: with less of the time budget left, the run "
            "stops before them and gives them when it is continued",
            minutes(report.facts["answering_seconds"]),
        )
    stop.raise_if_asked(kept)  # the answers are kept, so that a continuation gets further
    return before


def _prove_final_model(backend: Any, engine: Any, report: Report, questions: Questions) -> None:
    """Have a fresh process load what was saved. A model that is another there is put aside, and the run has failed."""
    final, tokenizer, style = report.run.final_model, questions.tokenizer, questions.style
    refused = final.with_name("final_model-refused")
    try:
        proof = prove_reload(
            backend, engine, final, tokenizer=tokenizer, style=style, stop_ids=stop_ids(tokenizer, style)
        )
    except EvidenceError:
        with contextlib.suppress(OSError):  # what was found is said, whatever the disk does
            shutil.rmtree(refused, ignore_errors=True)
            final.rename(refused)
        raise
    shutil.rmtree(refused, ignore_errors=True)
    if proof is None:
        report.facts["final_model"] = {"proven": False}
        return
    said = {name: value for name, value in to_plain(proof).items() if value is not None}
    report.facts["final_model"] = {"proven": True, **said}
    logger.info("Final model: %s", proof.sentence)


def _write_summary(report: Report, config: RunConfig, data: Prepared, questions: Questions) -> None:
    named = (
        {"evalset": data.evalset.key, "evalset_sha256": data.evalset.sha256}
        if data.evalset
        else {"evalset": "held out"}
    )
    facts = {
        "models": [config.model.model_name_or_path], "weights": config.model.weights, **named,
        "questions": len(data.items), "device": report.facts["device"], "dtype": config.training.dtype,
        "decoding": questions.settings(),
    }  # fmt: skip
    before, after = report.scores["before"], report.scores["after"]
    write_json(report.run.eval_summary, summary_of(before, after, report.comparison, **facts))


def _refuse_occupied(run: RunDir, config: RunConfig) -> bool:
    """Whether `run` is continued. Refuses a folder that holds a run, unless it is this run, unfinished, and asked for.

    A folder whose run was refused before it began holds none, so that the same command can be given again.
    """
    if not run.holds_a_run():
        return False
    status = _status(run)
    if not run.holds_work() and (status == "refused" or not run.precommit.exists()):
        with storage(run.root):
            for stale in (
                run.rows,
                run.processes,
                run.checkpoint_list,
                run.result,
                run.hashes,
                run.precommit,
                run.memory,
            ):
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
    committed = read_precommit(run)
    refuse_another_format(committed, run.root)
    refuse_another_config(committed, config, run.root)
    return True


def _status(run: RunDir) -> str:
    if not run.result.exists():
        return "unfinished"
    try:
        return str(read_json(run.result)["status"])
    except (TunixError, KeyError, TypeError):
        return "broken"


def _timed_before(run: RunDir) -> dict[str, float]:
    """How long the answers before training took, as the process before this one wrote down; nothing where it did not."""
    try:
        seconds = read_json(run.result)["answering_seconds"]
    except (TunixError, KeyError, TypeError):
        return {}
    return {"answering_seconds": float(seconds)} if isinstance(seconds, int | float) and 0 <= seconds < math.inf else {}


def find_model(config: RunConfig) -> tuple[ModelSource, ModelShape]:
    model = resolve_model(
        config.model.model_name_or_path or "", revision=config.model.revision, weights=config.model.weights
    )
    shape = shape_of(model.config)
    if config.training.backend == "jax":
        refuse_dropout(model.name, architecture_of(model.config).dropout, model.config)
    return model, shape


def _say_preflight(config: RunConfig, model: ModelSource, shape: ModelShape, choice: DeviceChoice) -> None:
    """What is trained, on what, and in which types, with the settings that the run goes with."""
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


def find_tokenizer(config: RunConfig) -> tuple[Tokenizer, ModelFacts]:
    """The tokenizer of a configuration, and what the data stage must know of its model. Needs no weights."""
    model = resolve_model(config.model.model_name_or_path or "", revision=config.model.revision, weights="random")
    return tokenizer_of(config, model, shape_of(model.config))


def tokenizer_of(config: RunConfig, model: ModelSource, shape: ModelShape) -> tuple[Tokenizer, ModelFacts]:
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


def _commit(run: RunDir, committed: dict[str, Any], data: Prepared, report: Report) -> None:
    """Write `rows.jsonl` and `precommit.json` before the first step, or hold a continued run to those it wrote.

    The rows first: where a commitment is, what it speaks of is there too."""
    if run.precommit.exists():
        before = read_precommit(run)
        refuse_another_run(before, committed, run.root)
        if before.get("source_sha256") != committed["source_sha256"]:
            report.warn(f"resuming with another source of tunix-rt; numerics {committed['numerics']} is the same")
        if not has_rows(run.rows, data.row_facts):
            logger.warning("%s is missing or damaged, and written again: the rows are those committed to", run.rows)
            report.write(write_rows, run.rows, data.row_facts)
    else:
        write_rows(run.rows, data.row_facts)
        write_json(run.precommit, committed)
    report.facts["run_id"] = sha256_file(run.precommit)


def _go_on(report: Report, start: Start) -> MetricsLog:
    """Nothing more can refuse this run: a continued one is taken as it was up to `start`, and goes on there."""
    if report.continued:
        report.phases.take_up(report.run.memory)
        report.accept()
        report.training_began = True  # by an earlier process: what goes wrong from here on is no refusal
    report.facts |= start.facts
    report.facts["resumed_from"] = start.step
    report.seconds_before = start.seconds
    report.sound = start.sound
    report.phases.before_bytes = start.peak_bytes
    return cut_back(report.run, start)


def load_engine(
    backend: Any, model: ModelSource, shape: ModelShape, config: RunConfig, choice: DeviceChoice, step: StepShape, *,
    attempt: bool,
) -> Any:  # fmt: skip
    known: dict[str, Any] = {}
    if config.training.backend == "jax":  # a whole step is compiled, before a weight is loaded
        known = {"step": step, "implementation": config.model.implementation, "attempt": attempt}
    engine = backend.load(model, device=choice.device, training=config.training, **known)
    if known and len(engine.devices) != choice.count:
        raise HardwareError(
            f"{choice.count} x {choice.device} were counted, jax has {len(engine.devices)}",
            fix="ask `tunix-rt doctor --backend jax`; a GPU that is masked for one is masked for both",
            cause="jax-sees-no-device",
        )
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
    backend: Any, engine: Any, report: Report, questions: Questions, when: str, **asking: Any
) -> list[Prediction]:
    predictions, scores = evaluate_model(backend, engine, questions, when=when, run=report.run, **asking)
    report.note_scores(when, scores)
    report.phases.end(engine, "generation")
    return predictions

"""doctor, plan, data, train, evaluate, evidence: one run from configuration to hashed folder, in this order."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.backends import Progress, load_backend
from tunix_rt.config import RunConfig, dump_yaml, require_runnable
from tunix_rt.data.pack import total_steps
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.doctor.checks import DeviceChoice, choose_device, device_lines, env_info_text, torch_version_text
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.errors import ConfigError, TunixError
from tunix_rt.evaluate.report import Comparison, compare, read_predictions, read_scores, samples_markdown
from tunix_rt.evaluate.run import evaluate_model
from tunix_rt.evaluate.score import Prediction, Scores
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.evidence.precommit import build_precommit, refuse_another_run, settled_config
from tunix_rt.models import ModelSource, resolve_model
from tunix_rt.plan.fit import disk_needed_bytes, estimate_time, judge, refuse_if_too_big
from tunix_rt.plan.memory import MemoryPlan, predict
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.rundir import RunDir, read_json, sha256_file, write_json, write_text
from tunix_rt.train import StopRequest, train_run

logger = logging.getLogger(__name__)

GIB = 2**30
LOUD_PARAMETERS = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class Report:
    """What is known of the run so far; `result.json` is written from it whatever happens."""

    facts: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)
    comparison: Comparison | None = None
    phases: dict[str, int] = field(default_factory=dict)
    training_began: bool = False


def run_pipeline(config: RunConfig, output: Path, *, progress: Progress) -> Report:
    """Run everything into the folder `output`. Raises what went wrong after writing it into `result.json`."""
    require_runnable(config)
    run = RunDir(output)
    with run.locked():
        _refuse_occupied(run, config)
        report = Report()
        with _logged(run), _recorded(run, report), StopRequest().listening() as stop:
            _run_stages(run, config, report, stop, progress)
        return report


def _run_stages(run: RunDir, config: RunConfig, report: Report, stop: StopRequest, progress: Progress) -> None:
    logger.info("tunix-rt %s, run folder %s", tunix_rt.__version__, run.root)
    write_text(run.config, dump_yaml(settled_config(config)))
    choice = _doctor(run, config)
    report.facts["device"] = choice.device
    model, shape = _find_model(config, choice)
    report.facts["parameters"] = shape.parameters
    upper = _plan(config, shape, choice)
    tokenizer = load_tokenizer(_tokenizer_folder(config, model))
    data = prepare(config, tokenizer, model_vocabulary=shape.vocab)
    logger.info("Data: %s", data.sentence)
    plan = _plan_for_data(run, config, shape, choice, data, upper)
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes}
    total = _say_how_long(config, shape, data, choice)
    report.facts["steps_planned"] = total
    _commit(run, build_precommit(config, model, tokenizer, data), report)

    backend = load_backend(config.training.backend)
    engine = backend.load(model, device=choice.device, dtype=config.training.dtype, seed=config.training.seed)
    if engine.parameters != shape.parameters:
        raise TunixError(
            f"the plan counted {shape.parameters:,} parameters, the loaded model has {engine.parameters:,}",
            fix="this is a defect of the planner; please report it with the model's config.json",
        )
    report.phases["load"] = engine.peak_bytes()
    asking = {"items": data.items, "tokenizer": tokenizer, "config": config, "run": run, "progress": progress}
    before = _evaluate(backend, engine, report, "before", asking) if data.items else []
    stop.raise_if_asked("nothing was trained yet")
    report.training_began = True
    outcome = train_run(
        backend, engine, run=run, config=config, data=data, pad_id=tokenizer.pad_id, total=total,
        resume=config.training.resume_from_checkpoint is not None, stop=stop, progress=progress,
        note=report.facts.update,
    )  # fmt: skip
    report.facts["resumed_from"] = outcome.resumed_from
    logger.info("Trained at %s tokens/s", f"{outcome.tokens_per_second:,.0f}")
    report.phases["train"] = engine.peak_bytes()
    backend.save(engine, run.final_model, tokenizer_folder=tokenizer.folder)
    report.phases["save"] = engine.peak_bytes()
    if data.items:
        after = _evaluate(backend, engine, report, "after", asking)
        report.comparison = compare(before, after)
        write_text(run.samples, samples_markdown(before, after, report.comparison))
    _account_for_memory(run, report, plan)


def _refuse_occupied(run: RunDir, config: RunConfig) -> None:
    if not run.holds_a_run():
        return
    status = read_json(run.result).get("status", "broken") if run.result.exists() else "unfinished"
    if config.training.resume_from_checkpoint is None:
        raise ConfigError(
            f"{run.root} already holds a run ({status})", fix="add --resume to continue it, or choose another --output"
        )
    if status == "completed":
        raise ConfigError(f"the run in {run.root} is complete", fix="choose another --output for a new run")


def _doctor(run: RunDir, config: RunConfig) -> DeviceChoice:
    facts = gather_facts(run.root)
    write_json(run.doctor, facts)
    write_text(run.env_info, env_info_text(facts))
    write_text(run.torch_version, torch_version_text(facts))
    choice = choose_device(config.training.device, facts, config.training.backend)
    write_json(run.doctor, {"facts": facts, "choice": choice})
    for line in device_lines(choice, facts):
        logger.info("%s", line)
    return choice


def _find_model(config: RunConfig, choice: DeviceChoice) -> tuple[ModelSource, ModelShape]:
    model = resolve_model(
        config.model.model_name_or_path or "", revision=config.model.revision, weights=config.model.weights
    )
    shape = shape_of(model.config)
    logger.info(
        "Preflight: model=%s revision=%s parameters=%s device=%s dtype=%s weights=%s",
        model.name, model.revision, f"{shape.parameters:,}", choice.device, config.training.dtype, model.weights,
    )  # fmt: skip
    if model.weights == "random":
        logger.warning("The weights are random: nothing this run shows is evidence of learning from a pretrained model")
    return model, shape


def _tokenizer_folder(config: RunConfig, model: ModelSource) -> Path:
    named = config.model.tokenizer_name_or_path
    return resolve_model(named, weights="random").folder if named else model.folder


def _plan(config: RunConfig, shape: ModelShape, choice: DeviceChoice) -> MemoryPlan:
    """The prediction for rows of `max_length`, made before any data is read; refuses what cannot fit."""
    plan = predict(shape, config, device=choice.device)
    if choice.device == "cuda" and shape.parameters > LOUD_PARAMETERS:
        logger.warning(
            "OVER 1B PARAMETERS ON A GPU: %s parameters, %.1f GiB predicted; the TPU configuration is submission_tpu.yaml",
            f"{shape.parameters:,}", plan.peak_bytes / GIB,
        )  # fmt: skip
    refuse_if_too_big(plan, choice, shape, config)
    return plan


def _plan_for_data(
    run: RunDir, config: RunConfig, shape: ModelShape, choice: DeviceChoice, data: Prepared, upper: MemoryPlan
) -> MemoryPlan:
    """The prediction for the longest row there really is: the one that is held against the measurement."""
    longest = config.data.model_copy(update={"max_length": data.longest_row})
    plan = predict(shape, config.model_copy(update={"data": longest}), device=choice.device)
    fit = judge(plan, choice)
    disk = disk_needed_bytes(shape, config)
    write_json(
        run.plan,
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
    said = f"Steps: {total:,} of {min(rows_per_step, len(data.rows)):,} rows (about {tokens:,} tokens each)"
    if choice.device == "cpu":
        time_needed = estimate_time(shape, config, tokens_per_step=tokens, steps=total, eval_items=len(data.items))
        said += f"; it will take about {_minutes(time_needed.seconds_low)} to {_minutes(time_needed.seconds_high)}"
    logger.info("%s", said)
    return total


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _commit(run: RunDir, committed: dict[str, Any], report: Report) -> None:
    """Write `precommit.json` before the first step, or hold a continued run to the one it wrote."""
    if run.precommit.exists():
        refuse_another_run(read_json(run.precommit), committed, run.root)
    else:
        write_json(run.precommit, committed)
    report.facts["run_id"] = sha256_file(run.precommit)


def _evaluate(backend: Any, engine: Any, report: Report, when: str, asking: dict[str, Any]) -> list[Prediction]:
    run: RunDir = asking["run"]
    if when == "before" and run.scores(when).exists() and run.predictions(when).exists():  # continued run
        predictions, scores = read_predictions(run.predictions(when)), read_scores(run.scores(when))
    else:
        predictions, scores = evaluate_model(backend, engine, when=when, **asking)
    report.scores[when] = scores
    report.phases[when] = engine.peak_bytes()
    logger.info(
        "Evaluation %s: %d of %d right by the tags (%d leniently), %.0f %% well-formed",
        when, scores.correct, scores.items, scores.correct_lenient, 100 * scores.format_rate,
    )  # fmt: skip
    return predictions


def _account_for_memory(run: RunDir, report: Report, plan: MemoryPlan) -> None:
    """Hold the prediction against the measurement, per run, in the open."""
    measured = max(report.phases.values())
    error = plan.peak_bytes / measured - 1
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


@contextmanager
def _logged(run: RunDir) -> Iterator[None]:
    """Everything said also goes to `training_log.txt`; a continued run appends."""
    handler = logging.FileHandler(run.log, encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    package = logging.getLogger("tunix_rt")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()


@contextmanager
def _recorded(run: RunDir, report: Report) -> Iterator[None]:
    """Write `result.json` and the hashes at the end, however it ends. The one broad except of tunix-rt."""
    started, clock = datetime.now(UTC), time.monotonic()

    def write(status: str, exit_code: int, reason: str) -> None:
        facts = {
            "schema": "tunix-rt/result/1",
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
            **report.facts,
        }
        if report.scores:
            facts["scores"] = {
                when: {"accuracy": s.accuracy, "accuracy_lenient": s.accuracy_lenient, "format_rate": s.format_rate}
                for when, s in report.scores.items()
            }
        write_json(run.result, facts)
        write_hashes(run)

    try:
        yield
    except TunixError as error:
        refused = error.exit_code in (2, 3, 4, 5) and not report.training_began
        status = "preempted" if error.exit_code == 7 else "refused" if refused else "failed"
        logger.error("%s: %s", status, error.problem)
        write(status, error.exit_code, error.problem)
        raise
    except BaseException as error:  # recorded, then raised on: also for a second Ctrl-C and for our own defects
        logger.exception("failed")
        write("failed", 1, f"{type(error).__name__}: {error}")
        raise
    logger.info("Completed")
    write("completed", 0, "all steps taken")

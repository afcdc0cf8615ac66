"""doctor, plan, data, train, evaluate, evidence: one run from configuration to hashed folder, in this order."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.accelerators import find_accelerator, peaks
from tunix_rt.backends import Progress, load_backend
from tunix_rt.config import RunConfig, dump_yaml, require_runnable
from tunix_rt.data.limits import ModelFacts
from tunix_rt.data.pack import total_steps
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.template import OURS as NAMED_TEMPLATES
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.doctor.checks import Ask, judge
from tunix_rt.doctor.choose import DeviceChoice, choose_device, environment_for
from tunix_rt.doctor.facts import Facts
from tunix_rt.doctor.gpu_checks import visible_gpus
from tunix_rt.doctor.gpu_memory import gpu_memory, nvidia_smi_text
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.prove import cuda_check_text, proof_lines, proof_problem, prove
from tunix_rt.doctor.words import device_lines, env_info_text, torch_version_text
from tunix_rt.errors import ConfigError, HardwareError, InputError, TunixError
from tunix_rt.evaluate.report import Comparison, compare, read_predictions, read_scores, samples_markdown
from tunix_rt.evaluate.run import evaluate_model, stop_ids
from tunix_rt.evaluate.score import Prediction, Scores
from tunix_rt.evidence.precommit import (
    began_on,
    build_precommit,
    refuse_another_config,
    refuse_another_run,
    settled_config,
)
from tunix_rt.evidence.record import Record
from tunix_rt.models import ModelSource, resolve_model
from tunix_rt.plan.fit import disk_needed_bytes, estimate_time, refuse_if_too_big
from tunix_rt.plan.fit import judge as judge_fit
from tunix_rt.plan.memory import MemoryPlan, predict
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.rundir import RunDir, read_json, sha256_file, storage, to_plain, write_json, write_text
from tunix_rt.train import StopRequest, find_start, require_charts, train_run

logger = logging.getLogger(__name__)

GIB = 2**30
LOUD_PARAMETERS = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class Report(Record):
    """The record of the run, with the scores and the memory measured so far."""

    scores: dict[str, Scores] = field(default_factory=dict)
    comparison: Comparison | None = None
    phases: dict[str, int] = field(default_factory=dict)

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
    run = RunDir(output)
    with run.locked():
        report = Report(run=run, continued=_refuse_occupied(run, config))
        with report.logged(), report.ended(), StopRequest().listening() as stop:
            _run_stages(run, config, report, stop, progress)
        return report


def _run_stages(run: RunDir, config: RunConfig, report: Report, stop: StopRequest, progress: Progress) -> None:
    logger.info("tunix-rt %s, run folder %s", tunix_rt.__version__, run.root)
    require_charts(config)
    if not report.continued:
        write_text(run.config, dump_yaml(settled_config(config)))
    seen, choice = _doctor(report, config)
    report.facts["device"] = choice.device
    model, shape = _find_model(config, choice)
    report.facts["parameters"] = shape.parameters
    upper = _plan(config, shape, choice)
    if choice.device != "cpu":
        _prove(report, config, model, shape, seen, choice)
    tokenizer, facts = _tokenizer_of(config, model, shape)
    today = began_on(read_json(run.precommit)) if report.continued else None
    data = prepare(config, tokenizer, facts, stoppable(progress, stop), today=today)
    logger.info("Data: %s", data.sentence)
    plan = _plan_for_data(report, config, shape, choice, data, upper)
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes}
    total = _say_how_long(config, shape, data, choice)
    report.facts["steps_planned"] = total
    _commit(run, build_precommit(config, model, tokenizer, data, device=choice.device), report)
    start = find_start(run, resume=report.continued)
    report.facts |= start.facts
    report.facts["resumed_from"] = start.step
    report.seconds_before = start.seconds
    before = _earlier_answers(report) if report.continued and data.items else []

    backend = load_backend(config.training.backend)
    engine = _load(backend, model, shape, config, choice)
    report.note_peak("load", engine.peak_bytes())
    stop.raise_if_asked(start.kept)
    asking = {"items": data.items, "tokenizer": tokenizer, "style": data.style, "config": config, "run": run}
    asking["progress"] = progress
    if data.items and not before:
        before = _evaluate(backend, engine, report, "before", partial(stop.raise_if_asked, start.kept), asking)
    stop.raise_if_asked(start.kept)
    report.training_began = True
    speed = train_run(
        backend, engine, run=run, config=config, data=data, pad_id=tokenizer.pad_id, total=total, start=start,
        stop=stop, progress=progress, note=partial(_note_step, report, seen, choice, start.step + 1, total),
    )  # fmt: skip
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
    _account_for_memory(run, report, plan)


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
    refuse_another_config(read_json(run.precommit), config, run.root)
    return True


def _status(run: RunDir) -> str:
    if not run.result.exists():
        return "unfinished"
    try:
        return str(read_json(run.result)["status"])
    except (TunixError, KeyError, TypeError):
        return "broken"


def _doctor(report: Report, config: RunConfig) -> tuple[Facts, DeviceChoice]:
    """Facts, verdict, device. A refusal leaves its whole report in `doctor.json`."""
    run, training = report.run, config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    facts = gather_facts(run.root, backend=training.backend, device=training.device)
    report.write(write_text, run.env_info, env_info_text(facts))
    report.write(write_text, run.torch_version, torch_version_text(facts))
    judged = {"facts": facts, "checks": judge(facts, ask)}
    report.write(write_json, run.doctor, judged)
    try:
        choice = choose_device(ask, facts)
    except HardwareError as error:
        raise _with_report(error, run) from error
    report.write(write_json, run.doctor, judged | {"choice": choice})
    os.environ.update(environment_for(choice.device, training.backend))
    for line in device_lines(choice, facts):
        logger.info("%s", line)
    return facts, choice


def _prove(
    report: Report, config: RunConfig, model: ModelSource, shape: ModelShape, facts: Facts, choice: DeviceChoice
) -> None:
    """Run the kernels of this run on its accelerator, in a child process, before anything else does."""
    run, training = report.run, config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    proof = prove(
        backend=training.backend, device=choice.device, dtype=training.dtype, head_size=shape.head_dim,
        query_heads=shape.heads, kv_heads=shape.kv_heads, softcap=model.config.get("final_logit_softcapping"),
    )  # fmt: skip
    judged = {"facts": facts, "checks": judge(facts, ask), "choice": choice, "proof": proof}
    report.write(write_json, run.doctor, judged)
    if choice.device == "cuda":
        report.write(write_text, run.cuda_check, cuda_check_text(proof))
    known = find_accelerator(choice.kind, choice.memory_bytes)
    for line in proof_lines(proof, peaks(known, training.dtype) if known else (None, None)):
        logger.info("%s", line)
    if problem := proof_problem(proof):
        raise _with_report(HardwareError(problem[0], fix=problem[1], cause="not-proven"), run)


def _with_report(error: HardwareError, run: RunDir) -> HardwareError:
    return HardwareError(error.problem, fix=f"{error.fix}; the whole report: {run.doctor}", cause=error.cause)


def _note_step(
    report: Report, facts: Facts, choice: DeviceChoice, first: int, total: int, said: dict[str, Any]
) -> None:
    """Keep what the loop says of a step; on a GPU, also what NVML and nvidia-smi say after the first and the last."""
    report.facts.update(said)
    step = said["steps_completed"]
    if choice.device != "cuda" or step not in (first, total):
        return
    sample = gpu_memory(step, {gpu.uuid for gpu in visible_gpus(facts)})
    if step == first:
        report.write(write_text, report.run.nvidia_smi, nvidia_smi_text(sample, step))
        report.facts["gpu_memory"] = []
    if sample is not None:
        report.facts["gpu_memory"].append(to_plain(sample))
        whose = "under our process id" if sample.by == "nvml" else "in use on the device; NVML hides process ids here:"
        logger.info(
            "GPU memory: %.3f GiB %s %d (NVML, after step %d)", sample.used_bytes / GIB, whose, sample.pid, step
        )


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


def find_tokenizer(config: RunConfig) -> tuple[Tokenizer, ModelFacts]:
    """The tokenizer of a configuration, and what the data stage must know of its model. Needs no weights."""
    model = resolve_model(config.model.model_name_or_path or "", revision=config.model.revision, weights="random")
    return _tokenizer_of(config, model, shape_of(model.config))


def _tokenizer_of(config: RunConfig, model: ModelSource, shape: ModelShape) -> tuple[Tokenizer, ModelFacts]:
    named = config.model.tokenizer_name_or_path
    folder = resolve_model(named, weights="random").folder if named else model.folder
    model_type = str(model.config["model_type"])
    facts = ModelFacts(vocabulary=shape.vocab, positions=shape.max_positions, model_type=model_type)
    return load_tokenizer(folder, model_type), facts


def stoppable(progress: Progress, stop: StopRequest, *, fix: str = "run it again") -> Progress:
    """`progress` that ends the work once a stop was asked for: making the tokens of a large dataset takes a while."""

    def tell(what: str, done: int, total: int, note: str) -> None:
        progress(what, done, total, note)
        stop.raise_if_asked("the data was being prepared, and nothing half-made is kept", fix=fix)

    return tell


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
    report: Report, config: RunConfig, shape: ModelShape, choice: DeviceChoice, data: Prepared, upper: MemoryPlan
) -> MemoryPlan:
    """The prediction for the longest row there really is: the one that is held against the measurement."""
    share = data.trained_tokens / data.tokens
    plan = predict(shape, config, device=choice.device, row_tokens=data.longest_row, target_share=share)
    fit = judge_fit(plan, choice)
    disk = disk_needed_bytes(shape, config)
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
        refuse_another_run(read_json(run.precommit), committed, run.root)
        report.accept()
        report.training_began = True  # by an earlier process: what goes wrong from here on is no refusal
    else:
        write_json(run.precommit, committed)
    report.facts["run_id"] = sha256_file(run.precommit)


def _load(backend: Any, model: ModelSource, shape: ModelShape, config: RunConfig, choice: DeviceChoice) -> Any:
    engine = backend.load(model, device=choice.device, dtype=config.training.dtype, seed=config.training.seed)
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

"""May this run begin? Settings, memory, disk and time, predicted before a weight is loaded; then the commitment."""

import importlib.util
import logging
import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.load import dump_yaml, with_settings
from tunix_rt.config.settings import RunConfig, require_runnable
from tunix_rt.data.packing import total_steps
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.errors import ConfigError, DoesNotFitError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.compile_policy import layers_planned
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.report import judge, left_to_the_compiler, refuse_if_too_big
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.solver import Proposal, faster, solve
from tunix_rt.plan.speed import rates_for
from tunix_rt.plan.timing import disk_needed_bytes, estimate_time
from tunix_rt.runs.journal import Footprint, RunJournal, without_none
from tunix_rt.storage import bytes_below, require_space, to_plain, write_json, write_text
from tunix_rt.train.commitment import (
    Batch,
    as_it_began,
    batch_of_run,
    began_on,
    build_precommit,
    fitting_of_run,
    read_precommit,
    settled_config,
    write_commitment,
)
from tunix_rt.train.context import Options, RunContext, find_model, tokenizer_of
from tunix_rt.train.memory_report import record_ending
from tunix_rt.train.preemption import Preemption, stoppable
from tunix_rt.train.profiling import refuse_too_many
from tunix_rt.train.resume import find_start

logger = logging.getLogger(__name__)

GIB = 2**30
LOUD_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The plan of a run before its data is read."""

    model: ModelSource
    shape: ModelShape
    committed: RunConfig
    """With the settings that `memory: auto` chose: what `precommit.json` hashes."""
    config: RunConfig
    """The same with as many data replicas as divide the devices of this process."""
    fitting: dict[str, Any] | None
    """What `memory: auto` chose and why; None where it is not set."""
    batch: Batch
    memory: MemoryPlan
    """For rows of `max_length`."""


def plan_at_max_length(journal: RunJournal, config: RunConfig, device: DeviceChoice, *, attempt: bool) -> Draft:
    """Find the model, settle `memory: auto`, and predict memory for rows of `max_length`; refuse what cannot fit."""
    model, shape = find_model(config)
    journal.result.parameters = shape.parameters
    fitted = fit_settings(journal, config, shape, device)
    if fitted.config != config and not journal.continued:
        write_text(journal.run.config, dump_yaml(settled_config(fitted.config)))
    _log_preflight(fitted.config, model, shape, device)
    batch = micro_batch(journal, fitted.config, device)
    local = adjust_data_replicas(fitted.config, device.count, continued=journal.continued)
    return Draft(
        model=model, shape=shape, committed=fitted.config, config=local, fitting=fitted.fitting, batch=batch,
        memory=_predict_at_max_length(journal, local, shape, device, batch.rows, attempt=attempt),
    )  # fmt: skip


def prepare_data(journal: RunJournal, draft: Draft, stop: Preemption, options: Options) -> tuple[Tokenizer, Prepared]:
    """Tokenize and pack the dataset. A resumed run renders the date it began with."""
    tokenizer, facts = tokenizer_of(draft.committed, draft.model, draft.shape)
    today = began_on(read_precommit(journal.run)) if journal.continued else None
    progress = stoppable(options.progress, stop, starting=True)
    data = prepare(draft.committed, tokenizer, facts, progress, today=today)
    logger.info("Data: %s", data.describe())
    return tokenizer, data


def commit_run(
    journal: RunJournal,
    draft: Draft,
    device: DeviceChoice,
    gpus: frozenset[str],
    tokenizer: Tokenizer,
    data: Prepared,
    stop: Preemption,
    options: Options,
) -> RunContext:
    """Plan again with the rows that there are, write the commitment, and find the step to start from."""
    plan = plan_with_rows(journal, draft, device, data)
    journal.result.memory = Footprint(predicted_bytes=plan.peak_bytes)
    total = steps_of(draft.committed, data, draft.batch.rows)
    journal.result.steps_planned = total
    _log_steps(draft, data, device, total=total, eval_rows=plan.eval_rows)
    committed = build_precommit(
        draft.committed, draft.model, tokenizer, data, device=device.device, batch=draft.batch, fitting=draft.fitting
    )
    write_commitment(journal, committed, data)
    start = find_start(journal.run, resume=journal.continued)
    stop.refuse_if_never(done=start.step, total=total)
    if options.profile:
        refuse_too_many(options.profile, done=start.step, total=total)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler; read at its import
    stop.saved_state = lambda: start.saved_state
    context = RunContext(
        journal=journal, stop=stop, options=options, config=draft.config, device=device, gpus=gpus, model=draft.model,
        shape=draft.shape, tokenizer=tokenizer, data=data, plan=plan, batch=draft.batch, start=start, total=total,
    )  # fmt: skip
    journal.before_end.append(partial(record_ending, context))
    return context


def _log_preflight(config: RunConfig, model: ModelSource, shape: ModelShape, device: DeviceChoice) -> None:
    """The model, the device and the dtypes, with the settings that the run uses."""
    logger.info(
        "Preflight: model=%s revision=%s parameters=%s device=%s dtype=%s weights=%s",
        model.name, model.revision, f"{shape.parameters:,}", device.device, config.training.dtype, model.weights,
    )  # fmt: skip
    logger.info("Precision: %s", recipe_of(config.training).describe())
    if model.converted_from is not None:
        logger.info("Weights are dequantized from %s; they are not the original's", model.converted_from)
    if model.weights == "random":
        logger.warning("The weights are random: this run is no evidence of learning from a pretrained model")


def _predict_at_max_length(
    journal: RunJournal, config: RunConfig, shape: ModelShape, choice: DeviceChoice, rows: int, *, attempt: bool
) -> MemoryPlan:
    """Memory for micro-batches of `rows` rows of `max_length`. Refuses what cannot fit, unless it is an `attempt`, which is
    logged and recorded."""
    plan = predict_run(
        shape, config, device=choice.device, devices=choice.count, rows=rows, capability=choice.capability,
        device_name=choice.kind,
    )  # fmt: skip
    if choice.device == "cuda" and shape.parameters > LOUD_PARAMETERS:
        logger.warning(
            "OVER 1B PARAMETERS ON A GPU: %s parameters, %.1f GiB predicted; the TPU configuration is submission_tpu.yaml",
            f"{shape.parameters:,}", plan.peak_bytes / GIB,
        )  # fmt: skip
    if doubt := left_to_the_compiler(plan, choice):
        logger.info("Memory: %s", doubt)
        return plan
    try:
        refuse_if_too_big(plan, choice, shape, config)
    except DoesNotFitError as error:
        if not attempt:
            raise
        logger.warning("Continuing because of --allow-oom-attempt: %s", error.problem.splitlines()[0])
        journal.result.oom_attempt = Footprint(predicted_bytes=plan.least_bytes, available_bytes=choice.free_bytes)
    return plan


def require_peft(config: RunConfig) -> None:
    """Refuse LoRA where peft is not installed, before anything that takes time."""
    if config.training.lora_rank is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "training.lora_rank: peft is not installed",
            fix="pip install 'tunix-rt[lora]', or leave the setting out to train every parameter",
        )


def adjust_data_replicas(config: RunConfig, devices: int, *, continued: bool) -> RunConfig:
    """`config` with the most data replicas that divide `devices`. Only a run that is resumed on another number of devices is
    adjusted; a fresh one that does not divide them is refused where the mesh is made."""
    replicas = math.gcd(config.training.data_replicas, devices)
    if not continued or replicas == config.training.data_replicas:
        return config
    logger.warning(
        "data_replicas=%d does not divide %d device(s); using %d", config.training.data_replicas, devices, replicas
    )
    return with_settings(config, {"training.data_replicas": replicas})


def micro_batch(journal: RunJournal, config: RunConfig, choice: DeviceChoice) -> Batch:
    """The rows of a micro-batch. A run keeps those it began with, on however many devices it is resumed."""
    rows = config.training.per_device_train_batch_size
    if not CAPABILITIES[config.training.backend].multi_device:
        return Batch(rows=rows, devices=1)
    known = batch_of_run(read_precommit(journal.run)) if journal.continued else None
    batch = known or Batch(rows=rows * choice.count, devices=choice.count)
    if batch.devices != choice.count:
        logger.info(
            "Micro-batch: %d rows, as on the %d device(s) the run began on; now on %d",
            batch.rows, batch.devices, choice.count,
        )  # fmt: skip
    return batch


def layers_for_data(
    config: RunConfig, shape: ModelShape, choice: DeviceChoice, data: Prepared, rows: int
) -> str | None:
    """How the PyTorch engine runs the layers: the fastest way, or where that does not fit, compiled, which needs the least
    memory. None: the JAX engine compiles every step."""
    if CAPABILITIES[config.training.backend].compiles_whole_step:
        return None
    rule = partial(
        layers_planned, config, shape, device=choice.device, device_name=choice.kind, capability=choice.capability,
        row_tokens=data.longest_row, packed=config.data.packing and data.traces > len(data.rows),
    )  # fmt: skip
    fastest = rule(steps=steps_of(config, data, rows))
    if fastest == "compiled" or judge(plan_with_data(config, shape, choice, data, rows, fastest), choice).fits:
        return fastest
    could = rule() != "plain"  # of a run long enough
    if not could or not judge(plan_with_data(config, shape, choice, data, rows, "compiled"), choice).fits:
        return fastest
    why = {"plain": "though the run is too short for it to pay", "recorded": "and launched kernel by kernel"}[fastest]
    logger.info("Compiling the layers, %s: the run fits in no other way", why)
    return "compiled"


def plan_with_data(
    config: RunConfig, shape: ModelShape, choice: DeviceChoice, data: Prepared, rows: int, layers: str | None
) -> MemoryPlan:
    """The prediction for the longest row there really is, the share of targets and what computes the layers."""
    return predict_run(
        shape,
        config,
        device=choice.device,
        devices=choice.count,
        rows=rows,
        row_tokens=data.longest_row,
        target_share=data.trained_tokens / data.tokens,
        capability=choice.capability,
        device_name=choice.kind,
        layers=layers,
    )


def steps_of(config: RunConfig, data: Prepared, rows: int) -> int:
    training = config.training
    rows_per_step = rows * training.gradient_accumulation_steps
    return total_steps(len(data.rows), rows_per_step, epochs=training.num_train_epochs, max_steps=training.max_steps)


def plan_with_rows(journal: RunJournal, draft: Draft, choice: DeviceChoice, data: Prepared) -> MemoryPlan:
    """The prediction for the longest row there is: the one that is compared with the measurement. Refuses what cannot fit
    with it; writes `plan.json`."""
    config, shape, rows = draft.config, draft.shape, draft.batch.rows
    plan = plan_with_data(config, shape, choice, data, rows, layers_for_data(config, shape, choice, data, rows))
    fit, attempt = judge(plan, choice), journal.result.oom_attempt
    compiler_decides = CAPABILITIES[config.training.backend].compiles_whole_step
    if not fit.fits and not compiler_decides and attempt is None:
        refuse_if_too_big(plan, choice, shape, config, steps=steps_of(config, data, rows))
    disk = disk_needed_bytes(shape, config)
    used = bytes_below(journal.run.checkpoints) + bytes_below(journal.run.final_model)
    require_space(journal.run.root, disk - used, what="the run", keep=config.training.save_total_limit)
    limit = config.training.memory_limit_gib
    optional = {
        "fitting": draft.fitting,
        "memory_limit_bytes": None if limit is None else round(limit * GIB),
        "oom_attempt": None if attempt is None else without_none(to_plain(attempt)),
    }
    written = {
        "schema": "tunix-rt/plan/1",
        "peak_bytes": plan.peak_bytes,
        "peak_bytes_at_max_length": draft.memory.peak_bytes,
        "longest_row_tokens": data.longest_row,
        "memory": plan,
        "fit": fit,
        "disk_bytes": disk,
        **without_none(optional),
    }
    journal.write(write_json, journal.run.plan, written)
    verdict = "Fits" if fit.fits else "Does not fit" if attempt is not None else "May fit"
    logger.info(
        "%s: %.2f GiB predicted for rows of up to %d tokens, %.2f GiB available; up to %.2f GiB on disk",
        verdict, plan.peak_bytes / GIB, data.longest_row, fit.available_bytes / GIB, disk / GIB,
    )  # fmt: skip
    return plan


def _log_steps(draft: Draft, data: Prepared, choice: DeviceChoice, *, total: int, eval_rows: int) -> None:
    config = draft.committed
    rows_per_step = draft.batch.rows * config.training.gradient_accumulation_steps
    rows = min(rows_per_step, len(data.rows))
    tokens = round(data.tokens / len(data.rows) * rows)
    line = f"Steps: {total:,} of {rows:,} rows (about {tokens:,} tokens a step)"
    if choice.device == "cpu":
        time = estimate_time(
            draft.shape, config, tokens_per_step=tokens, steps=total, eval_items=len(data.items), eval_rows=eval_rows
        )
        line += f"; about {minutes(time.seconds_low)} to {minutes(time.seconds_high)}"
    logger.info("%s", line)
    if rows_per_step > len(data.rows):
        logger.warning(
            "A step has %d rows by its settings; the data has %d, so each step takes all of them",
            rows_per_step, len(data.rows),
        )  # fmt: skip


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The configuration to train with, and what `memory: auto` chose; None where it is not set."""

    config: RunConfig
    fitting: dict[str, Any] | None = None


def fit_settings(journal: RunJournal, config: RunConfig, shape: ModelShape, choice: DeviceChoice) -> Fitted:
    """`config` as it is, or with the settings that `memory: auto` chooses; a resumed run keeps those it began with. Where
    nothing fits, the configuration stays as written, and the plan refuses it."""
    if config.training.memory != "auto":
        return Fitted(config=config)
    if journal.continued:
        committed = read_precommit(journal.run)
        fitting = fitting_of_run(committed)
        if fitting is not None:
            logger.info("Memory: auto, as the run began: %s", _settings_text(fitting["chosen"]) or "as written")
        return Fitted(config=as_it_began(committed, config), fitting=fitting)
    plan = predict_run(
        shape, config, device=choice.device, devices=choice.count, capability=choice.capability, device_name=choice.kind
    )
    fits = judge(plan, choice).fits
    proposals = (faster if fits else solve)(plan, choice, shape, config, rates_for(choice))
    if not proposals:
        why = f"it fits ({plan.peak_bytes / GIB:.2f} GiB predicted), and nothing is predicted to be faster"
        if not fits:
            why = "no settings that keep the batch and the trained parameters are predicted to fit"
        logger.info("Memory: auto keeps the settings as written: %s", why)
        return Fitted(config=config, fitting={"chosen": {}, "written": {}, "why": why})
    why = f"as written, {plan.least_bytes / GIB:.2f} GiB are predicted, and {choice.free_bytes / GIB:.2f} GiB are available"
    if fits:
        why = f"as written it fits too ({plan.least_bytes / GIB:.2f} GiB), and is predicted to be slower"
    return _taken(proposals[0], config, shape, choice, why)


def _taken(best: Proposal, config: RunConfig, shape: ModelShape, choice: DeviceChoice, why: str) -> Fitted:
    """The configuration with `best`, logged and recorded."""
    fitted = with_settings(config, best.settings)
    require_runnable(fitted)
    speed = _tokens_per_second(best, fitted, shape, choice)
    now = config.model_dump(mode="json")
    written = {name: now[name.split(".")[0]][name.split(".")[1]] for name in best.settings}
    logger.warning(
        "Memory: auto sets %s: %.2f GiB and %s tokens/s predicted; %s%s",
        _settings_text(best.settings), best.plan.least_bytes / GIB, f"{speed:,.0f}", why,
        f". It changes the result: {'; '.join(best.costs)}" if best.level else "",
    )  # fmt: skip
    fitting = {
        "chosen": dict(best.settings),
        "written": written,
        "why": why,
        "changes_the_result": list(best.costs) if best.level else [],
        "predicted_bytes": best.plan.least_bytes,
        "predicted_tokens_per_second": round(speed, 1),
        "available_bytes": choice.free_bytes,
    }
    return Fitted(config=fitted, fitting=fitting)


def _tokens_per_second(best: Proposal, config: RunConfig, shape: ModelShape, choice: DeviceChoice) -> float:
    """As `tunix-rt plan` prints it: on a CPU from its measured rate; the solver orders settings by another figure there."""
    if choice.device != "cpu":
        return best.time.tokens_per_second
    time = estimate_time(shape, config, tokens_per_step=best.time.tokens, steps=1)
    return best.time.tokens / math.sqrt(time.seconds_low * time.seconds_high)


def _settings_text(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
    )

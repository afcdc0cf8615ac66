"""May this run begin? Settings, memory, disk and time, predicted before a weight is loaded; then the commitment."""

import importlib.util
import logging
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.load import dump_yaml, with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.packing import total_steps
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Engine, StepShape, load_backend
from tunix_rt.errors import ConfigError, DoesNotFitError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.knobs import value_of
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.report import refuse_if_too_big
from tunix_rt.plan.run import RowFacts, RunPlan, plan_run, settle_memory
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.target import devices_of
from tunix_rt.plan.timing import rate_under_load
from tunix_rt.progress import duration, phase
from tunix_rt.runs.journal import Footprint, RunJournal, without_none
from tunix_rt.runs.schemas import Batch
from tunix_rt.storage import bytes_below, require_space, to_plain, write_json, write_text
from tunix_rt.train import commitment
from tunix_rt.train.context import Options, RunContext, find_model, load_engine, tokenizer_of
from tunix_rt.train.memory_report import explaining_load, record_ending
from tunix_rt.train.plan_inputs import described
from tunix_rt.train.preemption import Preemption, stoppable
from tunix_rt.train.profiling import refuse_too_many
from tunix_rt.train.resume import find_start, refuse_lost_records
from tunix_rt.train.rollouts import require_sound_reward

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
    settled, fitting = settle_settings(journal, config, shape, device)
    if settled != config and not journal.continued:
        write_text(journal.run.config, dump_yaml(commitment.settled_config(settled)))
    _log_preflight(settled, model, shape, device)
    batch = micro_batch(journal, settled, device)
    local = adjust_data_replicas(settled, devices_of(settled.training, device), continued=journal.continued)
    plan = plan_run(local, shape, device, micro_batch=batch.rows, settle=False).memory
    _refuse_at_max_length(journal, local, shape, device, plan, attempt=attempt)
    return Draft(model=model, shape=shape, committed=settled, config=local, fitting=fitting, batch=batch, memory=plan)


def load_to_try(
    journal: RunJournal, draft: Draft, device: DeviceChoice, stop: Preemption, options: Options
) -> tuple[Engine | None, Draft]:
    """The model, if its family has no row and self-tests on the loaded model decide how it trains; and the draft with the
    settings that they leave. A resumed run keeps those it began with."""
    if draft.shape.trace is None:
        return None, draft
    training = draft.config.training
    backend = load_backend(training.backend)
    stop.check(stop.saved_state(), starting=True)
    with explaining_load(draft.memory, device):
        step = StepShape(
            rows=draft.batch.rows,
            accumulation=training.gradient_accumulation_steps,
            tokens=draft.config.data.max_length,
        )
        engine = load_engine(
            backend, draft.model, draft.shape, draft.config, device, step, attempt=options.oom_attempt
        )  # fmt: skip
    if engine.packs or not draft.committed.data.packing:
        return engine, draft
    alone = {"data.packing": False, "data.group_by_length": True}
    committed, config = (with_settings(one, alone) for one in (draft.committed, draft.config))
    if not journal.continued:
        write_text(journal.run.config, dump_yaml(commitment.settled_config(committed)))
    before = draft.fitting or {"chosen": {}, "written": {}, "why": ""}
    written = {name: value_of(draft.committed, name) for name in alone}
    why = "; ".join(filter(None, [before["why"], "the loaded model cannot separate packed examples"]))
    fitting = before | {"chosen": before["chosen"] | alone, "written": before["written"] | written, "why": why}
    return engine, replace(draft, committed=committed, config=config, fitting=fitting)


def settle_settings(
    journal: RunJournal, config: RunConfig, shape: ModelShape, device: DeviceChoice
) -> tuple[RunConfig, dict[str, Any] | None]:
    """`config` with the settings that `memory: auto` chooses, and the record of the choice; a resumed run keeps the choice it
    began with. Where nothing fits, the configuration stays as written, and the plan refuses it."""
    if config.training.memory != "auto":
        return config, None
    if journal.continued:
        committed = commitment.read_precommit(journal.run)
        fitting = commitment.fitting_of_run(committed)
        if fitting is not None:
            logger.info("Memory: auto, as the run began: %s", _settings_text(fitting["chosen"]) or "as written")
        return commitment.as_it_began(committed, config), fitting
    settled, fitting = settle_memory(config, shape, device, cpu_flops=cpu_flops(device))
    if not fitting["chosen"]:
        logger.info("Memory: auto keeps the settings as written: %s", fitting["why"])
        return settled, fitting
    costs = fitting["changes_the_result"]
    logger.warning(
        "Memory: auto sets %s: %.2f GiB and %s tokens/s predicted; %s%s",
        _settings_text(fitting["chosen"]), fitting["predicted_bytes"] / GIB,
        f"{fitting['predicted_tokens_per_second']:,.0f}", fitting["why"],
        f". It changes the result: {'; '.join(costs)}" if costs else "",
    )  # fmt: skip
    return settled, fitting


def cpu_flops(device: DeviceChoice) -> float | None:
    """Measured FLOP/s of this CPU; None for another device, whose figures are published."""
    return rate_under_load() if device.device == "cpu" else None


def prepare_data(journal: RunJournal, draft: Draft, stop: Preemption, options: Options) -> tuple[Tokenizer, Prepared]:
    """Tokenize and pack the dataset. A resumed run renders the date it began with."""
    tokenizer, facts = tokenizer_of(draft.committed, draft.model, draft.shape)
    today = commitment.began_on(commitment.read_precommit(journal.run)) if journal.continued else None
    progress = stoppable(options.progress, stop, starting=True)
    with phase("read the data"):
        data = prepare(draft.committed, tokenizer, facts, progress, today=today)
        require_sound_reward(data)
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
    planned = plan_with_rows(journal, draft, device, data)
    ends = (steps_of(draft.committed, data, draft.batch.rows), *(one.max_steps for one in journal.extensions))
    plan, total = planned.memory, ends[-1]
    journal.result.set(memory=Footprint(predicted_bytes=plan.peak_bytes), steps_planned=total)
    _refuse_without_heldout(draft.config, data)
    committed = commitment.build_precommit(
        draft.committed, draft.model, tokenizer, data, device=device.device, batch=draft.batch, fitting=draft.fitting
    )
    commitment.write_commitment(journal, committed, data, draft.committed)
    start = find_start(journal.run, resume=journal.continued)
    every = draft.committed.training.eval_steps or total
    refuse_lost_records(journal.run, start, evaluated=every if data.heldout_rows else None, ends=ends)
    stop.refuse_if_never(done=start.step, total=total)
    if len(ends) > 1:
        logger.info("Extended from %d to %d steps; later learning rates are those of %d steps", ends[-2], total, total)
    if start.checkpoint is not None:
        left = total - start.step
        took = f", about {duration(left * start.seconds / start.step)} at the speed so far" if left else ""
        logger.info("Resuming from %s: %d of %d steps left%s", start.checkpoint.name, left, total, took)
    elif len(ends) == 1:
        _log_steps(draft, data, planned, device)
    if options.profile:
        refuse_too_many(options.profile, done=start.step, total=total)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler; read at its import
    stop.saved_state = lambda: start.saved_state
    context = RunContext(
        journal=journal, stop=stop, options=options, config=draft.config, device=device, gpus=gpus, model=draft.model,
        shape=draft.shape, tokenizer=tokenizer, data=data, plan=plan, batch=draft.batch, start=start, total=total,
        ends=ends,
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
    for line in described(shape, multimodal=model.multimodal):
        logger.info("%s", line)
    if model.converted_from is not None:
        logger.info("Weights are dequantized from %s; they are not the original's", model.converted_from)
    if model.weights == "random":
        logger.warning("The weights are random: this run is no evidence of learning from a pretrained model")


def _refuse_at_max_length(
    journal: RunJournal, config: RunConfig, shape: ModelShape, choice: DeviceChoice, plan: MemoryPlan, *, attempt: bool
) -> None:
    """Refuse what cannot fit, unless it is an `attempt`, which is logged and recorded."""
    if choice.device == "cuda" and shape.parameters > LOUD_PARAMETERS:
        logger.warning(
            "OVER 1B PARAMETERS ON A GPU: %s parameters, %.1f GiB predicted; the TPU configuration is submission_tpu.yaml",
            f"{shape.parameters:,}", plan.peak_bytes / GIB,
        )  # fmt: skip
    try:
        refuse_if_too_big(plan, choice, shape, config)
    except DoesNotFitError as error:
        if not attempt:
            raise
        logger.warning("Continuing because of --allow-oom-attempt: %s", error.problem.splitlines()[0])
        journal.result.oom_attempt = Footprint(predicted_bytes=plan.least_bytes, available_bytes=choice.free_bytes)


def require_peft(config: RunConfig) -> None:
    """Refuse LoRA where peft is not installed, before anything that takes time."""
    if config.training.lora_rank is not None and importlib.util.find_spec("peft") is None:
        fix = "pip install 'tunix-rt[lora]', or leave the setting out to train every parameter"
        raise ConfigError("training.lora_rank: peft is not installed", fix=fix)
    if config.training.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        fix = "pip install 'tunix-rt[qlora]', or leave the setting out"
        raise ConfigError("training.load_in_4bit: bitsandbytes is not installed", fix=fix)


def adjust_data_replicas(config: RunConfig, devices: int, *, continued: bool) -> RunConfig:
    """`config` with the most data replicas that divide `devices`. Only a run that is resumed on another number of devices is
    adjusted; a fresh one that does not divide them is refused where the mesh is made."""
    configured = config.training.data_replicas
    replicas = math.gcd(configured, devices)
    if not continued or replicas == configured:
        return config
    logger.warning("data_replicas=%d does not divide %d device(s); using %d", configured, devices, replicas)
    return with_settings(config, {"training.data_replicas": replicas})


def micro_batch(journal: RunJournal, config: RunConfig, choice: DeviceChoice) -> Batch:
    """The rows of a micro-batch. A run keeps those it began with, on however many devices it is resumed."""
    rows = config.training.per_device_train_batch_size
    devices = devices_of(config.training, choice)
    known = commitment.batch_of_run(commitment.read_precommit(journal.run)) if journal.continued else None
    if journal.continued and not CAPABILITIES[config.training.backend].multi_device:
        known = known or Batch(rows=rows, devices=1)  # a run that began on one rank records no batch
    batch = known or Batch(rows=rows * devices, devices=devices)
    if batch.devices != devices:
        logger.info(
            "Micro-batch: %d rows, as on the %d device(s) the run began on; now on %d",
            batch.rows, batch.devices, devices,
        )  # fmt: skip
    return batch


def steps_of(config: RunConfig, data: Prepared, rows: int) -> int:
    training = config.training
    rows_per_step = training.rows_per_step(rows)
    return total_steps(len(data.rows), rows_per_step, epochs=training.num_train_epochs, max_steps=training.max_steps)


def row_facts(data: Prepared, *, packing: bool) -> RowFacts:
    return RowFacts(
        rows=len(data.rows), longest=data.longest_row, tokens=data.tokens,
        target_tokens=data.tokens if data.prompts else data.trained_tokens,
        packed=packing and data.traces > len(data.rows), eval_items=len(data.items),
        heldout_tokens=sum(len(row.ids) for row in data.heldout_rows),
    )  # fmt: skip


def plan_with_rows(journal: RunJournal, draft: Draft, choice: DeviceChoice, data: Prepared) -> RunPlan:
    """The plan for the longest row there is: the one that is compared with the measurement. Refuses what cannot fit with
    it; writes `plan.json`."""
    config, shape, facts = draft.config, draft.shape, row_facts(data, packing=draft.config.data.packing)
    planned = plan_run(config, shape, choice, facts, micro_batch=draft.batch.rows, cpu_flops=cpu_flops(choice))
    plan, attempt = planned.memory, journal.result.oom_attempt
    if attempt is None:
        refuse_if_too_big(plan, choice, shape, config, steps=planned.steps)
    used = bytes_below(journal.run.checkpoints) + bytes_below(journal.run.final_model)
    require_space(journal.run.root, planned.disk_bytes - used, what="the run", keep=config.training.save_total_limit)
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
        "fit": planned.fit,
        "disk_bytes": planned.disk_bytes,
        **without_none(optional),
    }
    journal.write(write_json, journal.run.plan, written)
    logger.info(
        "%s: %.2f GiB predicted for rows of up to %d tokens, %.2f GiB available; up to %.2f GiB on disk",
        planned.verdict.capitalize(), plan.peak_bytes / GIB, data.longest_row, planned.fit.available_bytes / GIB,
        planned.disk_bytes / GIB,
    )  # fmt: skip
    return planned


def _refuse_without_heldout(config: RunConfig, data: Prepared) -> None:
    if config.training.patience and not data.heldout_rows:
        fix = "use data with more questions, or leave training.patience out"
        raise ConfigError("training.patience needs a held-out loss, and no example is held out", fix=fix)


def _log_steps(draft: Draft, data: Prepared, planned: RunPlan, choice: DeviceChoice) -> None:
    rows, tokens, rollouts = planned.rows_per_step, planned.tokens_per_step, draft.config.training.rollouts
    line = f"Steps: {planned.steps:,} of {rows:,} "
    if rollouts is None:
        line += f"rows (about {tokens:,} tokens a step)"
    else:
        most = f"{rollouts.samples} rollouts of up to {rollouts.max_new_tokens} tokens"
        line += f"questions with {most} each; their time is not predicted"
    if choice.device == "cpu" and planned.seconds is not None:
        low, high = planned.seconds
        middle = duration(math.sqrt(low * high))
        line += f"; about {middle} with evaluation, saving and checks ({duration(low)} to {duration(high)})"
    logger.info("%s", line)
    rows_per_step = draft.committed.training.rows_per_step(draft.batch.rows)
    if rows_per_step > len(data.rows):
        logger.warning(
            "The batch of a step has %d rows (batch size x accumulation), the dataset has %d: every step uses the whole dataset",
            rows_per_step, len(data.rows),
        )  # fmt: skip


def _settings_text(settings: dict[str, Any]) -> str:
    plain = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return ", ".join(f"{name}={value}" for name, value in plain.items())

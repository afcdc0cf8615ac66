"""May this run begin? Memory, disk and time, foretold before a weight is loaded."""

import importlib.util
import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig, Training, require_runnable
from tunix_rt.data.packing import total_steps
from tunix_rt.data.prepare import Prepared
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import StepShape
from tunix_rt.errors import ConfigError, DoesNotFitError
from tunix_rt.plan.compile_policy import layers_planned
from tunix_rt.plan.fit import judge, left_to_the_compiler, refuse_if_too_big
from tunix_rt.plan.jax_limits import refuse_for_jax
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.solver import Proposal, faster, solve
from tunix_rt.plan.speed import rates_for
from tunix_rt.plan.target import limited
from tunix_rt.plan.timing import disk_needed_bytes, estimate_time
from tunix_rt.runs.journal import Record
from tunix_rt.storage import bytes_below, require_space, write_json
from tunix_rt.train.commitment import Batch, as_it_began, batch_of_run, fitting_of_run, read_precommit

logger = logging.getLogger(__name__)

GIB = 2**30
LOUD_PARAMETERS = 1_000_000_000


def plan_worst(
    report: Record, config: RunConfig, shape: ModelShape, choice: DeviceChoice, rows: int, *, attempt: bool = False
) -> MemoryPlan:
    """The prediction for micro-batches of `rows` rows of `max_length`, made before any data is read; refuses what cannot
    fit, unless it is to be an `attempt`, which is said aloud and written down."""
    plan = predict_run(
        shape, config, device=choice.device, devices=choice.count, rows=rows, capability=choice.capability,
        device_name=choice.kind,
    )  # fmt: skip
    if choice.device == "cuda" and shape.parameters > LOUD_PARAMETERS:
        logger.warning(
            "OVER 1B PARAMETERS ON A GPU: %s parameters, %.1f GiB predicted; the TPU configuration is submission_tpu.yaml",
            f"{shape.parameters:,}", plan.peak_bytes / GIB,
        )  # fmt: skip
    if doubt := left_to_the_compiler(plan, choice, config):
        logger.warning("%s", doubt)
        return plan
    try:
        refuse_if_too_big(plan, choice, shape, config)
    except DoesNotFitError as error:
        if not attempt:
            raise
        logger.warning("OUT OF MEMORY IS RISKED, as --allow-oom-attempt asks for: %s", error.problem.splitlines()[0])
        report.facts |= {"oom_attempt": {"predicted_bytes": plan.least_bytes, "available_bytes": choice.free_bytes}}
    return plan


def require_peft(config: RunConfig) -> None:
    """Refuse adapters where peft is not installed; called before anything that takes time."""
    if config.training.lora_rank is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "training.lora_rank: peft is not installed",
            fix="pip install 'tunix-rt[lora]', or leave the setting out to train every parameter",
        )


def with_copies_that_fit(config: RunConfig, devices: int, *, continued: bool) -> RunConfig:
    """`config` with as many copies of the state as `devices` can hold. A run that is continued on another number of them
    may have to do with fewer; a fresh one that asks for what does not divide them is refused where they are laid out."""
    asked = config.training.data_replicas
    held = copies_held(asked, devices)
    if not continued or held == asked:
        return config
    logger.warning(
        "Copies of the state: %d were asked for, which do not divide %d device(s); the run goes on with %d",
        asked, devices, held,
    )  # fmt: skip
    return config.model_copy(update={"training": config.training.model_copy(update={"data_replicas": held})})


def copies_held(asked: int, devices: int) -> int:
    """The largest number of copies that divides both what was asked for and the devices; 1 at worst."""
    return math.gcd(asked, devices)


def micro_batch(report: Record, config: RunConfig, choice: DeviceChoice) -> Batch:
    """The rows of a micro-batch. A run keeps those it began with, on however many devices it is continued."""
    rows = config.training.per_device_train_batch_size
    if config.training.backend != "jax":
        return Batch(rows=rows, devices=1)
    known = batch_of_run(read_precommit(report.run)) if report.continued else None
    batch = known or Batch(rows=rows * choice.count, devices=choice.count)
    if batch.devices != choice.count:
        logger.info(
            "Batch: %d rows in a micro-batch, as the run began with on %d device(s); it goes on with them on %d",
            batch.rows, batch.devices, choice.count,
        )  # fmt: skip
    return batch


def step_shape(config: RunConfig, data: Prepared, batch: Batch) -> StepShape:
    """No larger than the data: a step that asks for more rows than there are takes all of them."""
    rows = min(batch.rows, len(data.rows))
    most = config.training.gradient_accumulation_steps
    return StepShape(rows=rows, accumulation=min(most, -(-len(data.rows) // rows)), tokens=data.longest_row)


def layers_for_data(
    config: RunConfig, shape: ModelShape, choice: DeviceChoice, data: Prepared, rows: int
) -> str | None:
    """What computes the layers of a run of the PyTorch engine, which does as it is told: what is fastest, or where that does
    not fit, compiled layers, which need the least memory. None: the JAX engine compiles every step."""
    if config.training.backend == "jax":
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
    logger.info("Layers are compiled, %s: the run fits in no other way", why)
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


def plan_for_data(
    report: Record,
    config: RunConfig,
    shape: ModelShape,
    choice: DeviceChoice,
    data: Prepared,
    upper: MemoryPlan,
    rows: int,
    fitting: dict[str, Any] | None = None,
) -> MemoryPlan:
    """The prediction for the longest row there really is: the one that is held against the measurement. Refuses what cannot
    fit with it, as before. `fitting` is what `memory: auto` settled on."""
    plan = plan_with_data(config, shape, choice, data, rows, layers_for_data(config, shape, choice, data, rows))
    fit = judge(plan, choice)
    if not fit.fits and config.training.backend == "torch" and "oom_attempt" not in report.facts:
        refuse_if_too_big(plan, choice, shape, config, steps=steps_of(config, data, rows))
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
            **_besides(report, config, fitting),
        },
    )
    verdict = "Fits" if fit.fits else "Does not fit" if "oom_attempt" in report.facts else "May fit"
    logger.info(
        "%s: %.2f GiB predicted for rows of up to %d tokens, %.2f GiB can be had; up to %.2f GiB on disk",
        verdict, plan.peak_bytes / GIB, data.longest_row, fit.available_bytes / GIB, disk / GIB,
    )  # fmt: skip
    return plan


def _besides(report: Record, config: RunConfig, fitting: dict[str, Any] | None) -> dict[str, Any]:
    """What `plan.json` says of a run that was fitted, limited or is to be tried against the verdict."""
    limit = config.training.memory_limit_gib
    told = {
        "fitting": fitting,
        "memory_limit_bytes": None if limit is None else round(limit * GIB),
        "oom_attempt": report.facts.get("oom_attempt"),
    }
    return {name: value for name, value in told.items() if value is not None}


def say_how_long(
    config: RunConfig, shape: ModelShape, data: Prepared, choice: DeviceChoice, *, rows: int, eval_rows: int
) -> int:
    """The steps of the run, whose micro-batches have `rows` rows."""
    training = config.training
    rows_per_step = rows * training.gradient_accumulation_steps
    total = steps_of(config, data, rows)
    tokens = round(data.tokens / len(data.rows) * min(rows_per_step, len(data.rows)))
    said = f"Steps: {total:,} of {min(rows_per_step, len(data.rows)):,} rows (about {tokens:,} tokens a step)"
    if choice.device == "cpu":
        time_needed = estimate_time(
            shape, config, tokens_per_step=tokens, steps=total, eval_items=len(data.items), eval_rows=eval_rows
        )
        said += f"; it will take about {minutes(time_needed.seconds_low)} to {minutes(time_needed.seconds_high)}"
    logger.info("%s", said)
    if rows_per_step > len(data.rows):
        logger.warning(
            "A step was asked to take %d rows; the data has %d, so each step takes all of them",
            rows_per_step,
            len(data.rows),
        )
    return total


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The configuration that is trained with, and what precommit.json and plan.json say of how it came about; None where
    it is as written because nothing else was asked for."""

    config: RunConfig
    fitting: dict[str, Any] | None = None


def within_limit(choice: DeviceChoice, training: Training) -> DeviceChoice:
    """`choice` with no more free memory than `training.memory_limit_gib`. Says what holds the run to it."""
    if training.memory_limit_gib is None:
        return choice
    if choice.device == "cuda":
        kept = "the allocator gives out no more"
    else:
        kept = f"the plan judges by it, and nothing stops a run on a {choice.device.upper()} that takes more"
    logger.info(
        "Memory limit: %.2f GiB of the %.2f GiB free on %s; %s",
        training.memory_limit_gib, choice.free_bytes / GIB, choice.device, kept,
    )  # fmt: skip
    return replace(choice, free_bytes=limited(choice.free_bytes, training.memory_limit_gib))


def fit_settings(report: Record, config: RunConfig, shape: ModelShape, choice: DeviceChoice) -> Fitted:
    """`config` as it is, or with what `memory: auto` settles on; said either way. A run that is continued goes on as it
    began. Where nothing fits, the configuration stays as written, for the plan to refuse it with its words."""
    if config.training.memory != "auto":
        return Fitted(config=config)
    if report.continued:
        committed = read_precommit(report.run)
        fitting = fitting_of_run(committed)
        if fitting is not None:
            logger.info("Memory: as the run began, %s", _words(fitting["chosen"]) or "as written")
        return Fitted(config=as_it_began(committed, config), fitting=fitting)
    plan = predict_run(
        shape, config, device=choice.device, devices=choice.count, capability=choice.capability, device_name=choice.kind
    )
    fits = judge(plan, choice).fits
    proposals = (faster if fits else solve)(plan, choice, shape, config, rates_for(choice))
    if not proposals:
        why = f"it fits ({plan.peak_bytes / GIB:.2f} GiB predicted), and nothing is predicted to be faster"
        if not fits:
            why = "nothing that keeps the rows of a step and what is trained is predicted to fit"
        logger.info("Memory: auto keeps the settings as written: %s", why)
        return Fitted(config=config, fitting={"chosen": {}, "written": {}, "why": why})
    why = (
        f"as written, {plan.least_bytes / GIB:.2f} GiB are predicted, and {choice.free_bytes / GIB:.2f} GiB can be had"
    )
    if fits:
        why = f"as written it fits too ({plan.least_bytes / GIB:.2f} GiB), and is predicted to be slower"
    return _taken(proposals[0], config, shape, choice, why)


def _taken(best: Proposal, config: RunConfig, shape: ModelShape, choice: DeviceChoice, why: str) -> Fitted:
    """The configuration with `best`, which is said and written down."""
    fitted = with_settings(config, best.settings)
    require_runnable(fitted)
    refuse_for_jax(fitted)
    speed = _tokens_per_second(best, fitted, shape, choice)
    now = config.model_dump(mode="json")
    written = {name: now[name.split(".")[0]][name.split(".")[1]] for name in best.settings}
    logger.warning(
        "Memory: auto sets %s: %.2f GiB and %s tokens/s predicted; %s%s",
        _words(best.settings), best.plan.least_bytes / GIB, f"{speed:,.0f}", why,
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
    """As `tunix-rt plan` says it: on a CPU by its rate, measured for a moment. What settings are ordered by there is no
    figure of this CPU."""
    if choice.device != "cpu":
        return best.time.tokens_per_second
    told = estimate_time(shape, config, tokens_per_step=best.time.tokens, steps=1)
    return best.time.tokens / math.sqrt(told.seconds_low * told.seconds_high)


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
    )

"""May this run begin? Memory, disk and time, foretold before a weight is loaded, and held against what was measured."""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.config import RunConfig
from tunix_rt.data.pack import total_steps
from tunix_rt.data.prepare import Prepared
from tunix_rt.doctor.choose import DeviceChoice
from tunix_rt.errors import DoesNotFitError
from tunix_rt.evidence.record import Record
from tunix_rt.plan.fit import (
    disk_needed_bytes,
    estimate_time,
    explain_out_of_memory,
    judge,
    left_to_the_compiler,
    refuse_if_too_big,
)
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import ModelShape
from tunix_rt.rundir import bytes_below, require_space, write_json

logger = logging.getLogger(__name__)

GIB = 2**30
LOUD_PARAMETERS = 1_000_000_000


def plan_worst(config: RunConfig, shape: ModelShape, choice: DeviceChoice, rows: int) -> MemoryPlan:
    """The prediction for micro-batches of `rows` rows of `max_length`, made before any data is read; refuses what cannot
    fit."""
    plan = predict_run(
        shape, config, device=choice.device, devices=choice.count, rows=rows, capability=choice.capability
    )
    if choice.device == "cuda" and shape.parameters > LOUD_PARAMETERS:
        logger.warning(
            "OVER 1B PARAMETERS ON A GPU: %s parameters, %.1f GiB predicted; the TPU configuration is submission_tpu.yaml",
            f"{shape.parameters:,}", plan.peak_bytes / GIB,
        )  # fmt: skip
    if doubt := left_to_the_compiler(plan, choice, config):
        logger.warning("%s", doubt)
        return plan
    refuse_if_too_big(plan, choice, shape, config)
    return plan


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


def plan_for_data(
    report: Record,
    config: RunConfig,
    shape: ModelShape,
    choice: DeviceChoice,
    data: Prepared,
    upper: MemoryPlan,
    rows: int,
) -> MemoryPlan:
    """The prediction for the longest row there really is: the one that is held against the measurement."""
    share = data.trained_tokens / data.tokens
    plan = predict_run(
        shape,
        config,
        device=choice.device,
        devices=choice.count,
        rows=rows,
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
        "%s: %.2f GiB predicted for rows of up to %d tokens, %.1f GiB free; up to %.2f GiB on disk",
        "Fits" if fit.fits else "May fit", plan.peak_bytes / GIB, data.longest_row, fit.available_bytes / GIB, disk / GIB,
    )  # fmt: skip
    return plan


def say_how_long(
    config: RunConfig, shape: ModelShape, data: Prepared, choice: DeviceChoice, *, rows: int, eval_rows: int
) -> int:
    """The steps of the run, whose micro-batches have `rows` rows."""
    training = config.training
    rows_per_step = rows * training.gradient_accumulation_steps
    total = total_steps(len(data.rows), rows_per_step, epochs=training.num_train_epochs, max_steps=training.max_steps)
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


@contextlib.contextmanager
def memory_explained(
    engine: Any, plan: MemoryPlan, choice: DeviceChoice, shape: ModelShape, config: RunConfig
) -> Iterator[None]:
    """Let an engine that runs out of memory end with the planner's words: what was in memory, and what to change."""
    try:
        yield
    except DoesNotFitError as error:
        problem, fix = explain_out_of_memory(plan, engine.peak_bytes(), choice, shape, config)
        raise DoesNotFitError(f"{error.problem}\n  {problem}", fix=fix) from error


def account_for_memory(report: Record, plan: MemoryPlan, phases: Mapping[str, int]) -> None:
    """Hold the prediction against the measurement, per run, in the open."""
    measured = max(phases.values())
    error = plan.peak_bytes / max(1, measured) - 1  # in a process that had room from before, nothing rises
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes, "measured_bytes": measured}
    write_json(
        report.run.memory,
        {
            "schema": "tunix-rt/memory/1",
            "predicted_bytes": plan.peak_bytes,
            "predicted_parts": plan,
            "measured_bytes": measured,
            "measured_peak_after_phase": phases,
            "error": error,
        },
    )
    logger.info(
        "Memory: predicted %.3f GiB, measured %.3f GiB (prediction %+.0f %%)",
        plan.peak_bytes / GIB, measured / GIB, 100 * error,
    )  # fmt: skip

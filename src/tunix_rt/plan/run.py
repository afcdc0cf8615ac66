"""The plan of one run: the settings it trains with, its memory, steps, time and disk. Pure: it reads no clock and no file.

`plan_run` is called twice: before the data is read, with rows of `data.max_length`, where it settles `memory: auto`; then
with the rows that there are.
"""

import math
from dataclasses import dataclass
from typing import Any

from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.fit import GIB, Fit, predict_as_run, verdict
from tunix_rt.plan.knobs import value_of
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.solver import Proposal, faster, solve
from tunix_rt.plan.speed import rates_for, time_of_plan
from tunix_rt.plan.target import Chosen, devices_of
from tunix_rt.plan.timing import disk_needed_bytes, estimate_time, run_time, seconds_beside, steps_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """The rows of a dataset, once it is tokenized and packed."""

    rows: int
    longest: int
    """Tokens of the longest row."""
    tokens: int
    target_tokens: int
    packed: bool
    """Some row has several examples."""
    eval_items: int = 0
    """Questions of each evaluation."""
    heldout_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run on one kind of device. What depends on the number of steps is None until the rows are known."""

    config: RunConfig
    """With the settings that `memory: auto` chose."""
    fitting: dict[str, Any] | None
    """What `memory: auto` chose and why, as `precommit.json` and `plan.json` have it; None if it is not set."""
    memory: MemoryPlan
    fit: Fit
    disk_bytes: int
    rows_per_step: int
    """On all devices, over all micro-batches; no more than there are."""
    steps: int | None
    tokens_per_step: int | None
    """A mean over the dataset."""
    seconds: tuple[float, float] | None
    """Of all steps, as a range; on a CPU of evaluation, loading, saving and the reload check too. None for rollouts: nobody knows
    their lengths before."""

    @property
    def verdict(self) -> str:
        if not self.fit.fits:
            return "does not fit"
        return "may fit, the compiler decides" if self.memory.lower_bound else "fits"


def plan_run(
    config: RunConfig,
    shape: ModelShape,
    device: Chosen,
    rows: RowFacts | None = None,
    *,
    micro_batch: int | None = None,
    settle: bool = True,
    cpu_flops: float | None = None,
) -> RunPlan:
    """The plan of a run of `config` on `device`.

    Without `rows`, they are assumed to be as long as `data.max_length`, and `memory: auto` is settled, unless `settle` is
    False: a resumed run keeps what it began with. `micro_batch` is the rows of a micro-batch on all devices, by default
    `per_device_train_batch_size` on each; a resumed run keeps its own. The time on a CPU needs its rate,
    `timing.measure_rate()`, as `cpu_flops`."""
    fitting = None
    if rows is None and settle and config.training.memory == "auto":
        config, fitting = settle_memory(config, shape, device, cpu_flops=cpu_flops)
    training = config.training
    devices = devices_of(training, device)
    batch = micro_batch or training.per_device_train_batch_size * devices
    rows_per_step = training.rows_per_step(batch)
    known: dict[str, Any] = {}
    steps = None
    if rows is not None:
        steps = steps_of_run(config, rows=rows.rows, rows_per_step=rows_per_step)
        rows_per_step = min(rows_per_step, rows.rows)
        known = {"row_tokens": rows.longest, "target_share": rows.target_tokens / rows.tokens, "packed": rows.packed}
    memory = predict_as_run(shape, config, device, devices=devices, rows=batch, steps=steps, **known)
    return RunPlan(
        config=config,
        fitting=fitting,
        memory=memory,
        fit=verdict(memory, device),
        disk_bytes=disk_needed_bytes(shape, config),
        rows_per_step=rows_per_step,
        steps=steps,
        tokens_per_step=None if rows is None or training.samples else round(rows.tokens / rows.rows * rows_per_step),
        seconds=None if rows is None or training.samples else _seconds(config, shape, device, rows, memory, cpu_flops),
    )


def _seconds(
    config: RunConfig, shape: ModelShape, device: Chosen, rows: RowFacts, memory: MemoryPlan, cpu_flops: float | None
) -> tuple[float, float] | None:
    """How long the run takes, at least and at most; None on a CPU of unknown rate."""
    rows_per_step = config.training.rows_per_step(memory.rows)
    steps = steps_of_run(config, rows=rows.rows, rows_per_step=rows_per_step) or 0
    if device.device == "cpu":
        if cpu_flops is None:
            return None
        tokens = round(rows.tokens / rows.rows * min(rows_per_step, rows.rows))
        time = estimate_time(
            shape, config, tokens_per_step=tokens, steps=steps, eval_items=rows.eval_items, eval_rows=memory.generation_rows,
            flops_per_second=cpu_flops, target_share=rows.target_tokens / rows.tokens, heldout_tokens=rows.heldout_tokens,
        )  # fmt: skip
        low, high = seconds_beside(shape, config, steps)
        return time.seconds_low + low, time.seconds_high + high
    step = time_of_plan(memory, shape, config, rates_for(device), device)
    whole = run_time(step, config, rows=rows.rows, rows_per_step=rows_per_step)
    return None if whole is None else (3600 * whole.hours_low, 3600 * whole.hours_high)


# --- memory: auto -----------------------------------------------------------------------------------------------------


def settle_memory(
    config: RunConfig, shape: ModelShape, device: Chosen, *, cpu_flops: float | None = None
) -> tuple[RunConfig, dict[str, Any]]:
    """`config` with the settings that `memory: auto` chooses, and the record of the choice: the fastest that fits and keeps
    the result if the run fits as written, else what fits and changes the result least. Where nothing fits or the compiler
    decides, the configuration stays as written."""
    plan = predict_as_run(shape, config, device, devices=devices_of(config.training, device))
    fits = verdict(plan, device).fits
    proposals = (faster if fits else solve)(plan, device, shape, config, rates_for(device))
    predicted, free = f"{plan.least_bytes / GIB:.2f} GiB", f"{device.free_bytes / GIB:.2f} GiB"
    if not proposals:
        why = f"it fits ({plan.peak_bytes / GIB:.2f} GiB predicted), and nothing is predicted to be faster"
        if plan.lower_bound:
            why = f"at least {predicted} of {free}, and the compiler decides"
        if not fits:
            why = "no settings that keep the batch and the trained parameters are predicted to fit"
        return config, {"chosen": {}, "written": {}, "why": why}
    why = f"as written, {predicted} are predicted, and {free} are available"
    if fits:
        why = f"as written it fits too ({predicted}), and is predicted to be slower"
    best = proposals[0]
    settled = with_settings(config, best.settings)
    require_runnable(settled)
    return settled, {
        "chosen": dict(best.settings),
        "written": {name: value_of(config, name) for name in best.settings},
        "why": why,
        "changes_the_result": list(best.costs) if best.level else [],
        "predicted_bytes": best.plan.least_bytes,
        "predicted_tokens_per_second": round(_tokens_per_second(best, settled, shape, device, cpu_flops), 1),
        "available_bytes": device.free_bytes,
    }


def _tokens_per_second(
    best: Proposal, config: RunConfig, shape: ModelShape, device: Chosen, cpu_flops: float | None
) -> float:
    """As `tunix-rt plan` prints it: on a CPU of known rate from that rate; settings are ordered by another figure there."""
    if device.device != "cpu" or cpu_flops is None:
        return best.time.tokens_per_second
    time = estimate_time(shape, config, tokens_per_step=best.time.tokens, steps=1, flops_per_second=cpu_flops)
    return best.time.tokens / math.sqrt(time.seconds_low * time.seconds_high)

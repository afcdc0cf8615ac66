"""With which settings a run goes, and within how much memory: as written, or those that `training.memory: auto` settles on.

What was settled on is part of the run: it stands in its precommit.json, and a run that is continued goes on with it, whatever
is free by then.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from tunix_rt.commitment import as_it_began, fitting_of_run, read_precommit
from tunix_rt.config import RunConfig, Training, require_runnable, with_settings
from tunix_rt.doctor.choose import DeviceChoice
from tunix_rt.plan.fit import judge
from tunix_rt.plan.jax_limits import refuse_for_jax
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.solver import Proposal, faster, solve
from tunix_rt.plan.speed import rates_for
from tunix_rt.plan.timing import estimate_time
from tunix_rt.plan.verdict import limited
from tunix_rt.runs.journal import Record

logger = logging.getLogger(__name__)

GIB = 2**30


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

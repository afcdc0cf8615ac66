"""Everything a plan says of one device: memory, verdict, time, and what to change."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tunix_rt import assets
from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.fit import left_to_the_compiler
from tunix_rt.plan.knobs import BFLOAT16_CAPABILITY, differing, set_line
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.solver import OFFERED, Proposal, faster, last_resorts, offered, solve
from tunix_rt.plan.speed import StepTime, rates_for, step_time
from tunix_rt.plan.target import Fit, Target, limited, predict_as_run, verdict
from tunix_rt.plan.timing import RunTime, estimate_time, run_time, steps_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A run on one device. There are `proposals` where it does not fit as it is written, `faster` where it does."""

    target: Target
    plan: MemoryPlan
    fit: Fit
    unable: str
    """Why the device computes no such run, whatever its memory; empty where it does."""
    doubt: str
    """What to say where only the compiler of the JAX engine can tell; empty where the verdict stands."""
    time: StepTime
    proposals: tuple[Proposal, ...]
    faster: tuple[Proposal, ...]
    resorts: tuple[str, ...]
    """Where nothing else makes it fit: what changes the step, the data or the kind of training, in words."""

    @property
    def runs(self) -> bool:
        """As it is written."""
        return self.fit.fits and not self.unable

    def fit_of(self, proposal: Proposal) -> Fit:
        return verdict(proposal.plan, self.target)


def look(shape: ModelShape, config: RunConfig, target: Target) -> Outlook:
    """What a run of `config` is like on `target`, rows taken to be as long as `data.max_length`, and as many steps as are
    known of."""
    free = limited(target.free_bytes, config.training.memory_limit_gib)
    target, rates = replace(target, free_bytes=free), rates_for(target)
    plan, time = _predicted(shape, config, target)
    fit, unable = verdict(plan, target), computes_not(config, target)
    doubt = "" if unable else left_to_the_compiler(plan, target, config)
    quicker: list[Proposal] = []
    if unable:
        found, resorts = _otherwise(shape, config, target)
    elif fit.fits:
        found, resorts = [], []
        quicker = faster(plan, target, shape, config, rates, steps=steps_known(config, target))
    else:
        found, resorts = _what_fits(plan, target, shape, config, asked=config)
    return Outlook(
        target=target,
        plan=plan,
        fit=fit,
        unable=unable,
        doubt=doubt,
        time=time,
        proposals=tuple(found),
        faster=tuple(_of_fewer_settings(quicker))[:OFFERED],
        resorts=tuple(resorts),
    )


def _what_fits(
    plan: MemoryPlan, target: Target, shape: ModelShape, config: RunConfig, *, asked: RunConfig
) -> tuple[list[Proposal], list[str]]:
    """What makes `config` fit, over what was `asked` for; where nothing does, the last resorts instead."""
    steps, rates = steps_known(config, target), rates_for(target)
    found = offered(solve(plan, target, shape, config, rates, steps=steps, asked=asked))
    return found, [] if found else last_resorts(plan, target, shape, config, rates, steps=steps, asked=asked)


def _of_fewer_settings(proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """The first, and of the others those that ask for fewer changes than all before them."""
    fewest = math.inf
    for one in proposals:
        if len(one.settings) < fewest:
            fewest = len(one.settings)
            yield one


def _predicted(shape: ModelShape, config: RunConfig, target: Target) -> tuple[MemoryPlan, StepTime]:
    jax = config.training.backend == "jax"
    devices = target.count if jax else 1
    plan = predict_as_run(shape, config, target, devices=devices, steps=steps_known(config, target))
    time = step_time(
        shape, config, rates_for(target), device=target.device, devices=devices, rows=plan.rows, row_tokens=plan.row_tokens,
        capability=target.capability, layers=plan.layers,
    )  # fmt: skip
    return plan, time


# --- a type that a device does not compute in --------------------------------------------------------------------------


def computes_not(config: RunConfig, target: Target) -> str:
    """Why a run would be refused there whatever its memory, as the doctor does; empty where it would not."""
    known = target.capability
    if target.device != "cuda" or known is None or known >= BFLOAT16_CAPABILITY or config.training.dtype != "bfloat16":
        return ""
    return f"computes bfloat16 only by emulation (compute capability {known[0]}.{known[1]}; it begins at 8.0)"


def _otherwise(shape: ModelShape, config: RunConfig, target: Target) -> tuple[list[Proposal], list[str]]:
    """The run in a type that the device computes in, with what more it takes to fit; or the last resorts of such a run."""
    training = config.training
    narrow = training.backend == "torch" and not training.optim_in_backward
    settings: dict[str, object] = {"training.dtype": "float16" if narrow else "float32"}
    if training.master_dtype == "bfloat16":
        settings |= {"training.master_dtype": "float32", "training.stochastic_rounding": True}
    changed = with_settings(config, settings)
    plan, time = _predicted(shape, changed, target)
    if not verdict(plan, target).fits:
        return _what_fits(plan, target, shape, changed, asked=config)
    said = differing(config, changed)
    cost = f"products in {changed.training.dtype}"
    return [Proposal(settings=said, plan=plan, time=time, level=0, costs=(cost,), line=set_line(said))], []


# --- how many steps ----------------------------------------------------------------------------------------------------


def most_rows(config: RunConfig) -> int | None:
    """Rows that the dataset can come to: one for each trace that is not held out. Packed there are fewer. None where no
    manifest says how many traces there are."""
    key = config.data.dataset
    found = assets.find("datasets", f"{key}/manifest.json") if key and "/" not in key else None
    if found is None:
        return None
    try:
        traces = json.loads(found.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the data stage says what is wrong with it
    return max(1, math.ceil(traces * (1 - config.data.validation_fraction))) if isinstance(traces, int) else None


def steps_known(config: RunConfig, target: Target) -> int | None:
    """Of the whole run, at most where rows are packed; None where neither the configuration nor a manifest says it."""
    training = config.training
    devices = target.count if training.backend == "jax" else 1
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * devices
    return steps_of_run(config, rows=most_rows(config), rows_per_step=rows)


def whole_run(config: RunConfig, seen: Outlook) -> RunTime | None:
    """Steps, tokens and hours, where the configuration or the manifest of its dataset says how many steps there are; at
    most those, without `training.max_steps` and with packed rows."""
    rows_per_step = seen.plan.rows * config.training.gradient_accumulation_steps
    return run_time(seen.time, config, rows=most_rows(config), rows_per_step=rows_per_step)


def measured_here(seen: Outlook, shape: ModelShape, config: RunConfig) -> Outlook:
    """`seen` of the CPU that this runs on, with its rate measured for a moment instead of assumed."""
    told = estimate_time(shape, config, tokens_per_step=seen.time.tokens, steps=1)
    seconds = math.sqrt(told.seconds_low * told.seconds_high)
    time = replace(
        seen.time, seconds=seconds, seconds_low=told.seconds_low, seconds_high=told.seconds_high,
        tokens_per_second=seen.time.tokens / seconds,
    )  # fmt: skip
    return replace(seen, time=time)

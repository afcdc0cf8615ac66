"""What a plan reports: a device with its memory, time and proposals; a whole run; and the refusal of what does not fit."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tunix_rt import assets
from tunix_rt.config.capabilities import capabilities_of
from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.fit import GIB, Device, Fit, limited, predict_as_run, verdict
from tunix_rt.plan.jax_floor import savings
from tunix_rt.plan.knobs import BFLOAT16_CAPABILITY, differing, set_line
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.phases import Phase
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.solver import OFFERED, Proposal, faster, last_resorts, offered, solve, words_of
from tunix_rt.plan.speed import Rates, StepTime, rates_for, time_of_plan
from tunix_rt.plan.target import Target, devices_of
from tunix_rt.plan.timing import RunTime, estimate_time, run_time, steps_of_run

# --- one device -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A run on one device: `proposals` if it does not fit as written, `faster` if it does."""

    target: Target
    plan: MemoryPlan
    fit: Fit
    unable: str
    """Why the device cannot run it, whatever its memory; empty if it can."""
    doubt: str
    """That the compiler decides, if the prediction is a lower bound that fits; else empty."""
    time: StepTime
    proposals: tuple[Proposal, ...]
    faster: tuple[Proposal, ...]
    resorts: tuple[str, ...]
    """If nothing else makes it fit: lines about other steps, other data or another kind of training."""

    @property
    def runs(self) -> bool:
        """As written, and as far as is known before compiling."""
        return self.fit.fits and not self.unable

    def fit_of(self, proposal: Proposal) -> Fit:
        return verdict(proposal.plan, self.target)


def look(shape: ModelShape, config: RunConfig, target: Target, *, brief: bool = False) -> Outlook:
    """The outlook for `config` on `target`, with rows of `data.max_length` and as many steps as are known. A `brief` one is for
    a table of devices: one proposal, not the best, where there are any; nothing that is faster; no last resorts."""
    free = limited(target.free_bytes, config.training.memory_limit_gib)
    target, rates = replace(target, free_bytes=free), rates_for(target)
    plan, time = _predicted(shape, config, target)
    fit, unable = verdict(plan, target), emulated_bfloat16(config, target)
    doubt = "" if unable else left_to_the_compiler(plan, target)
    quicker: list[Proposal] = []
    if unable:
        found, resorts = _without_bfloat16(shape, config, target, brief=brief)
    elif fit.fits:
        found, resorts = [], []
        quicker = [] if brief else faster(plan, target, shape, config, rates, steps=steps_known(config, target))
    else:
        found, resorts = _what_fits(plan, target, shape, config, written=config, brief=brief)
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
    plan: MemoryPlan, target: Target, shape: ModelShape, config: RunConfig, *, written: RunConfig, brief: bool
) -> tuple[list[Proposal], list[str]]:
    """What makes `config` fit, as changes of the `written` one; if nothing does, the last resorts."""
    steps, rates = steps_known(config, target), rates_for(target)
    found = offered(solve(plan, target, shape, config, rates, steps=steps, written=written, first=brief))
    return found, [] if found or brief else last_resorts(
        plan, target, shape, config, rates, steps=steps, written=written
    )


def _of_fewer_settings(proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """The first, then those with fewer changes than all before them."""
    fewest = math.inf
    for one in proposals:
        if len(one.settings) < fewest:
            fewest = len(one.settings)
            yield one


def _predicted(shape: ModelShape, config: RunConfig, target: Target) -> tuple[MemoryPlan, StepTime]:
    plan = predict_as_run(
        shape, config, target, devices=devices_of(config.training, target), steps=steps_known(config, target)
    )
    return plan, time_of_plan(plan, shape, config, rates_for(target), target)


def emulated_bfloat16(config: RunConfig, target: Target) -> str:
    """Why the doctor would refuse the run on this GPU whatever its memory; empty if it would not."""
    known = target.capability
    if target.device != "cuda" or known is None or known >= BFLOAT16_CAPABILITY or config.training.dtype != "bfloat16":
        return ""
    return f"computes bfloat16 only by emulation (compute capability {known[0]}.{known[1]}; it begins at 8.0)"


def _without_bfloat16(
    shape: ModelShape, config: RunConfig, target: Target, *, brief: bool
) -> tuple[list[Proposal], list[str]]:
    """The run in a dtype that the device supports, with what else it needs to fit; or its last resorts."""
    training = config.training
    narrow = "float16" in capabilities_of(training).dtypes and not training.optim_in_backward
    settings: dict[str, object] = {"training.dtype": "float16" if narrow else "float32"}
    if training.master_dtype == "bfloat16":
        settings |= {"training.master_dtype": "float32", "training.stochastic_rounding": True}
    changed = with_settings(config, settings)
    plan, time = _predicted(shape, changed, target)
    if not verdict(plan, target).fits:
        return _what_fits(plan, target, shape, changed, written=config, brief=brief)
    changes = differing(config, changed)
    cost = f"{changed.training.dtype} matmuls"
    return [Proposal(settings=changes, plan=plan, time=time, level=0, costs=(cost,), line=set_line(changes))], []


# --- how many steps ----------------------------------------------------------------------------------------------------


def most_rows(config: RunConfig) -> int | None:
    """The most rows that the datasets can have: one per trace that is not held out, fewer if packed. None without a
    manifest."""
    data = config.data
    counts = [_rows_in_manifest(key) for key in data.names]
    traces = sum(count or 0 for count in counts)
    if not traces or None in counts:
        return None
    traces = min(traces, data.max_examples or traces)
    return max(1, math.ceil(traces * (1 if data.validation else 1 - data.validation_fraction)))


def _rows_in_manifest(key: str) -> int | None:
    found = assets.find("datasets", f"{key}/manifest.json") if "/" not in key else None
    if found is None:
        return None
    try:
        rows = json.loads(found.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the data stage reports what is wrong with it
    return rows if isinstance(rows, int) else None


def steps_known(config: RunConfig, target: Target) -> int | None:
    """Steps of the run, an upper bound if rows are packed; None if neither the configuration nor a manifest has them."""
    training = config.training
    rows = training.rows_per_step(training.per_device_train_batch_size * devices_of(training, target))
    return steps_of_run(config, rows=most_rows(config), rows_per_step=rows)


def whole_run(config: RunConfig, seen: Outlook) -> RunTime | None:
    """Steps, tokens and hours if the number of steps is known; upper bounds if `max_steps` is not set and rows are packed. None
    for rollouts: nobody knows their lengths before."""
    if config.training.samples:
        return None
    rows_per_step = config.training.rows_per_step(seen.plan.rows)
    return run_time(seen.time, config, rows=most_rows(config), rows_per_step=rows_per_step)


def measured_here(seen: Outlook, shape: ModelShape, config: RunConfig) -> Outlook:
    """`seen` on the CPU of this computer, with its measured rate instead of an assumed one."""
    time = estimate_time(shape, config, tokens_per_step=seen.time.tokens, steps=1)
    seconds = math.sqrt(time.seconds_low * time.seconds_high)
    scale = seconds / seen.time.seconds  # proposals were compared at the assumed rate: their gains stay

    known = replace(_scaled(seen.time, scale), seconds_low=time.seconds_low, seconds_high=time.seconds_high)
    faster, proposals = (
        tuple(replace(one, time=_scaled(one.time, scale)) for one in several)
        for several in (seen.faster, seen.proposals)
    )
    return replace(seen, time=known, faster=faster, proposals=proposals)


def _scaled(time: StepTime, scale: float) -> StepTime:
    return replace(
        time, parts={name: scale * seconds for name, seconds in time.parts.items()}, seconds=scale * time.seconds,
        seconds_low=scale * time.seconds_low, seconds_high=scale * time.seconds_high,
        tokens_per_second=time.tokens_per_second / scale,
    )  # fmt: skip


# --- refusal and advice -----------------------------------------------------------------------------------------------


def left_to_the_compiler(plan: MemoryPlan, choice: Device) -> str:
    """The line for a lower bound that fits, of which only the compiler knows the rest; else empty."""
    if not plan.lower_bound or not verdict(plan, choice).fits:
        return ""
    return (
        f"at least {plan.least_bytes / GIB:.2f} GiB of {choice.free_bytes / GIB:.2f} GiB free on {choice.device}; the compiler "
        "decides before a weight is loaded"
    )


def judge(
    plan: MemoryPlan,
    choice: Device,
    shape: ModelShape | None = None,
    config: RunConfig | None = None,
    *,
    steps: int | None = None,
) -> Fit:
    """The verdict. With `shape` and `config`, a run that does not fit comes with advice for its number of `steps`."""
    fit = verdict(plan, choice)
    if fit.fits or shape is None or config is None:
        return fit
    return replace(fit, advice=advice_for(plan, choice, shape, config, rates_for(choice), steps=steps))


def advice_for(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, rates: Rates, *, steps: int | None = None
) -> list[str]:
    """Up to three proposals that fit, as `--set` lines; if none does, the last resorts."""
    found = offered(solve(plan, choice, shape, config, rates, steps=steps))
    return [words_of(one) for one in found] or last_resorts(plan, choice, shape, config, rates, steps=steps)


def refuse_if_too_big(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, *, steps: int | None = None
) -> None:
    """Raise DoesNotFitError, with the parts and what to change, unless the run fits."""
    fit = judge(plan, choice, shape, config, steps=steps)
    if fit.fits:
        return
    predicted = f"{'at least ' if plan.lower_bound else ''}{fit.predicted_bytes / GIB:.2f} GiB predicted"
    margin = f" + {fit.safety_bytes / GIB:.2f} GiB margin" if fit.safety_bytes else ""
    context = f" + {plan.context_bytes / GIB:.2f} GiB for the CUDA context" if plan.context_bytes else ""
    limit = config.training.memory_limit_gib
    free = f"free on {choice.device}" if limit is None else f"allowed (training.memory_limit_gib={limit:g})"
    raise DoesNotFitError(
        f"does not fit: {predicted}{margin}{context}, {fit.available_bytes / GIB:.2f} GiB {free}\n"
        f"  {_parts(plan.least)}",
        fix=_lines(fit.advice),
    )


def explain_out_of_memory(
    plan: MemoryPlan, measured_bytes: int, choice: Device, shape: ModelShape, config: RunConfig
) -> tuple[str, str]:
    """Problem and fix when memory ran out although `plan` fits.

    `measured_bytes` is the peak as the engine measures it. No more was available, so the fix is what fits into that; or into
    less than the prediction, if even that was not enough."""
    problem = (
        f"out of memory: {measured_bytes / GIB:.2f} GiB in use and no more available; {plan.peak_bytes / GIB:.2f} GiB "
        f"{'or more ' if plan.lower_bound else ''}predicted, {choice.free_bytes / GIB:.2f} GiB free on {choice.device} before\n"
        f"  {_parts(plan.least)}"
    )
    if plan.lower_bound:
        return problem, _lines(savings(config.training))
    free = min(measured_bytes, plan.least_bytes) + plan.context_bytes
    known = Target(
        name=choice.kind, kind=choice.kind, device=choice.device, memory_bytes=free, free_bytes=free,
        capability=choice.capability,
    )  # fmt: skip
    return problem, _lines(advice_for(plan, known, shape, config, rates_for(choice)))


def _parts(phase: Phase) -> str:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.parts.items() if size >= GIB / 200)
    return f"in GiB at the peak ({phase.name}): {parts}"


def _lines(advice: list[str]) -> str:
    return "\n       ".join(advice)

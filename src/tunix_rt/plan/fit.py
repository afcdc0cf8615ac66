"""From a prediction to an answer: does it fit this device, and what to change if not."""

from dataclasses import dataclass, replace

from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.phases import Phase
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.solver import last_resorts, offered, solve, words_of
from tunix_rt.plan.speed import Rates, rates_for
from tunix_rt.plan.target import SAFETY_SHARE, Device, Fit, verdict
from tunix_rt.plan.timing import disk_needed_bytes, estimate_time, measure_rate, training_flops_per_token

__all__ = [
    "SAFETY_SHARE", "Fit", "advice_for", "disk_needed_bytes", "estimate_time", "explain_out_of_memory", "judge",
    "left_to_the_compiler", "measure_rate", "refuse_if_too_big", "training_flops_per_token",
]  # fmt: skip

GIB = 2**30
OVERSHOOT = {"tpu": 1.35, "cuda": 1.65, "cpu": 1.65}
"""By how much the bound of the JAX engine may exceed what its compiler asks for, at most. On TPUs it was 1.33 times as much
(benchmarks/results/plan_against_compiler.json), on an H200 1.61 times (jax_local_gpu_h200/training_log.txt and
jax_program_h200.txt there). A CPU's compiler was not asked, and is taken to be no better than a GPU's."""


def judge(
    plan: MemoryPlan,
    choice: Device,
    shape: ModelShape | None = None,
    config: RunConfig | None = None,
    *,
    steps: int | None = None,
) -> Fit:
    """Hold the prediction against what is free. With `shape` and `config`, a run that does not fit comes with advice, for
    as many `steps` as it has where that is known."""
    fit = verdict(plan, choice)
    if fit.fits or shape is None or config is None:
        return fit
    return replace(fit, advice=advice_for(plan, choice, shape, config, rates_for(choice), steps=steps))


def advice_for(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, rates: Rates, *, steps: int | None = None
) -> list[str]:
    """Up to three proposals that fit, as lines of `--set`; where none does, the last resorts and what else is left to do."""
    found = offered(solve(plan, choice, shape, config, rates, steps=steps))
    return [words_of(one) for one in found] or last_resorts(plan, choice, shape, config, rates, steps=steps)


def refuse_if_too_big(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, *, steps: int | None = None
) -> None:
    """Raise DoesNotFitError, with the parts and what to change, unless the run fits."""
    fit = judge(plan, choice, shape, config, steps=steps)
    if fit.fits:
        return
    context = f" + {plan.context_bytes / GIB:.2f} GiB for CUDA itself" if plan.context_bytes else ""
    raise DoesNotFitError(
        f"does not fit: {fit.predicted_bytes / GIB:.2f} GiB predicted + {fit.safety_bytes / GIB:.2f} GiB margin{context}, "
        f"{fit.available_bytes / GIB:.2f} GiB free on {choice.device}\n"
        f"  {_parts(plan.least)}",
        fix=_lines(fit.advice),
    )


def left_to_the_compiler(plan: MemoryPlan, choice: Device, config: RunConfig) -> str:
    """What to say where a run of the JAX engine is not judged to fit and yet goes on: weights and optimizer have room, and
    the bound over everything is no further above it than bounds were seen to be above what XLA asks for. Empty where the
    verdict stands."""
    if config.training.backend != "jax" or verdict(plan, choice).fits:
        return ""
    step = next(phase for phase in plan.phases if phase.name == "step")
    room = choice.free_bytes - plan.context_bytes
    if step.parts["weights"] + step.parts["optimizer"] > room or plan.least_bytes > OVERSHOOT[plan.device] * room:
        return ""
    return (
        f"It may not fit: up to {plan.least_bytes / GIB:.2f} GiB predicted, {choice.free_bytes / GIB:.2f} GiB free on "
        f"{choice.device}; that is an upper bound, and the compiler decides before a weight is loaded"
    )


def explain_out_of_memory(
    plan: MemoryPlan, measured_bytes: int, choice: Device, shape: ModelShape, config: RunConfig
) -> tuple[str, str]:
    """What to say, and what to advise, when memory ran out although `plan` was judged to fit.

    `measured_bytes` is the peak up to then, as the engine measures it. More could not be had, whatever was thought to be
    free, so the advice is what would fit into that; or into less than was predicted, where even that was not enough.
    """
    usable = min(measured_bytes, plan.least_bytes)
    free = usable + plan.context_bytes
    known = _Known(device=choice.device, kind=choice.kind, free_bytes=free, capability=choice.capability)
    problem = (
        f"out of memory: {measured_bytes / GIB:.2f} GiB were taken when no more could be had; "
        f"{plan.peak_bytes / GIB:.2f} GiB had been predicted, and {choice.free_bytes / GIB:.2f} GiB were free on "
        f"{choice.device} before\n  {_parts(plan.least)}"
    )
    return problem, _lines(advice_for(plan, known, shape, config, rates_for(choice)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    device: str
    kind: str
    free_bytes: int
    capability: tuple[int, int] | None


def _parts(phase: Phase) -> str:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.parts.items() if size >= GIB / 200)
    return f"in GiB at the peak ({phase.name}): {parts}"


def _lines(advice: list[str]) -> str:
    return "\n       ".join(advice)

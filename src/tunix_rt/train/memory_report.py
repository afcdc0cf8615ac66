"""The prediction held against what was measured, phase by phase, in the open: `memory.json`, and the record over all runs."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import PhasePeak
from tunix_rt.errors import DoesNotFitError, TunixError
from tunix_rt.plan.calibration import SeenError, add
from tunix_rt.plan.fit import explain_out_of_memory
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.shape import ModelShape
from tunix_rt.runs.journal import Record
from tunix_rt.storage import read_json, write_json

logger = logging.getLogger(__name__)

GIB = 2**30
MOST_ABOVE = 0.03
"""A run that takes so much more than was predicted says so at its end."""
_STEP = ("forward", "loss", "backward", "update", "step")
PREDICTED_BY = {
    "load": ("load",),
    "first_step": ("recording", *_STEP),
    "steps": _STEP,
    "held-out": ("held-out loss",),
    "generation": ("generation",),
    "samples": ("samples",),
    "checkpoint": ("save",),
    "export": ("save",),
}
"""Phases that are measured -> those of the plan, of which the largest counts. What a run loads from a checkpoint (`resume`) is
measured and not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far memory had risen by the end of a phase, and which phases there had been by then."""

    used_bytes: int
    phases: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Phases:
    """The highest memory of each phase of this process, as far as its engine can tell one from the other."""

    peaks: dict[str, PhasePeak] = field(default_factory=dict)
    reached: dict[str, Reached] = field(default_factory=dict)
    before_bytes: int = 0
    """Peak of the steps that earlier processes of the run took, from their metrics."""
    earlier: dict[str, Any] = field(default_factory=dict)
    """What `memory.json` said when this process began; empty where there was none."""

    def end(self, engine: Any, phase: str) -> None:
        """`phase` has ended: keep its peak, or the higher one of its kind, and begin to count the next."""
        peak = engine.take_peak()
        known = self.peaks.get(phase)
        self.peaks[phase] = peak if known is None else known.or_higher(peak)
        self.reached[phase] = Reached(used_bytes=self.measured_bytes, phases=frozenset(self.peaks))

    @property
    def measured_bytes(self) -> int:
        return max((peak.used_bytes for peak in self.peaks.values()), default=0)

    def take_up(self, path: Path) -> None:
        """Go on from the `memory.json` of an earlier process of the run. One that is damaged is said and passed over."""
        if not path.exists():
            return
        try:
            earlier = read_json(path)
            phases = {str(name): {**told, "measured_bytes": int(told["measured_bytes"])}
                      for name, told in earlier["phases"].items()}  # fmt: skip
            self.earlier = {"phases": phases, "measured_as": str(earlier["measured_as"])}
        except (TunixError, KeyError, TypeError, ValueError, AttributeError):
            logger.warning("%s is damaged: what earlier processes measured in it is not told any more", path)


@contextlib.contextmanager
def memory_explained(
    engine: Any,
    phases: Phases,
    plan: MemoryPlan,
    choice: DeviceChoice,
    shape: ModelShape,
    config: RunConfig,
) -> Iterator[None]:
    """Let an engine that runs out of memory end with the planner's words: what was in memory, and what to change. Whatever
    else ends the work, the memory of what was under way is kept too; but an engine is not asked after a defect of ours."""
    try:
        yield
    except DoesNotFitError as error:
        phases.end(engine, "out_of_memory")
        problem, fix = explain_out_of_memory(plan, engine.peak_bytes(), choice, shape, config)
        raise DoesNotFitError(f"{error.problem}\n  {problem}", fix=fix) from error
    except TunixError:
        phases.end(engine, "interrupted")
        raise


@contextlib.contextmanager
def loading_explained(plan: MemoryPlan, choice: DeviceChoice) -> Iterator[None]:
    """The same before there is an engine to ask: its own words say what it had taken."""
    try:
        yield
    except DoesNotFitError as error:
        said = (
            f"{plan.peak_bytes / GIB:.2f} GiB had been predicted for the run, {_load_bytes(plan) / GIB:.2f} GiB of them for "
            f"the load, and {choice.free_bytes / GIB:.2f} GiB were free on {choice.device} before"
        )
        raise DoesNotFitError(f"{error.problem}\n  {said}", fix=error.fix) from error


def _load_bytes(plan: MemoryPlan) -> int:
    return next(phase.total_bytes for phase in plan.phases if phase.name == "load")


def account_for_memory(
    report: Record, plan: MemoryPlan, phases: Phases, choice: DeviceChoice, config: RunConfig
) -> None:
    """Write `memory.json` of a run that has come to its end, say the error, and keep it in the record of this computer."""
    measured = write_account(report, plan, phases, "completed")
    error = _error(plan.peak_bytes, measured)
    logger.info(
        "Memory: predicted %.3f GiB, measured %.3f GiB (prediction %+.1f %%)",
        plan.peak_bytes / GIB, measured / GIB, 100 * error,
    )  # fmt: skip
    kept = add(
        SeenError(
            device=choice.kind,
            backend=config.training.backend,
            layers=plan.layers,
            recipe=recipe_of(config.training).words,
            model=config.model.model_name_or_path or "",
            parameters=plan.parameters,
            predicted_bytes=plan.peak_bytes,
            measured_bytes=max(1, measured),
        )
    )
    above = measured / plan.peak_bytes - 1
    if above > MOST_ABOVE:
        where = f"{kept}, by which `tunix-rt plan` states its error here" if kept else f"{report.run.memory} alone"
        logger.warning(
            "MORE MEMORY THAN PREDICTED: %.1f %% more; it is kept in %s. Please report it with memory.json and config.yaml",
            100 * above, where,
        )  # fmt: skip


def write_account(report: Record, plan: MemoryPlan, phases: Phases, status: str) -> int:
    """Write `memory.json` of a run that ends with `status`; the highest that was measured, in earlier processes of the run
    too, as far as they measured the same."""
    peaks = list(phases.peaks.values())
    together = plan.device == "cpu" or not all(peak.alone for peak in peaks)
    measured_as = f"{peaks[0].measure}; {'up to the end of each phase' if together else 'in each phase'}"
    told = {name: _phase(plan, phases, name, together=together) for name in phases.peaks}
    before = phases.before_bytes
    if phases.earlier.get("measured_as", measured_as) == measured_as:
        told = _merged(phases.earlier.get("phases", {}), told)
    else:
        before = 0
        logger.warning(
            "Memory: earlier processes measured something else (%s): left out", phases.earlier["measured_as"]
        )
    measured: int = max(before, *(phase["measured_bytes"] for phase in told.values()))
    report.facts["memory"] = {"predicted_bytes": plan.peak_bytes, "measured_bytes": measured}
    account: dict[str, Any] = {
        "schema": "tunix-rt/memory/2",
        "status": status,
        "predicted_bytes": plan.peak_bytes,
        "predicted_parts": plan,
        "measured_bytes": measured,
        "measured_as": measured_as,
        "error": _error(plan.peak_bytes, measured),
        "phases": told,
    }
    if before:
        account["measured_bytes_before"] = before
    held = [phase["reserved_bytes"] for phase in told.values() if "reserved_bytes" in phase]
    if held:
        account["reserved_bytes"] = max(held)
    if sampled := report.facts.get("gpu_memory"):
        account["nvml_bytes"] = max(sample["used_bytes"] for sample in sampled)
    write_json(report.run.memory, account)
    return measured


def _merged(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Each phase as it was in the process in which it took most, with what was predicted there."""
    both = {name: max(earlier[name], now[name], key=lambda told: told["measured_bytes"])
            for name in earlier.keys() & now.keys()}  # fmt: skip
    return {**earlier, **now, **both}


def _phase(plan: MemoryPlan, phases: Phases, name: str, *, together: bool) -> dict[str, Any]:
    """What was measured of a phase beside its prediction; or, where phases cannot be told apart, of all `together` up to its
    end. On a CPU they cannot: what one has freed is still in the heap when the next begins."""
    peak, reached = phases.peaks[name], phases.reached[name]
    measured = reached.used_bytes if together else peak.used_bytes
    told: dict[str, Any] = {"measured_bytes": measured}
    if peak.reserved_bytes is not None:
        told["reserved_bytes"] = peak.reserved_bytes
    if name not in PREDICTED_BY:
        return told
    counted = {one for phase in (reached.phases if together else {name}) for one in PREDICTED_BY.get(phase, ())}
    sizes = [phase.total_bytes for phase in plan.phases if phase.name in counted]
    if sizes:
        told |= {"predicted_bytes": max(sizes), "error": _error(max(sizes), measured)}
    return told


def _error(predicted: int, measured: int) -> float:
    """Predicted over measured, less 1. In a process that had room from before nothing rises."""
    return predicted / max(1, measured) - 1

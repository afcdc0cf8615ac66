"""Predicted against measured memory, phase by phase: `memory.json`, and the errors seen on this computer."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Engine
from tunix_rt.engines.memory_meter import PhasePeak
from tunix_rt.errors import DoesNotFitError, StorageError, TunixError
from tunix_rt.plan.calibration import TINY_BYTES, SeenError, add, describe_error
from tunix_rt.plan.fit import safety_margin
from tunix_rt.plan.jax_floor import with_compiled_step
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.report import explain_out_of_memory
from tunix_rt.runs.journal import Footprint, RunJournal, without_none
from tunix_rt.runs.ledger import final_state
from tunix_rt.storage import read_json, write_json
from tunix_rt.train.checkpointer import best_checkpoint

if TYPE_CHECKING:
    from tunix_rt.train.context import RunContext

logger = logging.getLogger(__name__)

GIB = 2**30
_STEP = ("gather", "rollout", "forward", "loss", "backward", "reduce", "update", "step", "compiled step")
PREDICTED_BY = {
    "load": ("load",),
    "first_step": ("recording", *_STEP),
    "steps": _STEP,
    "held-out": ("held-out loss",),
    "generation": ("generation",),
    "samples": ("samples",),
    "held-out questions": ("rollout",),
    "checkpoint": ("save",),
    "export": ("save",),
}
"""Measured phases -> those of the plan, of which the largest counts. Restoring a checkpoint (`resume`) is measured and not
predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighWater:
    """Peak memory by the end of a phase, and the phases up to then."""

    used_bytes: int
    phases: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Phases:
    """Peak memory of each phase of this process, as far as its engine can separate them."""

    peaks: dict[str, PhasePeak] = field(default_factory=dict)
    reached: dict[str, HighWater] = field(default_factory=dict)
    before_bytes: int = 0
    """Peak of the steps that earlier processes of the run took, from their metrics."""
    earlier: dict[str, Any] = field(default_factory=dict)
    """`memory.json` as this process found it; empty where there was none."""
    step_parts: Mapping[str, int] = field(default_factory=dict)
    """Of a step that is compiled as a whole, what its compiler counts: the prediction in place of the lower bound."""

    def end(self, engine: Engine, phase: str) -> None:
        """`phase` has ended: keep its peak, or the higher one of its kind, and begin to count the next."""
        peak = engine.take_peak()
        known = self.peaks.get(phase)
        self.peaks[phase] = peak if known is None else known.or_higher(peak)
        self.reached[phase] = HighWater(used_bytes=self.measured_bytes, phases=frozenset(self.peaks))

    @property
    def measured_bytes(self) -> int:
        return max((peak.used_bytes for peak in self.peaks.values()), default=0)

    def take_up(self, path: Path) -> None:
        """Continue the `memory.json` of an earlier process of the run. A corrupt one is logged and skipped."""
        if not path.exists():
            return
        try:
            earlier = read_json(path)
            phases = {str(name): {**phase, "measured_bytes": int(phase["measured_bytes"])}
                      for name, phase in earlier["phases"].items()}  # fmt: skip
            self.earlier = {"phases": phases, "measured_as": str(earlier["measured_as"])}
        except (TunixError, KeyError, TypeError, ValueError, AttributeError):
            logger.warning("%s is corrupt; memory measured by earlier processes is lost", path)


@contextlib.contextmanager
def explaining_oom(context: "RunContext", engine: Engine) -> Iterator[None]:
    """Let an engine that runs out of memory end with the planner's explanation: what was in memory, and what to change.
    Whatever else ends the work, the peak of the phase in progress is kept, unless it is a defect of ours."""
    phases = context.phases
    try:
        yield
    except DoesNotFitError as error:
        phases.end(engine, "out_of_memory")
        run = (context.device, context.shape, context.config)
        problem, fix = explain_out_of_memory(context.plan, engine.peak_bytes(), *run)
        raise DoesNotFitError(f"{error.problem}\n  {problem}", fix=fix) from error
    except TunixError:
        phases.end(engine, "interrupted")
        raise


@contextlib.contextmanager
def explaining_load(plan: MemoryPlan, choice: DeviceChoice) -> Iterator[None]:
    """The same while the model is loaded: there is no engine yet."""
    try:
        yield
    except DoesNotFitError as error:
        predicted = (
            f"{plan.peak_bytes / GIB:.2f} GiB were predicted for the run, {_load_bytes(plan) / GIB:.2f} GiB of them for "
            f"loading; {choice.free_bytes / GIB:.2f} GiB were free on {choice.device} before"
        )
        raise DoesNotFitError(f"{error.problem}\n  {predicted}", fix=error.fix) from error


def _load_bytes(plan: MemoryPlan) -> int:
    return next(phase.total_bytes for phase in plan.phases if phase.name == "load")


def record_ending(context: "RunContext", status: str) -> None:
    """Before `result.json` is written: the last and the best checkpoint, and the memory of a run that did not complete. A
    disk that fails here hides no other error."""
    with contextlib.suppress(StorageError):
        context.journal.result.set(**final_state(context.run), **best_checkpoint(context.run))
        if status != "completed" and context.phases.peaks:
            write_memory_report(context.journal, context.plan, context.phases, status)


def report_memory(context: "RunContext") -> None:
    """Write `memory.json` of a completed run, log predicted and measured, and add the error to this computer's records."""
    plan, config = with_compiled_step(context.plan, context.phases.step_parts), context.config
    measured = write_memory_report(context.journal, context.plan, context.phases, "completed")
    if plan.lower_bound:  # no prediction, so it has no error
        logger.info("Memory: at least %.3f GiB expected, measured %.3f GiB", plan.peak_bytes / GIB, measured / GIB)
        return
    logger.info(
        "Memory: predicted %.3f GiB, measured %.3f GiB (prediction %s)",
        plan.peak_bytes / GIB, measured / GIB, describe_error(plan.peak_bytes, measured),
    )  # fmt: skip
    # `tunix-rt plan` states the lower bound, of which this is no error.
    # Of several ranks, only the memory of rank 0 is measured here.
    several = context.plan.devices > 1
    if several or context.plan.lower_bound or context.options.profile or max(plan.peak_bytes, measured) < TINY_BYTES:
        return
    add(
        SeenError(
            device=context.device.kind,
            backend=config.training.backend,
            layers=plan.layers,
            recipe=recipe_of(config.training).describe(),
            model=config.model.model_name_or_path or "",
            parameters=plan.parameters,
            predicted_bytes=plan.peak_bytes,
            measured_bytes=max(1, measured),
        )
    )
    margin = safety_margin(plan, plan.peak_bytes)
    if measured > plan.peak_bytes + margin:
        logger.warning(
            "Measured memory is %.1f %% above the prediction, more than its margin of %.3f GiB; please report it with %s and %s",
            100 * (measured / plan.peak_bytes - 1), margin / GIB, context.run.memory, context.run.config.name,
        )  # fmt: skip


def write_memory_report(journal: RunJournal, plan: MemoryPlan, phases: Phases, status: str) -> int:
    """Write `memory.json` of a run that ends with `status`. Returns the highest peak, earlier processes of the run included
    as far as they measured the same quantity. `plan` is that before the load; a compiled step replaces its lower bound."""
    plan = with_compiled_step(plan, phases.step_parts)
    peaks = list(phases.peaks.values())
    together = plan.device == "cpu" or not all(peak.alone for peak in peaks)
    measured_as = f"{peaks[0].measure}; {'up to the end of each phase' if together else 'in each phase'}"
    merged = {name: _phase(plan, phases, name, together=together) for name in phases.peaks}
    before = phases.before_bytes
    if phases.earlier.get("measured_as", measured_as) == measured_as:
        merged = _merged(phases.earlier.get("phases", {}), merged)
    else:
        before, other = 0, phases.earlier["measured_as"]
        logger.warning("Memory: earlier processes measured another quantity (%s), left out", other)
    measured: int = max(before, *(phase["measured_bytes"] for phase in merged.values()))
    journal.result.memory = Footprint(predicted_bytes=plan.peak_bytes, measured_bytes=measured)
    reserved = [phase["reserved_bytes"] for phase in merged.values() if "reserved_bytes" in phase]
    samples = journal.result.gpu_memory
    report = {
        "schema": "tunix-rt/memory/2",
        "status": status,
        "predicted_bytes": plan.peak_bytes,
        "predicted_parts": plan,
        "measured_bytes": measured,
        "measured_as": measured_as,
        "error": _error(plan.peak_bytes, measured),
        "phases": merged,
        "measured_bytes_before": before or None,
        "reserved_bytes": max(reserved, default=None),
        "nvml_bytes": max(sample["used_bytes"] for sample in samples) if samples else None,
    }
    write_json(journal.run.memory, without_none(report))
    return measured


def _merged(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Each phase of the process in which it took most, with its prediction."""
    both = {name: max(earlier[name], now[name], key=lambda phase: phase["measured_bytes"])
            for name in earlier.keys() & now.keys()}  # fmt: skip
    return {**earlier, **now, **both}


def _phase(plan: MemoryPlan, phases: Phases, name: str, *, together: bool) -> dict[str, Any]:
    """Measured and predicted memory of a phase; or, where phases cannot be separated, of all `together` up to its
    end. On a CPU they cannot: what one has freed is still in the heap when the next begins."""
    peak, reached = phases.peaks[name], phases.reached[name]
    measured = reached.used_bytes if together else peak.used_bytes
    report: dict[str, Any] = {"measured_bytes": measured}
    if peak.reserved_bytes is not None:
        report["reserved_bytes"] = peak.reserved_bytes
    if name not in PREDICTED_BY:
        return report
    counted = {one for phase in (reached.phases if together else {name}) for one in PREDICTED_BY.get(phase, ())}
    sizes = [phase.total_bytes for phase in plan.phases if phase.name in counted]
    if sizes:
        report["predicted_bytes"] = max(sizes)
        if not plan.lower_bound:
            report["error"] = _error(max(sizes), measured)
    return report


def _error(predicted: int, measured: int) -> float:
    """Predicted over measured, less 1. In a process that had room from before nothing rises."""
    return predicted / max(1, measured) - 1

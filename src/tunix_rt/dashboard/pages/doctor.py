"""`/doctor`: whether a run works on this computer, what prevents it, and the line that repairs it.

The facts are gathered in a thread, which starts NVML and the engines in child processes; the verdict on them is a function of
the address."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.dashboard.background import Background, Outcome
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.doctor.checks import judge, page_of
from tunix_rt.doctor.facts import Ask, Check, Facts
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.selection import DEVICES, choose_device, describe_choice, summary_rows

WORK = "doctor"
CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": DEVICES,
    "backend": tuple(CAPABILITIES),
    "dtype": tuple(dict.fromkeys(dtype for engine in CAPABILITIES.values() for dtype in engine.dtypes)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict on one request. `causes` are failures, with the documentation of each; the first one hides others."""

    ready: str
    """The device of a run; empty where it is refused."""
    causes: list[tuple[Check, str]]
    warnings: list[tuple[Check, str]]
    passed: list[Check]
    summary: list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorPage:
    ask: Ask
    choices: Mapping[str, tuple[str, ...]]
    command: str
    seconds: float | None
    """For how long facts have been gathered; None where they are not."""
    outcome: Outcome | None
    diagnosis: Diagnosis | None


def page(site: Site, query: Query, run_id: str = "") -> Page:
    work = background(site)
    if work.outcome(WORK) is None:
        look_again(site)
    seconds, outcome = work.running(), work.outcome(WORK)
    ask = Ask(**{name: query.choice(name, choices) for name, choices in CHOICES.items()})
    values = DoctorPage(
        ask=ask, choices=CHOICES, seconds=seconds, outcome=outcome,
        command=f"tunix-rt doctor --device {ask.device} --backend {ask.backend} --dtype {ask.dtype}",
        diagnosis=diagnose(outcome.value[ask.backend], ask) if outcome and outcome.value else None,
    )  # fmt: skip
    return Page(template="doctor.html", title="Doctor", values=values, live=seconds is not None)


def look_again(site: Site, run_id: str = "", body: bytes = b"") -> dict[str, Any]:
    """Gather the facts anew, for each engine: the doctor starts the one that is asked about. Nothing where it is under way."""

    def gathered() -> dict[str, Facts]:
        return {backend: gather_facts(site.folder, backend=backend) for backend in CAPABILITIES}

    background(site).start(WORK, "", gathered)
    return {"state": "running"}


def diagnose(facts: Facts, ask: Ask) -> Diagnosis:
    checks, ready = judge(facts, ask), ""
    if not any(one.verdict == "fail" for one in checks):
        ready = describe_choice(choose_device(ask, facts))
    causes, warnings = (
        [(one, page_of(one.cause)) for one in checks if one.verdict == kind] for kind in ("fail", "warn")
    )
    passed = [one for one in checks if one.verdict == "pass"]
    return Diagnosis(ready=ready, causes=causes, warnings=warnings, passed=passed, summary=list(summary_rows(facts)))


def background(site: Site) -> Background:
    made: Background = site.cache.setdefault("doctor", Background())
    return made

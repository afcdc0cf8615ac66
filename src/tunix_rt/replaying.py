"""Levels L3 and L4: steps of a recorded run taken again in a fresh process, and held against what was recorded."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tunix_rt.backends import Progress
from tunix_rt.errors import InputError
from tunix_rt.evidence.bringing import bring_words, to_bring
from tunix_rt.evidence.comparing import Compared, compare_answers, compare_heldout, compare_states, compare_steps
from tunix_rt.evidence.findings import Finding, Level
from tunix_rt.evidence.machine_class import Class, Match, class_of, worst
from tunix_rt.evidence.recorded import Recorded, read_predictions_of, read_recorded
from tunix_rt.evidence.segments import Segment, all_segments, choose_segments, fresh_nonce, passes_over
from tunix_rt.evidence.tolerances import MEASURED_STEPS, Tolerance, grown, texts_follow, tolerance_of
from tunix_rt.recompute.process import Answer, Source, compute, source_of
from tunix_rt.strict_yaml import read_yaml

OF_THE_MODEL = ("base-model", "tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How a replay came out. `words` are for people: what was chosen, in which class, and how each part compares."""

    class_name: Class
    segments: tuple[Segment, ...]
    findings: tuple[Finding, ...]
    words: tuple[str, ...]
    seconds: float
    recorded_seconds: float
    """Of the whole run, as its result says."""
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One stretch of steps that was computed, judged."""

    match: Match
    furthest: int
    """Steps from where it began to its end."""
    findings: tuple[Finding, ...]
    words: str


def replay(
    folder: Path,
    *,
    repository: Path | None,
    model: str | None,
    count: int = 3,
    nonce: str | None = None,
    whole: bool = False,
    progress: Progress,
) -> Replayed:
    """Take `count` segments of the run in `folder` again, or all of it; the first and the last are always among them.

    What cannot be tried because data or model are not here is raised; everything that comes out otherwise is a finding."""
    began = time.monotonic()
    recorded = read_recorded(folder)
    nonce = nonce or fresh_nonce()
    level: Level = "L4" if whole else "L3"
    total = recorded.total
    if whole:
        chosen: tuple[Segment, ...] = (Segment(start=0, stop=total),)
        passes = chosen
    else:
        chosen = choose_segments(recorded.checkpoints, total, count=count, root=recorded.root, nonce=nonce)
        passes = passes_over(chosen, recorded.states)
    findings = [Finding(level=level, check="replay-checkpoint", problem=problem) for problem in recorded.damaged]
    parts: list[_Part] = []
    with source_of(recorded, repository) as source:
        ask = partial(_computed, recorded, model=_whole_path(model), whole=whole, source=source, progress=progress)
        for answer, taken in _in_children(recorded, passes, ask):
            findings += _of_answer(answer, recorded, level)
            parts += [_judged(recorded, one, answer, source, level) for one in taken if _has_steps(answer, one)]
    class_name = worst(part.match.name for part in parts) if parts else "CROSS"
    seconds = time.monotonic() - began
    words = (
        _chosen_words(recorded, chosen, passes, nonce, whole=whole),
        source.words,
        *dict.fromkeys(_class_words(part.match, recorded.compute, part.furthest) for part in parts),
        *(part.words for part in parts),
        f"computed again in {seconds:.1f} s; the run took {recorded.seconds:.1f} s",
    )
    return Replayed(
        class_name=class_name,
        segments=chosen,
        findings=(*findings, *(finding for part in parts for finding in part.findings)),
        words=words,
        seconds=round(seconds, 3),
        recorded_seconds=recorded.seconds,
        nonce=nonce,
    )


# --- computing --------------------------------------------------------------------------------------------------------


def _in_children(
    recorded: Recorded, passes: Sequence[Segment], ask: Callable[[Sequence[Segment], object], Answer]
) -> Iterator[tuple[Answer, list[Segment]]]:
    """One process for all passes that were computed with as many threads; in the order of the steps."""

    def threads(one: Segment) -> object:
        return next((machine.get("threads") for machine in recorded.machines(one.start, one.stop)), None)

    for number, group in groupby(passes, key=threads):
        taken = list(group)
        yield ask(taken, number), taken


def _computed(
    recorded: Recorded,
    passes: Sequence[Segment],
    threads: object,
    *,
    model: str | None,
    whole: bool,
    source: Source,
    progress: Progress,
) -> Answer:
    asked = [when for when in ("before", "after") if whole and read_predictions_of(recorded.folder, when)]
    request = {
        "folder": str(recorded.folder.absolute()),
        "model": model,
        "passes": [{"start": one.start, "stop": one.stop} for one in passes],
        "checkpoints": sorted(recorded.checkpoints),
        "states": sorted(recorded.states),
        "heldout": sorted(recorded.heldout),
        "answers": asked,
    }
    steps = sum(one.steps for one in passes)
    how: dict[str, Any] = {"threads": threads, "jax": recorded.backend == "jax", "progress": progress}
    try:
        answer = compute("steps", request, source=source, total=steps, **how)
    except InputError as error:
        raise _to_be_brought(recorded, error.problem, error.fix) from error
    if model is not None:
        for line in answer.of("finding"):
            if line["check"] in OF_THE_MODEL:  # which whoever verifies has named: it says nothing about the run
                raise _to_be_brought(recorded, str(line["problem"]), "")
    return answer


def _whole_path(model: str | None) -> str | None:
    """The process that loads it has another working folder."""
    if model is None or not os.path.exists(os.path.expanduser(model)):
        return model
    return os.path.abspath(os.path.expanduser(model))


def _to_be_brought(recorded: Recorded, problem: str, fix: str) -> InputError:
    """With the list of all that the run was given, by hash."""
    settings = read_yaml(recorded.folder / "config.yaml")
    things = [bring_words(thing).replace("`", "") for thing in to_bring(recorded.precommit, settings)]
    ways = [fix] if fix else []
    if things:
        ways.append(
            "to be brought, the model by --model DIR, the rest by name in the working folder:\n    "
            + "\n    ".join(things)
        )
    elif not fix:
        ways.append("leave --model out: the model of this run comes with tunix-rt")
    return InputError(f"could not be tried here: {problem}", fix="; ".join(ways))


# --- judging ----------------------------------------------------------------------------------------------------------


def _of_answer(answer: Answer, recorded: Recorded, level: Level) -> list[Finding]:
    """What is wrong with the whole of it, before any step is looked at."""
    found = [
        Finding(level=level, check=str(line["check"]), problem=str(line["problem"])) for line in answer.of("finding")
    ]
    for line in answer.of("machine"):
        if line["total"] != recorded.total:
            problem = f"{recorded.total} steps are recorded, settings and data give {line['total']}"
            found.append(Finding(level=level, check="replay-steps", problem=problem))
    if answer.failed:
        found.append(Finding(level=level, check="not-replayed", problem=answer.failed))
    return found


def _has_steps(answer: Answer, one: Segment) -> bool:
    return any(one.start < line["step"] <= one.stop for line in answer.of("step"))


def _judged(recorded: Recorded, one: Segment, answer: Answer, source: Source, level: Level) -> _Part:
    """The lines of one pass against the recorded ones."""

    def within(kind: str) -> list[Mapping[str, Any]]:
        first = 0 if kind == "heldout" and not one.start else one.start + 1
        return [line for line in answer.of(kind) if first <= line["step"] <= one.stop]

    match = _class(recorded, one, answer.machine, source)
    exact = match.name == "SAME"
    tolerance = tolerance_of(match.name, recorded.compute)
    rule: dict[str, Any] = {"exact": exact, "level": level}

    def allowed(step: int) -> Tolerance:
        return grown(tolerance, recorded.compute, step - one.start)

    steps = compare_steps(recorded.steps, within("step"), allowed, **rule)
    states = compare_states(recorded.checkpoints, within("checkpoint"), allowed, **rule)
    findings = [
        *steps.findings,
        *states.findings,
        *compare_heldout(recorded.heldout, within("heldout"), allowed, **rule),
    ]
    if steps.steps < one.steps and not answer.failed:
        problem = f"{one.words}: only {steps.steps} of {one.steps} could be taken again"
        findings.append(Finding(level=level, check="replay-steps", problem=problem))
    if one.stop == recorded.total:
        findings += _final(recorded, answer, exact=exact, level=level)
        for line in answer.of("answers"):
            if texts_follow(match.name, recorded.compute):
                theirs = read_predictions_of(recorded.folder, line["when"])
                findings += compare_answers(theirs, line["answers"], tolerance, when=line["when"], **rule)
    took = sum(line["seconds"] for line in answer.of("pass") if line["start"] == one.start)
    words = _part_words(recorded, one, steps, states.words, len(within("heldout")), exact=exact, seconds=took)
    return _Part(match=match, furthest=one.steps, findings=tuple(findings), words=words)


def _class(recorded: Recorded, one: Segment, here: Mapping[str, Any], source: Source) -> Match:
    """The worst over the machines that took these steps."""
    matches = [class_of(machine, here) for machine in recorded.machines(one.start, one.stop)]
    reasons = tuple(dict.fromkeys(reason for match in matches for reason in match.reasons))
    match = Match(name=worst(match.name for match in matches), reasons=reasons)
    return match if source.same else match.at_most("NEAR", source.words)


def _final(recorded: Recorded, answer: Answer, *, exact: bool, level: Level) -> list[Finding]:
    """The final model to the byte, where bits can be held to anything."""
    if not exact or not recorded.final_model:
        return []
    here: dict[str, str] = next((dict(line["files"]) for line in answer.of("final_model")), {})
    names = sorted(recorded.final_model.keys() | here.keys())
    other = [name for name in names if recorded.final_model.get(name) != here.get(name)]
    if not other:
        return []
    problem = f"{', '.join(other[:4])} of the recorded final model: other content than training gives here"
    return [Finding(level=level, check="final-model", problem=problem)]


# --- words ------------------------------------------------------------------------------------------------------------


def _chosen_words(
    recorded: Recorded, chosen: Sequence[Segment], passes: Sequence[Segment], nonce: str, *, whole: bool
) -> str:
    if whole:
        return f"the whole run: {recorded.total} steps from the base model"
    of = len(all_segments(recorded.checkpoints, recorded.total))
    named = ", ".join(one.words for one in chosen)
    said = f"nonce {nonce}: {len(chosen)} of {of} segments: {named}"
    if tuple(passes) != tuple(chosen):
        taken = ", ".join(one.words for one in passes)
        said += f"; the bundle has not every checkpoint that they begin at, so {taken} are taken and compared"
    return said


def _class_words(match: Match, compute: str, furthest: int) -> str:
    """With what is allowed where it is most: at the end of a stretch that is `furthest` steps long."""
    if match.name == "SAME":
        return "class SAME: the machine, its threads and its libraries are the recorded ones; every bit is compared"
    first = tolerance_of(match.name, compute)
    most = grown(first, compute, furthest)
    times = most.loss / first.loss
    grows = f", {times:.3g} times what is allowed of the first {MEASURED_STEPS} steps" if times > 1 else ""
    texts = "" if texts_follow(match.name, compute) else "; answers are not compared in 16 bits, where near ties turn"
    return (
        f"class {match.name}, not exact ({'; '.join(match.reasons)}): after {furthest} steps losses must lie within "
        f"{_share(most.loss)}, gradient norms within {_share(most.grad_norm)}, weights within {_share(most.weights)} of their "
        f"way{grows}{texts}"
    )


def _share(value: float) -> str:
    """`24 %`, `0.003 %`."""
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def _part_words(
    recorded: Recorded, one: Segment, steps: Compared, states: str, heldout: int, *, exact: bool, seconds: float
) -> str:
    origin = f"the checkpoint of step {one.start}" if one.start else "the base model"
    differ = any(finding.check.startswith("replay-") for finding in steps.findings)
    outcome = "DIFFERENT" if differ else "the same bits" if exact else "within the tolerance"
    if not exact or differ:
        outcome += f" (losses apart by up to {steps.largest_loss:.1e}, gradient norms by {steps.largest_norm:.1e})"
    more = f"; {states}" if states else ""
    more += f"; held-out losses at {heldout} place(s)" if heldout else ""
    spent = recorded.step_seconds(one.start, one.stop)
    return (
        f"{one.words} from {origin}: {steps.steps} steps, {outcome}{more}; {seconds:.1f} s, {spent:.1f} s when recorded"
    )

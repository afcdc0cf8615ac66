"""Recorded numbers against those computed again, within a tolerance: pure functions that say every difference once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.findings import Finding, Level
from tunix_rt.evidence.tolerances import LEARNING_RATE, Tolerance

Allowed = Callable[[int], Tolerance]
"""What is allowed after a step."""

NAMED_STEPS = 3
"""Of the steps that differ in one thing, how many are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How a part of a run came out."""

    findings: tuple[Finding, ...]
    steps: int
    largest_loss: float
    """Difference of a step's loss, as a share of it or of 1."""
    largest_norm: float
    """Difference of a gradient norm, as a share of it."""


def compare_steps(
    recorded: Mapping[int, Mapping[str, Any]],
    again: Sequence[Mapping[str, Any]],
    allowed: Allowed,
    *,
    exact: bool,
    level: Level,
) -> Compared:
    """Each step that was taken again against its line. `exact` asks for the same bits, whatever the tolerance."""
    found: dict[str, list[str]] = {}
    loss = norm = 0.0
    for step in again:
        number = step["step"]
        line = recorded.get(number)
        if line is None:
            found.setdefault("replay-steps", []).append(f"step {number} is not recorded")
            continue
        loss, norm = (
            max(loss, loss_apart(line["loss"], step["loss"])),
            max(norm, share_apart(line["grad_norm"], step["grad_norm"])),
        )
        for check, problem in _differences(line, step, allowed(number), exact=exact):
            found.setdefault(check, []).append(f"step {number}: {problem}")
    findings = tuple(
        Finding(level=level, check=check, problem=_some(problems, len(again))) for check, problems in found.items()
    )
    return Compared(findings=findings, steps=len(again), largest_loss=loss, largest_norm=norm)


def compare_heldout(
    recorded: Mapping[int, Mapping[str, Any]],
    again: Sequence[Mapping[str, Any]],
    allowed: Allowed,
    *,
    exact: bool,
    level: Level,
) -> tuple[Finding, ...]:
    """The held-out losses that were measured again."""
    problems = []
    for measured in again:
        line = recorded[measured["step"]]
        where = f"after step {measured['step']}"
        if line["target_tokens"] != measured["target_tokens"]:
            problems.append(f"{where}: {line['target_tokens']} tokens are recorded, {measured['target_tokens']} here")
        elif not _same_loss(line, measured, allowed(measured["step"]), exact=exact):
            problems.append(f"{where}: {_two(line['loss'], measured['loss'])}")
    return (Finding(level=level, check="held-out", problem=_some(problems, len(again))),) if problems else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesCompared:
    findings: tuple[Finding, ...]
    words: str
    """How the states came out; empty where none was passed."""


def compare_states(
    recorded: Mapping[int, Mapping[str, str]],
    again: Sequence[Mapping[str, Any]],
    allowed: Allowed,
    *,
    exact: bool,
    level: Level,
) -> StatesCompared:
    """The state at each checkpoint that was passed: by its hashes where bits are compared, else by the distance of its
    weights where the recorded ones are at hand."""
    problems, far, unseen = [], [], 0
    again = [state for state in again if state["step"] in recorded]
    for state in again:
        where, apart = f"after step {state['step']}", state.get("apart")
        other = [name for name, digest in recorded[state["step"]].items() if state["files"].get(name) != digest]
        if exact and other:
            problems.append(f"{where}: {' and '.join(other)} would have other content")
        if apart is not None:
            far.append(apart)
            if not exact and not apart <= allowed(state["step"]).weights:
                problems.append(f"{where}: the weights lie {apart:.2g} of their way from the recorded ones")
        unseen += not exact and apart is None
    findings = (
        (Finding(level=level, check="replay-checkpoint", problem=_some(problems, len(again))),) if problems else ()
    )
    said = [f"{len(again)} state(s) hashed"] * bool(exact and again)
    said += [f"weights {max(far, default=0.0):.1e} of their way apart"] * bool(far and not exact)
    said += [f"the weights of {unseen} checkpoint(s) are not in the bundle, and not compared"] * bool(unseen)
    return StatesCompared(findings=findings, words="; ".join(said))


def compare_answers(
    recorded: Sequence[Mapping[str, Any]],
    again: Sequence[Mapping[str, Any]],
    tolerance: Tolerance,
    *,
    when: str,
    exact: bool,
    level: Level,
    check: str = "replay-answers",
) -> tuple[Finding, ...]:
    """Recorded answers against those to the same questions. Another text, or another way to its end, is another answer."""
    asked, here = [[one["id"], one["prompt"]] for one in recorded], [[one["id"], one["prompt"]] for one in again]
    if asked != here:
        problem = f"{when}: {len(asked)} questions are recorded, {len(here)} are asked here, and they are not the same"
        return (Finding(level=level, check=check, problem=problem),)
    other = [one["id"] for one, two in zip(recorded, again, strict=True) if not same_answer(one, two)]
    share = 1 - len(other) / len(asked) if asked else 1.0
    if share >= (1.0 if exact else tolerance.texts):
        return ()
    named = ", ".join(shown(name) for name in other[:NAMED_STEPS])
    problem = f"{when}: {len(other)} of {len(asked)} answers come out otherwise, first {named}"
    return (Finding(level=level, check=check, problem=problem),)


def compare_gaps(
    recorded: Sequence[Mapping[str, Any]], gaps: Sequence[float], *, most: float, share: float
) -> tuple[Finding, ...]:
    """Recorded answers that were followed token by token. At least this `share` of them must have no gap above `most`."""
    far = [(gap, one["id"]) for one, gap in zip(recorded, gaps, strict=True) if not gap <= most]
    if 1 - len(far) / len(recorded) >= share:
        return ()
    named = ", ".join(f"{shown(name)} by {gap:.2g}" for gap, name in far[:NAMED_STEPS])
    problem = f"after: {len(far)} of {len(recorded)} answers have tokens that these weights do not give, first {named}"
    return (Finding(level="L2", check="followed-answers", problem=problem),)


def same_answer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("output", "ended"))


def _differences(
    line: Mapping[str, Any], step: Mapping[str, Any], tolerance: Tolerance, *, exact: bool
) -> Iterator[tuple[str, str]]:
    if line["batch"] != step["batch"]:
        yield "replay-batch", "its rows are not those that seed and data give"
    for name in ("tokens", "target_tokens"):
        if line[name] != step[name]:
            yield "replay-tokens", f"{name} {_two(line[name], step[name])}"
    if share_apart(line["lr"], step["lr"]) > (0.0 if exact else LEARNING_RATE):
        yield "replay-learning-rate", _two(line["lr"], step["lr"])
    if not _same_loss(line, step, tolerance, exact=exact):
        yield "replay-loss", _two(line["loss"], step["loss"])
    norms = share_apart(line["grad_norm"], step["grad_norm"])
    if not norms <= (0.0 if exact else tolerance.grad_norm):
        yield "replay-grad-norm", _two(line["grad_norm"], step["grad_norm"])


def _same_loss(line: Mapping[str, Any], again: Mapping[str, Any], tolerance: Tolerance, *, exact: bool) -> bool:
    if exact:
        return bool(line["loss_hex"] == again["loss_hex"] and line["loss"] == again["loss"])
    return loss_apart(line["loss"], again["loss"]) <= tolerance.loss


def loss_apart(one: float, other: float) -> float:
    """As a share of the second, or of 1 where that is more: a loss near 0 is not held to its last digits."""
    return abs(one - other) / max(1.0, abs(other))


def share_apart(one: float, other: float) -> float:
    """As a share of the second."""
    return 0.0 if one == other else abs(one - other) / max(abs(other), 1e-12)


def _two(recorded: Any, here: Any) -> str:
    return f"{shown(recorded)} is recorded, {shown(here)} comes out here"


def _some(problems: Sequence[str], of: int) -> str:
    named = "; ".join(problems[:NAMED_STEPS])
    more = len(problems) - NAMED_STEPS
    return f"{named}; and {more} more of {of}" if more > 0 else named

"""Recorded numbers against those computed again: pure functions, one problem per kind of difference."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunix_rt.backends import Step
from tunix_rt.evidence.replay.tolerances import LEARNING_RATE, Tolerance
from tunix_rt.runs.reading import shown
from tunix_rt.runs.schemas import HeldoutLine, PredictionLine, StepLine

Allowed = Callable[[int], Tolerance]
"""The tolerance after a step."""
LISTED = 3
"""Of the steps that differ in one thing, how many are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How the steps of one pass came out."""

    problems: tuple[str, ...]
    largest_loss: float


def compare_steps(recorded: Sequence[StepLine], again: Sequence[Step], allowed: Allowed, *, exact: bool) -> Steps:
    found: dict[str, list[str]] = {}
    loss = 0.0
    for step in again:
        line = recorded[step.step - 1]
        loss = max(loss, loss_apart(line.loss, step.loss))
        for what, problem in _differences(line, step, allowed(step.step), exact=exact):
            found.setdefault(what, []).append(f"step {step.step}: {problem}")
    problems = tuple(f"{what}: {listed(problems, len(again))}" for what, problems in found.items())
    return Steps(problems=problems, largest_loss=loss)


def _differences(line: StepLine, step: Step, tolerance: Tolerance, *, exact: bool) -> Iterator[tuple[str, str]]:
    for name in ("batch", "tokens", "target_tokens"):
        if getattr(line, name) != getattr(step, name):
            yield name, _two(getattr(line, name), getattr(step, name))
    if relative(line.lr, step.lr) > (0.0 if exact else LEARNING_RATE):
        yield "lr", _two(line.lr, step.lr)
    if line.loss_hex != step.loss.hex() and not loss_apart(line.loss, step.loss) <= tolerance.loss:
        yield "loss", _two(line.loss, step.loss)
    if not relative(line.grad_norm, step.grad_norm) <= tolerance.grad_norm:
        yield "gradient norm", _two(line.grad_norm, step.grad_norm)


def heldout_problem(line: HeldoutLine, loss: float, targets: int, tolerance: float) -> str:
    if line.target_tokens != targets:
        return f"held-out loss after step {line.step}: {_two(line.target_tokens, targets)} tokens"
    if line.loss_hex != loss.hex() and not loss_apart(line.loss, loss) <= tolerance:
        return f"held-out loss after step {line.step}: {_two(line.loss, loss)}"
    return ""


def answers_problem(
    when: str, recorded: Sequence[PredictionLine], again: Sequence[Mapping[str, Any]], *, texts: float
) -> str:
    other = [one.id for one in other_answers(recorded, again).values()]
    if not recorded or 1 - len(other) / len(recorded) >= texts:
        return ""
    return f"answers {when}: {len(other)} of {len(recorded)} differ, first {', '.join(map(shown, other[:LISTED]))}"


def other_answers(recorded: Sequence[PredictionLine], again: Sequence[Mapping[str, Any]]) -> dict[int, PredictionLine]:
    """Recorded answers, by place, that came out differently: another text, or another way to its end."""
    pairs = enumerate(zip(recorded, again, strict=True))
    return {place: one for place, (one, two) in pairs if (one.output, one.ended) != (two["output"], two["ended"])}


def gaps_problem(when: str, recorded: Sequence[PredictionLine], gaps: Iterable[float], most: float) -> str:
    """Answers that were followed token by token: no logit of a recorded token may lie further below the largest."""
    far = [(one.id, gap) for one, gap in zip(recorded, gaps, strict=True) if not gap <= most]
    if not far:
        return ""
    named = ", ".join(f"{shown(name)} by {gap:.2g}" for name, gap in far[:LISTED])
    return f"answers {when}: {len(far)} of {len(recorded)} contain tokens that these weights do not give: {named}"


def loss_apart(one: float, other: float) -> float:
    """Relative to the second, or to 1 where that is more: a loss near 0 is not held to its last digits."""
    return abs(one - other) / max(1.0, abs(other))


def relative(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other) / max(abs(other), 1e-12)


def _two(recorded: Any, here: Any) -> str:
    return f"{shown(recorded)} recorded, {shown(here)} here"


def listed(problems: Sequence[str], of: int) -> str:
    more = len(problems) - LISTED
    return "; ".join(problems[:LISTED]) + (f"; and {more} more of {of}" if more > 0 else "")

"""How closely two machines compute: `bitwise` gives the same bits, `same hardware` the same numbers but for rounding, `other
hardware` less. The recorded side is self-reported; claiming another machine only trades bits for a tolerance, and if most
losses are bit-equal, the states and the final model are compared bit by bit all the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tunix_rt.engines.base import Step
from tunix_rt.runs.checksums import shown
from tunix_rt.runs.schemas import HeldoutLine, PredictionLine, StepLine
from tunix_rt.runs.schemas_host import Machine

Comparison = Literal["bitwise", "same hardware", "other hardware"]
COMPARISONS: tuple[Comparison, ...] = ("bitwise", "same hardware", "other hardware")

_OF_A_CPU = {
    "cpu_flags_sha256": "CPU instruction set", "cpu_capability": "CPU kernels", "threads": "threads",
}  # fmt: skip
_OF_A_GPU = ("capability", "driver", "cuda", "cudnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How results may be compared, and everything that stands against a closer comparison."""

    name: Comparison
    reasons: tuple[str, ...] = ()

    def at_most(self, name: Comparison, reason: str) -> "Match":
        return Match(name=loosest([self.name, name]), reasons=(*self.reasons, reason))

    def describe(self) -> str:
        if self.name == "bitwise":
            return "bitwise: same numerics, engine versions and machine"
        return f"within tolerance, not bitwise ({self.name}: {'; '.join(self.reasons)})"


def loosest(names: Iterable[Comparison]) -> Comparison:
    return max(names, key=COMPARISONS.index, default="bitwise")


def match_machines(recorded: Machine, here: Mapping[str, Any]) -> Match:
    """Python's own version decides no bit and is not compared."""
    theirs = recorded.model_dump(exclude_none=True)
    gpu, own_gpu = theirs.get("gpu", {}), here.get("gpu") or {}
    for name in ("backend", "device"):
        if theirs[name] != here.get(name):
            return Match(name="other hardware", reasons=(f"{name} {theirs[name]} recorded, {here.get(name)} here",))
    if gpu.get("name") != own_gpu.get("name"):
        return Match(name="other hardware", reasons=(f"{gpu.get('name')} recorded, {own_gpu.get('name')} here",))
    reasons = [*_versions(theirs["versions"], here.get("versions", {})), *_other("devices", "devices", theirs, here)]
    if here.get("device") == "cpu":
        reasons += [reason for name, title in _OF_A_CPU.items() for reason in _other(name, title, theirs, here)]
    elif here.get("device") == "cuda":
        reasons += [reason for name in _OF_A_GPU for reason in _other(name, f"GPU {name}", gpu, own_gpu)]
        reasons += ["recorded without training.deterministic"] * (not recorded.deterministic)
    else:
        reasons.append(f"no bitwise comparison is known for {here.get('device')}")
    return Match(name="same hardware" if reasons else "bitwise", reasons=tuple(reasons))


def _versions(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return [f"{name} {theirs.get(name)} recorded, {ours.get(name)} here" for name in names]


def _other(name: str, title: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    if theirs.get(name) == ours.get(name):
        return []
    if name.endswith("sha256"):
        return [f"another {title}"]
    return [f"{title} {theirs.get(name)} recorded, {ours.get(name)} here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest allowed difference between a recorded number and the one computed again."""

    loss: float
    """Of a step and of the held-out rows, relative to the loss, or to 1 where that is more."""
    grad_norm: float
    """Relative."""
    weights: float
    """Distance of the weights at a checkpoint, relative to how far they moved since the replay began."""
    texts: float
    """The least fraction of answers whose text must be the same."""


EXACT = Tolerance(loss=0.0, grad_norm=0.0, weights=0.0, texts=1.0)
LEARNING_RATE = 1e-12
"""Relative, unless bitwise: another mathematical library may round the last bit of a cosine differently."""

WIDE = ("float32", "float64")

FACTOR = 3.0
"""Times honest noise, the least that is allowed of any."""
MEASURED_STEPS = 16
"""Over which the noise was measured on a CPU; that of a GPU over 40 steps has the same limit, without growth. Further from its
start a replay may differ more, in proportion, up to `MOST_GROWTH`, which is a choice."""
MOST_GROWTH = {"float32": 10.0, "bfloat16": 2.0}

TOLERANCES: dict[tuple[Comparison, str], Tolerance] = {
    ("same hardware", "float32"): Tolerance(loss=3e-5, grad_norm=3e-4, weights=6e-4, texts=0.98),
    ("same hardware", "bfloat16"): Tolerance(loss=7.5e-2, grad_norm=0.85, weights=0.13, texts=0.98),
    ("other hardware", "float32"): Tolerance(loss=3e-4, grad_norm=3e-3, weights=6e-3, texts=0.98),
    ("other hardware", "bfloat16"): Tolerance(loss=0.12, grad_norm=0.85, weights=0.26, texts=0.98),
}

TIES = {"float32": 0.01, "bfloat16": 0.5}
"""How far the logit of a token of a greedy text may be below the largest, if another machine gives another text. In 16 bits
honest texts of the shipped model were up to 0.125 below, of the demo's up to 0.058 (`benchmarks.answer_gaps`, on a CPU);
the last number of the demo's texts made larger by 1, at least 4.9. In float32 all honest texts were the same."""
REPLAYED_TIES = 2.0
"""The same for the weights of a replay in 16 bits, which differ a little from the recorded ones. A choice between that and the
4.9 of a forged text."""
ROUNDED_HELDOUT = 0.02
"""Allowed relative difference between the held-out loss of the last state and that of weights saved in 16 bits."""


def precision(compute: str) -> str:
    """float32 and float64 round alike beside what is allowed; so do both 16-bit types."""
    return "float32" if compute in WIDE else "bfloat16"


def tolerance_of(name: Comparison, compute: str) -> Tolerance:
    return EXACT if name == "bitwise" else TOLERANCES[name, precision(compute)]


def grown(tolerance: Tolerance, compute: str, steps: int) -> Tolerance:
    """What is allowed `steps` after the replay began."""
    times = min(MOST_GROWTH[precision(compute)], max(1.0, steps / MEASURED_STEPS))
    return replace(
        tolerance, loss=tolerance.loss * times, grad_norm=tolerance.grad_norm * times, weights=tolerance.weights * times
    )


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
    """Answers that were followed token by token: no logit of a recorded token may be further below the largest."""
    far = [(one.id, gap) for one, gap in zip(recorded, gaps, strict=True) if not gap <= most]
    if not far:
        return ""
    named = ", ".join(f"{shown(name)} by {gap:.2g}" for name, gap in far[:LISTED])
    return f"answers {when}: {len(far)} of {len(recorded)} contain tokens that these weights do not give: {named}"


def loss_apart(one: float, other: float) -> float:
    """Relative to the second, or to 1 where that is more: a loss near 0 is not compared to its last digits."""
    return abs(one - other) / max(1.0, abs(other))


def relative(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other) / max(abs(other), 1e-12)


def _two(recorded: Any, here: Any) -> str:
    return f"{shown(recorded)} recorded, {shown(here)} here"


def listed(problems: Sequence[str], of: int) -> str:
    more = len(problems) - LISTED
    return "; ".join(problems[:LISTED]) + (f"; and {more} more of {of}" if more > 0 else "")

"""What is asked of a computer, and what a check answers."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a run wants. `backend` None asks for the device alone, as a plan does: no engine has to be installed."""

    device: str = "auto"
    """auto, cpu, cuda or tpu; `gpu` is another word for cuda."""
    backend: str | None = "torch"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.device == "gpu":
            object.__setattr__(self, "device", "cuda")


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one cause. `saw` is the evidence; on a failure or a warning `why` is what follows, `fix` the way out."""

    cause: str
    verdict: Verdict
    saw: str
    why: str = ""
    fix: str = ""


def skipped(cause: str, saw: str = "nothing to judge") -> Check:
    return Check(cause, "skip", saw)


def passed(cause: str, saw: str) -> Check:
    return Check(cause, "pass", saw)


def failed(cause: str, saw: str, why: str, fix: str) -> Check:
    return Check(cause, "fail", saw, why, fix)


def warned(cause: str, saw: str, why: str, fix: str) -> Check:
    return Check(cause, "warn", saw, why, fix)

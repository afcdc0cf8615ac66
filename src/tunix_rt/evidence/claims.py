"""What a verifier concludes: findings, a level, and a table of claims, each with how far it was checked. Pure values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["none", "L0", "L1", "L2", "L3", "L4"]
LEVELS: tuple[Level, ...] = ("none", "L0", "L1", "L2", "L3", "L4")
MEANINGS: dict[Level, str] = {
    "none": "not readable",
    "L0": "readable",
    "L1": "consistent",
    "L2": "regenerated",
    "L3": "replayed",
    "L4": "reproduced",
}
Label = Literal["recomputed", "consistent", "self-reported", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One failed check. `level` is the level that it denies."""

    level: Level
    check: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the run and how far it was checked.

    recomputed: the verifier computed the value itself. consistent: it follows from facts that were looked up outside of the
    bundle or from settings, seed and rows. self-reported: only the run says so. not checked: what the check needs was not given.
    """

    name: str
    value: str
    label: Label
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of `verify`."""

    folder: str
    level: Level
    required: Level
    findings: tuple[Finding, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for people: what was drawn, how it compared, what a sample can miss, what is not part of the run."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: segments, nonce, comparison, seconds."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found and the required level is reached."""
        return not self.findings and LEVELS.index(self.level) >= LEVELS.index(self.required)

    def describe(self) -> str:
        if not self.findings:
            return f"level {self.level} ({MEANINGS[self.level]})"
        failed = min((finding.level for finding in self.findings), key=LEVELS.index)
        return f"FAILED at {failed} ({MEANINGS[failed]}), level {self.level} ({MEANINGS[self.level]})"


def level_of(findings: Sequence[Finding], passed: Sequence[Level]) -> Level:
    """The highest of the levels that were `passed` and lie below every one that a finding denies."""
    denied = min((LEVELS.index(finding.level) for finding in findings), default=len(LEVELS))
    return max((level for level in passed if LEVELS.index(level) < denied), key=LEVELS.index, default="none")

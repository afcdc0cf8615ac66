"""What a verifier says: findings, each with the level it denies, and the level that is left. Pure values, no reading."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["L0", "L1", "L2", "L3", "L4"]

LEVELS: tuple[Level, ...] = ("L0", "L1", "L2", "L3", "L4")

MEANINGS: dict[str, str] = {
    "L0": "malformed or contradicts itself",
    "L1": "consistent",
    "L2": "regenerated",
    "L3": "replayed",
    "L4": "reproduced",
}
"""What each level is called. L1 is a folder that agrees with itself, no more; from L2 on something was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One contradiction. `level` is the level it denies: L0 unreadable, hashes, schema; L1 contradicts itself; L2 to L4
    what was computed again came out otherwise. `check` is the short name under which the documentation has it."""

    level: Level
    check: str
    problem: str


def found(level: Level, check: str, problems: Iterable[str]) -> list[Finding]:
    """A finding of `check` for each of `problems`."""
    return [Finding(level=level, check=check, problem=problem) for problem in problems]


def verdict_of(findings: Sequence[Finding], reached: Iterable[Level] = ()) -> Level:
    """The level that is left: L0 under any finding of L0 or L1; else the highest of `reached`, the strong checks that were
    run. One of them that found something leaves L1, whatever the others came to: the record was shown to be false."""
    if any(finding.level in ("L0", "L1") for finding in findings):
        return "L0"
    return "L1" if findings else max(reached, key=LEVELS.index, default="L1")


def below(level: Level, required: Level) -> bool:
    return LEVELS.index(level) < LEVELS.index(required)

"""Which steps of a run a verifier takes again: segments between recorded checkpoints, drawn after the bundle's root is fixed.

The draw is a function of the root and a nonce of the verifier, so whoever made the bundle cannot know it, and anybody who has
the nonce can repeat it. Pure functions.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

NONCE_BYTES = 16
LEAST_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """The steps after `start`, where a checkpoint or the base model is, up to `stop`."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start

    def describe(self) -> str:
        return f"steps {self.start + 1} to {self.stop}" if self.steps > 1 else f"step {self.stop}"


def fresh_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def all_segments(checkpoints: Iterable[int], total: int) -> list[Segment]:
    """The run of `total` steps, cut at each recorded checkpoint."""
    ends = sorted({step for step in checkpoints if 0 < step < total} | {total})
    return [Segment(start=start, stop=stop) for start, stop in zip([0, *ends], ends, strict=False)]


def draw_segments(segments: Sequence[Segment], count: int | None, *, root: str, nonce: str) -> tuple[Segment, ...]:
    """`count` of the segments without replacement, each with a chance in proportion to its steps; in order. Without a count,
    three, and more until they have a fifth of the steps: whoever made the run chose how short segments are."""

    def key(segment: Segment) -> float:
        digest = hashlib.sha256(f"{root}\n{nonce}\n{segment.stop}".encode()).digest()
        uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
        return float(
            uniform ** (1 / segment.steps)
        )  # the largest keys are a weighted sample (Efraimidis and Spirakis, 2006)

    drawn = sorted(segments, key=key, reverse=True)
    covered = accumulate(segment.steps for segment in drawn)
    enough = sum(steps < LEAST_SHARE * segments[-1].stop for steps in covered) + 1
    return tuple(sorted(drawn[: max(3, enough) if count is None else count]))


def chance_of_detection(segments: Sequence[Segment], count: int) -> float:
    """The least probability that a draw contains any one given segment: exact for segments of one length, else a lower bound."""
    if count >= len(segments) or len({segment.steps for segment in segments}) == 1:
        return min(1.0, count / len(segments))
    return 1 - (1 - min(segment.steps for segment in segments) / segments[-1].stop) ** count


def passes_over(segments: Sequence[Segment], states: Collection[int]) -> tuple[Segment, ...]:
    """What has to be computed to see all of `segments`, where the state after each step of `states` is at hand. One that
    begins where no state is begins earlier, at step 0 if need be; what overlaps then is one pass."""
    begun = sorted(
        Segment(start=max((state for state in states if state <= one.start), default=0), stop=one.stop)
        for one in segments
    )
    merged: list[Segment] = []
    for one in begun:
        if merged and one.start < merged[-1].stop:
            merged[-1] = Segment(start=merged[-1].start, stop=max(one.stop, merged[-1].stop))
        else:
            merged.append(one)
    return tuple(merged)

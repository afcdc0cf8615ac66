"""Which steps of a run a verifier takes again: segments between recorded checkpoints, drawn after the bundle's root is fixed.

The draw is a function of the root and a nonce of the verifier, so whoever made the bundle cannot know it, and anybody who has
the nonce can repeat it. Pure functions.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

NONCE_BYTES = 16
TRIALS = 2000


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


def draw_segments(segments: Sequence[Segment], count: int, *, root: str, nonce: str) -> tuple[Segment, ...]:
    """`count` of the segments without replacement, each with a chance in proportion to its steps; in order."""

    def key(segment: Segment) -> float:
        digest = hashlib.sha256(f"{root}\n{nonce}\n{segment.stop}".encode()).digest()
        uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
        return float(
            uniform ** (1 / segment.steps)
        )  # the largest keys are a weighted sample (Efraimidis and Spirakis, 2006)

    return tuple(sorted(sorted(segments, key=key, reverse=True)[:count]))


def chance_of_detection(segments: Sequence[Segment], count: int) -> float:
    """The least probability that a draw contains any one given segment."""
    if count >= len(segments):
        return 1.0
    if len({segment.steps for segment in segments}) == 1:
        return count / len(segments)
    drawn = [draw_segments(segments, count, root="chance", nonce=str(trial)) for trial in range(TRIALS)]
    return min(sum(segment in one for one in drawn) / TRIALS for segment in segments)


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

"""Which steps of a run a verifier takes again: parts between recorded checkpoints, chosen after the bundle was written.

The choice is a function of the bundle and a nonce of the verifier, so that whoever made the bundle cannot know it, and anybody
who is told the nonce can repeat it. Pure functions.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """The steps after `start`, where a checkpoint or the base model is, up to `stop`."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start

    @property
    def words(self) -> str:
        return f"steps {self.start + 1} to {self.stop}" if self.steps > 1 else f"step {self.stop}"


def fresh_nonce() -> str:
    """Sixteen random bytes in hex: what nobody could have known."""
    return secrets.token_hex(NONCE_BYTES)


def all_segments(checkpoints: Iterable[int], total: int) -> list[Segment]:
    """The run of `total` steps, cut at each recorded checkpoint. Numbers that are no step of it are left out."""
    ends = sorted({step for step in checkpoints if 0 < step < total} | {total})
    return [Segment(start=start, stop=stop) for start, stop in zip([0, *ends], ends, strict=False)]


def choose_segments(
    checkpoints: Iterable[int], total: int, *, count: int, root: str, nonce: str
) -> tuple[Segment, ...]:
    """`count` of the segments, in order: always the first and the last, the others drawn by `root`, the hash of the bundle,
    and `nonce`. All of them where there are no more; never fewer than these two."""
    whole = all_segments(checkpoints, total)
    between = sorted(whole[1:-1], key=lambda one: draw(root, nonce, str(one.stop)))
    return tuple(sorted({whole[0], whole[-1], *between[: max(0, count - 2)]}))


def draw(root: str, nonce: str, what: str) -> bytes:
    """A number for `what`, that decides its place among the others."""
    return hashlib.sha256(f"{root}\n{nonce}\n{what}".encode()).digest()


def passes_over(segments: Sequence[Segment], states: Collection[int]) -> tuple[Segment, ...]:
    """What has to be computed to see all of `segments`, where the state after each step of `states` is at hand. One that
    begins where no state is begins earlier, at step 0 if need be; what overlaps then is one."""
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


def drawn_items(ids: Sequence[str], *, count: int, root: str, nonce: str) -> tuple[int, ...]:
    """The places of `count` items, drawn by the same rule, in the order of `ids`; all where there are no more."""
    by_number = sorted(range(len(ids)), key=lambda place: draw(root, nonce, f"item {place} {ids[place]}"))
    return tuple(sorted(by_number[:count]))

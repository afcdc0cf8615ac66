"""How answers are written: greedy or drawn, how long, and where they end. Values and pure functions; no library of tensors."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STOP, TAG, LENGTH, TIME, CONTEXT = "stop", "tag", "length", "time", "context"
"""What ended an answer: the model itself, the closing tag of the answer with more after it, the most tokens allowed, the
time allowed, the model's last position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Settings that decide what an answer is. Two answers can be compared when these are the same."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token every time."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from."""
    seed: int = 0
    closing: str | None = None
    """Text after which an answer is over, though the model writes on."""
    max_seconds: float | None = None
    """Time for the answers of one batch. What is cut by it depends on the machine."""

    def settings(self) -> dict[str, Any]:
        """What is set; nothing is said of a limit that there is not, nor of a draw where none is made."""
        drawing = () if self.temperature else ("top_p", "seed")
        return {name: value for name, value in asdict(self).items() if value is not None and name not in drawing}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """New tokens, without the one that ended them."""

    ids: list[int]
    ended: str


@dataclass(slots=True, kw_only=True)
class Ending:
    """Finds the end of one answer as its tokens come. Gives the same for tokens one by one or many at a time."""

    stop_ids: frozenset[int]
    closing: str | None
    decode: Callable[[list[int]], str]
    _seen: int = field(default=0, init=False)
    _closed_at: int | None = field(default=None, init=False)

    def anew(self) -> "Ending":
        """The same for another answer."""
        return Ending(stop_ids=self.stop_ids, closing=self.closing, decode=self.decode)

    def find(self, ids: Sequence[int]) -> Answer | None:
        """The answer, once it is over. A tag ends it only when the model does not stop right after it by itself."""
        for place in range(self._seen, len(ids)):
            if ids[place] in self.stop_ids:
                return Answer(ids=list(ids[:place]), ended=STOP)
            if self._closed_at is not None:
                return Answer(ids=list(ids[:place]), ended=TAG)
            if self._closes(ids, place + 1):
                self._closed_at = place + 1
        self._seen = len(ids)
        return None

    def cut(self, ids: Sequence[int], ended: str) -> Answer:
        """The answer that is not over, and gets no further token because of `ended`."""
        return Answer(ids=list(ids), ended=TAG if self._closed_at == len(ids) and ids else ended)

    def _closes(self, ids: Sequence[int], end: int) -> bool:
        """Whether the token before `end` completes the closing text. A token is at least a byte of it."""
        if self.closing is None:
            return False
        start = max(0, end - len(self.closing.encode()) - 1)
        return self.closing in self.decode(list(ids[start:end]))


def batches(lengths: Sequence[int], rows_at: Callable[[int], int]) -> Iterator[list[int]]:
    """Numbers of prompts to be asked together, the longest first: what needs the most memory comes before all else.

    `rows_at` says how many prompts of a length fit."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while order:
        rows = max(1, rows_at(lengths[order[0]]))
        yield order[:rows]
        del order[:rows]


def random_keys(seed: int, index: int, count: int) -> list[int]:
    """64 bits for each of the first `count` tokens of prompt `index`: the same in whatever batch it is asked."""
    return [
        int.from_bytes(hashlib.sha256(f"{seed}/{index}/{place}".encode()).digest()[:8], "big", signed=True)
        for place in range(count)
    ]

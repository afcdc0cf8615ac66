"""The text of a generation as its tokens arrive: whole characters, up to the first stop string."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What the bytes of a character decode to before the last one is there."""


class GrowingText:
    """`add` takes the tokens so far, `finish` all of them. `text` is cut before the first stop string, once there is one."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._from = self._to = self._sent = 0
        self.text, self.stopped = "", False

    def add(self, ids: list[int]) -> str:
        """The text that these tokens add: not what may be the beginning of a stop string."""
        if len(ids) > self._to and not self.stopped:
            # Decoded behind the tokens before: how a tokenizer decodes its first token differs.
            before, now = self._decode(ids[self._from : self._to]), self._decode(ids[self._from :])
            if not now.endswith(UNFINISHED):
                self.text += now[len(before) :]
                self._from, self._to = self._to, len(ids)
        return self._take(self._held())

    def finish(self, ids: list[int]) -> str:
        """The rest of the text."""
        if not self.stopped:
            self.text = self._decode(ids)
        return self._take(0)

    def _take(self, held: int) -> str:
        found = [at for stop in self._stops if (at := self.text.find(stop, self._sent)) >= 0]
        if found and not self.stopped:
            self.text, self.stopped = self.text[: min(found)], True
        end = len(self.text) - (0 if self.stopped else held)
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        return new

    def _held(self) -> int:
        """Characters at the end that a stop string begins with."""
        tail = self.text[self._sent :]
        return max(
            (size for stop in self._stops for size in range(1, len(stop)) if tail.endswith(stop[:size])), default=0
        )

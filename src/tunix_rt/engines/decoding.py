"""How answers are written: greedy or drawn, how long, and where they end. Values and pure functions; no library of tensors."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tunix_rt.errors import DoesNotFitError, InputError
from tunix_rt.scoring.score import CONTEXT, LENGTH, STOP, TAG, TIME

logger = logging.getLogger(__name__)

NOT_A_TOKEN = -1
"""What an engine gives for a token whose logits are NaN."""


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


@dataclass(slots=True, kw_only=True)
class Row:
    """A prompt and what has come of its answer."""

    index: int
    prompt: Sequence[int]
    ending: Ending
    room: int
    """New tokens that may come."""
    no_more: str
    """Why no more may."""
    ids: list[int] = field(default_factory=list)

    def begin_anew(self) -> None:
        """Asked again after memory ran out, nothing is left of what came before."""
        self.ids, self.ending = [], self.ending.anew()

    def take(self, tokens: Sequence[int], *, late: bool, model: str) -> Answer | None:
        """The answer, if it is over with the next `tokens` or because it is `late`. `model` is named where they are none."""
        sound = tokens[: tokens.index(NOT_A_TOKEN)] if NOT_A_TOKEN in tokens else tokens
        self.ids = [*self.ids, *sound][: self.room]
        answer = self.ending.find(self.ids)
        if answer is None and len(sound) < len(tokens) and len(self.ids) < self.room:
            raise InputError(f"{model}: gives NaN instead of a next token", fix="the weights are damaged")
        if answer is None and (late or len(self.ids) == self.room):
            answer = self.ending.cut(self.ids, self.no_more if len(self.ids) == self.room else TIME)
        return answer


def row_of(
    index: int,
    prompt: Sequence[int],
    *,
    positions: int | None,
    decoding: Decoding,
    stop_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> Row:
    """Prompt number `index` of a model that knows so many `positions`; None: any number."""
    left = decoding.max_new_tokens if positions is None else positions - len(prompt)
    return Row(
        index=index,
        prompt=prompt,
        ending=Ending(stop_ids=frozenset(stop_ids), closing=decoding.closing, decode=decode),
        room=min(decoding.max_new_tokens, left),
        no_more=CONTEXT if left < decoding.max_new_tokens else LENGTH,
    )


def answer_in_batches(
    rows: Sequence[Row],
    answers: Callable[[Sequence[Row]], Iterator[tuple[Row, Answer]]],
    *,
    rows_at: Callable[[int], int],
    most: int,
    free_memory: Callable[[], None],
) -> Iterator[tuple[int, Answer]]:
    """(number of the prompt, its answer) as answers come to their end. At most `most` rows are asked at once, and half as
    many as before where `answers` finds no memory for them."""
    for chosen in batches([len(row.prompt) for row in rows], rows_at):
        together = [rows[place] for place in chosen]
        yield from ((row.index, Answer(ids=[], ended=CONTEXT)) for row in together if row.room < 1)
        waiting = [row for row in together if row.room >= 1]
        while waiting:
            asked, burst = waiting[:most], False
            try:
                for row, answer in answers(asked):
                    waiting.remove(row)
                    yield row.index, answer
            except DoesNotFitError:
                if len(asked) == 1:
                    raise
                burst = True
            if burst:  # not above: there, the error still holds on to what did not fit
                most = len(asked) // 2
                logger.warning("No memory for %d answers at once: going on with %d", len(asked), most)
                free_memory()


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

"""The thread that decodes: requests that wait when it is free, with equal settings, are one batch of the engine."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.errors import TunixError
from tunix_rt.inference import LoadedModel
from tunix_rt.scoring.score import STOP, TAG
from tunix_rt.serve.requests import ApiError
from tunix_rt.serve.text import GrowingText

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 0.01
"""For requests that arrive together."""
MOST_ROWS = 64
JOIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of a choice."""

    choice: int
    text: str
    reason: str | None = None
    """`stop` or `length` in the last one."""
    tokens: int = 0
    """In the last one: all that were generated, with the one that ended it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One request: a prompt for each choice. `send` gets its pieces, or why there are none, from the thread that decodes."""

    prompts: list[list[int]]
    draws: list[tuple[int, int]]
    """Seed and sample of each choice."""
    decoding: Decoding
    stops: list[str]
    send: Callable[[Piece | ApiError], None]
    cancelled: bool = False
    """The client has gone."""

    def joins(self, batch: "list[Generation]") -> bool:
        if not batch:
            return True
        ours, theirs = (replace(one.decoding, max_new_tokens=1) for one in (self, batch[0]))
        return ours == theirs and sum(len(one.prompts) for one in (*batch, self)) <= MOST_ROWS


@dataclass(slots=True, kw_only=True)
class _Row:
    """One choice in a batch."""

    generation: Generation
    choice: int
    text: GrowingText
    ended: bool = False

    @property
    def most(self) -> int:
        return self.generation.decoding.max_new_tokens

    def add(self, ids: list[int]) -> bool:
        """Send the new text; whether the generation ends here."""
        if not self.generation.cancelled and (new := self.text.add(ids[: self.most])):
            self.generation.send(Piece(choice=self.choice, text=new))
        return self.generation.cancelled or self.text.stopped or len(ids) >= self.most

    def end(self, answer: Answer) -> None:
        self.ended, rest = True, self.text.finish(answer.ids[: self.most])
        stopped = self.text.stopped or (answer.ended in (STOP, TAG) and len(answer.ids) <= self.most)
        tokens, reason = min(len(answer.ids) + (answer.end is not None), self.most), "stop" if stopped else "length"
        self.generation.send(Piece(choice=self.choice, text=rest, reason=reason, tokens=tokens))


class Batcher:
    """Decodes one batch at a time. A request that arrives meanwhile waits for its end."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._waiting: list[Generation] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        with self._changed:
            self._waiting.append(generation)
            self._changed.notify()

    def close(self) -> None:
        """End every generation at its next token."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        while batch := self._next():
            problem = ApiError("The server stops", status=503, code="stopping")
            rows = [
                _Row(generation=one, choice=choice, text=GrowingText(self._model.tokenizer.decode, one.stops))
                for one in batch
                if not one.cancelled
                for choice in range(len(one.prompts))
            ]
            try:
                if rows and not self._stopping:
                    self._decode(rows)
            except TunixError as error:
                problem = ApiError(error.problem, status=500, code="generation_failed")
            except Exception:  # a defect ends the requests of its batch, not the server
                logger.exception("Decoding failed")
                problem = ApiError("Decoding failed; the output of tunix-rt has the error", status=500)
            for row in rows:
                if not row.ended:
                    row.generation.send(problem)

    def _next(self) -> list[Generation]:
        """The oldest request and those that join it; all of them, and then none, when the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
        time.sleep(WINDOW_SECONDS)
        batch: list[Generation] = []
        with self._changed:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                (batch if self._stopping or one.joins(batch) else self._waiting).append(one)
        return batch

    def _decode(self, rows: list[_Row]) -> None:
        decoding = replace(
            rows[0].generation.decoding, max_new_tokens=max(row.most for row in rows),
            draws=tuple(row.generation.draws[row.choice] for row in rows),
        )  # fmt: skip
        prompts = [row.generation.prompts[row.choice] for row in rows]
        found = self._model.generations(prompts, decoding, lambda index, ids: self._stopping or rows[index].add(ids))
        for index, answer in found:
            if not self._stopping:
                rows[index].end(answer)

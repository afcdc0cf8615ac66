"""The thread that decodes: requests that wait when it is free, with equal settings, are one batch of the engine."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice that has ended. `rest` is the part of `text` that no `Piece` had."""

    choice: int
    text: str
    rest: str
    reason: str
    """`stop` or `length`."""
    tokens: int
    """Generated, with the one that ended it."""
    scored: tuple[tuple[int, float], ...] = ()
    """Tokens of the text with their log-probabilities, where they are requested."""


Event = Piece | Choice | ApiError


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One request: a prompt for each choice. `send` gets its events, from the thread that decodes."""

    prompts: list[list[int]]
    decoding: Decoding
    """With the seed and sample of each choice."""
    send: Callable[[Event], None]
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    cancelled: bool = False
    """The client has gone."""

    @property
    def group(self) -> tuple[float, float, str | None, bool]:
        """Requests that can share a batch."""
        return self.decoding.temperature, self.decoding.top_p, self.decoding.closing, self.logprobs


@dataclass(slots=True, kw_only=True)
class _Row:
    """One choice in a batch."""

    generation: Generation
    choice: int
    text: GrowingText
    ended: bool = field(default=False)

    @property
    def most(self) -> int:
        return self.generation.decoding.max_new_tokens

    def add(self, ids: list[int]) -> bool:
        """Send the new text; whether the generation ends here."""
        if self.generation.cancelled:
            return True
        if new := self.text.add(ids[: self.most]):
            self.generation.send(Piece(choice=self.choice, text=new))
        return self.text.stopped or len(ids) >= self.most

    def end(self, answer: Answer, decode: Callable[[list[int]], str]) -> None:
        ids = answer.ids[: self.most]
        rest, self.ended = self.text.finish(ids), True
        stopped = self.text.stopped or (answer.ended in (STOP, TAG) and len(answer.ids) <= self.most)
        shown = ids
        if self.text.stopped and self.generation.logprobs:
            whole = (count for count in range(len(ids)) if len(decode(ids[:count])) >= len(self.text.text))
            shown = ids[: next(whole, len(ids))]
        self.generation.send(
            Choice(
                choice=self.choice, text=self.text.text, rest=rest, reason="stop" if stopped else "length",
                tokens=len(ids) + (answer.end is not None), scored=tuple(zip(shown, answer.logprobs, strict=False)),
            )
        )  # fmt: skip


class Batcher:
    """Decodes one batch at a time. A request that arrives meanwhile waits for its end."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        with self._changed:
            if self._stopping:
                raise _stopped()
            self._waiting.append(generation)
            self._changed.notify()

    def stop(self) -> None:
        """End every generation at its next token."""
        with self._changed:
            self._stopping = True
            for generation in self._waiting:
                generation.send(_stopped())
            self._waiting.clear()
            self._changed.notify()

    def close(self) -> None:
        self.stop()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stopping:
            rows = [
                _Row(generation=one, choice=choice, text=GrowingText(self._model.tokenizer.decode, one.stops))
                for one in self._next()
                for choice in range(len(one.prompts))
            ]
            problem = _stopped()
            try:
                if rows:
                    self._decode(rows)
            except TunixError as error:
                problem = ApiError(error.problem, status=500, code="generation_failed")
            except Exception:  # a defect ends the requests of its batch, not the server
                logger.exception("Decoding failed")
                problem = ApiError("Decoding failed; the output of tunix-rt has the error", status=500)
            for one in {id(row.generation): row.generation for row in rows if not row.ended}.values():
                one.send(problem)

    def _next(self) -> list[Generation]:
        """The oldest request and others of its group; empty when their clients have gone, or the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
        time.sleep(WINDOW_SECONDS)
        batch: list[Generation] = []
        with self._changed:
            left = deque(one for one in self._waiting if not one.cancelled)
            self._waiting = deque()
            for one in left:
                rows = sum(len(of.prompts) for of in batch) + len(one.prompts)
                joins = not batch or (one.group == batch[0].group and rows <= MOST_ROWS)
                (batch if joins else self._waiting).append(one)
        return batch

    def _decode(self, rows: list[_Row]) -> None:
        generations = [row.generation for row in rows]
        decoding = replace(
            generations[0].decoding,
            max_new_tokens=max(one.decoding.max_new_tokens for one in generations),
            draws=tuple((one.decoding.draws or ())[row.choice] for row, one in zip(rows, generations, strict=True)),
        )
        prompts = [one.prompts[row.choice] for row, one in zip(rows, generations, strict=True)]
        found = self._model.generations(
            prompts,
            decoding,
            lambda index, ids: self._stopping or rows[index].add(ids),
            logprobs=generations[0].logprobs,
        )
        for index, answer in found:
            if self._stopping:
                return
            rows[index].end(answer, self._model.tokenizer.decode)


def _stopped() -> ApiError:
    return ApiError("The server stops", status=503, code="stopping")

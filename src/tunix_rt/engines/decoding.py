"""Decoding settings, random numbers, where a generation ends, and how prompts are batched. Shared by both engines.

Tokens are sampled with noise that is a function of (seed, step, prompt, sample, position) alone: the same on every device, in
every batch and in every order."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tunix_rt.errors import DoesNotFitError, InputError
from tunix_rt.scoring.score import CONTEXT, LENGTH, STOP, TAG, TIME

logger = logging.getLogger(__name__)

Integers = Any
"""An array of numpy, torch or jax."""

GOLDEN = -7046029254386353131
"""The increment of splitmix64."""
NOT_A_TOKEN = -1
"""In place of a token whose logits are NaN."""
CALLER = "caller"
"""How a generation ended that `on_tokens` ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Settings that decide a generation. Generations are comparable only with equal settings."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: the most likely tokens with this total probability."""
    seed: int = 0
    step: int | None = None
    """Training step that the generations belong to: another step has other noise. None: of an evaluation."""
    samples: int = 1
    """Generations of each prompt, which is prefilled once. Generation `prompt * samples + sample` belongs to `prompt`."""
    draws: tuple[tuple[int, int], ...] | None = None
    """(seed, sample) of each prompt: its noise is that of a first prompt, whichever others are generated with it."""
    closing: str | None = None
    """Text after which a generation ends, such as a closing tag."""
    max_seconds: float | None = None
    """Time limit of a batch. Where it cuts depends on the machine."""

    def settings(self) -> dict[str, Any]:
        """As evaluations record them: without limits that are unset, and without sampling settings in greedy decoding."""
        unused = {*(() if self.temperature else ("top_p", "seed")), *(("samples",) if self.samples == 1 else ())}
        return {name: value for name, value in asdict(self).items() if value is not None and name not in unused}

    def keys(self, index: int, count: int) -> list[int]:
        """Random bits for each of the first `count` tokens of generation `index`."""
        prompt, sample = divmod(index, self.samples)
        if self.draws is not None:
            seed, sample = self.draws[index]
            return random_keys(seed, 0, count, step=self.step, sample=sample)
        return random_keys(self.seed, prompt, count, step=self.step, sample=sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """New tokens, without the stop token."""

    ids: list[int]
    ended: str
    end: int | None = None
    """The stop token."""
    logprobs: list[float] = field(default_factory=list, compare=False)
    """Log-probability of each token, then of the stop token, at temperature 1; empty unless requested. Its last bits depend on
    the batch, so equal generations may differ in it."""
    gaps: list[float] = field(default_factory=list, compare=False)
    """How far each token was ahead of the runner-up when it was chosen, in logits divided by the temperature."""


@dataclass(slots=True, kw_only=True)
class Ending:
    """Finds the end of a generation; the same whether tokens arrive one by one or several at a time."""

    stop_ids: frozenset[int]
    closing: str | None
    decode: Callable[[list[int]], str]
    _seen: int = field(default=0, init=False)
    _closed_at: int | None = field(default=None, init=False)

    def find(self, ids: Sequence[int]) -> Answer | None:
        """The generation, once it has ended. A stop token right after the closing text takes precedence over it."""
        for place in range(self._seen, len(ids)):
            if ids[place] in self.stop_ids:
                return Answer(ids=list(ids[:place]), ended=STOP, end=ids[place])
            if self._closed_at is not None:
                return Answer(ids=list(ids[:place]), ended=TAG)
            if self._closes(ids, place + 1):
                self._closed_at = place + 1
        self._seen = len(ids)
        return None

    def cut(self, ids: Sequence[int], ended: str) -> Answer:
        """The generation that has not ended, cut off because of `ended`."""
        return Answer(ids=list(ids), ended=TAG if self._closed_at == len(ids) and ids else ended)

    def _closes(self, ids: Sequence[int], end: int) -> bool:
        """Whether the token before `end` completes the closing text, of which a token is at least one byte."""
        if self.closing is None:
            return False
        start = max(0, end - len(self.closing.encode()) - 1)
        return self.closing in self.decode(list(ids[start:end]))


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A prompt and the tokens generated for it so far."""

    index: int
    prompt: Sequence[int]
    ending: Ending
    max_new: int
    """The most new tokens."""
    limit: str
    """What limits them: the context of the model, or `max_new_tokens`."""
    ids: list[int] = field(default_factory=list)
    scores: list[tuple[float, float]] = field(default_factory=list)
    """Log-probability and gap of each token, where they are requested."""

    def restart(self) -> None:
        """Discard the tokens so far, as after memory ran out."""
        self.ids, self.scores, self.ending = [], [], replace(self.ending)  # with its state reset

    def append(
        self, tokens: Sequence[int], *, late: bool, model: str, scores: Sequence[tuple[float, float]] = ()
    ) -> Answer | None:
        """The generation, if it ends with the next `tokens` or because it is `late`. NaN logits are an error of `model`."""
        self.scores += scores
        valid = tokens[: tokens.index(NOT_A_TOKEN)] if NOT_A_TOKEN in tokens else tokens
        self.ids = [*self.ids, *valid][: self.max_new]
        answer = self.ending.find(self.ids)
        if answer is None and len(valid) < len(tokens) and len(self.ids) < self.max_new:
            raise InputError(f"{model}: its logits are NaN", fix="the weights are corrupt")
        if answer is None and (late or len(self.ids) == self.max_new):
            answer = self.ending.cut(self.ids, self.limit if len(self.ids) == self.max_new else TIME)
        if answer is None or not self.scores:
            return answer
        kept = self.scores[: len(answer.ids) + (answer.end is not None)]
        return replace(answer, logprobs=[one for one, _ in kept], gaps=[gap for _, gap in kept])

    def cut_off(self) -> Answer:
        """The generation so far, which the caller ends."""
        return self.ending.cut(self.ids, CALLER)


def prompt_of(
    index: int, prompt: Sequence[int], positions: int | None, decoding: Decoding, stop_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> Prompt:  # fmt: skip
    """Prompt number `index`, for a model with a context of `positions` tokens; None: without a limit."""
    left = decoding.max_new_tokens if positions is None else positions - len(prompt)
    return Prompt(
        index=index,
        prompt=prompt,
        ending=Ending(stop_ids=frozenset(stop_ids), closing=decoding.closing, decode=decode),
        max_new=min(decoding.max_new_tokens, left),
        limit=CONTEXT if left < decoding.max_new_tokens else LENGTH,
    )


def generate_in_batches(
    prompts: Sequence[Sequence[int]], generate: Callable[[Sequence[Prompt]], Iterator[tuple[Prompt, Answer]]], *,
    positions: int | None, decoding: Decoding, stop_ids: Sequence[int], decode: Callable[[list[int]], str],
    batch_size_at: Callable[[int], int], most: int, free_memory: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Answer]]:  # fmt: skip
    """(index, generation) as each ends. A batch has at most `most` generations; the limit is halved where `generate` runs out of
    memory."""
    of = [prompt for prompt in prompts for _ in range(decoding.samples)]
    for chosen in batches([len(prompt) for prompt in of], batch_size_at):
        together = [prompt_of(index, of[index], positions, decoding, stop_ids, decode) for index in chosen]
        yield from ((one.index, Answer(ids=[], ended=CONTEXT)) for one in together if one.max_new < 1)
        waiting = [one for one in together if one.max_new >= 1]
        while waiting:
            batch, out_of_memory = waiting[:most], False
            try:
                for one, answer in generate(batch):
                    waiting.remove(one)
                    yield one.index, answer
            except DoesNotFitError:
                if len(batch) == 1:
                    raise
                out_of_memory = True
            if out_of_memory:  # not above, where the error still refers to the tensors
                most = len(batch) // 2
                logger.warning("Generation: out of memory with batch size %d, continuing with %d", len(batch), most)
                free_memory()


def batches(lengths: Sequence[int], batch_size_at: Callable[[int], int]) -> Iterator[list[int]]:
    """Indices of the prompts of each batch, the longest first, which need the most memory. `batch_size_at` gives the batch size
    for a length."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while order:
        size = max(1, batch_size_at(lengths[order[0]]))
        yield order[:size]
        del order[:size]


def bucket(rows: int) -> int:
    """The smallest power of two that is enough for `rows`: a GPU has a CUDA graph for each."""
    return 1 << max(0, rows - 1).bit_length()


def rows_left(alive: Sequence[bool], *, every: bool) -> list[int]:
    """Places of the rows that stay, in their new order, once enough have ended: with `every` as soon as one has, else for the
    next `bucket`, with ended rows to fill it. Empty: all stay. Rows that need not move keep their place."""
    places = [place for place, one in enumerate(alive) if one]
    size = len(places) if every else bucket(len(places))
    if not places or size >= len(alive):
        return []
    beyond = iter([place for place in places if place >= size])
    return [place if alive[place] else next(beyond, place) for place in range(size)]


# --- random numbers --------------------------------------------------------------------------------------------------


def random_keys(seed: int, prompt: int, count: int, *, step: int | None = None, sample: int = 0) -> list[int]:
    """64 bits for each of the first `count` tokens of a sample of a prompt, in whatever batch it is."""
    of = f"{seed}/{'' if step is None else step}/{prompt}/{sample}"
    start = np.frombuffer(hashlib.sha256(of.encode()).digest()[:8], ">i8").astype(np.int64)
    with np.errstate(over="ignore"):
        keys: list[int] = _mixed(start + np.arange(1, count + 1) * GOLDEN).tolist()
    return keys


def random_bits(keys: Integers, tokens: Integers) -> Integers:
    """32 random bits for each key and token; a pair of tokens shares 64. Both are 64-bit integers of numpy, torch or jax that
    broadcast against each other."""
    return (_mixed(keys + ((tokens >> 1) + 1) * GOLDEN) >> (32 * (tokens & 1))) & (2**32 - 1)


def _mixed(bits: Integers) -> Integers:
    """The mixing function of splitmix64; overflow wraps, and shifts are made logical by masks."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * factor
    return bits ^ ((bits >> 31) & (2**33 - 1))


def uniform(bits: Integers) -> Integers:
    """Floats of 64 bits between 0 and 1, neither included, from `random_bits` as such floats."""
    return 1 - (bits + 0.5) * 2.0**-32

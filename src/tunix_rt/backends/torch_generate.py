"""Answers of the PyTorch engine: prompts of mixed lengths in one batch, padded on the left, with a cache of keys and values.

A prompt is answered as if it were alone. Rows that are done leave the batch. On a GPU the tokens are looked at only every few
steps, because each look waits for the device; where an answer ends does not depend on it.
"""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from tunix_rt.backends.decoding import CONTEXT, LENGTH, TIME, Answer, Decoding, Ending, batches, random_keys
from tunix_rt.backends.torch_model import Engine, memory_is_named
from tunix_rt.errors import DoesNotFitError, InputError

logger = logging.getLogger(__name__)

LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""Tokens between two looks at answers. Where weights are cast for each look, a CPU looks as seldom as a GPU."""
DRAWN_AT_ONCE = 4 * 2**20
"""Logits whose tokens are drawn at once: noise and order of a logit take some 60 bytes."""
MOVING_ROPES = ("dynamic", "longrope")
"""Rotations that depend on the longest row of a batch: such a model is asked one prompt at a time."""


@dataclass(slots=True, kw_only=True)
class _Row:
    """A prompt and what has come of its answer."""

    index: int
    prompt: Sequence[int]
    ending: Ending
    room: int
    """New tokens that may come."""
    no_more: str
    """Why no more may."""
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What the model is given next, on the device: one line per row."""

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor | None
    """One for each new token, where tokens are drawn."""
    cache: Any

    def keep(self, places: Sequence[int]) -> None:
        kept = torch.tensor(places, device=self.ids.device)
        self.ids, self.mask, self.positions = (part[kept] for part in (self.ids, self.mask, self.positions))
        if self.keys is not None:
            self.keys = self.keys[kept]
        self.cache.batch_select_indices(kept)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    decoding: Decoding,
    stop_ids: Sequence[int],
    pad_id: int,
    decode: Callable[[list[int]], str],
    rows_at: Callable[[int], int],
    heard: Callable[[int, list[int]], None] | None = None,
) -> Iterator[tuple[int, Answer]]:
    """(number of the prompt, its answer) as answers come to their end; the longest prompts are asked first.

    `rows_at` says how many prompts of a length are asked at once. Where the device has no memory for so many, half of them
    are, and it is said. `heard` is told a prompt's tokens so far, as soon as there are any new ones.
    """
    engine.model.eval()
    most = 1 if _rope(engine) in MOVING_ROPES else len(prompts)
    for chosen in batches([len(prompt) for prompt in prompts], rows_at):
        rows = [_row(engine, index, prompts[index], decoding, stop_ids, decode) for index in chosen]
        yield from ((row.index, Answer(ids=[], ended=CONTEXT)) for row in rows if row.room < 1)
        waiting = [row for row in rows if row.room >= 1]
        while waiting:
            asked, burst = waiting[:most], False
            try:
                for row, answer in _answers(engine, asked, decoding, pad_id, heard):
                    waiting.remove(row)
                    yield row.index, answer
            except DoesNotFitError:
                if len(asked) == 1:
                    raise
                burst = True
            if burst:  # not above: there, the error still holds on to what did not fit
                most = len(asked) // 2
                logger.warning("No memory for %d answers at once: going on with %d", len(asked), most)
                if engine.device.type == "cuda":
                    torch.cuda.empty_cache()


def _row(
    engine: Engine,
    index: int,
    prompt: Sequence[int],
    decoding: Decoding,
    stop_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> _Row:
    positions = _positions(engine)
    left = decoding.max_new_tokens if positions is None else positions - len(prompt)
    return _Row(
        index=index,
        prompt=prompt,
        ending=Ending(stop_ids=frozenset(stop_ids), closing=decoding.closing, decode=decode),
        room=min(decoding.max_new_tokens, left),
        no_more=CONTEXT if left < decoding.max_new_tokens else LENGTH,
    )


def _rope(engine: Engine) -> str | None:
    settings = getattr(engine.model.config, "rope_parameters", None) or getattr(
        engine.model.config, "rope_scaling", None
    )
    return settings.get("rope_type") if isinstance(settings, dict) else None


def _positions(engine: Engine) -> int | None:
    """How many tokens the model knows places for."""
    known = getattr(engine.model.config, "max_position_embeddings", None)
    return known if isinstance(known, int) else None


def _answers(
    engine: Engine,
    rows: Sequence[_Row],
    decoding: Decoding,
    pad_id: int,
    heard: Callable[[int, list[int]], None] | None,
) -> Iterator[tuple[_Row, Answer]]:
    """Each row with its answer, as they end. Between two tokens nothing of torch's state is left changed."""
    began = time.monotonic()
    for row in rows:  # asked again after memory ran out, a row begins anew
        row.ids, row.ending = [], row.ending.anew()
    with memory_is_named("generation"):
        batch, alive, taken = _begin(engine, rows, decoding, pad_id), list(rows), 0
    while alive:
        looked = LOOK_EVERY["cuda" if engine.recipe.casts else engine.device.type] if heard is None else 1
        fresh = _more_tokens(engine, batch, decoding, taken, min(looked, max(row.room for row in alive) - taken))
        taken += len(fresh[0])
        late = decoding.max_seconds is not None and time.monotonic() - began >= decoding.max_seconds
        kept = []
        for place, (row, tokens) in enumerate(zip(list(alive), fresh, strict=True)):
            row.ids = [*row.ids, *tokens][: row.room]
            answer = row.ending.find(row.ids)
            if answer is None and (late or len(row.ids) == row.room):
                answer = row.ending.cut(row.ids, row.no_more if len(row.ids) == row.room else TIME)
            if heard is not None:
                heard(row.index, row.ids if answer is None else answer.ids)
            if answer is None:
                kept.append(place)
            else:
                yield row, answer
        if kept and len(kept) < len(alive):
            with memory_is_named("generation"):
                batch.keep(kept)
        alive = [alive[place] for place in kept]


def _begin(engine: Engine, rows: Sequence[_Row], decoding: Decoding, pad_id: int) -> _Batch:
    """Prompts padded on the left, so that every answer starts in the same column."""
    width = max(len(row.prompt) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[place, width - len(row.prompt) :] = 1
    drawn = None
    if decoding.temperature:
        longest = max(row.room for row in rows)
        drawn = torch.tensor([random_keys(decoding.seed, row.index, longest) for row in rows])
    return _Batch(
        ids=ids.to(engine.device),
        mask=mask.to(engine.device),
        positions=(mask.cumsum(dim=1) - 1).clamp(min=0).to(engine.device),
        keys=None if drawn is None else drawn.to(engine.device),
        cache=transformers.DynamicCache(config=engine.model.config),
    )


def _more_tokens(engine: Engine, batch: _Batch, decoding: Decoding, taken: int, count: int) -> list[list[int]]:
    """The next `count` tokens of every row. Rows that ended among them got some in vain."""
    named = frozenset(inspect.signature(engine.model.forward).parameters)
    attending = engine.attending(engine.attention.generating)
    with torch.no_grad(), memory_is_named("generation"), attending, engine.kernels(), engine.computing():
        found = [_step(engine, batch, decoding, number, named) for number in range(taken, taken + count)]
        tokens = torch.stack(found, dim=1).tolist()
    if any(_NOT_A_TOKEN in row for row in tokens):
        raise InputError(f"{engine.source.name}: gives NaN instead of a next token", fix="the weights are damaged")
    return tokens


_NOT_A_TOKEN = -1


def _step(engine: Engine, batch: _Batch, decoding: Decoding, number: int, named: frozenset[str]) -> torch.Tensor:
    """The next token of every row, put into `batch` as well; a row whose logits are NaN has none. Waits for nothing.

    `named` are the arguments that the model takes."""
    given = {"position_ids": batch.positions, "logits_to_keep": 1}
    logits = engine.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        past_key_values=batch.cache,
        use_cache=True,
        **{name: value for name, value in given.items() if name in named},
    ).logits[:, -1]
    chosen = _choose(logits, decoding, None if batch.keys is None else batch.keys[:, number])
    batch.ids = chosen.unsqueeze(1)
    # A row that ended is carried on until the next look, and has no position beyond the last.
    batch.positions = (batch.positions[:, -1:] + 1).clamp(max=(_positions(engine) or 2**31) - 1)
    batch.mask = torch.cat([batch.mask, batch.mask.new_ones((len(chosen), 1))], dim=1)
    return torch.where(logits.isnan().any(dim=-1), _NOT_A_TOKEN, chosen)


def _choose(logits: torch.Tensor, decoding: Decoding, keys: torch.Tensor | None) -> torch.Tensor:
    """The likeliest token of each row; with a key for each row, one drawn by its share, a few rows at a time."""
    if keys is None:
        return logits.argmax(dim=-1)
    rows = max(1, DRAWN_AT_ONCE // logits.shape[-1])
    pairs = zip(logits.split(rows), keys.split(rows), strict=True)
    return torch.cat([_drawn(some, of, decoding) for some, of in pairs])


def _drawn(logits: torch.Tensor, keys: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """By adding noise to every logit and taking the largest (Gumbel). A draw by summed shares would move with the last bits
    of all of them, which depend on the batch that a row is computed in."""
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / decoding.temperature
    if decoding.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        shares = torch.softmax(ordered, dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= decoding.top_p
        scores = torch.empty_like(scores).scatter_(-1, order, ordered.masked_fill_(beyond, -torch.inf))
    return (scores + _gumbel(keys, scores.shape[-1])).argmax(dim=-1)


def _gumbel(keys: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers of the standard Gumbel distribution for each key, by the mixing function of splitmix64."""
    mixed = keys.unsqueeze(1) + torch.arange(1, count + 1, device=keys.device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    mixed ^= (mixed >> 31) & (2**33 - 1)
    uniform = ((mixed >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)  # 52 bits: with 53 the last would be 1
    return uniform.log_().neg_().log_().neg_()

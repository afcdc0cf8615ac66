"""Answers of the PyTorch engine: prompts of mixed lengths in one batch, padded on the left, with a cache of keys and values.

A prompt is answered as if it were alone. Rows that are done leave the batch. On a GPU the tokens are looked at only every few
steps, because each look waits for the device; where an answer ends does not depend on it. For models that are known well the
masks of new tokens are views of one that is made at the start: transformers, which makes one for every token, waits for the
device to see whether any is needed.
"""

import contextlib
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tunix_rt.engines.decoding import NOT_A_TOKEN, Answer, Decoding, Row, answer_in_batches, random_keys, row_of
from tunix_rt.engines.torch.model import Engine, memory_is_named

LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""Tokens between two looks at answers. Where weights are cast for each look, a CPU looks as seldom as a GPU."""
DRAWN_AT_ONCE = 4 * 2**20
"""Logits whose tokens are drawn at once: noise and order of a logit take some 60 bytes."""
MOVING_ROPES = frozenset({"dynamic", "longrope"})
"""Rotations that depend on the longest row of a batch: such a model is asked one prompt at a time."""

MASKS_BY_TYPE = ("gemma2", "gemma3_text", "qwen2", "qwen3")
"""Models that take masks made already, one for each type of layer."""
ONE_MASK = ("gemma", "gpt2", "llama", "mistral", "phi3")
"""Models that take one such mask for all layers."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What the model is given, on the device: one line per row. A column is a token, of the prompt or of the answer."""

    ids: torch.Tensor
    """The tokens that are given next."""
    held: int
    """Columns whose keys and values are in the cache."""
    mask: torch.Tensor
    """[rows, columns]: whether a column is a token, and no padding. Those of the answer are there from the start."""
    ready: torch.Tensor | None
    """[rows, 1, 1, columns]: the same as attention takes it; None where transformers has to make it."""
    positions: torch.Tensor
    """[rows, columns]"""
    keys: torch.Tensor | None
    """One for each new token, where tokens are drawn."""
    cache: Any
    windows: dict[str, int | None]
    """How many columns each type of layer sees; None for all."""
    one_mask: bool
    takes: frozenset[str]
    """Names of the arguments that the model takes."""

    def keep(self, places: Sequence[int]) -> None:
        kept = torch.tensor(places, device=self.ids.device)
        self.ids, self.mask, self.positions = (part[kept] for part in (self.ids, self.mask, self.positions))
        if self.ready is not None:
            self.ready = self.ready[kept]
        if self.keys is not None:
            self.keys = self.keys[kept]
        self.cache.batch_select_indices(kept)

    def given(self) -> dict[str, Any]:
        """Arguments of the model for the next tokens."""
        given = {
            "input_ids": self.ids,
            "attention_mask": self.masks(),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if "position_ids" in self.takes:
            given["position_ids"] = self.positions.narrow(1, self.held, self.ids.shape[1])
        if "logits_to_keep" in self.takes:
            given["logits_to_keep"] = 1
        return given

    def masks(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """For one new token what it sees, ready to be used; else the tokens that are no padding: transformers makes the rest."""
        columns = self.held + self.ids.shape[1]
        if self.ready is None or self.ids.shape[1] > 1:
            return self.mask[:, :columns]
        made = {}
        for kind, window in self.windows.items():
            seen = columns if window is None else min(columns, window)
            made[kind] = self.ready.narrow(3, columns - seen, seen)
        return next(iter(made.values())) if self.one_mask else made


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
    yield from answer_in_batches(
        [_row(engine, index, prompt, decoding, stop_ids, decode) for index, prompt in enumerate(prompts)],
        lambda rows: _answers(engine, rows, decoding, pad_id, heard),
        rows_at=rows_at,
        most=1 if _ropes(engine) & MOVING_ROPES else len(prompts),
        free_memory=partial(_free_memory, engine),
    )


def _free_memory(engine: Engine) -> None:
    """Of answers that were given up: an error and the calls it came through refer to each other, and to tensors."""
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


def _row(
    engine: Engine,
    index: int,
    prompt: Sequence[int],
    decoding: Decoding,
    stop_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> Row:
    return row_of(index, prompt, positions=_positions(engine), decoding=decoding, stop_ids=stop_ids, decode=decode)


def _ropes(engine: Engine) -> set[str]:
    """Kinds of rotation in the model; some have one for each type of layer."""
    config = engine.model.config
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(settings, dict):
        return set()
    return {str(each.get("rope_type")) for each in (settings, *settings.values()) if isinstance(each, dict)}


def _positions(engine: Engine) -> int | None:
    """How many tokens the model knows places for."""
    known = getattr(engine.model.config, "max_position_embeddings", None)
    return known if isinstance(known, int) else None


def _answers(
    engine: Engine,
    rows: Sequence[Row],
    decoding: Decoding,
    pad_id: int,
    heard: Callable[[int, list[int]], None] | None,
) -> Iterator[tuple[Row, Answer]]:
    """Each row with its answer, as they end. Between two tokens nothing of torch's state is left changed."""
    began = time.monotonic()
    for row in rows:
        row.begin_anew()
    with memory_is_named("generation"):
        batch, alive, taken = _begin(engine, rows, decoding, pad_id), list(rows), 0
    while alive:
        looked = LOOK_EVERY["cuda" if engine.recipe.casts else engine.device.type] if heard is None else 1
        fresh = _more_tokens(engine, batch, decoding, taken, min(looked, max(row.room for row in alive) - taken))
        taken += len(fresh[0])
        late = decoding.max_seconds is not None and time.monotonic() - began >= decoding.max_seconds
        kept = []
        for place, (row, tokens) in enumerate(zip(list(alive), fresh, strict=True)):
            answer = row.take(tokens, late=late, model=engine.source.name)
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


def _begin(engine: Engine, rows: Sequence[Row], decoding: Decoding, pad_id: int) -> _Batch:
    """Prompts padded on the left, so that every answer starts in the same column."""
    width, longest = max(len(row.prompt) for row in rows), max(row.room for row in rows)
    cache = transformers.DynamicCache(config=engine.model.config)
    windows = _windows(engine, cache)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.ones((len(rows), width + longest), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[place, : width - len(row.prompt)] = 0
    # A row that ended is carried on until the next look, and has no position beyond the last.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0, max=(_positions(engine) or 2**31) - 1)
    drawn = None
    if decoding.temperature:
        drawn = torch.tensor([random_keys(decoding.seed, row.index, longest) for row in rows])
    return _Batch(
        ids=ids.to(engine.device),
        held=0,
        mask=mask.to(engine.device),
        ready=None if windows is None else _ready(engine, mask).to(engine.device),
        positions=positions.to(engine.device),
        keys=None if drawn is None else drawn.to(engine.device),
        cache=cache,
        windows=windows or {},
        one_mask=engine.model.config.model_type in ONE_MASK,
        takes=frozenset(inspect.signature(engine.model.forward).parameters),
    )


def _windows(engine: Engine, cache: Any) -> dict[str, int | None] | None:
    """How many columns each type of layer sees, for a model whose masks are made here; None for others."""
    config = engine.model.config
    known = config.model_type in (*MASKS_BY_TYPE, *ONE_MASK) and engine.attention.generating in ("sdpa", "eager")
    ahead = getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True)
    if not known or ahead:
        return None
    found: set[tuple[str, int | None]] = set()
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            found.add((FULL, None))
        elif type(layer) is DynamicSlidingWindowLayer:
            found.add((SLIDING, layer.sliding_window))
        else:
            return None
    windows = dict(found)
    several = len(windows) > 1 and config.model_type in ONE_MASK
    return None if several or len(windows) < len(found) else windows


def _ready(engine: Engine, mask: torch.Tensor) -> torch.Tensor:
    """The mask as transformers' own would be for one new token: booleans for sdpa, for eager what is added to the scores."""
    seen = mask.bool()[:, None, None]
    if engine.attention.generating == "sdpa":
        return seen
    kind = engine.model.get_input_embeddings().weight.dtype
    return torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)


def _unrecorded(engine: Engine) -> contextlib.AbstractContextManager[Any]:
    """No gradients. On a GPU, where a step is as long as its calls take, by the mode in which a call is shortest; but under it
    autocast casts every weight for every token again, and a rotation that moves would be left in the model unfit to train."""
    if engine.device.type == "cuda" and not engine.recipe.casts and not _ropes(engine) & MOVING_ROPES:
        return torch.inference_mode()
    return torch.no_grad()


@contextlib.contextmanager
def _kernels(engine: Engine) -> Iterator[None]:
    """The engine's kernels of attention without cuDNN's, which is planned anew for every number of keys: for every token."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with engine.kernels():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _more_tokens(engine: Engine, batch: _Batch, decoding: Decoding, taken: int, count: int) -> list[list[int]]:
    """The next `count` tokens of every row. Rows that ended among them got some in vain."""
    attending = engine.attending(engine.attention.generating)
    with _unrecorded(engine), memory_is_named("generation"), attending, _kernels(engine), engine.computing():
        found = [_step(engine, batch, decoding, number) for number in range(taken, taken + count)]
        tokens = torch.stack(found, dim=1).tolist()
    return tokens


def _step(engine: Engine, batch: _Batch, decoding: Decoding, number: int) -> torch.Tensor:
    """The next token of every row, put into `batch` as well; a row whose logits are NaN has none. Waits for nothing, unless
    transformers does."""
    logits = engine.model(**batch.given()).logits[:, -1]
    chosen = _choose(logits, decoding, None if batch.keys is None else batch.keys[:, number])
    batch.held += batch.ids.shape[1]
    batch.ids = chosen.unsqueeze(1)
    return torch.where(logits.isnan().any(dim=-1), NOT_A_TOKEN, chosen)


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

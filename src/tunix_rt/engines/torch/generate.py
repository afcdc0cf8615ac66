"""Generation of the PyTorch engine: prompts of mixed lengths in one batch, left-padded, with a KV cache.

A generation does not depend on its batch. Rows that have ended leave the batch. On a GPU the tokens are read only every few
steps, because each read synchronizes; where a generation ends does not depend on it. For known model types the masks of new
tokens are views of one mask: transformers builds one for every token, and synchronizes to see whether it needs any.
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

from tunix_rt.engines.decoding import NOT_A_TOKEN, Answer, Decoding, Prompt, generate_in_batches, random_bits, uniform
from tunix_rt.engines.failures import memory_errors_named
from tunix_rt.engines.torch import reload as torch_reload
from tunix_rt.engines.torch.model import Engine
from tunix_rt.models.families import FAMILIES, FULL, SLIDING

LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""Tokens between two reads. Where autocast casts the weights once per read, a CPU reads as seldom as a GPU."""
DRAWN_AT_ONCE = 4 * 2**20
"""Logits that are sampled at once: noise and sort order of a logit take some 60 bytes."""
MOVING_ROPES = frozenset({"dynamic", "longrope"})
"""RoPE types that depend on the longest row of a batch: such a model generates for one prompt at a time."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    """The inputs of the model on the device, one row per prompt. A column is a token, of the prompt or generated."""

    ids: torch.Tensor
    """The next input tokens."""
    held: int
    """Columns in the KV cache."""
    mask: torch.Tensor
    """[rows, columns]: 1 for a token, 0 for padding. It includes the columns of new tokens from the start."""
    ready: torch.Tensor | None
    """[rows, 1, 1, columns]: the same as an attention mask; None where transformers builds it."""
    positions: torch.Tensor
    """[rows, columns]"""
    keys: torch.Tensor | None
    """Random bits for each new token, where tokens are sampled."""
    cache: Any
    windows: dict[str, int | None]
    """The sliding window of each layer type; None: all columns."""
    one_mask: bool
    takes: frozenset[str]
    """Names of the arguments of the model."""

    def keep(self, places: Sequence[int]) -> None:
        kept = torch.tensor(places, device=self.ids.device)
        self.ids, self.mask, self.positions = (part[kept] for part in (self.ids, self.mask, self.positions))
        if self.ready is not None:
            self.ready = self.ready[kept]
        if self.keys is not None:
            self.keys = self.keys[kept]
        self.cache.batch_select_indices(kept)

    def inputs(self) -> dict[str, Any]:
        """Arguments of the model for the next tokens."""
        inputs: dict[str, Any] = {
            "input_ids": self.ids,
            "attention_mask": self.masks(),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if "position_ids" in self.takes:
            inputs["position_ids"] = self.positions.narrow(1, self.held, self.ids.shape[1])
        if "logits_to_keep" in self.takes:
            inputs["logits_to_keep"] = 1
        return inputs

    def masks(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """For one new token a prepared mask; else which tokens are not padding, of which transformers builds the masks."""
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
    batch_size_at: Callable[[int], int],
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Iterator[tuple[int, Answer]]:
    """See `base.EngineModule.generate`."""
    engine.model.eval()
    known = engine.model.config.model_type in FAMILIES
    yield from generate_in_batches(
        prompts,
        partial(_generate if known else _generate_alone, engine, decoding=decoding, pad_id=pad_id, on_tokens=on_tokens),
        positions=engine.positions,
        decoding=decoding,
        stop_ids=stop_ids,
        decode=decode,
        batch_size_at=batch_size_at,
        most=1 if not known or _ropes(engine) & MOVING_ROPES else len(prompts),
        free_memory=partial(free_memory, engine),
    )


def free_memory(engine: Engine) -> None:
    """Return unused memory to the device: after an error, whose traceback refers to tensors, or with the model."""
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


def _ropes(engine: Engine) -> set[str]:
    """RoPE types of the model; some have one for each layer type."""
    config = engine.model.config
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(settings, dict):
        return set()
    return {str(each.get("rope_type")) for each in (settings, *settings.values()) if isinstance(each, dict)}


def _generate(
    engine: Engine,
    rows: Sequence[Prompt],
    decoding: Decoding,
    pad_id: int,
    on_tokens: Callable[[int, list[int]], None] | None,
) -> Iterator[tuple[Prompt, Answer]]:
    """Each prompt with its generation, as they end. Global settings of torch are restored before each yield."""
    began = time.monotonic()
    for row in rows:
        row.restart()
    with memory_errors_named("generation"):
        batch, alive, taken = _begin(engine, rows, decoding, pad_id), list(rows), 0
    while alive:
        count = LOOK_EVERY["cuda" if engine.recipe.casts else engine.device.type] if on_tokens is None else 1
        fresh = _more_tokens(engine, batch, decoding, taken, min(count, max(row.max_new for row in alive) - taken))
        taken += len(fresh[0])
        late = decoding.max_seconds is not None and time.monotonic() - began >= decoding.max_seconds
        kept = []
        for place, (row, tokens) in enumerate(zip(list(alive), fresh, strict=True)):
            answer = row.append(tokens, late=late, model=engine.source.name)
            if on_tokens is not None:
                on_tokens(row.index, row.ids if answer is None else answer.ids)
            if answer is None:
                kept.append(place)
            else:
                yield row, answer
        if kept and len(kept) < len(alive):
            with memory_errors_named("generation"):
                batch.keep(kept)
        alive = [alive[place] for place in kept]


def _generate_alone(
    engine: Engine,
    rows: Sequence[Prompt],
    decoding: Decoding,
    pad_id: int,
    on_tokens: Callable[[int, list[int]], None] | None,
) -> Iterator[tuple[Prompt, Answer]]:
    """One prompt at a time by transformers' own `generate`, for families whose cache and masks are not known here."""
    for row in rows:
        row.restart()
        ids = torch.tensor([row.prompt], device=engine.device)
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=row.max_new, max_time=decoding.max_seconds, pad_token_id=pad_id,
            eos_token_id=sorted(row.ending.stop_ids),
        )  # fmt: skip
        chooser = _Chooser(decoding, row, len(row.prompt))
        attending = engine.attending(engine.attention.generating)
        with torch.no_grad(), memory_errors_named("generation"), attending, _kernels(engine), engine.computing():
            found = torch_reload.generate(
                engine.model, ids, generation_config=settings,
                logits_processor=transformers.LogitsProcessorList([chooser]),
            )  # fmt: skip
        tokens = found[0, ids.shape[1] :].tolist()
        answer = row.append(tokens + [NOT_A_TOKEN] * chooser.invalid, late=True, model=engine.source.name)
        if on_tokens is not None and answer is not None:
            on_tokens(row.index, answer.ids)
        if answer is not None:
            yield row, answer


class _Chooser(transformers.LogitsProcessor):
    """Leaves the next token of `_choose` alone as a choice of transformers' greedy search."""

    def __init__(self, decoding: Decoding, row: Prompt, prompt: int) -> None:
        self.decoding, self.prompt, self.invalid = decoding, prompt, False
        self.keys = decoding.keys(row.index, row.max_new) if decoding.temperature else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.invalid = self.invalid or bool(scores.isnan().any())
        if self.keys is None:
            return scores
        key = torch.tensor([self.keys[input_ids.shape[1] - self.prompt]], device=scores.device)
        chosen = _choose(scores, self.decoding, key)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


def _begin(engine: Engine, rows: Sequence[Prompt], decoding: Decoding, pad_id: int) -> _Batch:
    """Left-padded prompts: new tokens of all rows start in the same column."""
    width, longest = max(len(row.prompt) for row in rows), max(row.max_new for row in rows)
    cache = transformers.DynamicCache(config=engine.model.config)
    windows = _windows(engine, cache)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.ones((len(rows), width + longest), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[place, : width - len(row.prompt)] = 0
    # A row that has ended is computed until the next read, with positions clamped to the last.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0, max=(engine.positions or 2**31) - 1)
    keys = None
    if decoding.temperature:
        keys = torch.tensor([decoding.keys(row.index, longest) for row in rows])
    return _Batch(
        ids=ids.to(engine.device),
        held=0,
        mask=mask.to(engine.device),
        ready=None if windows is None else _attention_mask(engine, mask).to(engine.device),
        positions=positions.to(engine.device),
        keys=None if keys is None else keys.to(engine.device),
        cache=cache,
        windows=windows or {},
        one_mask=_takes_one_mask(engine.model.config.model_type),
        takes=frozenset(inspect.signature(engine.model.forward).parameters),
    )


def _windows(engine: Engine, cache: Any) -> dict[str, int | None] | None:
    """The sliding window of each layer type, for a model whose masks are prepared here; None for others."""
    config = engine.model.config
    known = config.model_type in FAMILIES and engine.attention.generating in ("sdpa", "eager")
    ahead = getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True)
    if not known or ahead:
        return None
    kinds: set[tuple[str, int | None]] = set()
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            kinds.add((FULL, None))
        elif type(layer) is DynamicSlidingWindowLayer:
            kinds.add((SLIDING, layer.sliding_window))
        else:
            return None
    windows = dict(kinds)
    several = len(windows) > 1 and _takes_one_mask(config.model_type)
    return None if several or len(windows) < len(kinds) else windows


def _takes_one_mask(model_type: str) -> bool:
    """Whether the model takes one prepared mask for all layers, not a dict by layer type."""
    return model_type in FAMILIES and not FAMILIES[model_type].masks_by_layer_type


def _attention_mask(engine: Engine, mask: torch.Tensor) -> torch.Tensor:
    """The mask that transformers builds for one new token: boolean for sdpa, additive for eager."""
    seen = mask.bool()[:, None, None]
    if engine.attention.generating == "sdpa":
        return seen
    kind = engine.model.get_input_embeddings().weight.dtype
    return torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)


def _no_gradients(engine: Engine) -> contextlib.AbstractContextManager[Any]:
    """inference_mode on a GPU, where launch overhead dominates; but under it autocast would cast every weight for every token,
    and a dynamic RoPE would leave inference tensors in the model, which cannot be trained."""
    if engine.device.type == "cuda" and not engine.recipe.casts and not _ropes(engine) & MOVING_ROPES:
        return torch.inference_mode()
    return torch.no_grad()


@contextlib.contextmanager
def _kernels(engine: Engine) -> Iterator[None]:
    """The attention kernels of the engine without cuDNN's, which is planned for every number of keys: for every token."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with engine.kernels():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _more_tokens(engine: Engine, batch: _Batch, decoding: Decoding, taken: int, count: int) -> list[list[int]]:
    """The next `count` tokens of every row, also of rows that end among them."""
    attending = engine.attending(engine.attention.generating)
    with _no_gradients(engine), memory_errors_named("generation"), attending, _kernels(engine), engine.computing():
        steps = [_step(engine, batch, decoding, number) for number in range(taken, taken + count)]
        tokens: list[list[int]] = torch.stack(steps, dim=1).tolist()
    return tokens


def _step(engine: Engine, batch: _Batch, decoding: Decoding, number: int) -> torch.Tensor:
    """The next token of every row, which becomes the input of `batch`; NOT_A_TOKEN where logits are NaN. Does not synchronize,
    unless transformers does."""
    logits = engine.model(**batch.inputs()).logits[:, -1]
    chosen = _choose(logits, decoding, None if batch.keys is None else batch.keys[:, number])
    batch.held += batch.ids.shape[1]
    batch.ids = chosen.unsqueeze(1)
    return torch.where(logits.isnan().any(dim=-1), NOT_A_TOKEN, chosen)


def _choose(logits: torch.Tensor, decoding: Decoding, keys: torch.Tensor | None) -> torch.Tensor:
    """The most likely token of each row; with a key for each row a sampled one, a few rows at a time."""
    if keys is None:
        return logits.argmax(dim=-1)
    rows = max(1, DRAWN_AT_ONCE // logits.shape[-1])
    pairs = zip(logits.split(rows), keys.split(rows), strict=True)
    return torch.cat([_sample(some, of, decoding) for some, of in pairs])


def _sample(logits: torch.Tensor, keys: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Gumbel-max sampling. Sampling by cumulative probabilities would change with the last bits of all of them, which depend on
    the batch of a row."""
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / decoding.temperature
    if decoding.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        beyond = probabilities.cumsum(dim=-1) - probabilities >= decoding.top_p
        scores = torch.empty_like(scores).scatter_(-1, order, ordered.masked_fill_(beyond, -torch.inf))
    return (scores + _gumbel(keys, scores.shape[-1])).argmax(dim=-1)


def _gumbel(keys: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers of the standard Gumbel distribution for each key."""
    bits = random_bits(keys.unsqueeze(1), torch.arange(count, device=keys.device))
    return uniform(bits.double()).log_().neg_().log_().neg_()

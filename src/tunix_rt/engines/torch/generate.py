"""Generation of the PyTorch engine: prompts of mixed lengths in one batch, left-padded, with a KV cache that is preallocated
(`static_cache.py`) where the family allows it; a GPU then replays one CUDA graph for each token (`decode_graph.py`).

A generation does not depend on its batch. Rows that have ended leave the batch. On a GPU the tokens are read only every few
steps, because each read synchronizes; where a generation ends does not depend on it. Other models have transformers' growing
cache. For known model types the masks of its new tokens are views of one mask: transformers builds one for every token, and
synchronizes to see whether it needs any.
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

from tunix_rt.engines.decoding import NOT_A_TOKEN, Answer, Decoding, Prompt, generate_in_batches, rows_left
from tunix_rt.engines.failures import memory_errors_named
from tunix_rt.engines.torch import reload as torch_reload
from tunix_rt.engines.torch.decode_graph import DecodeGraphs, is_supported
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.sampling import choose
from tunix_rt.engines.torch.static_cache import StaticBatch, static_batch, static_windows
from tunix_rt.models.families import FAMILIES, FULL, SLIDING

LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""Tokens between two reads. Where autocast casts the weights once per read, a CPU reads as seldom as a GPU."""
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
    implementation: str
    """The attention, under its name in transformers."""

    def logits(self, model: Any) -> torch.Tensor:
        """Of the next token of every row."""
        found = model(**self.inputs()).logits[:, -1]
        self.held += self.ids.shape[1]
        return found

    def take(self, chosen: torch.Tensor) -> None:
        """The next tokens of all rows."""
        self.ids = chosen.unsqueeze(1)

    def keep(self, order: Sequence[int]) -> None:
        kept = torch.tensor(order, device=self.ids.device)
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
    on_tokens: Callable[[int, list[int]], bool] | None = None,
    logprobs: bool = False,
) -> Iterator[tuple[int, Answer]]:
    """See `base.EngineModule.generate`."""
    engine.model.eval()
    known = engine.model.config.model_type in FAMILIES
    kept: list[DecodeGraphs] = []
    one_batch = partial(_generate, engine, kept=kept) if known else partial(_generate_alone, engine)
    yield from generate_in_batches(
        prompts,
        partial(one_batch, decoding=decoding, pad_id=pad_id, on_tokens=on_tokens, logprobs=logprobs),
        positions=engine.positions,
        decoding=decoding,
        stop_ids=stop_ids,
        decode=decode,
        batch_size_at=batch_size_at,
        most=1 if not known or _ropes(engine) & MOVING_ROPES else len(prompts) * decoding.samples,
        free_memory=partial(free_memory, engine, kept),
    )


def free_memory(engine: Engine, kept: list[DecodeGraphs] | None = None) -> None:
    """Return unused memory to the device: after an error, whose traceback refers to tensors, or with the model."""
    if kept is not None:
        kept.clear()
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
    on_tokens: Callable[[int, list[int]], bool] | None,
    logprobs: bool,
    kept: list[DecodeGraphs],
) -> Iterator[tuple[Prompt, Answer]]:
    """Each prompt with its generation, as they end. Global settings of torch are restored before each yield. `kept` has the CUDA
    graphs of the batch before."""
    began = time.monotonic()
    for row in rows:
        row.restart()
    slots: list[Prompt | None] = [*rows]  # the rows of the batch; None once a generation has ended
    with memory_errors_named("generation"):
        batch, taken = _begin(engine, rows, decoding, pad_id), 0
        _use_graphs(engine, batch, kept, decoding, max(row.max_new for row in rows), logprobs)
    while any(slots):
        count = LOOK_EVERY["cuda" if engine.recipe.casts else engine.device.type] if on_tokens is None else 1
        longest = max(row.max_new for row in slots if row)
        fresh = _more_tokens(engine, batch, decoding, taken, min(count, longest - taken), logprobs)
        taken += len(fresh[0][0])
        late = decoding.max_seconds is not None and time.monotonic() - began >= decoding.max_seconds
        for place, one in [(place, one) for place, one in enumerate(slots) if one]:
            tokens, scores = fresh[place]
            answer = one.append(tokens, late=late, model=engine.source.name, scores=scores)
            if on_tokens is not None and on_tokens(one.index, one.ids if answer is None else answer.ids):
                answer = answer or one.cut_off()
            if answer is not None:
                slots[place] = None
                yield one, answer
        order = rows_left([row is not None for row in slots], every=engine.device.type == "cpu")
        if order:
            with memory_errors_named("generation"):
                batch.keep(order)
            slots = [slots[place] for place in order]


def _generate_alone(
    engine: Engine,
    rows: Sequence[Prompt],
    decoding: Decoding,
    pad_id: int,
    on_tokens: Callable[[int, list[int]], bool] | None,
    logprobs: bool,
) -> Iterator[tuple[Prompt, Answer]]:
    """One prompt at a time by transformers' own `generate`, for families whose cache and masks are not known here."""
    for row in rows:
        row.restart()
        ids = torch.tensor([row.prompt], device=engine.device)
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=row.max_new, max_time=decoding.max_seconds, pad_token_id=pad_id,
            eos_token_id=sorted(row.ending.stop_ids),
        )  # fmt: skip
        chooser = _Chooser(decoding, row, len(row.prompt), logprobs)
        attending = engine.attending(engine.attention.generating)
        with torch.no_grad(), memory_errors_named("generation"), attending, _kernels(engine), engine.computing():
            found = torch_reload.generate(
                engine.model, ids, generation_config=settings,
                logits_processor=transformers.LogitsProcessorList([chooser]),
            )  # fmt: skip
        tokens = found[0, ids.shape[1] :].tolist()
        answer = row.append(
            tokens + [NOT_A_TOKEN] * chooser.invalid, late=True, model=engine.source.name, scores=chooser.scores
        )
        if on_tokens is not None and answer is not None:
            on_tokens(row.index, answer.ids)
        if answer is not None:
            yield row, answer


class _Chooser(transformers.LogitsProcessor):
    """Leaves the next token of `choose` alone as a choice of transformers' greedy search."""

    def __init__(self, decoding: Decoding, row: Prompt, prompt: int, logprobs: bool) -> None:
        self.decoding, self.prompt, self.invalid, self.logprobs = decoding, prompt, False, logprobs
        self.scores: list[tuple[float, float]] = []
        self.keys = decoding.keys(row.index, row.max_new) if decoding.temperature else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.invalid = self.invalid or bool(scores.isnan().any())
        if self.keys is None and not self.logprobs:
            return scores
        place = input_ids.shape[1] - self.prompt
        key = None if self.keys is None else torch.tensor([self.keys[place]], device=scores.device)
        chosen, found = choose(scores, self.decoding, key, self.logprobs)
        self.scores += [tuple(pair) for pair in found.tolist()]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


def _begin(engine: Engine, rows: Sequence[Prompt], decoding: Decoding, pad_id: int) -> _Batch | StaticBatch:
    """With a static cache where the model can have one, else with transformers' growing one."""
    longest = max(row.max_new for row in rows)
    keys = None
    if decoding.temperature:
        keys = torch.tensor([decoding.keys(row.index, longest) for row in rows])
    windows = None if _ropes(engine) & MOVING_ROPES else static_windows(engine.model)
    if windows is None:
        return _growing(engine, rows, keys, pad_id)
    return static_batch(
        [row.prompt for row in rows], windows, new_tokens=longest, positions=engine.positions, keys=keys,
        device=engine.device,
    )  # fmt: skip


def _use_graphs(
    engine: Engine,
    batch: _Batch | StaticBatch,
    kept: list[DecodeGraphs],
    decoding: Decoding,
    longest: int,
    logprobs: bool,
) -> None:
    """Decode `batch` by CUDA graphs where they are supported: by those of the batch before, if it fits into their memory."""
    if not isinstance(batch, StaticBatch) or not is_supported(engine):
        return
    if not kept or not kept[0].fits(batch, longest):
        kept[:] = [DecodeGraphs(engine, decoding, rows=batch.cache.rows, new_tokens=longest, logprobs=logprobs)]
    batch.graphs = kept[0]
    batch.graphs.begin(batch)


def _growing(engine: Engine, rows: Sequence[Prompt], keys: torch.Tensor | None, pad_id: int) -> _Batch:
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
        implementation=engine.attention.generating,
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


def _more_tokens(
    engine: Engine, batch: _Batch | StaticBatch, decoding: Decoding, taken: int, count: int, logprobs: bool = False
) -> list[tuple[list[int], list[tuple[float, float]]]]:
    """The next `count` tokens of every row with their scores, also of rows that end among them."""
    attending = engine.attending(batch.implementation)
    if isinstance(batch, StaticBatch) and batch.graphs is not None:
        with (
            torch.no_grad(),
            memory_errors_named("generation"),
            attending,
            _kernels(engine),
            engine.computing(once=True),
        ):
            tokens, found = batch.graphs.more_tokens(batch, count)
        return [
            (ids, [(one, gap) for one, gap in of]) for ids, of in zip(tokens, found or [()] * len(tokens), strict=True)
        ]
    with torch.no_grad(), memory_errors_named("generation"), attending, _kernels(engine), engine.computing():
        steps = [_step(engine, batch, decoding, number, logprobs) for number in range(taken, taken + count)]
        tokens = torch.stack([chosen for chosen, _ in steps], dim=1).tolist()
        scores = torch.stack([found for _, found in steps], dim=1).tolist() if logprobs else [()] * len(tokens)
    return [(ids, [(one, gap) for one, gap in of]) for ids, of in zip(tokens, scores, strict=True)]


def _step(
    engine: Engine, batch: _Batch | StaticBatch, decoding: Decoding, number: int, logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of every row, which becomes the input of `batch`; NOT_A_TOKEN where logits are NaN. Then its scores. Does
    not synchronize, unless transformers does."""
    logits = batch.logits(engine.model)
    chosen, scores = choose(logits, decoding, None if batch.keys is None else batch.keys[:, number], logprobs)
    batch.take(chosen)
    return torch.where(logits.isnan().any(dim=-1), NOT_A_TOKEN, chosen), scores

"""A preallocated KV cache of the PyTorch engine, and the attention that reads it, for transformers' own forward pass.

The columns of a row are its tokens, left-padded so that new tokens of all rows are written to the same column. A layer with a
sliding window has a ring of its window. A new token is written in place: nothing grows, nothing is copied, and no mask is made
where no padding is in sight. Query heads that share a KV head are computed as queries of that head: none is repeated.

`families.py` says which families it covers: their layers have one KV cache each and pass all that their attention needs to the
attention function.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tunix_rt.engines.torch.attention import needs_more
from tunix_rt.engines.torch.lm_head import Head, next_logits
from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.plan.generation import PREFILL_TOKENS

STATIC = "tunix_rt_static"
"""Name of the attention function in transformers, which makes no mask for a name without a mask function."""
FOLDED_ROWS = 8
"""Rows from which on the query heads of a KV head are computed as its queries on a CPU: for fewer, torch's own grouping is
faster. Benchmarked at 1 row: 15 us against 35; at 64 rows: 142 us against 92."""


class StaticCache(transformers.Cache):
    """Keys and values of every row and layer. As many rows as prompts are filled first, then all get one token after another."""

    def __init__(
        self, windows: Sequence[int | None], *, begins: Sequence[int], capacity: int, device: torch.device
    ) -> None:
        """`windows` of the layers; `begins` are the columns at which the rows begin."""
        super().__init__(layers=[])
        self.capacity, self.device = capacity, device
        self.sizes = [self._size(window) for window in windows]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.held = 0
        """Columns that are filled."""
        self._filling: _Filling | None = None
        self._device: tuple[torch.Tensor, torch.Tensor] | None = None
        """Of a step whose column is known on the device alone: its number, and the columns at which the rows begin."""
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._columns = {size: torch.full((size,), -1, device=device) for size in set(self.sizes)}
        """The column in each slot of a ring."""
        self._seen: dict[int, torch.Tensor | None] = {}
        self._begin_with(begins)

    def _begin_with(self, begins: Sequence[int]) -> None:
        self.rows, self._latest = len(begins), max(begins)
        self.begins = torch.tensor(begins, device=self.device)
        self._live = [tuple(part[: self.rows] for part in both) for both in zip(self.keys, self.values, strict=True)]

    def _size(self, window: int | None) -> int:
        """Columns of a layer."""
        return self.capacity if window is None else min(window, self.capacity)

    def restart(self, other: "StaticCache") -> None:
        """Take the rows of `other`, in the memory of this cache."""
        self.held, self._seen = 0, {}
        self._begin_with(other.begins.tolist())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.held

    # --- the next columns

    def fill(self, held: int, rows: Sequence[int], prompts: Sequence[int], begins: torch.Tensor) -> "StaticCache":
        """Prepare a forward pass over prompts that end before column `held`: row `rows[i]` gets prompt `prompts[i]` of the
        batch, of which prompt p begins with its token `begins[p]`."""
        self._filling, self._device = (
            _Filling(held, torch.tensor(rows), torch.tensor(prompts), begins, self.device),
            None,
        )
        return self

    def on_device(self, state: torch.Tensor, begins: torch.Tensor) -> "StaticCache":
        """Prepare a forward pass over one more token of every row, for column `state[0]`."""
        self._filling, self._device = None, (state, begins)
        return self

    def next_column(self, held: int) -> "StaticCache":
        """Prepare a forward pass over one more token of every row, for column `held`."""
        self._filling = self._device = None
        for size, columns in self._columns.items() if self._latest else ():
            if self.held < held:  # the columns of the prompts
                places = torch.arange(max(0, held - size), held, device=self.device)
                columns[places % size] = places
            columns[held % size] = held
            filled = min(held + 1, size)
            padded = self._latest > held + 1 - filled
            self._seen[size] = (columns[:filled] >= self.begins[:, None])[:, None, None] if padded else None
        self.held = held + 1
        return self

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *more: Any, **named: Any) -> Any:
        """Store the keys and values of a layer, [rows, KV heads, tokens, head size]. Returns those to attend to."""
        if layer == len(self.keys):
            self._allocate(key, value, self.sizes[layer])
        size, (keys, values) = self.sizes[layer], self._live[layer]
        if self._filling is not None:
            self._filling.store(keys, key, size)
            self._filling.store(values, value, size)
            return key, value
        if self._device is not None:
            self._new = key, value  # stored by the attention
            return keys, values
        place, filled = (self.held - 1) % size, min(self.held, size)
        keys.select(2, place).copy_(key.select(2, 0))
        values.select(2, place).copy_(value.select(2, 0))
        return keys.narrow(2, 0, filled), values.narrow(2, 0, filled)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, size: int) -> None:
        """In the dtype of the values: autocast would round the keys to it in every matmul. Padding is never written: it must be
        finite, because its weight of 0 is multiplied with it."""
        for parts, new in ((self.keys, key), (self.values, value)):
            shape = (self.rows, new.shape[1], size, new.shape[3])
            parts.append(torch.zeros(shape, dtype=value.dtype, device=self.device))
        self._live.append((self.keys[-1], self.values[-1]))

    def keep(self, order: Sequence[int]) -> None:
        """The rows of `order` alone, in that order. Only rows that change their place are copied."""
        moved = [(to, place) for to, place in enumerate(order) if to != place]
        if moved:
            to, places = (torch.tensor(part, device=self.device) for part in zip(*moved, strict=True))
            for part in (*self.keys, *self.values):
                part[to] = part[places]
        begins = self.begins.tolist()
        self._begin_with([begins[place] for place in order])
        self._seen.clear()

    # --- attention

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:  # fmt: skip
        """[rows, heads, tokens, size] of the queries and, from `update`, of all keys and values in sight; those of another
        layer where layers share them."""
        if self._device is not None:
            from tunix_rt.engines.torch.triton.decode import attend_to_cache

            new, self._new, (state, begins) = self._new, None, self._device
            return attend_to_cache(query, key, value, new, begins=begins, state=state, scale=scale, softcap=softcap)
        query, key, groups = query.to(value.dtype), key.to(value.dtype), query.shape[1] // key.shape[1]
        filling, shape = self._filling, query.shape
        mask = (
            self._seen.get(self._size(window)) if filling is None else filling.mask(window, needed=softcap is not None)
        )
        if filling is None and (shape[0] >= FOLDED_ROWS or query.device.type != "cpu" or softcap is not None):
            query, groups = query.view(shape[0], key.shape[1], groups, shape[3]), 1
        if softcap is None:
            causal = filling is not None and mask is None
            if groups > 1 and query.device.type == "cuda" and not (causal and query.dtype != torch.float32):
                # Only flash attention shares KV heads; for others torch would materialize the scores.
                key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
                groups = 1
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
            )
        else:
            key, value = (part if groups == 1 else part.repeat_interleave(groups, dim=1) for part in (key, value))
            out = _capped(query, key, value, mask, scale, softcap)
        return out.reshape(*shape[:3], value.shape[3])


class _Filling:
    """A forward pass over prompts, left-padded to one length: which rows they fill, and what each token sees."""

    def __init__(
        self, held: int, rows: torch.Tensor, prompts: torch.Tensor, begins: torch.Tensor, device: torch.device
    ) -> None:
        self.held = held
        self.rows, self.prompts, self.begins = rows.to(device), prompts.to(device), begins.to(device)
        self.padded, self.longest = bool(begins.any()), 0
        self._masks: dict[int | None, torch.Tensor] = {}

    def store(self, part: torch.Tensor, new: torch.Tensor, size: int) -> None:
        self.longest = new.shape[2]
        kept = min(size, self.longest)
        slots = torch.arange(self.held - kept, self.held, device=new.device) % size
        part[self.rows[:, None], :, slots] = new[self.prompts, :, -kept:].transpose(1, 2).to(part.dtype)

    def mask(self, window: int | None, *, needed: bool) -> torch.Tensor | None:
        """[prompts, 1, tokens, tokens]; padding sees itself, because it must see something. None where every token sees all
        before it, unless it is `needed`."""
        if window is not None and window >= self.longest:
            window = None
        if window is None and not self.padded and not needed:
            return None
        if window not in self._masks:
            places = torch.arange(self.longest, device=self.begins.device)
            distance = places[:, None] - places
            near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            seen = near & (places >= self.begins[:, None, None]) | (distance == 0)
            self._masks[window] = seen[:, None]
        return self._masks[window]


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Attention with soft-capped scores, as transformers' eager attention computes it."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    static_cache: StaticCache | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: [rows, heads, tokens, size] in, [rows, tokens, heads, size] out."""
    reason = needs_more(module, dropout, more) or ("it has a mask" if attention_mask is not None else None)
    if reason or static_cache is None:
        raise InputError(
            f"a layer cannot use a static KV cache: {reason or 'it does not pass the cache on'}",
            fix="report it; the family is listed as one that can",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = static_cache.attend(query, key, value, scale=scale, window=sliding_window, softcap=softcap)
    return out.transpose(1, 2), None


def static_windows(model: Any) -> list[int | None] | None:
    """The sliding window of each layer, of a model that can have a static cache; None for others."""
    config = model.config
    family = FAMILIES.get(config.model_type)
    ahead = getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True)
    if family is None or not family.static_cache or ahead:
        return None
    windows: list[int | None] = []
    for layer in transformers.DynamicCache(config=config).layers:
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        else:
            return None
    return windows


def prefill_groups(lengths: Sequence[int], most: int) -> Iterator[range]:
    """Prompts, the longest first, that are prefilled together: few tokens of padding, and at most `most` tokens."""
    start = 0
    while start < len(lengths):
        width, end = lengths[start], start + 1
        while end < len(lengths) and (end + 1 - start) * width <= most and 2 * lengths[end] >= width:
            end += 1
        yield range(start, end)
        start = end


@dataclass(slots=True, kw_only=True)
class StaticBatch:
    """The inputs of the model on the device, one row per generation. Prompts are prefilled with the first logits."""

    cache: StaticCache
    prompts: list[list[int]]
    """Different ones, the longest first."""
    owners: list[list[int]]
    """The rows that each prompt belongs to."""
    last_position: int
    keys: torch.Tensor | None
    """Random bits for each new token, where tokens are sampled."""
    ids: torch.Tensor
    held: int
    prefilled: bool = False
    graphs: Any = None
    """The `DecodeGraphs` that compute its steps; None: each kernel is launched by itself."""
    implementation: ClassVar[str] = STATIC

    def logits(self, model: Any, head: Head | None = None) -> torch.Tensor:
        """Of the next token of every row."""
        if not self.prefilled:
            self.prefilled = True
            return self._prefill(model, head)
        # A row that has ended is computed until it leaves, with positions clamped to the last.
        positions = (self.held - self.cache.begins).clamp(max=self.last_position)[:, None]
        cache = self.cache.next_column(self.held)
        self.held += 1
        return next_logits(model, self.ids, positions, cache)

    def _prefill(self, model: Any, head: Head | None) -> torch.Tensor:
        found = torch.empty(0) if head is None else head.out[: self.cache.rows]
        for group in prefill_groups([len(one) for one in self.prompts], PREFILL_TOKENS[self.ids.device.type]):
            width = len(self.prompts[group.start])
            lengths = torch.tensor([len(self.prompts[place]) for place in group])
            ids = torch.tensor(
                [[*(width - len(one)) * one[:1], *one] for one in self.prompts[group.start : group.stop]]
            )
            begins = width - lengths
            positions = (torch.arange(width) - begins[:, None]).clamp(min=0)
            pairs = [(row, place - group.start) for place in group for row in self.owners[place]]
            rows, of = zip(*pairs, strict=True)
            cache = self.cache.fill(self.held, rows, of, begins)
            logits = next_logits(model, ids.to(self.ids.device), positions.to(self.ids.device), cache, head)
            if not found.numel():
                found = logits.new_empty(self.cache.rows, logits.shape[1])
            if of != tuple(range(len(logits))):  # samples of one prompt
                logits = logits[torch.tensor(of, device=found.device)]
            found[torch.tensor(rows, device=found.device)] = logits
        return found

    def take(self, chosen: torch.Tensor) -> None:
        """The next tokens of all rows."""
        self.ids = chosen.unsqueeze(1)

    def keep(self, order: Sequence[int]) -> None:
        if self.graphs is not None:
            self.graphs.keep(order)
            return
        kept = torch.tensor(order, device=self.ids.device)
        self.ids = self.ids[kept]
        if self.keys is not None:
            self.keys = self.keys[kept]
        self.cache.keep(order)


def static_batch(
    prompts: Sequence[Sequence[int]], windows: Sequence[int | None], *, new_tokens: int, positions: int | None,
    keys: torch.Tensor | None, device: torch.device,
) -> StaticBatch:  # fmt: skip
    """One row for each of `prompts`, of which equal ones are prefilled once."""
    AttentionInterface.register(STATIC, _attend)
    owners: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        owners.setdefault(tuple(prompt), []).append(row)
    different = sorted(owners, key=len, reverse=True)
    width = len(different[0])
    begins = [width - len(prompt) for prompt in prompts]
    return StaticBatch(
        cache=StaticCache(windows, begins=begins, capacity=width + new_tokens, device=device),
        prompts=[list(prompt) for prompt in different],
        owners=[owners[prompt] for prompt in different],
        last_position=(positions or 2**31) - 1,
        keys=None if keys is None else keys.to(device),
        ids=torch.empty(0, dtype=torch.long, device=device),
        held=width,
    )

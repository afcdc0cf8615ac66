"""Decode steps on a GPU as CUDA graphs: one launch for a token of every row, instead of a thousand.

A graph replays the same kernels on the same addresses. So ids, noise, output and the number of the current column are tensors
that stay where they are, and the attention of a step reads from the device how many columns there are. There is one graph for
each number of rows, captured when it is first needed; the token before its capture is computed eagerly, as its warm-up.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from tunix_rt.engines.decoding import NOT_A_TOKEN, Decoding
from tunix_rt.engines.torch.lm_head import Head, next_logits
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.sampling import choose
from tunix_rt.engines.torch.static_cache import StaticBatch, StaticCache
from tunix_rt.models.families import FAMILIES

OLDEST_CAPABILITY = (8, 0)
"""Of the Triton kernels of a decode step."""


def is_supported(engine: Engine) -> bool:
    """Whether decode steps can be captured: elsewhere each kernel is launched by itself."""
    return (
        engine.device.type == "cuda"
        and engine.compute in (torch.float32, torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(engine.device) >= OLDEST_CAPABILITY
        and importlib.util.find_spec("triton") is not None
    )


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """The decode steps of one batch after another, of which none has more rows or columns than the first."""

    def __init__(self, engine: Engine, decoding: Decoding, *, rows: int, new_tokens: int, logprobs: bool) -> None:
        device = engine.device
        self.cache: StaticCache | None = None
        self.state = torch.zeros(2, dtype=torch.long, device=device)
        """The column of the next token, and how many new tokens there are before it."""
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, new_tokens, dtype=torch.long, device=device)
        self.scores = torch.zeros(rows, new_tokens, 2, dtype=torch.float64, device=device) if logprobs else None
        self.keys = torch.zeros(rows, new_tokens, dtype=torch.long, device=device) if decoding.temperature else None
        self._begins = torch.zeros(rows, dtype=torch.long, device=device)
        self._model, self._decoding = engine.model, decoding
        self._head = Head.of(engine.model, engine.compute, rows)
        self._last_position = (engine.positions or 2**31) - 1
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(device)
        self._taken = 0

    def fits(self, batch: StaticBatch, new_tokens: int) -> bool:
        """Whether the buffers are large enough for `batch`."""
        rows, longest = self.tokens.shape
        within = self.cache is None or batch.cache.capacity <= self.cache.capacity
        return within and batch.cache.rows <= rows and new_tokens <= longest

    def begin(self, batch: StaticBatch) -> None:
        """Take over `batch`, which has prefilled nothing yet: its keys and values go to the memory of the first one."""
        if self.cache is not None:
            self.cache.restart(batch.cache)
            batch.cache = self.cache
        self.cache = batch.cache
        self._begins[: batch.cache.rows] = batch.cache.begins
        if self.keys is not None:
            assert batch.keys is not None
            self.keys[: batch.cache.rows, : batch.keys.shape[1]] = batch.keys
        self._taken = 0

    def more_tokens(self, batch: StaticBatch, count: int) -> tuple[list[list[int]], list[list[list[float]]]]:
        """The next `count` tokens of every row, and their scores. Waits for the device once."""
        rows, steps = batch.cache.rows, count
        if self._taken == 0:
            if not batch.cache.keys and rows > 1:
                self._allocate(batch.cache)
            self.state.copy_(torch.tensor([batch.held - 1, 0]))
            self._choose(batch.logits(self._model, self._head), rows)
            steps -= 1
        if steps and rows not in self._graphs:
            self._graphs[rows] = self._captured(rows)
            steps -= 1
        for _ in range(steps):
            self._graphs[rows].replay()
        new = slice(self._taken, self._taken + count)
        self._taken += count
        return self.tokens[:rows, new].tolist(), [] if self.scores is None else self.scores[:rows, new].tolist()

    def _allocate(self, cache: StaticCache) -> None:
        """Keys and values of all layers side by side, by a pass over one token: beside the activations of a prefill they would
        leave gaps that nothing fits into."""
        one = torch.zeros(1, dtype=torch.long)
        ids = self.ids[:1]
        next_logits(
            self._model, ids, torch.zeros_like(ids), cache.fill(1, [0], [0], one), self._head, self._head.out[:1]
        )

    def keep(self, order: Sequence[int]) -> None:
        """The rows of `order` alone, in that order."""
        assert self.cache is not None
        kept = torch.tensor(order, device=self.ids.device)
        for part in (self.ids, self.tokens, self.scores, self.keys, self._begins):
            if part is not None:
                part[: len(order)] = part[kept]
        self.cache.keep(order)

    def _captured(self, rows: int) -> torch.cuda.CUDAGraph:
        """Computes one token of `rows` rows, and captures the next one."""
        if not self._graphs:  # during a capture the allocator returns nothing that it has in reserve
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(rows)
            torch.cuda.current_stream().synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(rows)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _step(self, rows: int) -> None:
        assert self.cache is not None
        begins = self._begins[:rows]
        positions = (self.state[0] - begins).clamp(max=self._last_position)[:, None]
        cache = self.cache.on_device(self.state, begins)
        with fused_norms(self._model):
            logits = next_logits(self._model, self.ids[:rows], positions, cache, self._head, self._head.out[:rows])
        self._choose(logits, rows)

    def _choose(self, logits: torch.Tensor, rows: int) -> None:
        """The next token of each row; NOT_A_TOKEN where logits are NaN. It is in the next column."""
        decoding, scores = self._decoding, self.scores
        if decoding.temperature and decoding.top_p < 1:  # sorts the logits
            number = self.state[1:2]
            of = None if self.keys is None else self.keys[:rows].index_select(1, number)[:, 0]
            chosen, found = choose(logits, decoding, of, scores is not None)
            self.ids[:rows, 0] = chosen
            valid = torch.where(logits.isnan().any(dim=-1), NOT_A_TOKEN, chosen)
            self.tokens[:rows].index_copy_(1, number, valid[:, None])
            if scores is not None:
                scores[:rows].index_copy_(1, number, found[:, None])
        else:
            from tunix_rt.engines.torch.triton.decode import choose_next

            choose_next(
                logits, self.keys, self.state, temperature=decoding.temperature, ids=self.ids, tokens=self.tokens,
                scores=scores,
            )  # fmt: skip
        self.state.add_(1)


@contextlib.contextmanager
def fused_norms(model: Any) -> Iterator[None]:
    """RMSNorm in one kernel within the block, where transformers launches ten: of a step of Gemma 3 they are two kernels in
    three."""
    from tunix_rt.engines.torch.triton.decode import rms_norm

    kind = FAMILIES[model.config.model_type].norm
    norms = [one for one in model.modules() if type(one).__name__.endswith("RMSNorm") and hasattr(one, "weight")]
    for one in norms if kind != "layer" else []:
        eps = one.variance_epsilon if hasattr(one, "variance_epsilon") else one.eps
        one.forward = partial(rms_norm, weight=one.weight, eps=eps, kind=kind)
    try:
        yield
    finally:
        for one in norms:
            one.__dict__.pop("forward", None)

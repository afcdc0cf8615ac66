"""Peak memory of a run, predicted as a sum of named parts, from `config.json` and settings alone. Loads no weights.

What a step keeps is counted tensor by tensor (a test holds the count against autograd's own saved tensors). On a CPU the
prediction is the rise of resident memory over the moment before the load, so it also has to follow the C allocator: glibc
serves blocks up to `HEAP_BLOCK_BYTES` from a heap that it seldom returns, and larger ones as mappings that it returns at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tunix_rt.config import RunConfig
from tunix_rt.plan.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}

MIB = 2**20
HEAP_BLOCK_BYTES = 32 * MIB
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: freed blocks up to this size stay in the heap of the process (mallopt(3))."""
HEAP_SLACK = 0.25
"""Share of the heap lost between blocks after some steps. Fitted to the cases marked so in
benchmarks/results/memory_cpu.json."""
CPU_OVERHEAD_BYTES = 27 * MIB
"""Thread pools, code loaded by the first step, library buffers. Fitted like the slack; mostly to case `tiny 1x8`, where
little else is counted."""
CUDA_OVERHEAD_BYTES = 32 * MIB
"""Room for workspaces of the CUDA libraries inside the allocator. An allowance, not measured."""
CUDA_CONTEXT_BYTES = 768 * MIB
"""Room for the CUDA context and allocator rounding, outside what the allocator counts. An allowance, not measured."""
LOGIT_COPIES = 3
"""Full-vocabulary tensors alive at once as the loss turns back: log-probabilities, their gradient, the logits' gradient."""
EVAL_LOGIT_COPIES = 2
"""The same without gradients: logits and log-probabilities."""
EVAL_LOSS_ROWS = 1024
"""Target tokens projected at a time when no gradient is needed (the engine's chunk)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One moment of the run and what is in memory then, in bytes by cause."""

    name: str
    parts: dict[str, int]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes by phase and part. `peak_bytes` is the largest phase; nothing is added across phases."""

    device: str
    dtype: str
    parameters: int
    rows: int
    row_tokens: int
    phases: tuple[Phase, ...]
    peak_phase: str
    peak_bytes: int
    """On a CPU the rise of resident memory; on CUDA what the allocator will have given out."""
    context_bytes: int
    """Taken on the device besides, by the CUDA context; 0 on a CPU."""

    @property
    def peak(self) -> Phase:
        return next(phase for phase in self.phases if phase.name == self.peak_phase)


def predict(
    shape: ModelShape, config: RunConfig, *, device: str, row_tokens: int | None = None, target_share: float = 1.0
) -> MemoryPlan:
    """What training `shape` under `config` needs on `device` (`cpu` or `cuda`).

    Before the data is read the rows are taken to be as long as `data.max_length` and every token to be a target, the
    worst case. Give the longest row as `row_tokens` and the share of targets to predict a run whose rows are known.
    Held-out rows and questions are single examples, which are never longer than the positions of the model.
    """
    training, evaluation = config.training, config.evaluation
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    single = min(length, shape.max_positions)
    step = _Batch(rows=training.per_device_train_batch_size, length=length, packed=config.data.packing, device=device)
    asked = _Batch(rows=evaluation.per_device_eval_batch_size, length=single, packed=config.data.packing, device=device)
    width = DTYPE_BYTES[training.dtype]
    weights = shape.parameters * width
    state = {"weights": weights, "optimizer": 2 * weights}
    overhead = {"overhead": CPU_OVERHEAD_BYTES if device == "cpu" else CUDA_OVERHEAD_BYTES}
    # Between steps the gradients are freed; on a CPU their place in the heap is not, and seldom suits what comes next.
    between = state | overhead | {"gradients": weights if device == "cpu" else 0}
    phases = (
        _phase("load", weights=weights, loading=_loading(shape, config, width), **overhead),
        *_step_phases(shape, config, step, state | overhead, target_share),
        _heldout_phase(shape, asked, width, between),
        _generation_phase(shape, asked, width, evaluation.max_new_tokens, between),
        _phase("save", **between),
    )
    peak = max(phases, key=lambda phase: phase.total_bytes)
    return MemoryPlan(
        device=device,
        dtype=training.dtype,
        parameters=shape.parameters,
        rows=step.rows,
        row_tokens=length,
        phases=phases,
        peak_phase=peak.name,
        peak_bytes=peak.total_bytes,
        context_bytes=0 if device == "cpu" else CUDA_CONTEXT_BYTES,
    )


def longest_row(shape: ModelShape, config: RunConfig, tokens: int) -> int:
    """`tokens`, unless a row is one example: no example goes beyond the model's positions, several in a row do."""
    return tokens if config.data.packing else min(tokens, shape.max_positions)


def _phase(name: str, **parts: int) -> Phase:
    return Phase(name=name, parts=parts, total_bytes=sum(parts.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Rows of one forward pass."""

    rows: int
    length: int
    packed: bool
    device: str

    @property
    def tokens(self) -> int:
        return self.rows * self.length


# --- what a step keeps -----------------------------------------------------------------------------------------------


def kept_by_layer(shape: ModelShape, *, rows: int, length: int, packed: bool, device: str) -> list[int]:
    """Sizes, in elements, of the tensors that one layer keeps for its backward pass."""
    tokens, hidden = rows * length, shape.hidden
    query, kv = tokens * shape.query_size, tokens * shape.kv_size
    kept = [tokens * hidden] * 2  # the inputs of the two blocks' first products
    if shape.norm_has_bias:  # LayerNorm: its input, mean and deviation
        kept += [tokens * hidden, tokens, tokens] * shape.norms_per_layer
    else:  # RMSNorm, spelled out: its input, the normalised input and the root
        kept += [tokens * hidden, tokens * hidden, tokens] * shape.norms_per_layer
    if shape.head_norms:
        kept += [query, query, tokens * shape.heads, kv, kv, tokens * shape.kv_heads]
    kept += _kept_by_attention(shape, rows=rows, length=length, packed=packed, device=device)
    if shape.hidden_dropout:
        kept += [tokens * hidden] * 2
    # Gate, activated gate, up and their product; or the five operands of a spelled-out GELU; or input and output.
    inner = 4 if shape.gated_mlp else 5 if shape.composite_activation else 2
    return kept + [tokens * shape.ffn] * inner


def _kept_by_attention(shape: ModelShape, *, rows: int, length: int, packed: bool, device: str) -> list[int]:
    """Query, key, value and result, and either the scores or what the fused kernel needs to find them again.

    The fused kernel of torch (SDPA) keeps one number per head and token. With a packed mask it also keeps the mask as
    numbers, once per layer, and repeats shared key-value heads. It steps aside for dropout on a CPU and for soft caps.
    """
    tokens = rows * length
    query, kv = tokens * shape.query_size, tokens * shape.kv_size
    scores = tokens * shape.heads * length
    if shape.capped_scores:  # the capped scores and their softmax
        return [query] * 4 + [scores] * 2
    if shape.attention_dropout and device == "cpu":  # the softmax, what dropout leaves of it, and which it leaves
        return [query] * 4 + [scores] * 3
    if packed:
        return [query] * 4 + [tokens * shape.heads, tokens * length]
    return [query, query, kv, kv, tokens * shape.heads]


def _step_phases(
    shape: ModelShape, config: RunConfig, batch: _Batch, state: dict[str, int], target_share: float
) -> tuple[Phase, Phase]:
    """The two moments at which a step can peak: everything kept and the loss turning back, or all gradients there."""
    training = config.training
    width = DTYPE_BYTES[training.dtype]
    layer = [
        size * width
        for size in kept_by_layer(shape, rows=batch.rows, length=batch.length, packed=batch.packed, device=batch.device)
    ]
    block_input = batch.tokens * shape.hidden * width
    # Checkpointing keeps the input of every layer, and one layer in full while it is computed again.
    kept = [block_input] * shape.layers + layer if training.gradient_checkpointing else layer * shape.layers
    kept += [block_input] * 3  # embedded tokens, the last norm and its result
    targets = int(batch.tokens * target_share)
    logits = [targets * shape.vocab * max(width, 4)] * (LOGIT_COPIES + 2 * shape.capped_logits)
    table = shape.embedding_parameters * width
    gradients = shape.parameters * width
    accumulating = training.gradient_accumulation_steps > 1
    in_flight = sum(layer)  # gradients of what one layer kept, while its backward pass runs
    slack = _slack(kept + logits, batch.device)
    forward = _phase(
        "loss",
        **state,
        # From the second micro-batch on, the gradients of the first are there.
        gradients=gradients if accumulating else table,
        activations=sum(kept),
        loss_head=sum(logits),
        in_flight=in_flight,
        allocator_slack=slack,
    )
    returned = batch.device != "cpu"
    backward = _phase(
        "backward",
        **state,
        gradients=gradients,
        # A table used twice gets two gradients, then their sum; so does every parameter when accumulating.
        gradient_sums=2 * table if shape.tied_head or accumulating else 0,
        activations=0 if returned else _heap(kept),
        loss_head=0 if returned else _heap(logits),
        in_flight=in_flight,
        allocator_slack=slack,
    )
    return forward, backward


def _heap(blocks: Iterable[int]) -> int:
    """Bytes of freed `blocks` that stay with the process. A larger block counts as the largest that does."""
    return sum(min(block, HEAP_BLOCK_BYTES) for block in blocks)


def _slack(blocks: list[int], device: str) -> int:
    return int(HEAP_SLACK * _heap(blocks)) if device == "cpu" else 0


# --- load and evaluation ---------------------------------------------------------------------------------------------


def _loading(shape: ModelShape, config: RunConfig, width: int) -> int:
    """Beside the weights: the file they are read from, or the head that random weights draw before it is tied."""
    if config.model.weights == "pretrained":
        return shape.parameters * width
    return shape.embedding_parameters * width if shape.tied_head else 0


def _heldout_phase(shape: ModelShape, batch: _Batch, width: int, state: dict[str, int]) -> Phase:
    """Forward passes without gradients: one layer at a time, the head in chunks."""
    layer = _forward_of_one_layer(shape, batch, width)
    logits = [min(EVAL_LOSS_ROWS, batch.tokens) * shape.vocab * max(width, 4)] * EVAL_LOGIT_COPIES
    return _phase(
        "held-out loss",
        **state,
        activations=sum(layer),
        loss_head=sum(logits),
        allocator_slack=_slack(layer + logits, batch.device),
    )


def _generation_phase(
    shape: ModelShape, batch: _Batch, width: int, max_new_tokens: int, state: dict[str, int]
) -> Phase:
    """Prompts up to a whole row, then `max_new_tokens` more: keys and values of all, one layer of them copied to grow."""
    tokens = batch.rows * (batch.length + max_new_tokens)
    layer = _forward_of_one_layer(shape, batch, width)
    logits = [batch.rows * shape.vocab * max(width, 4)] * EVAL_LOGIT_COPIES
    cache = [tokens * shape.kv_size * width] * (2 * shape.layers + 2)
    repeated = [tokens * shape.query_size * width] * 2  # key-value heads repeated for each query head, in one layer
    return _phase(
        "generation",
        **state,
        kv_cache=sum(cache) + sum(repeated),
        activations=sum(layer),
        loss_head=sum(logits),
        allocator_slack=_slack(layer + logits, batch.device),
    )


def _forward_of_one_layer(shape: ModelShape, batch: _Batch, width: int) -> list[int]:
    """Bytes of the tensors alive at once in a forward pass without gradients, at the widest point of a layer."""
    tokens = batch.tokens * width
    stream = [tokens * shape.hidden] * 3  # the residual, its norm and the block's result
    mask = [tokens * batch.length] * (2 if batch.packed else 0)  # as truth values and as numbers
    mlp = [tokens * shape.ffn] * (3 if shape.gated_mlp else 4)
    scores = [tokens * shape.heads * batch.length] * (3 if shape.capped_scores else 0)
    attention = [tokens * shape.query_size] * 6 + scores  # query, key, value, and the halves of their rotation
    return stream + mask + max(mlp, attention, key=sum)

"""Peak memory of a run, predicted as a sum of named parts, from `config.json` and settings alone. Loads no weights.

What a step keeps is counted tensor by tensor (`activations.py`), what it holds parameter by parameter (`footprint.py`); here
they are put together into the moments at which a run can peak. On CUDA the allocator gives out what is counted. On a CPU the
prediction is the rise of resident memory over the moment before the load, so it also has to follow the C allocator: glibc
serves blocks up to `HEAP_BLOCK_BYTES` from a heap that it seldom returns, and what one moment leaves behind seldom suits the
next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tunix_rt.config import RunConfig
from tunix_rt.plan.activations import (
    Batch,
    Moment,
    backward_moments,
    forward_of_one_layer,
    generating_kernel,
    kept_by_last_norm,
    kept_by_layer,
    kept_once,
)
from tunix_rt.plan.compiling import compiled_length, may_compile
from tunix_rt.plan.footprint import Footprint, footprint_of
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.tensors import elements

MIB = 2**20
HEAP_BLOCK_BYTES = 32 * MIB
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: freed blocks up to this size stay in the heap of the process (mallopt(3))."""
CPU_OVERHEAD_BYTES = 27 * MIB
"""Thread pools, code loaded by the first step, library buffers. Fitted like what follows; mostly to case `tiny 1x8`, where
little else is counted."""
EVALUATION_SLACK = 0.25
KEPT_SLACK, ACCUMULATED_SLACK, ADAPTED_SLACK = 0.08, 0.6, 0.7
RECOMPUTED_SLACK = 1.6
UPDATED_SLACK, UPDATED_SLACK_BYTES = 0.25, 384 * MIB
"""Shares of the heap that are lost between blocks, as `_lost` uses them. Fitted to the cases marked so in
benchmarks/results/memory_cpu.json; two runs of one case differ by up to 30 % where updates are in the backward pass."""
CUDA_OVERHEAD_BYTES = 64 * MIB
"""Workspaces of cuBLAS, which torch takes from its allocator: 32 MiB on Hopper, less elsewhere, for each of the two threads
that compute (forward and backward)."""
PUBLISHED_BYTES = 2
"""Of an element of the file that pretrained weights are read from."""
CUDA_CONTEXT_BYTES = 512 * MIB
"""Room for the CUDA context, outside what the allocator counts. An allowance, not measured."""


PROOF_SPARE_BYTES = 2**30
"""Of a fresh process that loads the final model, beside the weights: libraries, a CUDA context, activations of short prompts."""
LEFT_OUT = ("proof",)
"""Phases that no run is refused for. The final model is proven on the run's own device where it finds room there, else on the
CPU, else not at all, which is said (`evaluate/reloading.py`)."""
EVAL_ROWS = (64, 32, 16, 8, 4, 2, 1)
"""Questions answered at once where no number is asked for: the first of these that needs no more memory than training."""
SPARE = ("snapshot", "mapped_file")
"""Parts that a run can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One moment of the run and what is in memory then, in bytes by cause."""

    name: str
    parts: dict[str, int]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes by phase and part. `peak_bytes` is the largest that is judged; nothing is added across phases."""

    device: str
    dtype: str
    parameters: int
    rows: int
    row_tokens: int
    target_share: float
    """Of the tokens, how many are taken to be targets."""
    phases: tuple[Phase, ...]
    peak_phase: str
    peak_bytes: int
    """On a CPU the rise of resident memory; on CUDA what the allocator will have given out."""
    least_bytes: int
    """The same without what a run can do without: a copy of the state for checkpoints, which is only made where there is
    room for it, and pages of a file that the system takes back when it needs them."""
    context_bytes: int
    """Taken on the device besides, by the CUDA context; 0 on a CPU."""
    eval_rows: int
    """Questions that are answered at once, and rows of a forward pass of the held-out loss."""
    devices: int = 1
    """Over which the run is spread. Bytes are those of one of them; on a CPU, of all together."""

    @property
    def peak(self) -> Phase:
        return next(phase for phase in self.phases if phase.name == self.peak_phase)

    @property
    def judged(self) -> tuple[Phase, ...]:
        """All that must fit: the phases but those that are left out where there is no room."""
        return tuple(phase for phase in self.phases if phase.name not in LEFT_OUT)

    @property
    def least(self) -> Phase:
        """The phase that needs `least_bytes`."""
        return max(map(_without_spare, self.judged), key=lambda phase: phase.total_bytes)


def predict(
    shape: ModelShape,
    config: RunConfig,
    *,
    device: str,
    row_tokens: int | None = None,
    target_share: float = 1.0,
    capability: tuple[int, int] | None = None,
) -> MemoryPlan:
    """What training `shape` under `config` needs on `device` (`cpu` or `cuda`).

    Before the data is read the rows are taken to be as long as `data.max_length` and every token to be a target, the
    worst case. Give the longest row as `row_tokens` and the share of targets to predict a run whose rows are known.
    Held-out rows and questions are single examples, which are never longer than the positions of the model. A GPU of
    unknown CUDA `capability` is taken to be a modern one; below 8.0, attention over packed rows needs a mask.
    """
    training, evaluation = config.training, config.evaluation
    run = footprint_of(shape, training, device)
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    compiles = may_compile(training.compile, device=device, packed=config.data.packing)
    step = Batch(
        rows=training.per_device_train_batch_size,
        length=compiled_length(length) if compiles else length,
        packed=config.data.packing,
        device=device,
        modern=capability is None or capability >= (8, 0),
        deterministic=training.deterministic,
    )
    accumulating = training.gradient_accumulation_steps > 1
    # A checkpoint is written while training goes on, by copies in the memory of the host.
    copied = run.checkpoint if device == "cpu" else 0
    during = {"snapshot": copied if training.save_steps is not None else 0}
    phases = [
        _load(run, pretrained=config.model.weights == "pretrained"),
        *_step(run, step, max(1, int(step.tokens * target_share)), accumulating, _state(run) | during),
        _save(run, copied),
    ]
    asking = {
        rows: list(_asking(run, replace(step, rows=rows, length=min(length, shape.max_positions)), config, during))
        for rows in ([evaluation.per_device_eval_batch_size] if evaluation.per_device_eval_batch_size else EVAL_ROWS)
    }
    room = max(_without_spare(phase).total_bytes for phase in phases)
    fitting = (rows for rows, asked in asking.items() if all(_without_spare(one).total_bytes <= room for one in asked))
    eval_rows = next(fitting, min(asking))
    phases += asking[eval_rows]
    peak = max(phases, key=lambda phase: phase.total_bytes)
    return MemoryPlan(
        device=device,
        dtype=training.dtype,
        parameters=shape.parameters,
        rows=step.rows,
        row_tokens=length,
        target_share=target_share,
        phases=(*phases, _proof(run)),
        peak_phase=peak.name,
        peak_bytes=peak.total_bytes,
        least_bytes=max(_without_spare(phase).total_bytes for phase in phases),
        context_bytes=0 if device == "cpu" else CUDA_CONTEXT_BYTES,
        eval_rows=eval_rows,
    )


def longest_row(shape: ModelShape, config: RunConfig, tokens: int) -> int:
    """`tokens`, unless a row is one example: no example goes beyond the model's positions, several in a row do."""
    return tokens if config.data.packing else min(tokens, shape.max_positions)


def _phase(name: str, **parts: int) -> Phase:
    return Phase(name=name, parts=parts, total_bytes=sum(parts.values()))


def _without_spare(phase: Phase) -> Phase:
    return _phase(phase.name, **{name: size for name, size in phase.parts.items() if name not in SPARE})


def _state(run: Footprint) -> dict[str, int]:
    """What is there from the first step on."""
    overhead = CPU_OVERHEAD_BYTES if run.device == "cpu" else CUDA_OVERHEAD_BYTES
    return {"weights": run.weights, "optimizer": run.optimizer, "overhead": overhead}


def _between_steps(run: Footprint) -> dict[str, int]:
    """Between steps gradients are freed; on a CPU their place in the heap is not, and seldom suits what comes next."""
    kept = run.table_gradients if run.recipe.in_backward else run.gradients
    return _state(run) | {"gradients": kept if run.device == "cpu" else 0}


def _in_heap(blocks: Iterable[int]) -> int:
    """Bytes of `blocks` in the heap of the C library. A larger block counts as the largest that is served from it."""
    return sum(min(block, HEAP_BLOCK_BYTES) for block in blocks)


# --- load ------------------------------------------------------------------------------------------------------------


def _load(run: Footprint, *, pretrained: bool) -> Phase:
    """Beside the weights: the file they are read from, or the head that random weights draw before it is tied.

    Weights of the file's own type are the file itself, mapped into memory, until they are updated; it is taken to be of a
    16-bit type, as models are published. Then a few tokens are tried, with casts of one matrix after the other.
    """
    other_type = pretrained and run.device == "cpu" and run.widths.stream != PUBLISHED_BYTES
    drawn = elements(run.tensors.tables[:1]) * run.widths.stream if run.shape.tied_head and not pretrained else 0
    parts = {name: size for name, size in _state(run).items() if name != "optimizer"}
    return _phase(
        "load",
        **parts,
        loading=max(drawn, run.largest_cast, run.head_cast, run.operand),
        mapped_file=run.shape.parameters * PUBLISHED_BYTES if other_type else 0,
    )


# --- a step ----------------------------------------------------------------------------------------------------------


def _step(run: Footprint, batch: Batch, targets: int, accumulating: bool, state: dict[str, int]) -> tuple[Phase, ...]:
    """The moments at which a step can peak. From the second micro-batch on, the gradients of the first are there."""
    kept_layers = run.recipe.kept_layers(run.shape.layers)
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    layer = sum(kept_by_layer(run.shape, run.widths, batch).all)
    # A layer that is computed again keeps what it was given.
    kept = (run.shape.layers - kept_layers) * passed_on + kept_layers * layer
    kept += sum(kept_once(run.shape, run.widths, batch))
    behind = sum(kept_by_last_norm(run.shape, run.widths, batch)) + passed_on
    passing = 2 * passed_on if kept_layers else sum(forward_of_one_layer(run.shape, run.widths, batch))
    gradients = run.table_gradients if run.recipe.in_backward else run.gradients
    forward = _phase(
        "forward",
        **state,
        gradients=gradients if accumulating else 0,
        casts=kept_layers * run.casts_of_layer or run.largest_cast,
        activations=kept,
        in_flight=passing,
    )
    loss = _phase(
        "loss",
        **state,
        gradients=gradients if accumulating else run.head_gradient,
        casts=kept_layers * run.casts_of_layer,
        activations=kept + behind,
        loss_head=sum(run.loss_head(targets, gradients_there=accumulating)),
    )
    backward = max(_backward(run, batch, accumulating, state), key=lambda phase: phase.total_bytes)
    update = _phase("update", **state, gradients=gradients, in_flight=run.update_of(run.trained_kinds))
    phases = (forward, loss, backward, update)
    slack = _lost(run, batch, phases, accumulating) if run.device == "cpu" else 0
    return tuple(_phase(phase.name, **phase.parts, allocator_slack=slack) for phase in phases)


def _lost(run: Footprint, batch: Batch, phases: Iterable[Phase], accumulating: bool) -> int:
    """On a CPU: places in the heap that a moment of the step left behind and no other uses, after a few steps.

    None uses another's, so a part counts as it is at its largest. Where blocks that come and go lie between others that
    stay, more is lost: gradients while layers are computed again or the next micro-batch is, temporaries of adapters and
    of updates in the backward pass.
    """
    layers = run.shape.layers
    kept_layers = run.recipe.kept_layers(layers)
    live = max(phase.total_bytes for phase in phases)
    largest = {name: max(phase.parts.get(name, 0) for phase in phases) for phase in phases for name in phase.parts}
    layer = _in_heap(kept_by_layer(run.shape, run.widths, batch).all)
    passing = _in_heap(forward_of_one_layer(run.shape, run.widths, batch))
    kept = kept_layers * layer
    cut = kept * (KEPT_SLACK + ACCUMULATED_SLACK * accumulating + ADAPTED_SLACK * bool(run.adapters))
    cut += (1 - kept_layers / layers) * (RECOMPUTED_SLACK * layer + passing)
    if run.recipe.in_backward:
        cut += UPDATED_SLACK * min(run.updates, UPDATED_SLACK_BYTES)
    return max(0, sum(largest.values()) - live) + int(cut)


def _backward(run: Footprint, batch: Batch, accumulating: bool, state: dict[str, int]) -> Iterator[Phase]:
    """Moments of the backward pass, from the last layer to the lookup of the input tokens."""
    layers = run.shape.layers
    recomputed = layers - run.recipe.kept_layers(layers)
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    layer = sum(kept_by_layer(run.shape, run.widths, batch).all)
    once = sum(kept_once(run.shape, run.widths, batch))
    trained = run.width * elements(run.trained_of_layer)
    matrices = elements(run.tensors.matrices)

    def at(below: int, moment: Moment) -> Phase:
        """In the layer that has `below` layers before it."""
        kept_below = max(0, below - recomputed)
        held = min(below, recomputed) * passed_on + kept_below * layer + once
        # What the layer was given is kept as it is only where its norm computes in the same type.
        own = passed_on if below < recomputed and run.widths.stream != run.widths.norm else 0
        done = 0 if run.recipe.in_backward else int((layers - 1 - below + moment.done / matrices) * trained)
        return _phase(
            "backward",
            **state,
            gradients=run.gradients if accumulating else run.head_gradient + done,
            casts=kept_below * run.casts_of_layer + moment.casts * run.widths.compute * run.widths.casts,
            activations=held + own + moment.kept,
            in_flight=moment.in_flight + moment.updating * run.update_of(run.tensors.matrices[-1:]),
        )

    # All that is held rises or falls evenly from one to the next of these.
    for below in {0, recomputed - 1, recomputed, layers - 1} & set(range(layers)):
        for moment in backward_moments(run.shape, run.widths, batch):
            if run.recipe.in_backward or not moment.updating:
                yield at(below, moment)
    if not run.adapters:
        gradients = run.table_gradients if run.recipe.in_backward else run.gradients
        yield _phase("backward", **state, gradients=gradients, casts=0, activations=0, in_flight=_lookup(run, batch))


def _lookup(run: Footprint, batch: Batch) -> int:
    """The gradient of the input tokens: as it comes, in order, summed by token in at least float32, and rounded."""
    wide, narrow = max(4, run.width), run.widths.stream
    copies = 2 * narrow + wide + (wide + narrow if wide != run.width else 0)
    return batch.tokens * run.shape.hidden * copies


# --- evaluation and save ---------------------------------------------------------------------------------------------


def _asking(run: Footprint, batch: Batch, config: RunConfig, during: dict[str, int]) -> Iterator[Phase]:
    """What is measured and asked beside training, with the rows of `batch`."""
    new_tokens = config.evaluation.max_new_tokens
    if config.data.validation_fraction:
        yield _heldout(run, batch, _between_steps(run) | during)
    if config.evaluation.enabled:
        # Before the optimizer is made and after it is gone; on a CPU its place in the heap is taken to be still there.
        there = _between_steps(run) | {"optimizer": run.optimizer if run.device == "cpu" else 0}
        yield _phase("generation", **there, **answering_parts(run, batch, new_tokens))
    if config.evaluation.asked_along:
        rows = min(batch.rows, config.evaluation.asked_along)
        parts = answering_parts(run, replace(batch, rows=rows), new_tokens)
        yield _phase("samples", **_between_steps(run), **during, **parts)


def _heldout(run: Footprint, batch: Batch, state: dict[str, int]) -> Phase:
    """Forward passes without gradients: one layer at a time, then the head in chunks."""
    layer = forward_of_one_layer(run.shape, run.widths, batch) + kept_once(run.shape, run.widths, batch)
    head = run.loss_head_without_gradients(batch.tokens)
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    slack = int(EVALUATION_SLACK * _in_heap(layer + head)) if run.device == "cpu" else 0
    in_layers = {"casts": run.largest_cast, "activations": sum(layer), "loss_head": 0}
    in_head = {"casts": 0, "activations": passed_on, "loss_head": sum(head)}
    both = [_phase("held-out loss", **state, **parts, allocator_slack=slack) for parts in (in_layers, in_head)]
    return max(both, key=lambda phase: phase.total_bytes)


def answering_parts(run: Footprint, batch: Batch, max_new_tokens: int) -> dict[str, int]:
    """Prompts up to a whole row, then `max_new_tokens` more: keys and values of all, one layer of them copied to grow."""
    shape, width = run.shape, run.widths.compute
    tokens = batch.rows * (batch.length + max_new_tokens)
    kernel = generating_kernel(shape, run.widths, batch)
    layer = forward_of_one_layer(shape, run.widths, batch, kernel) + kept_once(shape, run.widths, batch, kernel)
    logits = [batch.rows * shape.vocab * max(width, 4)] * 2
    cache = [tokens * shape.kv_size * width] * (2 * shape.layers + 2)
    repeated = [tokens * shape.query_size * width] * 2  # key-value heads repeated for each query head, in one layer
    return {
        "casts": run.casts + run.head_cast,
        "kv_cache": sum(cache) + sum(repeated),
        "activations": sum(layer),
        "loss_head": sum(logits),
        "allocator_slack": int(EVALUATION_SLACK * _in_heap(layer + logits)) if run.device == "cpu" else 0,
    }


def reloaded_bytes(saved: int, *, device: str, autocast: bool) -> int:
    """Weights of a process that loads a folder with `saved` bytes of them: on a GPU, casts of matrices stand beside them."""
    return saved * 3 // 2 if device != "cpu" and autocast else saved


def _proof(run: Footprint) -> Phase:
    """The end of a run: a fresh process loads the final model on the same device, beside the one in memory.

    On a GPU the optimizer is gone and what the allocator held in vain was given back; on a CPU its place stays taken.
    """
    there = _between_steps(run) | {"optimizer": run.optimizer if run.device == "cpu" else 0}
    autocast = run.recipe.casts and run.recipe.frozen is None
    weights = reloaded_bytes(run.final_model, device=run.device, autocast=autocast)
    return _phase("proof", **there, fresh_process=weights + PROOF_SPARE_BYTES)


def _save(run: Footprint, copied: int) -> Phase:
    """A checkpoint; or the model in the end, with adapters added to it in float32 on the host, tensor by tensor.

    What an adapter adds is there twice, as it is and scaled; then beside the sum. Weights in float32 without an adapter are
    not copied on a CPU.
    """
    merged = 0
    if run.adapters:
        largest = 4 * max(elements([one]) for one in run.tensors.matrices)
        summed = run.shape.layers * elements(run.tensors.matrices)
        on_host = 4 * (summed if run.widths.stream == 4 else run.shape.parameters)
        merged = on_host + largest if run.device == "cpu" else 2 * largest
    return _phase("save", **_between_steps(run), snapshot=copied, merged=merged)

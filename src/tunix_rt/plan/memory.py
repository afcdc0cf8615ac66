"""Peak memory of a run, predicted as a sum of named parts, from `config.json` and settings alone. Loads no weights.

What a step keeps is counted tensor by tensor (`activations.py`), what it holds parameter by parameter (`footprint.py`); here
they are put together into the moments at which a run can peak. On CUDA the allocator gives out what is counted. On a CPU the
prediction is the rise of resident memory over the moment before the load, so it also has to follow the C allocator: glibc
serves blocks up to `HEAP_BLOCK_BYTES` from a heap that it seldom returns, and what one moment leaves behind seldom suits the
next.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.activations import Batch, elements, forward_of_one_layer, generating_kernel, kept_once
from tunix_rt.plan.compile_policy import compiled_length, layers_planned
from tunix_rt.plan.footprint import Footprint, footprint_of, footprint_to_ask
from tunix_rt.plan.phases import Phase, in_heap, phase_of, recorded_phases, step_phases
from tunix_rt.plan.shape import ModelShape

MIB = 2**20
CPU_OVERHEAD_BYTES = 27 * MIB
"""Thread pools, code loaded by the first step, library buffers. Fitted like what follows; mostly to case `tiny 1x8`, where
little else is counted."""
EVALUATION_SLACK = 0.25
CACHE_SLACK = 0.2
"""Of keys and values on a GPU: a cache that grows by a token is copied, layer by layer, and leaves places behind that nothing
fits into. A choice, after one case ran out of memory with less (benchmarks/results/memory_cuda.json)."""
CUDA_OVERHEAD_BYTES = 64 * MIB
"""Workspaces of cuBLAS, which torch takes from its allocator: 32 MiB on Hopper, less elsewhere, for each of the two threads
that compute (forward and backward)."""
RECORDING_OVERHEAD_BYTES = 128 * MIB
"""The same once more for each of two streams: layers that are recorded are tried out on one and recorded on another."""
PUBLISHED_BYTES = 2
"""Of an element of the file that pretrained weights are read from."""
CUDA_CONTEXT_BYTES = 512 * MIB
"""Room for the CUDA context, outside what the allocator counts. An allowance, not measured."""


PROOF_SPARE_BYTES = 2**30
"""Of a fresh process that loads the final model, beside the weights: libraries, a CUDA context, activations of short prompts."""
LEFT_OUT = ("proof",)
"""Phases that no run is refused for. The final model is proven on the run's own device where it finds room there, else on the
CPU, else not at all, which is said (`export/roundtrip.py`)."""
EVAL_ROWS = (64, 32, 16, 8, 4, 2, 1)
"""Questions answered at once where no number is asked for: the first of these that needs no more memory than training."""
SPARE = ("snapshot", "mapped_file")
"""Parts that a run can do without."""


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
    layers: str = "plain"
    """What computes them in a training step: `plain`, `compiled` or `recorded`."""
    pool_bytes: int = 0
    """Held besides what the allocator counts, for as long as training goes on: what recorded layers work in."""

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
    layers: str | None = None,
) -> MemoryPlan:
    """What training `shape` under `config` needs on `device` (`cpu` or `cuda`).

    Before the data is read the rows are taken to be as long as `data.max_length` and every token to be a target, the
    worst case. Give the longest row as `row_tokens` and the share of targets to predict a run whose rows are known.
    Held-out rows and questions are single examples, which are never longer than the positions of the model. A GPU of
    unknown CUDA `capability` is taken to be a modern one; below 8.0, attention over packed rows needs a mask. `layers`, as
    `layers_planned` names them, are of a long run on an unknown device unless given.
    """
    training, evaluation = config.training, config.evaluation
    modern = capability is None or capability >= (8, 0)
    run = footprint_of(shape, training, device, modern=modern)
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    if layers is None:
        layers = layers_planned(config, shape, device=device, capability=capability, row_tokens=length)
    step = Batch(
        rows=training.per_device_train_batch_size,
        length=length if layers == "plain" else compiled_length(length),
        packed=config.data.packing,
        device=device,
        modern=modern,
        deterministic=training.deterministic,
        compiled=layers != "plain",
    )
    accumulating = training.gradient_accumulation_steps > 1
    # A checkpoint is written while training goes on, by copies in the memory of the host.
    copied = run.checkpoint if device == "cpu" else 0
    during = {"snapshot": copied if training.save_steps is not None else 0}
    if layers == "recorded":
        during = {**during, "overhead": CUDA_OVERHEAD_BYTES + RECORDING_OVERHEAD_BYTES}
    in_step = step_phases(run, step, max(1, int(step.tokens * target_share)), accumulating, _state(run) | during)
    pool = 0
    if layers == "recorded":
        in_step, pool = recorded_phases(run, step, in_step)
        during = {**during, "gradients": run.gradients}  # they lie in the recording
    phases = [
        _load(run, pretrained=config.model.weights == "pretrained"),
        *in_step,
        _save(run, copied),
    ]
    asked = replace(step, compiled=False, length=min(length, shape.max_positions))
    asking = {
        rows: list(_asking(run, replace(asked, rows=rows), config, during))
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
        layers=layers,
        pool_bytes=pool,
    )


def longest_row(shape: ModelShape, config: RunConfig, tokens: int) -> int:
    """`tokens`, unless a row is one example: no example goes beyond the model's positions, several in a row do."""
    return tokens if config.data.packing else min(tokens, shape.max_positions)


def _without_spare(phase: Phase) -> Phase:
    return phase_of(phase.name, **{name: size for name, size in phase.parts.items() if name not in SPARE})


def _state(run: Footprint) -> dict[str, int]:
    """What is there from the first step on."""
    overhead = CPU_OVERHEAD_BYTES if run.device == "cpu" else CUDA_OVERHEAD_BYTES
    return {"weights": run.weights, "optimizer": run.optimizer, "overhead": overhead}


def _between_steps(run: Footprint) -> dict[str, int]:
    """Between steps gradients are freed; on a CPU their place in the heap is not, and seldom suits what comes next."""
    kept = run.table_gradients if run.recipe.in_backward else run.gradients
    return _state(run) | {"gradients": kept if run.device == "cpu" else 0}


# --- load ------------------------------------------------------------------------------------------------------------


def _load(run: Footprint, *, pretrained: bool) -> Phase:
    """Beside the weights: the file they are read from, or the head that random weights draw before it is tied.

    Weights of the file's own type are the file itself, mapped into memory, until they are updated; it is taken to be of a
    16-bit type, as models are published. Then a few tokens are tried, with casts of one matrix after the other.
    """
    other_type = pretrained and run.device == "cpu" and run.widths.stream != PUBLISHED_BYTES
    drawn = elements(run.tensors.tables[:1]) * run.widths.stream if run.shape.tied_head and not pretrained else 0
    base = run.shape.parameters * run.widths.stream
    later = run.weights - base + max(run.largest_cast, run.head_cast, run.operand)  # adapters come behind the draw
    parts = {"weights": base, "overhead": CPU_OVERHEAD_BYTES if run.device == "cpu" else 0}
    return phase_of(
        "load",
        **parts,
        loading=max(drawn, later),
        mapped_file=run.shape.parameters * PUBLISHED_BYTES if other_type else 0,
    )


# --- evaluation and save ---------------------------------------------------------------------------------------------


def _asking(run: Footprint, batch: Batch, config: RunConfig, during: dict[str, int]) -> Iterator[Phase]:
    """What is measured and asked beside training, with the rows of `batch`."""
    new_tokens = config.evaluation.max_new_tokens
    if config.data.validation_fraction:
        yield _heldout(run, batch, _between_steps(run) | during)
    if config.evaluation.enabled:
        # Before the optimizer is made and after it is gone; on a CPU its place in the heap is taken to be still there.
        there = _between_steps(run) | {"optimizer": run.optimizer if run.device == "cpu" else 0}
        yield phase_of("generation", **there, **answering_parts(run, batch, new_tokens))
    if config.evaluation.asked_along:
        rows = min(batch.rows, config.evaluation.asked_along)
        parts = answering_parts(run, replace(batch, rows=rows), new_tokens)
        yield phase_of("samples", **(_between_steps(run) | during), **parts)


def _heldout(run: Footprint, batch: Batch, state: dict[str, int]) -> Phase:
    """Forward passes without gradients: one layer at a time, then the head in chunks."""
    layer = forward_of_one_layer(run.shape, run.widths, batch) + kept_once(run.shape, run.widths, batch)
    head = run.loss_head_without_gradients(batch.tokens)
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    slack = int(EVALUATION_SLACK * in_heap(layer + head)) if run.device == "cpu" else 0
    in_layers = {"casts": run.largest_cast, "activations": sum(layer), "loss_head": 0}
    in_head = {"casts": 0, "activations": passed_on, "loss_head": sum(head)}
    both = [phase_of("held-out loss", **state, **parts, allocator_slack=slack) for parts in (in_layers, in_head)]
    return max(both, key=lambda phase: phase.total_bytes)


def answering_parts(run: Footprint, batch: Batch, max_new_tokens: int) -> dict[str, int]:
    """Prompts up to a whole row, then `max_new_tokens` more: keys and values of all, one layer of them copied to grow."""
    shape, width = run.shape, run.widths.compute
    tokens = batch.rows * min(batch.length + max_new_tokens, max(batch.length, shape.max_positions))
    kernel = generating_kernel(shape, run.widths, batch)
    layer = forward_of_one_layer(shape, run.widths, batch, kernel) + kept_once(shape, run.widths, batch, kernel)
    logits = [batch.rows * shape.vocab * max(width, 4)] * 2
    # Keys are rotated by numbers of the type that layers pass on, and kept as they come.
    keys = width if shape.learned_positions else max(width, run.widths.stream)
    cache = [tokens * shape.kv_size * (width + keys)] * (shape.layers + 1)
    cut = EVALUATION_SLACK * in_heap(layer + logits) if run.device == "cpu" else CACHE_SLACK * sum(cache)
    repeated = [tokens * shape.query_size * width] * 2  # key-value heads repeated for each query head, in one layer
    return {
        "casts": run.casts + run.head_cast,
        "kv_cache": sum(cache) + sum(repeated),
        "activations": sum(layer),
        "loss_head": sum(logits),
        "allocator_slack": int(cut),
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
    return phase_of("proof", **there, fresh_process=weights + PROOF_SPARE_BYTES)


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
    return phase_of("save", **_between_steps(run), snapshot=copied, merged=merged)


MOST_ROWS = {"cpu": 64, "cuda": 512}
"""More at once make a CPU no faster, and a GPU hardly."""
USED_SHARE = {"cpu": 0.5, "cuda": 0.85}
"""Of the memory at hand. A CPU's is shared with other programs, a GPU's comes in pieces."""


def rows_that_fit(
    shape: ModelShape,
    *,
    dtype: str,
    device: str,
    length: int,
    max_new_tokens: int,
    free_bytes: int,
    modern: bool = True,
) -> int:
    """The most prompts of `length` tokens whose answers fit into `free_bytes` beside the weights, and at least 1."""
    run = footprint_to_ask(shape, dtype, device)

    def needed(rows: int) -> int:
        batch = Batch(rows=rows, length=length, packed=False, device=device, modern=modern)
        return sum(answering_parts(run, batch, max_new_tokens).values())

    low, high = 1, MOST_ROWS[device]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= USED_SHARE[device] * free_bytes else (low, middle - 1)
    return low

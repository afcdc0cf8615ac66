"""Peak memory of a run of the PyTorch engine, predicted as a sum of named parts from `config.json` and the settings.

Activations are counted tensor by tensor (`activations.py`), weights, gradients and optimizer states parameter by parameter
(`footprint.py`); this module adds them up for each phase of a run. On CUDA the allocator returns what is counted. On a CPU the
prediction is the rise of resident memory over the moment before the load, so it also models the C allocator: glibc serves
blocks up to `HEAP_BLOCK_BYTES` from a heap that it seldom returns, and the next phase can seldom reuse what one has freed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan import footprint
from tunix_rt.plan.activations import Batch, saved_once
from tunix_rt.plan.compile_policy import compiled_length, layers_planned
from tunix_rt.plan.fsdp import NCCL_BYTES, SHARDED, Rank, rank_phases, streams_margin
from tunix_rt.plan.generation import EVALUATION_SLACK, generation_parts, widest
from tunix_rt.plan.phases import Phase, in_heap, phase_of, recorded_phases, step_phases
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.tensors import elements

MIB = 2**20
CPU_OVERHEAD_BYTES = 27 * MIB
"""Thread pools, code loaded by the first step, library buffers. Fitted like the figures below; mostly to the case `tiny 1x8`,
where little else is counted."""
CUDA_OVERHEAD_BYTES = 64 * MIB
"""cuBLAS workspaces, which torch takes from its allocator: 32 MiB on Hopper, less elsewhere, for the forward and the backward
thread."""
RECORDING_OVERHEAD_BYTES = 128 * MIB
"""The same again for two streams: CUDA graphs are warmed up on one and captured on another."""
PUBLISHED_BYTES = 2
"""Bytes of an element in a checkpoint file of pretrained weights."""
CUDA_CONTEXT_BYTES = 512 * MIB
"""Allowance for the CUDA context, which the allocator does not count. Not measured."""
PROOF_SPARE_BYTES = 2**30
"""A fresh process that loads the final model needs this beside the weights: libraries, a CUDA context, short prompts."""
LEFT_OUT = ("proof",)
"""Phases that no run is refused for. The final model is reloaded on the run's own device if it fits there, else on the CPU,
else the check is skipped with a warning (`export/roundtrip.py`)."""
EVAL_ROWS = (64, 32, 16, 8, 4, 2, 1)
"""Evaluation batch sizes: unless one is set, the first of these that needs no more memory than training."""
GENERATION_ROWS = (512, 256, 128)
"""Larger batches on a GPU for generation alone, under the same condition: it decodes them in hardly more time."""
SPARE = ("snapshot", "mapped_file")
"""Parts that a run does without if memory is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes by phase and part. `peak_bytes` is the largest phase that must fit; phases are not added up."""

    device: str
    dtype: str
    parameters: int
    rows: int
    row_tokens: int
    target_share: float
    """Fraction of the tokens that are targets of the loss."""
    phases: tuple[Phase, ...]
    peak_phase: str
    peak_bytes: int
    """On a CPU the rise of resident memory; on CUDA the peak of allocated memory."""
    least_bytes: int
    """The same without spare parts: a copy of the state for checkpoints, which is only made if it fits, and pages of a mapped
    file, which the system reclaims."""
    context_bytes: int
    """Of the CUDA context, and of NCCL for several devices, not included above; 0 on a CPU."""
    eval_rows: int
    """Batch size of the held-out loss."""
    devices: int = 1
    """Over which the run is sharded. Bytes are those of one device; with the JAX engine on a CPU, of all together."""
    layers: str = "plain"
    """How layers run in a training step: `plain` (eager), `compiled` or `recorded` (CUDA graphs)."""
    pool_bytes: int = 0
    """Memory pool of CUDA graphs, not included above, for as long as training goes on."""
    generation_rows: int = 0
    """Batch size of generation; 0 in plans of earlier versions, which had one for both."""
    traced: bool = False
    """The family has no row: a step was traced by PyTorch."""
    streams_bytes: int = 0
    """Margin for memory that FSDP's streams do not share at once."""

    @property
    def peak(self) -> Phase:
        return next(phase for phase in self.phases if phase.name == self.peak_phase)

    @property
    def lower_bound(self) -> bool:
        """Whether a run needs at least this much, and its compiler decides how much more: of a step that is compiled as a
        whole, one phase is counted."""
        return self.peak_phase == "step"

    @property
    def sharing(self) -> int:
        """How many such plans the memory of the device has to hold: the ranks of a CPU share it."""
        sharded = any(name in SHARDED for phase in self.phases for name in phase.parts)
        return self.devices if sharded and self.device == "cpu" else 1

    @property
    def judged(self) -> tuple[Phase, ...]:
        """The phases that must fit."""
        return tuple(phase for phase in self.phases if phase.name not in LEFT_OUT)

    @property
    def least(self) -> Phase:
        """The phase that needs `least_bytes`."""
        return _without_spare(max(self.judged, key=_without_spare_bytes))


def predict(
    shape: ModelShape,
    config: RunConfig,
    *,
    device: str,
    row_tokens: int | None = None,
    target_share: float = 1.0,
    capability: tuple[int, int] | None = None,
    layers: str | None = None,
    devices: int = 1,
    rows: int | None = None,
) -> MemoryPlan:
    """The memory that training `shape` under `config` needs on `device` (`cpu` or `cuda`), or sharded by FSDP over `devices` of
    them on the fullest. `rows` counts a micro-batch on all of them, by default `per_device_train_batch_size` on each.

    Before the data is read, rows are assumed to be as long as `data.max_length` and every token a target, the worst case. Pass
    the longest row as `row_tokens` and the fraction of targets once they are known. Held-out rows and questions are single
    examples, never longer than the positions of the model. A GPU of unknown CUDA `capability` is assumed to be a modern one;
    below 8.0, attention over packed rows needs a mask. `layers`, as `layers_planned` names them, default to those of a long
    run on an unknown device.
    """
    training = config.training
    run = _parameters(shape, config, device, capability, devices)
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    all_rows = rows or training.per_device_train_batch_size * devices
    layers = layers or layers_planned(config, shape, device=device, capability=capability, row_tokens=length)
    if devices > 1 and layers == "recorded":
        layers = "compiled"  # a graph cannot contain FSDP's hooks
    step = _micro_batch(config, device, capability, -(-all_rows // devices), length, layers)
    copied = run.checkpoint if device == "cpu" else 0  # a checkpoint is written from a copy while training goes on
    in_step, pool, during = _step(run, step, config, layers, target_share, copied)
    phases = [_load(run, pretrained=config.model.weights == "pretrained"), *in_step, _save(run, copied)]
    single = replace(step, compiled=False, length=min(length, shape.max_positions))
    eval_rows, generation_rows, evaluating = _evaluation(
        run, single, config, during, max(map(_without_spare_bytes, phases))
    )
    phases += evaluating
    peak = max(phases, key=lambda phase: phase.total_bytes)
    return MemoryPlan(
        device=device,
        dtype=training.dtype,
        parameters=shape.parameters,
        rows=all_rows,
        row_tokens=length,
        target_share=target_share,
        phases=(*phases, _proof(run)),
        peak_phase=peak.name,
        peak_bytes=peak.total_bytes,
        least_bytes=max(map(_without_spare_bytes, phases)),
        context_bytes=0 if device == "cpu" else CUDA_CONTEXT_BYTES + NCCL_BYTES * (devices > 1),
        eval_rows=eval_rows,
        devices=devices,
        generation_rows=generation_rows,
        layers=layers,
        pool_bytes=pool,
        traced=shape.trace is not None,
        streams_bytes=0 if device == "cpu" else streams_margin(phases),
    )


def state_bytes(
    shape: ModelShape, config: RunConfig, device: str, *, capability: tuple[int, int] | None = None, devices: int = 1
) -> int:
    """Weights and optimizer states of the fullest device, which no micro-batch and no checkpointing changes."""
    run = _parameters(shape, config, device, capability, devices)
    return run.weights + run.optimizer


def _parameters(
    shape: ModelShape, config: RunConfig, device: str, capability: tuple[int, int] | None, devices: int
) -> footprint.Footprint:
    """Of the whole run, or of one of several ranks."""
    modern = capability is None or capability >= (8, 0)
    run = footprint.footprint_of(shape, config.training, device, modern=modern)
    return Rank.of(run, devices, config.training.data_replicas) if devices > 1 else run


def _micro_batch(
    config: RunConfig, device: str, capability: tuple[int, int] | None, rows: int, length: int, layers: str
) -> Batch:
    return Batch(
        rows=rows,
        length=length if layers == "plain" else compiled_length(length),
        packed=config.data.packing,
        device=device,
        capability=capability,
        deterministic=config.training.deterministic,
        compiled=layers != "plain",
    )


def _step(
    run: footprint.Footprint, step: Batch, config: RunConfig, layers: str, target_share: float, copied: int
) -> tuple[tuple[Phase, ...], int, dict[str, int]]:
    """The phases of a training step, the pool of CUDA graphs, and what stays allocated between steps."""
    training = config.training
    during = {"snapshot": copied if training.save_steps is not None else 0}
    if layers == "recorded":
        during |= {"overhead": CUDA_OVERHEAD_BYTES + RECORDING_OVERHEAD_BYTES}
    targets = max(1, int(step.tokens * target_share))
    accumulating = training.gradient_accumulation_steps > 1 or training.samples
    if isinstance(run, Rank):
        return rank_phases(run, step, targets, accumulating, _state(run) | during), 0, during
    phases = step_phases(run, step, targets, accumulating, _state(run) | during)
    if layers != "recorded":
        return phases, 0, during
    phases, pool = recorded_phases(run, step, phases)
    return phases, pool, during | {"gradients": run.gradients}  # they are part of the graphs


def _evaluation(
    run: footprint.Footprint, batch: Batch, config: RunConfig, during: dict[str, int], room: int
) -> tuple[int, int, list[Phase]]:
    """The batch sizes of the held-out loss and of generation, and their phases: as configured, else the largest that need no
    more than `room`."""
    fixed = config.evaluation.per_device_eval_batch_size
    sizes = [(fixed, fixed)] if fixed else [(rows, rows) for rows in EVAL_ROWS]
    if config.evaluation.enabled and run.device == "cuda" and not fixed:
        sizes = [(EVAL_ROWS[0], rows) for rows in GENERATION_ROWS] + sizes
    heldout = cache(lambda rows: _heldout(run, replace(batch, rows=rows), _between_steps(run) | during))
    for eval_rows, generation_rows in sizes:  # the largest first
        found = [heldout(eval_rows)] if config.data.holds_out else []
        found += _generating(run, replace(batch, rows=generation_rows), config, during)
        if (eval_rows, generation_rows) == sizes[-1] or all(_without_spare_bytes(one) <= room for one in found):
            break
    return eval_rows, generation_rows, found


def longest_row(shape: ModelShape, config: RunConfig, tokens: int) -> int:
    """`tokens`, limited by the positions of the model if a row is one example."""
    return tokens if config.data.packing else min(tokens, shape.max_positions)


def _without_spare(phase: Phase) -> Phase:
    return phase_of(phase.name, **{name: size for name, size in phase.parts.items() if name not in SPARE})


def _without_spare_bytes(phase: Phase) -> int:
    return phase.total_bytes - sum(phase.parts.get(name, 0) for name in SPARE)


def _state(run: footprint.Footprint) -> dict[str, int]:
    """Allocated from the first step on."""
    overhead = CPU_OVERHEAD_BYTES if run.device == "cpu" else CUDA_OVERHEAD_BYTES
    return {"weights": run.weights, **run.four_bit, "optimizer": run.optimizer, "overhead": overhead}


def _between_steps(run: footprint.Footprint) -> dict[str, int]:
    """Gradients are freed between steps; on a CPU the heap keeps their blocks, which the next phase can seldom reuse."""
    kept = run.table_gradients if run.recipe.in_backward else run.gradients
    return _state(run) | {"gradients": kept if run.device == "cpu" else 0}


# --- load ------------------------------------------------------------------------------------------------------------


def _load(run: footprint.Footprint, *, pretrained: bool) -> Phase:
    """Beside the weights: the file they are read from, or the lm_head weight that is drawn before it is tied.

    Weights of the file's dtype are the mapped file itself until they are updated; files are assumed to be 16-bit, as models
    are published. Then a few tokens are tried, with one matrix cast after the other.
    """
    if isinstance(run, Rank):  # reads its rows of each tensor
        whole = (*run.tensors.embeddings, *run.tensors.layer, *run.tensors.others)
        return phase_of("load", weights=run.weights, loading=max(map(prod, whole)) * run.widths.stream)
    other_type = pretrained and run.device == "cpu" and run.widths.stream != PUBLISHED_BYTES
    drawn = elements(run.tensors.embeddings[:1]) * run.widths.stream if run.shape.tied_head and not pretrained else 0
    base = run.shape.parameters * run.widths.stream
    later = max(run.largest_cast, run.head_cast, run.operand)
    if not run.recipe.four_bit:
        later += run.weights - base  # adapters are added after the draw
    elif run.device != "cpu":  # the model is read or drawn on the host, its projections are packed one by one
        base, drawn = run.weights, 0
    parts = {
        "weights": base,
        **(run.four_bit | run.unpacking if run.device != "cpu" else {}),
        "overhead": CPU_OVERHEAD_BYTES if run.device == "cpu" else 0,
    }
    return phase_of(
        "load",
        **parts,
        loading=max(drawn, later),
        mapped_file=run.shape.parameters * PUBLISHED_BYTES if other_type else 0,
    )


# --- evaluation and save ---------------------------------------------------------------------------------------------


def _generating(run: footprint.Footprint, batch: Batch, config: RunConfig, during: dict[str, int]) -> Iterator[Phase]:
    """The phases in which the rows of `batch` are generated."""
    new_tokens = config.evaluation.max_new_tokens
    if config.evaluation.enabled:
        # Before the optimizer exists and after it is freed; on a CPU the heap is assumed to keep its blocks.
        state = _between_steps(run) | {"optimizer": run.optimizer if run.device == "cpu" else 0}
        parts = run.gathered_to_generate | generation_parts(run, batch, new_tokens)
        yield phase_of("generation", **state, **parts)
    if (rollouts := config.training.rollouts) is not None:
        prompts = replace(batch, length=max(1, batch.length - rollouts.max_new_tokens))
        parts = generation_parts(run, prompts, rollouts.max_new_tokens, samples=rollouts.samples)
        yield phase_of("rollout", **(_between_steps(run) | during), **(run.gathered_to_generate | parts))
    if config.evaluation.samples_during_training:
        rows = min(batch.rows, config.evaluation.samples_during_training)
        parts = run.gathered_to_generate | generation_parts(run, replace(batch, rows=rows), new_tokens)
        yield phase_of("samples", **(_between_steps(run) | during), **parts)


def _heldout(run: footprint.Footprint, batch: Batch, state: dict[str, int]) -> Phase:
    """Forward passes without gradients: one layer at a time, then the loss in chunks."""
    layer = widest(run, batch) + saved_once(run.shape, run.widths, batch)
    head = run.loss_head_without_gradients(batch.tokens)
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    slack = int(EVALUATION_SLACK * in_heap(layer + head)) if run.device == "cpu" else 0
    in_layers = {"casts": run.largest_cast, "activations": sum(layer), "loss_head": 0, **run.unpacking}
    in_head = {"casts": 0, "activations": passed_on, "loss_head": sum(head)}
    state |= run.gathered_in_forward
    both = [phase_of("held-out loss", **state, **parts, allocator_slack=slack) for parts in (in_layers, in_head)]
    return max(both, key=lambda phase: phase.total_bytes)


def reloaded_bytes(saved: int, *, device: str, autocast: bool) -> int:
    """Weights of a process that loads `saved` bytes of them: on a GPU with autocast, casts of the matrices come on top."""
    return saved * 3 // 2 if device != "cpu" and autocast else saved


def _proof(run: footprint.Footprint) -> Phase:
    """The end of a run: a fresh process loads the final model on the same device, beside the one in memory.

    On a GPU the optimizer and the allocator's cache are freed; on a CPU the heap keeps the blocks of the optimizer.
    """
    state = _between_steps(run) | {"optimizer": run.optimizer if run.device == "cpu" else 0}
    autocast = run.recipe.casts and run.recipe.frozen is None
    weights = reloaded_bytes(run.final_model, device=run.device, autocast=autocast)
    return phase_of("proof", **state, fresh_process=weights + PROOF_SPARE_BYTES)


def _save(run: footprint.Footprint, copied: int) -> Phase:
    """A checkpoint, or the final model with its adapters merged in float32 on the host, tensor by tensor.

    The update of an adapter exists twice, plain and scaled, then beside the sum. On a CPU, float32 weights without an adapter
    are not copied.
    """
    merged = 0
    if (adapters := run.widths.adapters) is not None:
        largest = 4 * max(elements([one]) for one in adapters.matrices)
        summed = elements(run.four_bit_matrices or list(adapters.matrices))
        on_host = 4 * (summed if run.widths.stream == 4 else run.shape.parameters)
        merged = on_host + largest if run.device == "cpu" else 2 * largest
    return phase_of("save", **_between_steps(run), snapshot=copied, merged=merged, **run.unpacking)

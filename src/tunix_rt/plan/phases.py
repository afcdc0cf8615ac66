"""The phases at which a training step of the PyTorch engine can peak.

Everything is counted, except for the fractions of the C heap that a CPU loses between blocks, which are fitted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tunix_rt.plan import activations
from tunix_rt.plan.backward import Moment, backward_moments
from tunix_rt.plan.experts import cast_matrices
from tunix_rt.plan.footprint import MIB, Footprint
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.tensors import elements, tensors_of

HEAP_BLOCK_BYTES = 32 * MIB
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: freed blocks up to this size stay in the heap of the process (mallopt(3))."""
KEPT_SLACK, ACCUMULATED_SLACK, ADAPTED_SLACK = 0.08, 0.6, 0.7
RECOMPUTED_SLACK = 1.6
UPDATED_SLACK, UPDATED_SLACK_BYTES = 0.25, 384 * MIB
"""Fractions of the heap that are lost between blocks, as `allocator_slack` uses them. Fitted to the cases marked so in
benchmarks/results/memory_cpu.json; two runs of one case differ by up to 30 % with updates in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a run and what is in memory at its peak, in bytes by part."""

    name: str
    parts: dict[str, int]
    total_bytes: int


def phase_of(name: str, **parts: int) -> Phase:
    return Phase(name=name, parts=parts, total_bytes=sum(parts.values()))


def times(phase: Phase, count: int) -> Phase:
    return phase_of(phase.name, **{name: size * count for name, size in phase.parts.items()})


def in_heap(blocks: Iterable[int]) -> int:
    """Bytes of `blocks` in the heap of the C library. A larger block counts as the largest that it serves."""
    return sum(min(block, HEAP_BLOCK_BYTES) for block in blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The memory of one layer in a step. Sizes are in bytes."""

    saved: activations.SavedTensors
    saved_bytes: int
    forward: list[int]
    """At the widest point of its forward pass."""
    moments: list[Moment]
    casts: int
    """Its matrices in the compute dtype."""
    matrices: int
    """Elements of its matrices."""
    trained: int
    """Its trained parameters; of adapters, in a layer on average."""


def layers_of(run: Footprint, batch: activations.Batch) -> list[Layer]:
    """The layers of a model, from the first to the last."""
    kinds, adapted = [], elements(run.adapters) // run.shape.layers
    for index, shape in enumerate(run.shape.stack):
        trained = adapted if run.adapters else elements(tensors_of(shape).layer)
        kinds.append(_layer_of(shape, run.widths.of_kind(index), batch, trained * run.width))
    return [kinds[kind] for kind in run.shape.order or (0,) * run.shape.layers]


@lru_cache(maxsize=1024)
def _layer_of(shape: ModelShape, widths: activations.Widths, batch: activations.Batch, trained: int) -> Layer:
    """Cached: a search changes what is recomputed and how weights are updated, and a layer knows neither."""
    tensors, saved = tensors_of(shape), activations.saved_by_layer(shape, widths, batch)
    casts = shape.trace is None and widths.casts
    return Layer(
        saved=saved,
        saved_bytes=sum(saved.all),
        forward=activations.forward_of_one_layer(shape, widths, batch),
        moments=backward_moments(shape, widths, batch),
        casts=elements(cast_matrices(tensors.matrices)) * widths.compute if casts else 0,
        matrices=elements(tensors.matrices),
        trained=trained,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What the forward pass of a step leaves for its backward pass. Sizes are in bytes."""

    layers: list[Layer]
    kept_layers: int
    """How many save their activations, the last ones."""
    kept: int
    """Activations that all layers save, and what is saved once."""
    behind: int
    """What the last norm saves, and its result."""
    passing: int
    """Beside them, at the widest point of a layer."""
    casts: int

    @classmethod
    def of(cls, run: Footprint, batch: activations.Batch) -> "Forward":
        layers = layers_of(run, batch)
        kept_layers = run.recipe.kept_layers(len(layers))
        keeping = layers[len(layers) - kept_layers :]
        passed_on = batch.tokens * run.shape.hidden * run.widths.stream
        # A checkpointed layer saves its input.
        kept = (len(layers) - kept_layers) * passed_on + sum(layer.saved_bytes for layer in keeping)
        kept += sum(activations.saved_once(run.shape, run.widths, batch)) - _without_gradient(run, layers, batch)
        # A compiled layer returns all that it would save, and only then is it freed.
        one_layer = max(layer.saved_bytes if batch.compiled else sum(layer.forward) for layer in layers)
        return cls(
            layers=layers,
            kept_layers=kept_layers,
            kept=kept,
            behind=sum(activations.saved_by_last_norm(run.shape, run.widths, batch)) + passed_on,
            passing=2 * passed_on if kept_layers else one_layer,
            casts=sum(layer.casts for layer in keeping),
        )


def step_phases(
    run: Footprint, batch: activations.Batch, targets: int, accumulating: bool, state: dict[str, int]
) -> tuple[Phase, ...]:
    """The phases of a step. From the second micro-batch on, the gradients of the first exist."""
    left = Forward.of(run, batch)
    gradients = run.table_gradients if run.recipe.in_backward else run.gradients
    forward = phase_of(
        "forward",
        **state,
        gradients=gradients if accumulating else 0,
        casts=left.casts or run.largest_cast,
        activations=left.kept,
        in_flight=left.passing,
        **run.unpacking,
    )
    loss = phase_of(
        "loss",
        **state,
        gradients=gradients if accumulating else run.head_gradient,
        casts=left.casts,
        activations=left.kept + left.behind,
        loss_head=sum(run.loss_head(targets, gradients_there=accumulating)),
    )
    passes = _backward(run, left.layers, batch, accumulating)
    widest = dict(zip(BACKWARD_PARTS, max(passes, key=sum), strict=True))
    backward = phase_of("backward", **state, **widest, **run.unpacking)
    update = phase_of("update", **state, gradients=gradients, in_flight=run.update_of(run.trained_kinds))
    phases = (forward, loss, backward, update)
    slack = allocator_slack(run, left.layers, phases, accumulating) if run.device == "cpu" else 0
    return tuple(phase_of(phase.name, **phase.parts, allocator_slack=slack) for phase in phases)


def recorded_phases(run: Footprint, batch: activations.Batch, phases: Iterable[Phase]) -> tuple[tuple[Phase, ...], int]:
    """The same for layers that run as CUDA graphs, and the bytes of the graphs' memory pool.

    Activations and casts are in the pool, which the allocator does not count once the graphs are captured. Gradients are static
    tensors of the graphs: they exist from the first step to the last. The graphs are captured before the optimizer exists.
    """
    by_name = {phase.name: phase for phase in phases}
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    behind = sum(activations.saved_by_last_norm(run.shape, run.widths, batch)) + passed_on
    state = {name: size for name, size in by_name["update"].parts.items() if name not in ("gradients", "in_flight")}
    compiling = by_name["loss"].parts | {"optimizer": 0}
    making = by_name["backward"].parts | {"optimizer": 0, "gradients": run.gradients - run.head_gradient}
    handed_over = 3 * passed_on  # input and output of the layers, and its gradient
    loss = by_name["loss"].parts | {"gradients": run.gradients, "casts": 0, "activations": behind + handed_over}
    held = {"gradients": run.gradients, "activations": handed_over}
    backward = phase_of("backward", **state, **held, in_flight=lookup_gradient(run, batch))
    update = phase_of("update", **state, **held, in_flight=run.update_of(run.trained_kinds))
    kept = by_name["forward"].parts["activations"] + by_name["forward"].parts["casts"]
    moments = (moment for layer in layers_of(run, batch) for moment in layer.moments)
    pool = kept + max(moment.in_flight for moment in moments)
    both = (phase_of("recording", **parts) for parts in (compiling, making))
    recording = max(both, key=lambda phase: phase.total_bytes)
    return (recording, phase_of("loss", **loss), backward, update), pool


def _without_gradient(run: Footprint, layers: list[Layer], batch: activations.Batch) -> int:
    """What attention of the first layer would save, if adapters begin behind it: no gradient flows through it."""
    adapters = run.widths.of_kind(0).adapters
    if adapters is None or adapters.inputs or adapters.output or batch.compiled or run.recipe.kept_share < 1:
        return 0
    return sum(layers[0].saved.attention + layers[0].saved.post_norm)


def allocator_slack(run: Footprint, layers: list[Layer], phases: Iterable[Phase], accumulating: bool) -> int:
    """On a CPU: heap blocks that one phase of the step freed and no other can reuse, after a few steps.

    A part counts as in its largest phase. More is lost where short-lived blocks lie between others that stay: gradients during
    recomputation or the next micro-batch, temporaries of adapters and of updates in the backward pass.
    """
    kept_layers = run.recipe.kept_layers(len(layers))
    live = max(phase.total_bytes for phase in phases)
    largest = {name: max(phase.parts.get(name, 0) for phase in phases) for phase in phases for name in phase.parts}
    heaps = {id(layer): in_heap(layer.saved.all) for layer in layers}
    layer = max(heaps.values())
    passing = max(in_heap(layer.forward) for layer in {id(layer): layer for layer in layers}.values())
    kept = sum(heaps[id(layer)] for layer in layers[len(layers) - kept_layers :])
    cut = kept * (KEPT_SLACK + ACCUMULATED_SLACK * accumulating + ADAPTED_SLACK * bool(run.adapters))
    cut += (1 - kept_layers / len(layers)) * (RECOMPUTED_SLACK * layer + passing)
    if run.recipe.in_backward:
        cut += UPDATED_SLACK * min(run.updates, UPDATED_SLACK_BYTES)
    return max(0, sum(largest.values()) - live) + int(cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """The backward pass, layer by layer from the last one. Sizes are in bytes."""

    run: Footprint
    batch: activations.Batch
    layers: list[Layer]
    recomputed: int
    """How many layers are recomputed, the first ones."""
    once: int
    unsaved: int
    kept_below: list[int]
    casts_below: list[int]

    @classmethod
    def of(cls, run: Footprint, layers: list[Layer], batch: activations.Batch) -> "Descent":
        recomputed = len(layers) - run.recipe.kept_layers(len(layers))
        kept = (0 if at < recomputed else layer.saved_bytes for at, layer in enumerate(layers))
        casts = (0 if at < recomputed else layer.casts for at, layer in enumerate(layers))
        return cls(
            run=run,
            batch=batch,
            layers=layers,
            recomputed=recomputed,
            once=sum(activations.saved_once(run.shape, run.widths, batch)),
            unsaved=_without_gradient(run, layers, batch),
            kept_below=[0, *accumulate(kept)],
            casts_below=[0, *accumulate(casts)],
        )

    def at(self, below: int, moment: Moment) -> tuple[int, int]:
        """Casts and activations in the layer with `below` layers before it."""
        run, recomputes = self.run, below < self.recomputed
        passed_on = self.batch.tokens * run.shape.hidden * run.widths.stream
        held = min(below, self.recomputed) * passed_on + self.kept_below[below] + self.once
        held -= self.unsaved if below > self.recomputed else 0
        # The input of the layer is saved once if its norm computes in the same dtype.
        own = passed_on if recomputes and run.widths.stream != run.widths.norm and not self.batch.compiled else 0
        casts = self.casts_below[below] + moment.casts * run.widths.compute * run.widths.casts
        return casts, held + own + moment.saved


BACKWARD_PARTS = ("gradients", "casts", "activations", "in_flight")


def _backward(
    run: Footprint, layers: list[Layer], batch: activations.Batch, accumulating: bool
) -> Iterator[tuple[int, ...]]:
    """`BACKWARD_PARTS` where the backward pass can be largest: in the layers and at the embedding."""
    descent = Descent.of(run, layers, batch)
    trained_above = [*accumulate((layer.trained for layer in reversed(layers)), initial=0)]
    updating = run.update_of(run.tensors.matrices[-1:])

    def at(below: int, moment: Moment) -> tuple[int, ...]:
        """In the layer with `below` layers before it."""
        layer = layers[below]
        done = trained_above[len(layers) - 1 - below] + moment.done / layer.matrices * layer.trained
        gradients = run.gradients if accumulating else run.head_gradient + int(0 if run.recipe.in_backward else done)
        return gradients, *descent.at(below, moment), moment.in_flight + moment.updating * updating

    def widest(layer: Layer) -> Moment:
        """The moment that adds most, however many layers are before it."""
        width, whole = run.widths.compute * run.widths.casts, accumulating or run.recipe.in_backward
        share = 0 if whole else layer.trained / layer.matrices
        moments = (one for one in layer.moments if run.recipe.in_backward or not one.updating)
        return max(
            moments,
            key=lambda one: one.saved + one.in_flight + one.casts * width + one.updating * updating + one.done * share,
        )

    moments = {id(layer): widest(layer) for layer in {id(layer): layer for layer in layers}.values()}
    # Memory rises or falls evenly between these, if all layers are alike.
    ends = {0, descent.recomputed - 1, descent.recomputed, len(layers) - 1} - {-1, len(layers)}
    for below in range(len(layers)) if run.shape.kinds else ends:
        yield at(below, moments[id(layers[below])])
    if not run.adapters:
        gradients = run.table_gradients if run.recipe.in_backward else run.gradients
        yield gradients, 0, 0, lookup_gradient(run, batch)


def lookup_gradient(run: Footprint, batch: activations.Batch) -> int:
    """The gradient of the embedding: as it arrives, sorted, summed by token in at least float32, and rounded."""
    wide, narrow = max(4, run.width), run.widths.stream
    copies = 2 * narrow + wide + (wide + narrow if wide != run.width else 0)
    return batch.tokens * max(run.shape.hidden, run.shape.layer_inputs) * copies

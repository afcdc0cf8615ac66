"""The memory of a training step of the PyTorch engine: sums over the parameters, and the phases at which a step can peak.

Everything is counted, except for the fractions of the C heap that a CPU loses between blocks, which are fitted.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from tunix_rt.config.optimizers import OPTIMIZERS, state_bytes
from tunix_rt.config.settings import Training
from tunix_rt.plan import activations
from tunix_rt.plan.adapters import FourBit, adapters_of, modules_of, refuse_four_bit
from tunix_rt.plan.experts import cast_matrices
from tunix_rt.plan.precision import Recipe, loss_rows, recipe_for_inference, recipe_of
from tunix_rt.plan.sizes import Dimensions, ModelShape
from tunix_rt.plan.tensors import Tensors, elements, tensors_of

MIB = 2**20
HEAP_BLOCK_BYTES = 32 * MIB
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: freed blocks up to this size stay in the heap of the process (mallopt(3))."""
KEPT_SLACK, ACCUMULATED_SLACK, ADAPTED_SLACK = 0.08, 0.6, 0.7
RECOMPUTED_SLACK = 1.6
UPDATED_SLACK, UPDATED_SLACK_BYTES = 0.25, 384 * MIB
"""Fractions of the heap that are lost between blocks, as `_lost` uses them. Fitted to the cases marked so in
benchmarks/results/memory_cpu.json; two runs of one case differ by up to 30 % with updates in the backward pass."""
TABLE_SLICE_ROWS = 32_768
"""Rows of the lm_head gradient that are computed at a time if its dtype is not the compute dtype."""
UPDATE_ELEMENTS = 8 * 2**20
"""Elements of a tensor that are updated at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The parameters of a run with its dtypes and optimizer. Sizes are in bytes."""

    shape: ModelShape
    recipe: Recipe
    widths: activations.Widths
    device: str
    tensors: Tensors
    adapters: list[Dimensions] = field(default_factory=list)
    """Factors of LoRA adapters, of all layers; empty if every parameter is trained."""
    optimizer: int = 0
    """Optimizer states of all trained parameters."""
    trained_elements: int = 0
    modern: bool = True
    """A GPU of compute capability 8.0 or above, for which the optimizers have kernels."""

    @property
    def width(self) -> int:
        """Bytes of an element of trained weights and of their gradients."""
        return activations.DTYPE_BYTES[self.recipe.weights]

    @property
    def trained_kinds(self) -> list[Dimensions]:
        """Every trained tensor, those of one layer standing for all."""
        return self.adapters or [*self.tensors.embeddings, *self.tensors.layer, *self.tensors.others]

    @property
    def weights(self) -> int:
        """Adapters and what is not kept in 4 bits."""
        four = elements(self.four_bit_matrices)
        return (self.shape.parameters - four) * self.widths.stream + self.width * elements(self.adapters)

    @property
    def four_bit_matrices(self) -> list[Dimensions]:
        return [one for layer in modules_of(self.shape) for one in layer.values()] if self.recipe.four_bit else []

    @property
    def four_bit(self) -> dict[str, int]:
        """Parts of the weights that are kept in 4 bits; none without them."""
        if not (matrices := self.four_bit_matrices):
            return {}
        found = FourBit.of(matrices, self.widths.compute)
        return {"packed_4bit": found.packed, "scales_4bit": found.scales}

    @property
    def unpacking(self) -> dict[str, int]:
        """The part of a matmul with a matrix of 4 bits: the largest."""
        matrices = self.four_bit_matrices
        return {"unpacked": FourBit.of(matrices, self.widths.compute).unpacked} if matrices else {}

    @property
    def final_model(self) -> int:
        """As saved: in the dtype of the weights, in float32 if adapters are merged."""
        return self.shape.parameters * (4 if self.adapters else self.widths.stream)

    @property
    def gradients(self) -> int:
        return self.width * self.trained_elements

    @property
    def checkpoint(self) -> int:
        """Trained weights and optimizer states."""
        return self.width * self.trained_elements + self.optimizer

    @property
    def table_gradients(self) -> int:
        """Of embeddings and lm_head, which live until the end of the backward pass."""
        own = self.shape.layer_inputs * self.shape.layer_input_vocab
        return 0 if self.adapters else self.width * (elements(self.tensors.embeddings) + own)

    @property
    def head_gradient(self) -> int:
        """Of the lm_head weight, which exists from the loss on."""
        return 0 if self.adapters else self.width * elements(self.tensors.embeddings[:1])

    @property
    def casts(self) -> int:
        """The matrices of all layers in the compute dtype; a traced layer has them among what it saves."""
        if self.shape.trace is not None or not self.widths.casts:
            return 0
        return (
            sum(kind.layers * elements(cast_matrices(tensors_of(kind).matrices)) for kind in self.shape.stack)
            * self.widths.compute
        )

    @property
    def largest_cast(self) -> int:
        """Of its casts one at a time, if none outlives its matmul."""
        return (
            max(elements([one]) for one in cast_matrices(self.tensors.matrices)) * self.widths.compute
            if self.widths.casts
            else 0
        )

    @property
    def head_cast(self) -> int:
        """The lm_head weight in the compute dtype, for the model's own head: a trial after loading, and generation."""
        return elements(self.tensors.embeddings[:1]) * self.widths.compute if self.widths.casts else 0

    @property
    def updated_by_kernel(self) -> bool:
        """Whether `engines/torch/triton` has a kernel for the update."""
        return self.recipe.weights in OPTIMIZERS[self.recipe.optimizer].triton and self.device != "cpu" and self.modern

    @property
    def _copies_updating(self) -> float:
        """Bytes of temporaries for one updated element."""
        spec = OPTIMIZERS[self.recipe.optimizer]
        if spec.fused and not self.recipe.in_backward and self.width != 2:
            return 0  # one fused call for all tensors, in place
        if self.updated_by_kernel:
            return 0  # a Triton kernel, in place
        return spec.workspace[self.width == 2] * max(4, self.width)

    def update_of(self, tensors: list[Dimensions]) -> int:
        """Temporaries of an update of the largest of `tensors`."""
        return int(self._copies_updating * min(max(math.prod(one) for one in tensors), UPDATE_ELEMENTS))

    @property
    def updates(self) -> int:
        """Temporaries of all updates together."""
        return int(self._copies_updating * self.trained_elements)

    # --- the loss head

    @property
    def product_width(self) -> int:
        """Bytes of an operand of the lm_head matmuls. A CPU has no 16-bit matmul with a float32 result."""
        return 4 if self.device == "cpu" and self.widths.compute == 2 else self.widths.compute

    @property
    def operand(self) -> int:
        """The lm_head weight in the dtype of its matmuls, if stored in another; or padded to a multiple of 8 rows, without
        which 16-bit matmuls are slow on a GPU."""
        table = elements(self.tensors.embeddings[:1])
        padded = self.device != "cpu" and self.product_width == 2 and self.shape.vocab % 8 != 0
        return table * self.product_width if padded or self.product_width != self.widths.stream else 0

    def loss_head(self, targets: int, *, gradients_there: bool) -> list[int]:
        """The tensors of the loss head at its peak, beside the lm_head gradient: logits and their gradient, or a chunk's lm_head
        gradient. `gradients_there`: the lm_head gradient exists from the beginning."""
        shape, width = self.shape, self.product_width
        rows = loss_rows(targets)
        logits = rows * shape.vocab
        if self.device != "cpu" and width <= 4:  # dlogits overwrite the logits
            turning = adding = [logits * 4]
        else:
            turning = [logits * max(4, width)] * (2 if shape.capped_logits else 1)
            adding = [logits * width]
        if self.head_gradient and self.width != width:
            adding = [*adding, min(TABLE_SLICE_ROWS, shape.vocab) * shape.hidden * max(self.width, width)]
        if targets <= rows and not gradients_there:  # the lm_head gradient is made after the first chunk, not beside it
            turning = [sum(turning) - self.head_gradient]
        states = [targets * shape.hidden * self.widths.stream] * 2  # hidden states of the targets, and their gradient
        return [self.operand, *max(turning, adding, key=sum), *states]

    def loss_head_without_gradients(self, targets: int) -> list[int]:
        logits = loss_rows(targets) * self.shape.vocab * max(4, self.product_width)
        return [self.operand, logits, targets * self.shape.hidden * self.widths.stream]


def footprint_of(shape: ModelShape, training: Training, device: str, *, modern: bool = True) -> Footprint:
    refuse_four_bit(shape, training)
    tensors, recipe = tensors_of(shape), recipe_of(training)
    adapters = adapters_of(tensors.matrices, shape, training)
    stack = tensors.layer * shape.layers if tensors.stack is None else tensors.stack
    every = [*tensors.embeddings, *tensors.others, *stack]
    trained = every if adapters is None else adapters.factors
    return Footprint(
        shape=shape,
        recipe=recipe,
        widths=activations.widths_of(recipe, adapters),
        device=device,
        tensors=tensors,
        adapters=[] if adapters is None else trained,
        optimizer=sum(state_bytes(one, recipe.optimizer, recipe.weights) for one in trained),
        trained_elements=elements(trained),
        modern=modern,
    )


def footprint_for_inference(shape: ModelShape, dtype: str, device: str) -> Footprint:
    """Of a model that generates and is not trained."""
    recipe = recipe_for_inference(dtype)
    return Footprint(
        shape=shape,
        recipe=recipe,
        widths=activations.widths_of(recipe),
        device=device,
        tensors=tensors_of(shape),
    )


# --- phases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a run and what is in memory at its peak, in bytes by part."""

    name: str
    parts: dict[str, int]
    total_bytes: int


def phase_of(name: str, **parts: int) -> Phase:
    return Phase(name=name, parts=parts, total_bytes=sum(parts.values()))


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
    moments: list[activations.Moment]
    casts: int
    """Its matrices in the compute dtype."""
    matrices: int
    """Elements of its matrices."""
    trained: int
    """Its trained parameters; of adapters, in a layer on average."""


def layers_of(run: Footprint, batch: activations.Batch) -> list[Layer]:
    """The layers of a model, from the first to the last."""
    kinds = []
    for index, shape in enumerate(run.shape.stack):
        widths, tensors = run.widths.of_kind(index), tensors_of(shape)
        saved = activations.saved_by_layer(shape, widths, batch)
        casts = (
            0
            if shape.trace is not None or not widths.casts
            else elements(cast_matrices(tensors.matrices)) * widths.compute
        )
        trained = elements(run.adapters) // run.shape.layers if run.adapters else elements(tensors.layer)
        kinds.append(
            Layer(
                saved=saved,
                saved_bytes=sum(saved.all),
                forward=activations.forward_of_one_layer(shape, widths, batch),
                moments=activations.backward_moments(shape, widths, batch),
                casts=casts,
                matrices=elements(tensors.matrices),
                trained=trained * run.width,
            )
        )
    return [kinds[kind] for kind in run.shape.order or (0,) * run.shape.layers]


def step_phases(
    run: Footprint, batch: activations.Batch, targets: int, accumulating: bool, state: dict[str, int]
) -> tuple[Phase, ...]:
    """The phases of a step. From the second micro-batch on, the gradients of the first exist."""
    layers = layers_of(run, batch)
    kept_layers = run.recipe.kept_layers(len(layers))
    keeping = layers[len(layers) - kept_layers :]
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    # A checkpointed layer saves its input.
    kept = (len(layers) - kept_layers) * passed_on + sum(layer.saved_bytes for layer in keeping)
    kept += sum(activations.saved_once(run.shape, run.widths, batch)) - _without_gradient(run, layers, batch)
    behind = sum(activations.saved_by_last_norm(run.shape, run.widths, batch)) + passed_on
    # A compiled layer returns all that it would save, and only then is it freed.
    one_layer = max(layer.saved_bytes if batch.compiled else sum(layer.forward) for layer in layers)
    passing = 2 * passed_on if kept_layers else one_layer
    gradients = run.table_gradients if run.recipe.in_backward else run.gradients
    casts = sum(layer.casts for layer in keeping)
    forward = phase_of(
        "forward",
        **state,
        gradients=gradients if accumulating else 0,
        casts=casts or run.largest_cast,
        activations=kept,
        in_flight=passing,
        **run.unpacking,
    )
    loss = phase_of(
        "loss",
        **state,
        gradients=gradients if accumulating else run.head_gradient,
        casts=casts,
        activations=kept + behind,
        loss_head=sum(run.loss_head(targets, gradients_there=accumulating)),
    )
    backward = max(_backward(run, layers, batch, accumulating, state), key=lambda phase: phase.total_bytes)
    update = phase_of("update", **state, gradients=gradients, in_flight=run.update_of(run.trained_kinds))
    phases = (forward, loss, backward, update)
    slack = _lost(run, layers, phases, accumulating) if run.device == "cpu" else 0
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
    backward = phase_of("backward", **state, **held, in_flight=_lookup(run, batch))
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


def _lost(run: Footprint, layers: list[Layer], phases: Iterable[Phase], accumulating: bool) -> int:
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


def _backward(
    run: Footprint, layers: list[Layer], batch: activations.Batch, accumulating: bool, state: dict[str, int]
) -> Iterator[Phase]:
    """The backward pass at its moments, from the last layer to the embedding."""
    recomputed = len(layers) - run.recipe.kept_layers(len(layers))
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    once = sum(activations.saved_once(run.shape, run.widths, batch))
    unsaved = _without_gradient(run, layers, batch)
    kept = [0 if at < recomputed else layer.saved_bytes for at, layer in enumerate(layers)]
    casts = [0 if at < recomputed else layer.casts for at, layer in enumerate(layers)]
    kept_below, casts_below = ([0, *accumulate(sizes)] for sizes in (kept, casts))
    trained_above = [*accumulate((layer.trained for layer in reversed(layers)), initial=0)]

    def at(below: int, moment: activations.Moment) -> Phase:
        """In the layer with `below` layers before it."""
        layer = layers[below]
        held = min(below, recomputed) * passed_on + kept_below[below] + once - (unsaved if below > recomputed else 0)
        # The input of the layer is saved once if its norm computes in the same dtype.
        own = passed_on if below < recomputed and run.widths.stream != run.widths.norm and not batch.compiled else 0
        done = trained_above[len(layers) - 1 - below] + moment.done / layer.matrices * layer.trained
        return phase_of(
            "backward",
            **state,
            gradients=run.gradients if accumulating else run.head_gradient + int(0 if run.recipe.in_backward else done),
            casts=casts_below[below] + moment.casts * run.widths.compute * run.widths.casts,
            activations=held + own + moment.saved,
            in_flight=moment.in_flight + moment.updating * run.update_of(run.tensors.matrices[-1:]),
            **run.unpacking,
        )

    # Memory rises or falls evenly between these, if all layers are alike.
    ends = {0, recomputed - 1, recomputed, len(layers) - 1} - {-1, len(layers)}
    for below in range(len(layers)) if run.shape.kinds else ends:
        for moment in layers[below].moments:
            if run.recipe.in_backward or not moment.updating:
                yield at(below, moment)
    if not run.adapters:
        gradients = run.table_gradients if run.recipe.in_backward else run.gradients
        yield phase_of("backward", **state, gradients=gradients, casts=0, activations=0, in_flight=_lookup(run, batch))


def _lookup(run: Footprint, batch: activations.Batch) -> int:
    """The gradient of the embedding: as it arrives, sorted, summed by token in at least float32, and rounded."""
    wide, narrow = max(4, run.width), run.widths.stream
    copies = 2 * narrow + wide + (wide + narrow if wide != run.width else 0)
    return batch.tokens * max(run.shape.hidden, run.shape.layer_inputs) * copies

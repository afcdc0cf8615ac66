"""The moments at which a training step of the PyTorch engine can peak, each as a sum of named parts.

All of it is counted; what is fitted are shares of the C heap that a CPU loses between blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tunix_rt.plan.activations import (
    Batch,
    Moment,
    backward_moments,
    elements,
    forward_of_one_layer,
    kept_by_last_norm,
    kept_by_layer,
    kept_once,
)
from tunix_rt.plan.footprint import Footprint

MIB = 2**20
HEAP_BLOCK_BYTES = 32 * MIB
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: freed blocks up to this size stay in the heap of the process (mallopt(3))."""
KEPT_SLACK, ACCUMULATED_SLACK, ADAPTED_SLACK = 0.08, 0.6, 0.7
RECOMPUTED_SLACK = 1.6
UPDATED_SLACK, UPDATED_SLACK_BYTES = 0.25, 384 * MIB
"""Shares of the heap that are lost between blocks, as `_lost` uses them. Fitted to the cases marked so in
benchmarks/results/memory_cpu.json; two runs of one case differ by up to 30 % where updates are in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One moment of the run and what is in memory then, in bytes by cause."""

    name: str
    parts: dict[str, int]
    total_bytes: int


def phase_of(name: str, **parts: int) -> Phase:
    return Phase(name=name, parts=parts, total_bytes=sum(parts.values()))


def in_heap(blocks: Iterable[int]) -> int:
    """Bytes of `blocks` in the heap of the C library. A larger block counts as the largest that is served from it."""
    return sum(min(block, HEAP_BLOCK_BYTES) for block in blocks)


# --- a step ----------------------------------------------------------------------------------------------------------


def step_phases(
    run: Footprint, batch: Batch, targets: int, accumulating: bool, state: dict[str, int]
) -> tuple[Phase, ...]:
    """The moments at which a step can peak. From the second micro-batch on, the gradients of the first are there."""
    kept_layers = run.recipe.kept_layers(run.shape.layers)
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    layer = sum(kept_by_layer(run.shape, run.widths, batch).all)
    # A layer that is computed again keeps what it was given.
    kept = (run.shape.layers - kept_layers) * passed_on + kept_layers * layer
    kept += sum(kept_once(run.shape, run.widths, batch))
    behind = sum(kept_by_last_norm(run.shape, run.widths, batch)) + passed_on
    # A compiled layer hands out all that it would keep, and only then is it dropped.
    one_layer = layer if batch.compiled else sum(forward_of_one_layer(run.shape, run.widths, batch))
    passing = 2 * passed_on if kept_layers else one_layer
    gradients = run.table_gradients if run.recipe.in_backward else run.gradients
    forward = phase_of(
        "forward",
        **state,
        gradients=gradients if accumulating else 0,
        casts=kept_layers * run.casts_of_layer or run.largest_cast,
        activations=kept,
        in_flight=passing,
    )
    loss = phase_of(
        "loss",
        **state,
        gradients=gradients if accumulating else run.head_gradient,
        casts=kept_layers * run.casts_of_layer,
        activations=kept + behind,
        loss_head=sum(run.loss_head(targets, gradients_there=accumulating)),
    )
    backward = max(_backward(run, batch, accumulating, state), key=lambda phase: phase.total_bytes)
    update = phase_of("update", **state, gradients=gradients, in_flight=run.update_of(run.trained_kinds))
    phases = (forward, loss, backward, update)
    slack = _lost(run, batch, phases, accumulating) if run.device == "cpu" else 0
    return tuple(phase_of(phase.name, **phase.parts, allocator_slack=slack) for phase in phases)


def recorded_phases(run: Footprint, batch: Batch, phases: Iterable[Phase]) -> tuple[tuple[Phase, ...], int]:
    """The same for layers that are recorded, and the bytes that the recording holds besides for its own use.

    Activations and casts lie in its memory, of which the allocator counts nothing once it is made. Gradients lie there too, and
    stay: so they are there from the first step to the last. It is made before there is an optimizer.
    """
    by_name = {phase.name: phase for phase in phases}
    passed_on = batch.tokens * run.shape.hidden * run.widths.stream
    behind = sum(kept_by_last_norm(run.shape, run.widths, batch)) + passed_on
    state = {name: size for name, size in by_name["update"].parts.items() if name not in ("gradients", "in_flight")}
    compiling = by_name["loss"].parts | {"optimizer": 0}
    making = by_name["backward"].parts | {"optimizer": 0, "gradients": run.gradients - run.head_gradient}
    handed_over = 3 * passed_on  # what the layers are given, what they give, and its gradient
    loss = by_name["loss"].parts | {"gradients": run.gradients, "casts": 0, "activations": behind + handed_over}
    held = {"gradients": run.gradients, "activations": handed_over}
    backward = phase_of("backward", **state, **held, in_flight=_lookup(run, batch))
    update = phase_of("update", **state, **held, in_flight=run.update_of(run.trained_kinds))
    kept = by_name["forward"].parts["activations"] + by_name["forward"].parts["casts"]
    pool = kept + max(moment.in_flight for moment in backward_moments(run.shape, run.widths, batch))
    recording = max(
        phase_of("recording", **compiling), phase_of("recording", **making), key=lambda phase: phase.total_bytes
    )
    return (recording, phase_of("loss", **loss), backward, update), pool


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
    layer = in_heap(kept_by_layer(run.shape, run.widths, batch).all)
    passing = in_heap(forward_of_one_layer(run.shape, run.widths, batch))
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
        own = passed_on if below < recomputed and run.widths.stream != run.widths.norm and not batch.compiled else 0
        done = 0 if run.recipe.in_backward else int((layers - 1 - below + moment.done / matrices) * trained)
        return phase_of(
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
        yield phase_of("backward", **state, gradients=gradients, casts=0, activations=0, in_flight=_lookup(run, batch))


def _lookup(run: Footprint, batch: Batch) -> int:
    """The gradient of the input tokens: as it comes, in order, summed by token in at least float32, and rounded."""
    wide, narrow = max(4, run.width), run.widths.stream
    copies = 2 * narrow + wide + (wide + narrow if wide != run.width else 0)
    return batch.tokens * run.shape.hidden * copies

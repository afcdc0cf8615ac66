"""The memory of one rank of a run that FSDP2 shards over several GPUs: `fully_shard` around each layer and around the model.

A rank has shards of weights, optimizer states and reduced gradients. Beside them are whole, for a while: what is outside the
layers (embedding, lm_head, last norm), gathered for the whole step, and its gradient; two layers, the one in work and the one
that is prefetched; the gradients of the layer in work; and the input of a reduce-scatter, until the next one begins. Rank 0 has
the largest shards, and every rank allocates as much: shards are cut along the first dimension and padded to equal size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from math import prod

from tunix_rt.config.optimizers import OPTIMIZERS, optimizer_of, states_bytes
from tunix_rt.plan.activations import Batch
from tunix_rt.plan.backward import Moment
from tunix_rt.plan.footprint import Footprint
from tunix_rt.plan.phases import (
    Descent,
    Forward,
    Layer,
    Phase,
    allocator_slack,
    lookup_gradient,
    phase_of,
)
from tunix_rt.plan.sizes import Dimensions
from tunix_rt.plan.tensors import elements, layer_tensors

REDUCED_WIDTH = 4
"""Bytes of an element of a sum over ranks: float32 also for 16-bit gradients."""
NCCL_BYTES = 2**30
"""Allowance for the buffers of NCCL's communicators, beside the context. Not measured."""
STREAMS_BYTES = 2 * 2**30
"""Margin of a sharded run: memory of one stream is not reused by another at once. On an H200, the allocator had reserved 1.4
to 3.5 GiB more than it had given out, most of which it releases if memory is short. A choice."""
SHARDED = ("gathered", "unreduced", "reducing")
"""Parts that only a sharded run has."""


def shard_of(dimensions: Dimensions, shards: int) -> Dimensions:
    """The largest of `shards` pieces, cut along the first dimension."""
    return (-(-dimensions[0] // shards), *dimensions[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that are gathered and reduced together: those of a layer, or all outside the layers. Sizes are in bytes."""

    weights: int
    """The shard."""
    trained: int
    """Elements of the shard that are trained."""
    optimizer: int
    gathered: int
    """All shards, with their padding."""
    gradients: int
    """Whole, before they are reduced."""
    reducing: int
    """The input of the reduce-scatter."""
    reduced: int
    """Its output, before it has the dtype of the gradients."""


def _group(run: Footprint, shards: int, frozen: list[Dimensions], trained: list[Dimensions]) -> Group:
    kept = elements([shard_of(one, shards) for one in frozen])
    cut = [shard_of(one, shards) for one in trained]
    weights = kept * run.widths.stream + elements(cut) * run.width
    reduced = elements(cut) * max(REDUCED_WIDTH, run.width)
    return Group(
        weights=weights,
        trained=elements(cut),
        optimizer=sum(_state_bytes(run, whole, one) for whole, one in zip(trained, cut, strict=True)),
        gathered=weights * shards,
        gradients=elements(trained) * run.width,
        reducing=reduced * shards,
        reduced=reduced,
    )


def _state_bytes(run: Footprint, whole: Dimensions, shard: Dimensions) -> int:
    """Optimizer states of a shard. The size of the whole tensor decides whether they are quantized."""
    spec = OPTIMIZERS[optimizer_of(run.recipe.optimizer, whole)]
    return states_bytes(spec.states(shard, "float64" if run.recipe.weights == "float64" else "float32"))


@dataclass(frozen=True, kw_only=True)
class Rank(Footprint):
    """The parameters of one rank: sizes of a `Footprint` are those of its shards, but for gradients of embedding and lm_head
    and for what is computed with whole matrices."""

    replicas: int
    """Data-parallel replicas, each of which is sharded (HSDP)."""
    outside: Group
    """What is outside the layers."""
    groups: tuple[Group, ...]
    """The layers, from the first to the last."""
    largest: int
    """Elements of the largest shard that is updated at a time."""

    @classmethod
    def of(cls, run: Footprint, ranks: int, replicas: int) -> "Rank":
        shards = max(1, ranks // replicas)
        outside = [*run.tensors.embeddings, *run.tensors.others]
        factors = [shard_of(one, shards) for one in run.adapters]
        groups = _layer_groups(run, shards)
        beside = run.adapters[len(run.adapters) // len(groups) * len(groups) :]
        group = _group(run, shards, outside, beside) if run.adapters else _group(run, shards, [], outside)
        every = [group, *groups]
        known = {one.name: getattr(run, one.name) for one in fields(run)}
        return cls(
            **known
            | {"optimizer": sum(one.optimizer for one in every), "trained_elements": sum(one.trained for one in every)},
            replicas=replicas,
            outside=group,
            groups=groups,
            largest=max(map(prod, factors or [shard_of(one, shards) for one in run.trained_kinds])),
        )

    @cached_property
    def weights(self) -> int:
        return self.outside.weights + sum(group.weights for group in self.groups)

    @cached_property
    def two_layers(self) -> int:
        return 2 * max(group.gathered for group in self.groups)

    @property
    def gathered_in_forward(self) -> dict[str, int]:
        return {"gathered": self.outside.gathered + self.two_layers}

    @property
    def gathered_to_generate(self) -> dict[str, int]:
        """All weights: a token at a time, gathering layer by layer would take longer than computing."""
        return {"gathered": self.outside.gathered + sum(group.gathered for group in self.groups)}


def _layer_groups(run: Footprint, shards: int) -> tuple[Group, ...]:
    """The group of each layer. Adapters are spread evenly over the layers."""
    layers = layer_tensors(run.shape)
    if not run.adapters:
        known = {id(layer): _group(run, shards, [], layer) for layer in layers}
        return tuple(known[id(layer)] for layer in layers)
    each = len(run.adapters) // len(layers)
    factors = (run.adapters[at * each : (at + 1) * each] for at in range(len(layers)))
    return tuple(_group(run, shards, layer, own) for layer, own in zip(layers, factors, strict=True))


def streams_margin(phases: Iterable[Phase]) -> int:
    """`STREAMS_BYTES`, or what a phase gathers and reduces if that is less."""
    return min(STREAMS_BYTES, max(sum(phase.parts.get(name, 0) for name in SHARDED) for phase in phases))


# --- the phases of a step ---------------------------------------------------------------------------------------------


def rank_phases(run: Rank, batch: Batch, targets: int, accumulating: bool, state: dict[str, int]) -> tuple[Phase, ...]:
    """The phases of a step on one rank. Every micro-batch is reduced: from the second on, the sums of those before exist."""
    left, outside = Forward.of(run, batch), run.outside
    before = run.gradients if accumulating else 0
    both_embeddings = 2 * outside.gathered  # as received, and copied into its tensors
    gather = phase_of(
        "gather",
        **state,
        gathered=both_embeddings + run.groups[0].gathered,
        gradients=before,
        activations=batch.tokens * run.shape.hidden * run.widths.stream,
    )
    forward = phase_of(
        "forward",
        **state,
        **run.gathered_in_forward,
        gradients=before,
        casts=left.casts or run.largest_cast,
        activations=left.kept,
        in_flight=left.passing,
    )
    loss = phase_of(
        "loss",
        **state,
        gathered=outside.gathered + run.groups[-1].gathered,
        gradients=before,
        unreduced=run.head_gradient,
        casts=left.casts,
        activations=left.kept + left.behind,
        loss_head=sum(run.loss_head(targets, gradients_there=False)),
    )
    passes = _backward(run, left.layers, batch, before)
    backward = phase_of("backward", **state, **max(passes, key=lambda parts: sum(parts.values())))
    after = 0 if run.recipe.in_backward else run.gradients
    finished = 0 if run.recipe.in_backward else after - run.width * outside.trained
    reduce = phase_of(
        "reduce",
        **state,
        gradients=before or finished,
        # Until its sum is rounded, FSDP has a reference to the gradient of the last parameter: of a lm_head of its own.
        unreduced=max(outside.gradients, _reduced(run, outside) + run.head_gradient * (not run.shape.tied_head)),
        reducing=outside.reducing + _retained(run)[0],
    )
    update = phase_of("update", **state, gradients=after, in_flight=run.update_of([(run.largest,)]))
    phases = (gather, forward, loss, backward, reduce, update)
    slack = allocator_slack(run, left.layers, phases, accumulating) if run.device == "cpu" else 0
    return tuple(phase_of(phase.name, **phase.parts, allocator_slack=slack) for phase in phases)


def _backward(run: Rank, layers: list[Layer], batch: Batch, before: int) -> Iterator[dict[str, int]]:
    """The parts of the backward pass where it can be largest: in a layer, when its gradients are reduced, at the embedding."""
    descent, groups, retained = Descent.of(run, layers, batch), run.groups, _retained(run)
    above = _sums_from_the_end([run.width * group.trained for group in groups])

    def parts(below: int, moment: Moment, unreduced: int, reducing: int, gathered: int) -> dict[str, int]:
        finished = 0 if run.recipe.in_backward else above[below + 1]
        casts, activations = descent.at(below, moment)
        return {
            "gathered": run.outside.gathered + gathered + (groups[below - 1].gathered if below else 0),
            "gradients": before or finished,
            "unreduced": run.head_gradient + unreduced,
            "reducing": reducing + retained[below + 1],
            "casts": casts,
            "activations": activations,
            "in_flight": moment.in_flight,
        }

    def computing(below: int, moment: Moment) -> dict[str, int]:
        layer, group = layers[below], groups[below]
        done = 1.0 if run.shape.trace is not None else moment.done / layer.matrices
        reducing = groups[below + 1].reducing if below + 1 < len(groups) else 0
        return parts(below, moment, int(done * group.gradients), reducing, group.gathered)

    def reducing(below: int) -> dict[str, int]:
        group = groups[below]
        passed_on = batch.tokens * run.shape.hidden * run.widths.stream
        after = Moment(saved=0, in_flight=passed_on, done=0, casts=0)
        return parts(below, after, max(group.gradients, _reduced(run, group)), group.reducing, 0)

    # Memory rises or falls evenly between these, if all layers are alike.
    last = len(layers) - 1
    ends = {0, 1, descent.recomputed - 1, descent.recomputed, last - 1, last} & set(range(len(layers)))
    for below in ends if not run.shape.kinds and run.shape.trace is None else range(len(layers)):
        yield from (computing(below, moment) for moment in layers[below].moments if not moment.updating)
        yield reducing(below)
    if not run.adapters:
        yield {
            "gathered": run.outside.gathered,
            "gradients": before or (0 if run.recipe.in_backward else above[0]),
            "unreduced": run.outside.gradients,
            "reducing": groups[0].reducing + retained[0],
            "casts": 0,
            "activations": 0,
            "in_flight": lookup_gradient(run, batch),
        }


def _reduced(run: Rank, group: Group) -> int:
    """The sums of a shard, and their copy in the dtype of the gradients, which by then are freed."""
    return group.reduced + run.width * group.trained * (run.width < REDUCED_WIDTH)


def _retained(run: Rank) -> list[int]:
    """What the layers from each on have kept of their sums between replicas: FSDP keeps the input of an all-reduce until the
    end of the backward pass, beside the gradient in its own dtype."""
    apart = run.replicas > 1 and run.width < REDUCED_WIDTH
    return _sums_from_the_end([apart * group.reduced for group in run.groups])


def _sums_from_the_end(sizes: list[int]) -> list[int]:
    """At each index the sum of what is there and behind."""
    return [*accumulate(reversed(sizes), initial=0)][::-1]

"""What decides the memory of one device of the JAX engine, and how much of an array lies on it. Loads nothing."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tunix_rt.plan.activations import DTYPE_BYTES, Dimensions, tensors_of
from tunix_rt.plan.precision import Recipe
from tunix_rt.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What decides the memory of a device."""

    shape: ModelShape
    recipe: Recipe
    device: str
    parts: int
    """Devices over which the state is cut."""
    rows: int
    """Of a micro-batch, on one device."""
    all_rows: int
    """Of a micro-batch, on all devices."""
    tokens: int
    """Of a row."""
    accumulation: int
    kernel: bool
    """Whether a kernel computes attention, without scores of tokens x tokens (`engines/jax/attention.py` chooses)."""
    ours: bool = True
    """Whether our own model is trained, and not google-tunix's."""
    lean: bool = False
    """Whether float32 values between products of 16 bits are computed again in any case, as our models do on one device."""

    @property
    def width(self) -> int:
        return DTYPE_BYTES[self.recipe.weights]

    @property
    def compute(self) -> int:
        return DTYPE_BYTES[self.recipe.compute]

    @property
    def wide(self) -> int:
        return max(4, self.compute)

    @property
    def positions(self) -> int:
        return self.rows * self.tokens

    @property
    def passed_on(self) -> int:
        """Bytes of the states that one layer hands to the next."""
        return self.positions * self.shape.hidden * self.compute


def all_arrays(run: Run) -> list[Dimensions]:
    """Every array, those of layers stacked."""
    found = tensors_of(run.shape)
    stacked: list[Dimensions] = [(run.shape.layers, *one) for one in found.layer]
    return [*found.tables, *stacked, *found.others]


def on_device(run: Run, dimensions: Dimensions, *, stacked: bool) -> int:
    """Elements of an array on one device: a part of it where a dimension other than that of the layers can be cut."""
    cut = dimensions[1:] if stacked else dimensions
    can_be_cut = any(size % run.parts == 0 for size in cut)
    return math.prod(dimensions) // (run.parts if can_be_cut else 1)


def summed(run: Run, of_layer: Iterable[Dimensions], others: Iterable[Dimensions]) -> int:
    layers = run.shape.layers
    return sum(on_device(run, (layers, *one), stacked=True) for one in of_layer) + sum(
        on_device(run, one, stacked=False) for one in others
    )

"""What a run holds whatever it is just doing, and what its loss head and its updates take: sums over its parameters."""

import math
from dataclasses import dataclass

from tunix_rt.config.settings import Training
from tunix_rt.plan.activations import (
    DTYPE_BYTES,
    Dimensions,
    Tensors,
    Widths,
    adapters_of,
    elements,
    tensors_of,
    widths_of,
)
from tunix_rt.plan.optimizers import state_bytes
from tunix_rt.plan.precision import Recipe, loss_rows, recipe_of, recipe_to_ask
from tunix_rt.plan.shape import ModelShape

# How the PyTorch engine goes about it.
TABLE_SLICE_ROWS = 32_768
"""Rows of the table's gradient that are computed at a time where it is of another type than the products."""
UPDATE_ELEMENTS = 8 * 2**20
"""Elements of a tensor that are updated at a time."""
UPDATE_COPIES = {"adamw": (1.0, 3.25), "adamw_8bit": (4.25, 6.5), "adafactor": (2.0, 4.25)}
"""Temporaries of an update, in copies of what is updated at a time, in the type of the work: of weights in that type, and of
bfloat16 weights, which are cast to it and rounded back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The parameters of a run under its recipe. Sizes are in bytes."""

    shape: ModelShape
    recipe: Recipe
    widths: Widths
    device: str
    tensors: Tensors
    adapters: list[Dimensions]
    """Of one layer; empty where every parameter is trained."""
    optimizer: int
    """States of all trained parameters."""
    trained_elements: int
    modern: bool = True
    """A GPU of compute capability 8.0 or above, for which there are kernels of updates."""

    @property
    def width(self) -> int:
        """Of an element of trained weights, and of their gradients."""
        return DTYPE_BYTES[self.recipe.weights]

    @property
    def trained_of_layer(self) -> list[Dimensions]:
        return self.adapters or self.tensors.layer

    @property
    def trained_kinds(self) -> list[Dimensions]:
        """Every trained tensor, those of one layer standing for all."""
        return self.adapters or [*self.tensors.tables, *self.tensors.layer, *self.tensors.others]

    @property
    def weights(self) -> int:
        return self.shape.parameters * self.widths.stream + self.width * self.shape.layers * elements(self.adapters)

    @property
    def final_model(self) -> int:
        """As it is saved: in the type of the weights, and in float32 where adapters are added to them."""
        return self.shape.parameters * (4 if self.adapters else self.widths.stream)

    @property
    def gradients(self) -> int:
        return self.width * self.trained_elements

    @property
    def checkpoint(self) -> int:
        """Trained weights and the optimizer's states: what a checkpoint holds."""
        return self.width * self.trained_elements + self.optimizer

    @property
    def table_gradients(self) -> int:
        """Of the vocabulary, which live until the end of the backward pass."""
        return 0 if self.adapters else self.width * elements(self.tensors.tables)

    @property
    def head_gradient(self) -> int:
        """Of the head's table alone, which is there from the loss on."""
        return 0 if self.adapters else self.width * elements(self.tensors.tables[:1])

    @property
    def casts_of_layer(self) -> int:
        """Its matrices in the type of the products."""
        return elements(self.tensors.matrices) * self.widths.compute if self.widths.casts else 0

    @property
    def casts(self) -> int:
        return self.shape.layers * self.casts_of_layer

    @property
    def largest_cast(self) -> int:
        """Of its casts one at a time, where none outlives its product."""
        return max(elements([one]) for one in self.tensors.matrices) * self.widths.compute if self.widths.casts else 0

    @property
    def head_cast(self) -> int:
        """The head's table, where the model's own head computes: when it is tried after loading, and in generation."""
        return elements(self.tensors.tables[:1]) * self.widths.compute if self.widths.casts else 0

    @property
    def updated_by_kernel(self) -> bool:
        """Whether `engines/torch/triton` has the update: of bfloat16 weights, and of float32 with 8-bit optimizer states."""
        known = self.width == 2 or (self.width == 4 and self.recipe.optimizer == "adamw_8bit")
        return known and self.device != "cpu" and self.modern

    @property
    def _copies_updating(self) -> float:
        """Bytes of temporaries for one element that is updated."""
        if self.recipe.optimizer == "adamw" and not self.recipe.in_backward and self.width != 2:
            return 0  # one kernel for all, in place
        if self.updated_by_kernel:
            return 0  # ours, in place
        return UPDATE_COPIES[self.recipe.optimizer][self.width == 2] * max(4, self.width)

    def update_of(self, tensors: list[Dimensions]) -> int:
        """Temporaries of the update of the largest of `tensors`."""
        return int(self._copies_updating * min(max(math.prod(one) for one in tensors), UPDATE_ELEMENTS))

    @property
    def updates(self) -> int:
        """Temporaries of all updates together."""
        return int(self._copies_updating * self.trained_elements)

    # --- the loss head

    @property
    def product_width(self) -> int:
        """Of an element of the head's products. A CPU has none of 16-bit numbers with a float32 result."""
        return 4 if self.device == "cpu" and self.widths.compute == 2 else self.widths.compute

    @property
    def operand(self) -> int:
        """The table in the type of the head's products, where it is kept in another; or with rows up to an even number of
        them, without which a GPU has but slow products of 16 bits."""
        table = elements(self.tensors.tables[:1])
        padded = self.device != "cpu" and self.product_width == 2 and self.shape.vocab % 8 != 0
        return table * self.product_width if padded or self.product_width != self.widths.stream else 0

    def loss_head(self, targets: int, *, gradients_there: bool) -> list[int]:
        """The head's tensors beside the gradient of its table, where they are most: logits and what they turn into, or a
        chunk's gradient of the table. `gradients_there`: that of the table is there from the beginning."""
        shape, width = self.shape, self.product_width
        rows = loss_rows(targets)
        logits = rows * shape.vocab
        if self.device != "cpu" and width <= 4:  # turned into their gradient in place
            turning = adding = [logits * 4]
        else:
            turning = [logits * max(4, width)] * (2 if shape.capped_logits else 1)
            adding = [logits * width]
        if self.head_gradient and self.width != width:
            adding = [*adding, min(TABLE_SLICE_ROWS, shape.vocab) * shape.hidden * max(self.width, width)]
        if (
            targets <= rows and not gradients_there
        ):  # that of the table is made behind the first chunk: not both at once
            turning = [sum(turning) - self.head_gradient]
        states = [targets * shape.hidden * self.widths.stream] * 2  # of the targets, and their gradient
        return [self.operand, *max(turning, adding, key=sum), *states]

    def loss_head_without_gradients(self, targets: int) -> list[int]:
        logits = loss_rows(targets) * self.shape.vocab * max(4, self.product_width)
        return [self.operand, logits, targets * self.shape.hidden * self.widths.stream]


def footprint_of(shape: ModelShape, training: Training, device: str, *, modern: bool = True) -> Footprint:
    tensors, recipe = tensors_of(shape), recipe_of(training)
    adapters = adapters_of(tensors, training.lora_rank) if training.lora_rank is not None else []
    layer, besides = (adapters, []) if adapters else (tensors.layer, [*tensors.tables, *tensors.others])

    def states(of: list[Dimensions]) -> int:
        return sum(state_bytes(one, recipe.optimizer, recipe.weights) for one in of)

    return Footprint(
        shape=shape,
        recipe=recipe,
        widths=widths_of(recipe, training.lora_rank),
        device=device,
        tensors=tensors,
        adapters=adapters,
        optimizer=states(besides) + shape.layers * states(layer),
        trained_elements=elements(besides) + shape.layers * elements(layer),
        modern=modern,
    )


def footprint_to_ask(shape: ModelShape, dtype: str, device: str) -> Footprint:
    """Of a model that is not trained."""
    recipe = recipe_to_ask(dtype)
    return Footprint(
        shape=shape,
        recipe=recipe,
        widths=widths_of(recipe, None),
        device=device,
        tensors=tensors_of(shape),
        adapters=[],
        optimizer=0,
        trained_elements=0,
    )

"""The memory of a training step of the PyTorch engine: sums over the parameters."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from tunix_rt.config.optimizers import OPTIMIZERS, state_bytes
from tunix_rt.config.settings import Training
from tunix_rt.plan import activations
from tunix_rt.plan.adapters import FourBit, adapters_of, modules_of, refuse_four_bit
from tunix_rt.plan.experts import cast_matrices
from tunix_rt.plan.precision import Recipe, loss_rows, recipe_for_inference, recipe_of
from tunix_rt.plan.sizes import Dimensions, ModelShape
from tunix_rt.plan.tensors import Tensors, elements, tensors_of

MIB = 2**20
TABLE_SLICE_ROWS = 32_768
"""Rows of the lm_head gradient that are computed at a time if its dtype is not the compute dtype."""
UPDATE_ELEMENTS = 8 * 2**20
"""Elements of a tensor that are updated at a time."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The parameters of a run with its dtypes and optimizer. Sizes are in bytes; those that add up tensors are kept, as a
    search asks for them with many batches."""

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

    @cached_property
    def trained_kinds(self) -> list[Dimensions]:
        """Every trained tensor, those of one layer standing for all."""
        return self.adapters or [*self.tensors.embeddings, *self.tensors.layer, *self.tensors.others]

    @cached_property
    def weights(self) -> int:
        """Adapters and what is not kept in 4 bits."""
        four = elements(self.four_bit_matrices)
        return (self.shape.parameters - four) * self.widths.stream + self.width * elements(self.adapters)

    @cached_property
    def four_bit_matrices(self) -> list[Dimensions]:
        return [one for layer in modules_of(self.shape) for one in layer.values()] if self.recipe.four_bit else []

    @cached_property
    def four_bit(self) -> dict[str, int]:
        """Parts of the weights that are kept in 4 bits; none without them."""
        if not (matrices := self.four_bit_matrices):
            return {}
        found = FourBit.of(matrices, self.widths.compute)
        return {"packed_4bit": found.packed, "scales_4bit": found.scales}

    @cached_property
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
        return self.gradients + self.optimizer

    @property
    def gathered_in_forward(self) -> dict[str, int]:
        """The part that a rank of a sharded run gathers for a forward pass without gradients."""
        return {}

    @property
    def gathered_to_generate(self) -> dict[str, int]:
        return {}

    @cached_property
    def table_gradients(self) -> int:
        """Of embeddings and lm_head, which live until the end of the backward pass."""
        own = self.shape.layer_inputs * self.shape.layer_input_vocab
        return 0 if self.adapters else self.width * (elements(self.tensors.embeddings) + own)

    @cached_property
    def head_gradient(self) -> int:
        """Of the lm_head weight, which exists from the loss on."""
        return 0 if self.adapters else self.width * elements(self.tensors.embeddings[:1])

    @cached_property
    def casts(self) -> int:
        """The matrices of all layers in the compute dtype; a traced layer has them among what it saves."""
        if self.shape.trace is not None or not self.widths.casts:
            return 0
        return (
            sum(kind.layers * elements(cast_matrices(tensors_of(kind).matrices)) for kind in self.shape.stack)
            * self.widths.compute
        )

    @cached_property
    def largest_cast(self) -> int:
        """Of its casts one at a time, if none outlives its matmul."""
        return (
            max(elements([one]) for one in cast_matrices(self.tensors.matrices)) * self.widths.compute
            if self.widths.casts
            else 0
        )

    @cached_property
    def head_cast(self) -> int:
        """The lm_head weight in the compute dtype, for the model's own head: a trial after loading, and generation."""
        return elements(self.tensors.embeddings[:1]) * self.widths.compute if self.widths.casts else 0

    @property
    def updated_by_kernel(self) -> bool:
        """Whether `engines/torch/triton` has a kernel for the update."""
        return self.recipe.weights in OPTIMIZERS[self.recipe.optimizer].triton and self.device != "cpu" and self.modern

    @cached_property
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
        if shape.trace is not None and shape.trace.own_logits:  # in float32: their softmax, its gradient and theirs
            return [self.operand, 3 * targets * shape.vocab * max(4, width)]
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
        width = max(4, self.product_width)
        if self.shape.trace is not None and self.shape.trace.own_logits:  # as they are, in float32, and their softmax
            return [self.operand, targets * self.shape.vocab * (self.product_width + 2 * width)]
        logits = loss_rows(targets) * self.shape.vocab * width
        return [self.operand, logits, targets * self.shape.hidden * self.widths.stream]


def footprint_of(shape: ModelShape, training: Training, device: str, *, modern: bool = True) -> Footprint:
    """Cached: a search needs the memory and the time of the same settings, with many batches."""
    refuse_four_bit(shape, training)
    lora = training.model_copy(update=dict.fromkeys(_OF_THE_BATCH)) if training.lora_rank is not None else None
    return _footprint(shape, recipe_of(training), lora, device, modern)


_OF_THE_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")


@lru_cache(maxsize=1024)
def _footprint(shape: ModelShape, recipe: Recipe, lora: Training | None, device: str, modern: bool) -> Footprint:
    tensors = tensors_of(shape)
    adapters = None if lora is None else adapters_of(tensors.matrices, shape, lora)
    stack = tensors.layer * shape.layers if tensors.stack is None else tensors.stack
    every = [*tensors.embeddings, *tensors.others, *stack]
    trained = every if adapters is None else adapters.factors
    found = Footprint(
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
    if adapters is None or not (unpacked := found.unpacking.get("unpacked")):
        return found
    return replace(found, widths=activations.widths_of(recipe, replace(adapters, unpacked=unpacked)))


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

"""How many floating point operations a step asks for: counted from the model's shape and the examples in the step."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunix_rt.plan.recipe import Recipe
from tunix_rt.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Of forward and backward pass. `model` is what the method needs; `executed` adds padding and layers computed twice."""

    layers: float
    head: float
    attention: float
    executed_layers: float
    executed_attention: float

    @property
    def model(self) -> float:
        return self.layers + self.head + self.attention

    @property
    def executed(self) -> float:
        return self.executed_layers + self.head + self.executed_attention


def step_flops(shape: ModelShape, recipe: Recipe, *, lengths: Sequence[int], positions: int, targets: int) -> StepFlops:
    """A step on examples of these `lengths`, in rows of `positions` tokens together, of which `targets` meet the vocabulary.

    Six operations per matrix parameter and token, four where it is frozen: a product forth, and one for each gradient.
    Attention is causal and stays within an example; a window (Gemma 2 and 3) is not counted, so an example longer than it
    counts too much. What adapters add is left out, and so is what attention computes twice within its own backward pass.
    """
    each = 6 if recipe.frozen is None else 4
    matrices = shape.layers * shape.layer_matrix_parameters
    # 2 products x 2 operations x half of the square, with its diagonal
    attended = shape.layers * shape.query_size * 2 * sum(length * (length + 1) for length in lengths)
    again = shape.layers - recipe.kept_layers(shape.layers)
    # Computing a layer again ends with the last value that its backward pass needs: without a norm after it, the last
    # product of the layer is not taken.
    last = 0 if shape.norms_per_layer > 2 else shape.hidden * shape.ffn
    return StepFlops(
        layers=each * matrices * sum(lengths),
        head=each * shape.embedding_parameters * targets,
        attention=3 * attended,
        executed_layers=(each * matrices + 2 * again * (shape.layer_matrix_parameters - last)) * positions,
        executed_attention=(3 + again / shape.layers) * attended,
    )

"""The parameters of a model tensor by tensor: gradients, optimizer states and copies are made of them."""

import math
from dataclasses import dataclass

from tunix_rt.plan.shape import ModelShape

Dimensions = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Shapes of the parameters."""

    tables: list[Dimensions]
    """At the vocabulary: the head's first, then that of the input tokens where it is another one."""
    matrices: list[Dimensions]
    """Of one layer, in the order of its products; the last is the one behind the activation."""
    vectors: list[Dimensions]
    """Of one layer: norms and biases."""
    others: list[Dimensions]
    """Learned positions and the last norm."""

    @property
    def layer(self) -> list[Dimensions]:
        return self.matrices + self.vectors


def tensors_of(shape: ModelShape) -> Tensors:
    """Every parameter of a model of this shape."""
    hidden, query, kv = shape.hidden, shape.query_size, shape.kv_size
    norm: list[Dimensions] = [(hidden,)] * (2 if shape.norm_has_bias else 1)
    biases: list[Dimensions] = [(hidden,)] * shape.output_bias
    if shape.gated_mlp:
        attention = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
        mlp = [(shape.ffn, hidden), (shape.ffn, hidden), (hidden, shape.ffn)]
        biases += [(query,), (kv,), (kv,)] * shape.query_bias
        biases += [(shape.ffn,), (shape.ffn,), (hidden,)] * shape.mlp_bias
    else:  # query, key and value are one product (GPT-2)
        attention = [(hidden, query + 2 * kv), (query, hidden)]
        mlp = [(hidden, shape.ffn), (shape.ffn, hidden)]
        biases += [(query + 2 * kv,)] * shape.query_bias + [(shape.ffn,), (hidden,)] * shape.mlp_bias
    positions: list[Dimensions] = [(shape.max_positions, hidden)] * shape.learned_positions
    return Tensors(
        tables=[(shape.vocab, hidden)] * (1 if shape.tied_head else 2),
        matrices=[*attention, *mlp],
        vectors=norm * shape.norms_per_layer + [(shape.head_dim,)] * (2 * shape.head_norms) + biases,
        others=positions + norm,
    )


def adapters_of(tensors: Tensors, rank: int) -> list[Dimensions]:
    """The two factors of LoRA beside each matrix of one layer."""
    return [factor for one in tensors.matrices for factor in ((one[0], rank), (rank, one[1]))]


def elements(shapes: list[Dimensions]) -> int:
    return sum(math.prod(one) for one in shapes)

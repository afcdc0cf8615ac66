"""The parameters of a model, tensor by tensor."""

import math
from dataclasses import dataclass
from functools import lru_cache

from tunix_rt.plan.sizes import Dimensions, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Shapes of the parameters."""

    embeddings: list[Dimensions]
    """The lm_head weight, then the token embedding if it is not tied."""
    matrices: list[Dimensions]
    """Of one layer, in the order of its matmuls; the last is the down projection."""
    vectors: list[Dimensions]
    """Of one layer: norms and biases."""
    others: list[Dimensions]
    """Learned positions and the last norm."""
    stack: list[Dimensions] | None = None
    """Of all layers, where they differ; `matrices` and `vectors` are then those of the largest."""

    @property
    def layer(self) -> list[Dimensions]:
        return self.matrices + self.vectors


@lru_cache(maxsize=64)
def tensors_of(shape: ModelShape) -> Tensors:
    """Every parameter of a model of this shape. Cached: not to be changed."""
    if (trace := shape.trace) is not None:
        return Tensors(
            embeddings=[(shape.vocab, shape.hidden)] * (1 if shape.tied_head else 2),
            matrices=[one for one in trace.largest if len(one) > 1] or [(1, 1)],
            vectors=[one for one in trace.largest if len(one) < 2],
            others=list(trace.others),
            stack=[one for layer in trace.layers for one in layer],
        )
    layers = [(kind.layers, _matrices(kind), _vectors(kind)) for kind in shape.stack]
    _, matrices, vectors = max(layers, key=lambda one: elements(one[1] + one[2]))
    norm: list[Dimensions] = [(shape.hidden,)] * (2 if shape.norm_has_bias else 1)
    others: list[Dimensions] = [(shape.max_positions, shape.hidden)] * shape.learned_positions + norm
    if shape.layer_input:
        own = shape.layer_inputs
        others = [(shape.layer_input_vocab, own), *others, (own, shape.hidden), (shape.layer_input,)]
    return Tensors(
        embeddings=[(shape.vocab, shape.hidden)] * (1 if shape.tied_head else 2),
        matrices=matrices,
        vectors=vectors,
        others=others,
        stack=[one for count, *both in layers for part in both for one in part * count] if shape.kinds else None,
    )


def layer_tensors(shape: ModelShape) -> list[list[Dimensions]]:
    """Of each layer, from the first to the last; equal layers share one list."""
    if shape.trace is not None:
        return [list(layer) for layer in shape.trace.layers]
    kinds = [tensors_of(kind).layer for kind in shape.stack]
    return [kinds[kind] for kind in shape.order or (0,) * shape.layers]


def _matrices(shape: ModelShape) -> list[Dimensions]:
    """Of a layer of this kind, in the order of its matmuls."""
    hidden, query, kv = shape.hidden, shape.query_size, shape.kv_size
    if shape.fused_matrices:
        return [(query + 2 * kv, hidden), (hidden, query), (2 * shape.ffn, hidden), (hidden, shape.ffn)]
    if not shape.gated_mlp:  # query, key and value are one matmul (GPT-2)
        return [(hidden, query + 2 * kv), (query, hidden), (hidden, shape.ffn), (shape.ffn, hidden)]
    matrices: list[Dimensions] = [(query, hidden), *[(kv, hidden)] * shape.kv_matrices, (hidden, query)]
    if (experts := shape.experts) is not None:
        matrices += [(experts.count, hidden)]
        matrices += [(experts.count, 2 * experts.ffn, hidden), (experts.count, hidden, experts.ffn)]
    matrices += [(shape.layer_input, hidden), (hidden, shape.layer_input)] * (shape.layer_input > 0)
    return [*matrices, (shape.ffn, hidden), (shape.ffn, hidden), (hidden, shape.ffn)]


def _vectors(shape: ModelShape) -> list[Dimensions]:
    """Of a layer of this kind: norms and biases."""
    hidden, query, kv = shape.hidden, shape.query_size, shape.kv_size
    norm: list[Dimensions] = [(hidden,)] * (2 if shape.norm_has_bias else 1)
    biases: list[Dimensions] = [(hidden,)] * shape.output_bias
    if shape.gated_mlp and not shape.fused_matrices:
        biases += ([(query,)] + [(kv,)] * shape.kv_matrices) * shape.query_bias
        biases += [(shape.ffn,), (shape.ffn,), (hidden,)] * shape.mlp_bias
    elif not shape.gated_mlp:
        biases += [(query + 2 * kv,)] * shape.query_bias + [(shape.ffn,), (hidden,)] * shape.mlp_bias
    if shape.experts is not None:
        biases += [(hidden,), (shape.experts.count,)]  # scales of the router
    return norm * shape.norms_per_layer + _head_norms(shape) + biases


def _head_norms(shape: ModelShape) -> list[Dimensions]:
    """Weights of the norms of queries and keys."""
    each: list[Dimensions] = [(shape.head_dim,)] * (1 if shape.shares_kv else 2)
    if shape.head_norms_span_heads:
        each = [(shape.query_size,), (shape.kv_size,)]
    return each * shape.head_norms


def elements(shapes: list[Dimensions]) -> int:
    return sum(math.prod(one) for one in shapes)

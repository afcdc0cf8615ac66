"""The moments of the backward pass of a layer on the PyTorch engine."""

import math
from dataclasses import dataclass

from tunix_rt.plan.activations import Batch, Widths, attention_kernel, saved_by_layer, traced_bytes
from tunix_rt.plan.experts import cast_matrices, gradients_of_experts
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.tensors import elements, tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment in the backward pass of one layer."""

    saved: int
    """Bytes of the layer's saved tensors that are still alive."""
    in_flight: int
    """Bytes of gradients: of activations, and of the weight that is being computed."""
    done: int
    """Elements of the layer's matrices whose gradient is complete."""
    casts: int
    """Elements of its matrices whose cast is still alive."""
    updating: bool = False
    """The last matrix is being updated and its gradient not yet freed (`optim_in_backward`)."""


def backward_moments(shape: ModelShape, widths: Widths, batch: Batch) -> list[Moment]:
    """The moments at which the backward pass of a layer can be largest, from its end to its beginning."""
    if (trace := shape.trace) is not None:
        gradient = max(map(math.prod, tensors_of(shape).matrices)) * widths.stream
        saved, in_flight = traced_bytes(trace.saved, batch), traced_bytes(trace.backward, batch) + gradient
        return [Moment(saved=saved, in_flight=in_flight, done=0, casts=0, updating=now) for now in (False, True)]
    layer = saved_by_layer(shape, widths, batch)
    tokens, width = batch.tokens, widths.compute
    stream, inner = tokens * shape.hidden, tokens * shape.ffn * width
    matrices = tensors_of(shape).matrices
    last = elements(matrices[-1:])
    attention = elements(matrices[: 2 + shape.kv_matrices if shape.gated_mlp and not shape.fused_matrices else 2])
    everything = elements(matrices)
    cast, experts = elements(cast_matrices(matrices)), gradients_of_experts(shape, widths, tokens)
    upstream = stream * widths.stream + stream * width * (widths.casts or shape.post_norms)
    down, weight = inner, last * (width + widths.stream * widths.casts)
    if (adapters := widths.adapters) is not None:  # its adapter saves its input, whose gradient is in float32
        down = sum(adapters.saved_inputs(tokens * shape.ffn, adapters.down, compute=width, device=batch.device))
        weight = 4 * tokens * shape.ffn * adapters.down
    whole = sum(layer.all)
    in_mlp = whole - sum(layer.post_norm) - sum(layer.behind)
    moments = []
    if adapters is not None and adapters.mlp_inputs and shape.fused_matrices:
        # Gate and up, or their gradient: of the frozen matmul, in float32, and scaled by the adapter.
        adapted = max(0, 2 * tokens * shape.ffn * (width + 4 + 4) - adapters.unpacked) + 2 * stream * widths.norm
        moments.append(Moment(saved=in_mlp - down - 3 * inner, in_flight=upstream + adapted, done=0, casts=cast))
    if shape.layer_input:
        # The gradient of the layers' own embeddings grows by a layer's part, which is as large as the whole.
        upstream += 2 * tokens * shape.layer_inputs * widths.stream
    return [
        *moments,
        Moment(saved=whole, in_flight=upstream + 2 * stream * widths.norm, done=0, casts=cast),
        Moment(saved=in_mlp, in_flight=upstream + inner + weight, done=0, casts=cast),
        Moment(
            saved=in_mlp - down,
            in_flight=upstream + inner + last * widths.stream,
            done=0,
            casts=cast,
            updating=True,
        ),
        Moment(
            saved=in_mlp - down,
            in_flight=upstream + (2 if batch.compiled else 3) * inner,  # compiled code reuses one of them
            done=last,
            casts=cast,
        ),
        Moment(
            saved=sum(layer.attention),
            in_flight=upstream + _through_attention(shape, widths, batch),
            done=everything - attention,
            casts=attention,
        ),
        *[Moment(saved=in_mlp, in_flight=upstream + experts, done=0, casts=cast)] * (experts > 0),
        Moment(saved=0, in_flight=3 * stream * widths.norm + upstream, done=everything, casts=0),
    ]


def _through_attention(shape: ModelShape, widths: Widths, batch: Batch) -> int:
    """Gradients of output, query, key, value, and of the scores where they are materialized."""
    tokens, width = batch.tokens, widths.compute
    query, kv = tokens * shape.query_size * width, tokens * shape.kv_size * width
    kernel = attention_kernel(shape, widths, batch)
    if kernel == "fused":
        return 2 * query + 2 * kv
    scores = 2 * tokens * shape.heads * batch.length * widths.norm
    return 4 * query + (scores if kernel in ("math", "eager") else 0)

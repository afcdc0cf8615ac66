"""Parameters tensor by tensor, and the activations that autograd saves, of a model on the PyTorch engine."""

import math
from dataclasses import dataclass
from functools import partial

from tunix_rt.plan.adapters import Adapters
from tunix_rt.plan.attention_kernels import OLDEST_CAPABILITY, Capability, torch_generation_kernel, torch_kernel
from tunix_rt.plan.precision import Recipe
from tunix_rt.plan.shape import Cost, Dimensions, ModelShape


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


def tensors_of(shape: ModelShape) -> Tensors:
    """Every parameter of a model of this shape."""
    if (trace := shape.trace) is not None:
        return Tensors(
            embeddings=[(shape.vocab, shape.hidden)] * (1 if shape.tied_head else 2),
            matrices=[one for one in trace.largest if len(one) > 1] or [(1, 1)],
            vectors=[one for one in trace.largest if len(one) < 2],
            others=list(trace.others),
            stack=[one for layer in trace.layers for one in layer],
        )
    hidden, query, kv = shape.hidden, shape.query_size, shape.kv_size
    norm: list[Dimensions] = [(hidden,)] * (2 if shape.norm_has_bias else 1)
    biases: list[Dimensions] = [(hidden,)] * shape.output_bias
    if shape.fused_matrices:
        attention = [(query + 2 * kv, hidden), (hidden, query)]
        mlp = [(2 * shape.ffn, hidden), (hidden, shape.ffn)]
    elif shape.gated_mlp:
        attention = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
        mlp = [(shape.ffn, hidden), (shape.ffn, hidden), (hidden, shape.ffn)]
        biases += [(query,), (kv,), (kv,)] * shape.query_bias
        biases += [(shape.ffn,), (shape.ffn,), (hidden,)] * shape.mlp_bias
    else:  # query, key and value are one matmul (GPT-2)
        attention = [(hidden, query + 2 * kv), (query, hidden)]
        mlp = [(hidden, shape.ffn), (shape.ffn, hidden)]
        biases += [(query + 2 * kv,)] * shape.query_bias + [(shape.ffn,), (hidden,)] * shape.mlp_bias
    positions: list[Dimensions] = [(shape.max_positions, hidden)] * shape.learned_positions
    return Tensors(
        embeddings=[(shape.vocab, hidden)] * (1 if shape.tied_head else 2),
        matrices=[*attention, *mlp],
        vectors=norm * shape.norms_per_layer + _head_norms(shape) + biases,
        others=positions + norm,
    )


def _head_norms(shape: ModelShape) -> list[Dimensions]:
    """Weights of the norms of queries and keys."""
    each: list[Dimensions] = [(shape.head_dim,), (shape.head_dim,)]
    if shape.head_norms_span_heads:
        each = [(shape.query_size,), (shape.kv_size,)]
    return each * shape.head_norms


def elements(shapes: list[Dimensions]) -> int:
    return sum(math.prod(one) for one in shapes)


DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one forward pass, and what decides the attention kernel."""

    rows: int
    length: int
    packed: bool
    device: str
    capability: Capability | None = None
    """CUDA compute capability of a GPU; None: not known, assumed to be 8.0 or above."""
    deterministic: bool = False
    """On a GPU: without the memory-efficient kernel, whose backward pass adds in any order."""
    compiled: bool = False
    """Layers are compiled: what lies between two matmuls is recomputed from their results."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def modern(self) -> bool:
        """A GPU with the kernels for compute capability 8.0."""
        return self.capability is None or self.capability >= OLDEST_CAPABILITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of an element."""

    compute: int
    """Of the compute dtype."""
    stream: int
    """Of the residual stream, which has the dtype of the weights."""
    norm: int
    """Inside a norm."""
    adapters: Adapters | None = None
    """None without LoRA."""

    @property
    def casts(self) -> bool:
        return self.compute != self.stream


def widths_of(recipe: Recipe, adapters: Adapters | None = None) -> Widths:
    return Widths(
        compute=DTYPE_BYTES[recipe.compute],
        stream=DTYPE_BYTES[recipe.frozen or recipe.weights],
        norm=max(4, DTYPE_BYTES[recipe.compute]),
        adapters=adapters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """Bytes of the tensors that autograd saves in one layer, by block."""

    attention: list[int]
    mlp: list[int]
    post_norm: list[int]
    """Saved by the norm behind each of the two blocks, where there is one."""

    @property
    def all(self) -> list[int]:
        return self.attention + self.mlp + 2 * self.post_norm


def saved_by_layer(shape: ModelShape, widths: Widths, batch: Batch) -> SavedTensors:
    """What autograd saves in one layer, without weights and their casts."""
    if shape.trace is not None:
        return SavedTensors(attention=[_traced(shape.trace.saved, batch)], mlp=[], post_norm=[])
    if batch.compiled:
        return _saved_compiled(shape, widths, batch)
    tokens, compute = batch.tokens, widths.compute
    stream = tokens * shape.hidden
    before, after = _norms(shape, widths, tokens)
    separate = shape.gated_mlp and not shape.fused_matrices
    attention = [*before, *_saved_by_attention(shape, widths, batch)]
    mlp = [*before, *_saved_by_mlp(shape, widths, batch)]
    if shape.head_norms:
        for size, heads in ((shape.query_size, shape.heads), (shape.kv_size, shape.kv_heads)):
            roots = tokens * (1 if shape.head_norms_span_heads else heads)
            attention += _rms(shape, widths, tokens * size, roots, compute)
    if (adapters := widths.adapters) is None:
        attention += _inputs(widths, stream, 3 if separate else 1)
        mlp += _inputs(widths, stream, 2 if separate else 1)
    else:  # frozen matmuls save no input, their adapters do; and the result of their first factor
        saved = partial(adapters.saved_inputs, compute=compute, device=batch.device)
        attention += saved(stream, adapters.inputs) + saved(tokens * shape.query_size, adapters.output, there=True)
        mlp += saved(stream, adapters.mlp_inputs) + saved(tokens * shape.ffn, adapters.down)
        attention += [4 * tokens * adapters.rank] * (adapters.inputs + adapters.output)
        mlp += [4 * tokens * adapters.rank] * (adapters.mlp_inputs + adapters.down)
    if shape.hidden_dropout:  # the mask: a factor per element on a CPU, a boolean on a GPU
        attention.append(stream * (compute if batch.device == "cpu" else 1))
        mlp.append(stream * (compute if batch.device == "cpu" else 1))
    return SavedTensors(attention=attention, mlp=mlp, post_norm=after)


def _saved_compiled(shape: ModelShape, widths: Widths, batch: Batch) -> SavedTensors:
    """What compiled layers save: the input of the layer, the inputs of matmuls and what attention needs; of a block's result
    what the next norm is computed from. Norms save their reciprocal roots only, and the activation is recomputed."""
    tokens = batch.tokens
    stream, inner = tokens * shape.hidden * widths.compute, tokens * shape.ffn * widths.compute
    roots = [4 * tokens] * (2 if shape.norm_has_bias else 1)  # a LayerNorm also its mean
    before = roots if shape.pre_norms else []
    attention = [
        tokens * shape.hidden * widths.stream,
        *before,
        stream,
        *_saved_by_attention(shape, widths, batch),
        stream,
    ]
    mlp = [*before, stream] + [inner] * (3 if shape.gated_mlp else 2)
    if shape.post_norms:
        attention += roots
        mlp += [stream, *roots]
    if shape.head_norms:
        attention += [tokens * size * widths.compute for size in (shape.query_size, shape.kv_size)]
        spans = (1, 1) if shape.head_norms_span_heads else (shape.heads, shape.kv_heads)
        attention += [4 * tokens * each for each in spans]
    if shape.hidden_dropout:
        attention.append(tokens * shape.hidden)
        mlp.append(tokens * shape.hidden)
    return SavedTensors(attention=attention, mlp=mlp, post_norm=[])


def saved_by_last_norm(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """What the last norm saves, which every model has."""
    if shape.trace is not None:
        return [_traced(shape.trace.behind, batch)]
    if shape.norm_has_bias:
        return _norms(shape, widths, batch.tokens)[0]
    return _rms(shape, widths, batch.tokens * shape.hidden, batch.tokens, widths.stream)


def saved_once(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None = None) -> list[int]:
    """Saved once for all layers: sine and cosine of the positions, and the mask; each per kind of layer."""
    if shape.trace is not None:
        return [_traced(shape.trace.once, batch)]
    rotation = [] if shape.learned_positions else [batch.tokens * shape.head_dim * widths.stream] * 2
    kernel = kernel or attention_kernel(shape, widths, batch)
    width = widths.stream if kernel == "eager" else 1 if kernel == "masked" else 0
    return (rotation + [batch.tokens * batch.length * width] * (width > 0)) * shape.layer_kinds


def _norms(shape: ModelShape, widths: Widths, tokens: int) -> tuple[list[int], list[int]]:
    """What the norm before a block saves and the norm behind it, if they are there."""
    stream = tokens * shape.hidden
    if shape.norm_has_bias:  # LayerNorm: its input, mean and deviation
        return [stream * widths.stream, 4 * tokens, 4 * tokens], []
    before = _rms(shape, widths, stream, tokens, widths.stream) if shape.pre_norms else []
    return before, _rms(shape, widths, stream, tokens, widths.compute) if shape.post_norms else []


def _rms(shape: ModelShape, widths: Widths, size: int, roots: int, width: int) -> list[int]:
    """RMSNorm in single operations over `size` elements of `width` bytes: its input, reciprocal roots, and for the gradient of
    its weight the normalized input."""
    if widths.adapters is not None:
        return [size * widths.norm, roots * widths.norm]
    normed = widths.norm if shape.norm_in_float32 else width  # others round before they multiply by the weight
    return [size * widths.norm, size * normed, roots * widths.norm]


def _inputs(widths: Widths, size: int, matmuls: int) -> list[int]:
    """The normalized input of a block's first matmuls: one for all, or a cast for each."""
    return [widths.compute * size] * (matmuls if widths.casts else 1)


def _saved_by_attention(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """Query, key, value and output, and either the scores or what a fused kernel recomputes them from."""
    tokens, width = batch.tokens, widths.compute
    query, kv = tokens * shape.query_size * width, tokens * shape.kv_size * width
    log_sums = tokens * shape.heads * max(4, width)
    scores = tokens * shape.heads * batch.length
    kernel = attention_kernel(shape, widths, batch)
    adapters = widths.adapters  # the result is the input of a frozen matmul, whose adapter may save another one instead
    result = [query] * (adapters is None or (adapters.output > 0 and width == 4 and not adapters.dropout))
    if kernel == "eager":  # the capped scores, and their softmax in float32 and in the compute dtype
        return [query] * 3 + result + [scores * width, scores * 4] + [scores * width] * (width != 4)
    if kernel == "math":  # in float32 at least
        dropped = 2 if shape.attention_dropout else 0  # the softmax after dropout, and the mask of dropout
        return [query // width * widths.norm] * 3 + result + [scores * widths.norm] * (1 + dropped)
    # Phi-3 computes queries in another layout, and so is the output, of which the output projection saves a copy.
    copied = result if shape.fused_matrices and batch.device == "cpu" else []
    if kernel == "masked":  # the mask is saved as numbers, once per layer
        repeated = kv if shape.kv_heads == 1 else query  # shared key-value heads are repeated; a single one is expanded
        return [query] * 2 + [repeated] * 2 + [log_sums, tokens * batch.length * width] + copied
    value = query + 2 * kv if shape.fused_matrices else kv  # a view of the whole fused result
    return [query, query, kv, value, log_sums, *copied]


def attention_kernel(shape: ModelShape, widths: Widths, batch: Batch) -> str:
    """`fused`, `masked`, `math` or `eager`: the kernel of a training step."""
    return torch_kernel(
        shape, device=batch.device, compute_bytes=widths.compute, capability=batch.capability,
        deterministic=batch.deterministic, packed=batch.packed,
    )  # fmt: skip


def generation_kernel(shape: ModelShape, widths: Widths, batch: Batch) -> str:
    """The kernel of generation, which never is `fused`."""
    return torch_generation_kernel(
        shape, device=batch.device, compute_bytes=widths.compute, capability=batch.capability,
        deterministic=batch.deterministic,
    )  # fmt: skip


def _saved_by_mlp(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """Gate, activated gate, up and their product; or the operands of a GELU in single operations; or input and output."""
    size, width = batch.tokens * shape.ffn, widths.compute
    down = [] if widths.adapters is not None else [size * width]  # the input of the down projection
    if shape.gated_mlp:
        return [size * width] * 3 + down
    if not shape.composite_activation:
        return [size * width, *down]
    if batch.device != "cpu" and widths.casts:  # on CUDA, autocast computes powers in float32
        return [size * 4] * 3 + [size * width] + down
    return [size * width] * 4 + down


# --- besides what is saved -------------------------------------------------------------------------------------------


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


def _traced(cost: Cost, batch: Batch) -> int:
    return max(0, round(batch.tokens * (cost[0] + cost[1] * batch.length)))


def backward_moments(shape: ModelShape, widths: Widths, batch: Batch) -> list[Moment]:
    """The moments at which the backward pass of a layer can be largest, from its end to its beginning."""
    if (trace := shape.trace) is not None:
        gradient = max(map(math.prod, tensors_of(shape).matrices)) * widths.stream
        saved, in_flight = _traced(trace.saved, batch), _traced(trace.backward, batch) + gradient
        return [Moment(saved=saved, in_flight=in_flight, done=0, casts=0, updating=now) for now in (False, True)]
    layer = saved_by_layer(shape, widths, batch)
    tokens, width = batch.tokens, widths.compute
    stream, inner = tokens * shape.hidden, tokens * shape.ffn * width
    matrices = tensors_of(shape).matrices
    last = elements(matrices[-1:])
    attention = elements(matrices[: 4 if shape.gated_mlp and not shape.fused_matrices else 2])
    everything = elements(matrices)
    upstream = stream * widths.stream + stream * width * (widths.casts or shape.post_norms)
    down, weight = inner, last * (width + widths.stream * widths.casts)
    if (adapters := widths.adapters) is not None:  # its adapter saves its input, whose gradient is in float32
        down = sum(adapters.saved_inputs(tokens * shape.ffn, adapters.down, compute=width, device=batch.device))
        weight = 4 * tokens * shape.ffn * adapters.down
    whole = sum(layer.all)
    in_mlp = whole - sum(layer.post_norm)
    return [
        Moment(saved=whole, in_flight=upstream + 2 * stream * widths.norm, done=0, casts=everything),
        Moment(saved=in_mlp, in_flight=upstream + inner + weight, done=0, casts=everything),
        Moment(
            saved=in_mlp - down,
            in_flight=upstream + inner + last * widths.stream,
            done=0,
            casts=everything,
            updating=True,
        ),
        Moment(
            saved=in_mlp - down,
            in_flight=upstream + (2 if batch.compiled else 3) * inner,  # compiled code reuses one of them
            done=last,
            casts=everything,
        ),
        Moment(
            saved=sum(layer.attention),
            in_flight=upstream + _through_attention(shape, widths, batch),
            done=everything - attention,
            casts=attention,
        ),
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


def forward_of_one_layer(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None = None) -> list[int]:
    """Bytes of the tensors alive at once without autograd, at the widest point of a layer; besides `saved_once`."""
    if shape.trace is not None:
        return [_traced(shape.trace.forward, batch)]
    tokens, width = batch.tokens, widths.compute
    stream = [tokens * shape.hidden * widths.stream] * 3  # the residual, its norm and the block's result
    kernel = kernel or attention_kernel(shape, widths, batch)
    mask = [tokens * batch.length * width] if kernel == "masked" else []  # as numbers
    mlp = [tokens * shape.ffn * width] * (3 if shape.gated_mlp else 4)
    if widths.adapters is not None and widths.adapters.mlp_inputs:  # computed in float32, scaled, and then added
        mlp = [tokens * shape.ffn * width] * 2 + [tokens * shape.ffn * 4] * 2 + [tokens * shape.hidden * 4, stream[0]]
    # Scores and their softmax; in eager attention also those with the mask.
    of_scores = {"math": 3 if width == 2 else 2, "eager": 3}.get(kernel, 0)
    scores = [tokens * shape.heads * batch.length * widths.norm] * of_scores
    # Query, key, value, and the halves of their rotation, in the dtype of the residual stream.
    rotated = tokens * shape.query_size * (width if shape.learned_positions else max(width, widths.stream))
    attention = [rotated] * (12 if kernel == "math" else 6) + scores  # `math` also repeats and scales them
    return stream + mask + max(mlp, attention, key=sum)

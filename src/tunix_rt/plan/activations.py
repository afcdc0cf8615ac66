"""The activations that autograd saves, tensor by tensor, of a model on the PyTorch engine."""

from dataclasses import dataclass, field, replace
from functools import partial

from tunix_rt.plan.adapters import Adapters
from tunix_rt.plan.attention_kernels import (
    OLDEST_CAPABILITY,
    Capability,
    repeats_shared_heads,
    torch_generation_kernel,
    torch_kernel,
)
from tunix_rt.plan.experts import forward_of_experts, saved_by_experts
from tunix_rt.plan.precision import Recipe
from tunix_rt.plan.sizes import Cost, ModelShape

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

    def of_kind(self, index: int) -> "Widths":
        """With the adapters of one kind of layer, where layers differ."""
        several = () if self.adapters is None else self.adapters.kinds
        return replace(self, adapters=several[index]) if several else self


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
    behind: list[int] = field(default_factory=list)
    """Behind the MLP: what the layer's own embedding adds."""

    @property
    def all(self) -> list[int]:
        return self.attention + self.mlp + 2 * self.post_norm + self.behind


def saved_by_layer(shape: ModelShape, widths: Widths, batch: Batch) -> SavedTensors:
    """What autograd saves in a layer of this kind, without weights and their casts."""
    if shape.trace is not None:
        return SavedTensors(attention=[traced_bytes(shape.trace.saved, batch)], mlp=[], post_norm=[])
    if batch.compiled:
        return _saved_compiled(shape, widths, batch)
    tokens, compute = batch.tokens, widths.compute
    stream = tokens * shape.hidden
    before, after = _norms(shape, widths, tokens)
    separate = shape.gated_mlp and not shape.fused_matrices
    attention = [*before, *_saved_by_attention(shape, widths, batch)]
    mlp = [*before, *_saved_by_mlp(shape, widths, batch)]
    if shape.experts is not None:  # and the norms behind the MLP and behind the experts
        mlp += saved_by_experts(shape, widths, tokens, device=batch.device)
        mlp += 2 * _rms(shape, widths, stream, tokens, compute)
    if shape.head_norms:
        for size, heads in ((shape.query_size, shape.heads), (shape.kv_size, shape.kv_heads))[: 2 - shape.shares_kv]:
            roots = tokens * (1 if shape.head_norms_span_heads else heads)
            attention += _rms(shape, widths, tokens * size, roots, compute)
    if shape.value_norm and not shape.shares_kv:
        attention += _weightless_rms(shape, widths, tokens)
    if (adapters := widths.adapters) is None:
        attention += _inputs(widths, stream, 1 + shape.kv_matrices if separate else 1)
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
    behind = _saved_by_layer_input(shape, widths, batch)
    return SavedTensors(attention=attention, mlp=mlp, post_norm=after, behind=behind)


def _saved_by_layer_input(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """The layer's own embedding: input and output of its gate, the activation, input of its projection, the norm behind it."""
    if not shape.layer_input:
        return []
    tokens, compute = batch.tokens, widths.compute
    stream, own = tokens * shape.hidden, tokens * shape.layer_input
    normed = _rms(shape, widths, stream, tokens, compute)
    if (adapters := widths.adapters) is None:
        return [stream * compute, *[own * compute] * 3, *normed]
    saved = partial(adapters.saved_inputs, compute=compute, device=batch.device)
    inputs = saved(stream, adapters.gate) + saved(own, adapters.projection)
    activated = [own * compute] * adapters.once
    return [
        own * compute,
        *activated,
        *inputs,
        *[4 * tokens * adapters.rank] * (adapters.gate + adapters.projection),
        *normed,
    ]


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
    if shape.value_norm and not shape.shares_kv:
        attention += [tokens * shape.kv_size * widths.compute, 4 * tokens * shape.kv_heads]
    if shape.hidden_dropout:
        attention.append(tokens * shape.hidden)
        mlp.append(tokens * shape.hidden)
    own = tokens * shape.layer_input * widths.compute
    behind = [stream, own, own, stream, *roots] if shape.layer_input else []
    return SavedTensors(attention=attention, mlp=mlp, post_norm=[], behind=behind)


def saved_by_last_norm(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """What the last norm saves, which every model has."""
    if shape.trace is not None:
        return [traced_bytes(shape.trace.behind, batch)]
    if shape.norm_has_bias:
        return _norms(shape, widths, batch.tokens)[0]
    return _rms(shape, widths, batch.tokens * shape.hidden, batch.tokens, widths.stream)


def saved_once(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None = None) -> list[int]:
    """Saved once for all layers: sine and cosine of the positions, and the mask, each per kind of layer; and the layers' own
    embeddings."""
    if shape.trace is not None:
        return [traced_bytes(shape.trace.once, batch)]
    if shape.kinds:
        rotated = {kind.window: kind for kind in shape.kinds}.values()
        each = (_rotation_and_mask(kind, widths, batch, kernel) for kind in rotated)
        return [size for sizes in each for size in sizes] + _own_embeddings(shape, widths, batch)
    return _rotation_and_mask(shape, widths, batch, kernel) * shape.layer_kinds


def _rotation_and_mask(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None) -> list[int]:
    rotation = [] if shape.learned_positions else [batch.tokens * shape.head_dim * widths.stream] * 2
    kernel = kernel or attention_kernel(shape, widths, batch)
    width = widths.stream if kernel == "eager" else 1 if kernel == "masked" else 0
    return rotation + [batch.tokens * batch.length * width] * (width > 0)


def _own_embeddings(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """The layers' own embeddings of all tokens, and what the norm of their projection and the projection itself save."""
    if not shape.layer_input:
        return []
    own = batch.tokens * shape.layer_inputs
    stream = batch.tokens * shape.hidden
    normed = _rms(shape, widths, own, own // shape.layer_input, widths.compute)
    if (adapters := widths.adapters) is None:
        # The input is also that of the first norm, if both compute in one dtype.
        inputs = [stream * widths.compute] * (widths.stream != widths.norm or widths.casts)
        return [own * widths.stream, *normed, *inputs]
    if not adapters.once:
        return [own * widths.stream]
    inputs = adapters.saved_inputs(stream, 1, compute=widths.compute, device=batch.device)
    return [own * widths.stream, *normed, *inputs, 4 * batch.tokens * adapters.rank]


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
    squares = [roots * widths.norm] * (2 if shape.norm_saves_squares else 1)
    if widths.adapters is not None:
        return [size * widths.norm, *squares]
    normed = widths.norm if shape.norm_in_float32 else width  # others round before they multiply by the weight
    return [size * widths.norm, size * normed, *squares]


def _weightless_rms(shape: ModelShape, widths: Widths, tokens: int) -> list[int]:
    """The norm of values; the input is also that of the norm of keys, if they are the same and nothing is cast."""
    shared = shape.value_is_key and widths.compute == widths.norm
    inputs = [] if shared else [tokens * shape.kv_size * widths.norm]
    return inputs + [tokens * shape.kv_heads * widths.norm] * 2


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
        own = [repeated] * 2
        if shape.shares_kv and shape.kv_heads in (1, shape.heads):
            own = []
        elif shape.norm_saves_squares and widths.casts and shape.kv_heads == 1:
            own = [repeated]
        if shape.norm_saves_squares and widths.casts and shape.kv_heads == 1:
            own.append(query)  # keys are rotated in the dtype of the residual stream; a cast makes the heads real
        return [query] * 2 + own + [log_sums, tokens * batch.length * width] + copied
    if repeats_shared_heads(shape) and shape.kv_heads > 1:
        kv = query
    value = query + 2 * kv if shape.fused_matrices else kv  # a view of the whole fused result
    return [query, query, *([] if shape.shares_kv else [kv, value]), log_sums, *copied]


def attention_kernel(shape: ModelShape, widths: Widths, batch: Batch) -> str:
    """`fused`, `masked`, `math` or `eager`: the kernel of a training step. A window that a row exceeds needs a mask."""
    exceeded = shape.layer_kinds == 1 and shape.window is not None and shape.window < batch.length
    return torch_kernel(
        shape, device=batch.device, compute_bytes=widths.compute, capability=batch.capability,
        deterministic=batch.deterministic, packed=batch.packed or exceeded,
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


def traced_bytes(cost: Cost, batch: Batch) -> int:
    return max(0, round(batch.tokens * (cost.token + cost.token_and_length * batch.length) + cost.casts))


def forward_of_one_layer(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None = None) -> list[int]:
    """Bytes of the tensors alive at once without autograd, at the widest point of a layer; besides `saved_once`."""
    if shape.trace is not None:
        return [traced_bytes(shape.trace.forward, batch)]
    tokens, width = batch.tokens, widths.compute
    stream = [tokens * shape.hidden * widths.stream] * 3  # the residual, its norm and the block's result
    kernel = kernel or attention_kernel(shape, widths, batch)
    mask = [tokens * batch.length * width] if kernel == "masked" else []  # as numbers
    mlp = [tokens * shape.ffn * width] * (3 if shape.gated_mlp else 4)
    if widths.adapters is not None and widths.adapters.mlp_inputs:  # computed in float32, scaled, and then added
        adapted = [tokens * shape.ffn * 4] * 2
        if shape.fused_matrices:
            adapted = [max(0, 4 * tokens * shape.ffn * 4 - widths.adapters.unpacked)]
        mlp = [tokens * shape.ffn * width] * 2 + adapted + [tokens * shape.hidden * 4, stream[0]]
    # Scores and their softmax; in eager attention also those with the mask.
    of_scores = {"math": [widths.norm] * (3 if width == 2 else 2), "eager": [widths.norm] * 3}
    of_scores["capped"] = max([width] * 3, [width, 4, width], key=sum)  # in tanh, or in the softmax in float32
    scores = [tokens * shape.heads * batch.length * each for each in of_scores.get(kernel, [])]
    # Query, key, value, and the halves of their rotation, in the dtype of the residual stream.
    rotated = tokens * shape.query_size * (width if shape.learned_positions else max(width, widths.stream))
    attention = [rotated] * (12 if kernel == "math" else 6) + scores  # `math` also repeats and scales them
    return stream + mask + max(mlp, attention, forward_of_experts(shape, widths, tokens), key=sum)

"""The parameters of a model tensor by tensor: gradients, optimizer states and copies are made of them."""

import math
from dataclasses import dataclass

from tunix_rt.plan.precision import Recipe
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


DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one forward pass, and what decides how attention computes them."""

    rows: int
    length: int
    packed: bool
    device: str
    modern: bool = True
    """A GPU of compute capability 8.0 or above, for which there are kernels without a mask."""
    deterministic: bool = False
    """On a GPU: without the memory-efficient kernel, whose backward pass adds in any order."""
    compiled: bool = False
    """Layers are compiled: what lies between two products is computed again from them."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of an element."""

    compute: int
    """Of products."""
    stream: int
    """Of what layers pass on: the type of the weights."""
    norm: int
    """Inside a norm."""
    adapters: int | None
    """Rank of LoRA, whose factors compute in float32; None without."""

    @property
    def casts(self) -> bool:
        return self.compute != self.stream


def widths_of(recipe: Recipe, lora_rank: int | None) -> Widths:
    return Widths(
        compute=DTYPE_BYTES[recipe.compute],
        stream=DTYPE_BYTES[recipe.frozen or recipe.weights],
        norm=max(4, DTYPE_BYTES[recipe.compute]),
        adapters=lora_rank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Sizes of the tensors that one layer keeps, by the block that keeps them."""

    attention: list[int]
    mlp: list[int]
    behind: list[int]
    """By the norm behind each of the two blocks, where there is one."""

    @property
    def all(self) -> list[int]:
        return self.attention + self.mlp + 2 * self.behind


def kept_by_layer(shape: ModelShape, widths: Widths, batch: Batch) -> Kept:
    """What autograd saves in one layer, weights and their casts left out."""
    if batch.compiled:
        return _kept_compiled(shape, widths, batch)
    tokens, compute = batch.tokens, widths.compute
    stream = tokens * shape.hidden
    before, after = _norms(shape, widths, tokens)
    first = 3 if shape.gated_mlp else 1  # products that read the normed input of attention
    attention = [*before, *_inputs(widths, stream, first), *_kept_by_attention(shape, widths, batch)]
    mlp = [*before, *_inputs(widths, stream, 2 if shape.gated_mlp else 1), *_kept_by_mlp(shape, widths, batch)]
    if shape.head_norms:
        attention += _rms(shape, widths, tokens * shape.query_size, tokens * shape.heads, compute)
        attention += _rms(shape, widths, tokens * shape.kv_size, tokens * shape.kv_heads, compute)
    if widths.adapters is not None:  # the inputs of the other two products, in float32 for the adapters
        attention += [4 * tokens * shape.query_size] * (compute != 4)
        mlp.append(4 * tokens * shape.ffn)
        low = 4 * tokens * widths.adapters
        attention += [low] * (first + 1)
        mlp += [low] * (3 if shape.gated_mlp else 2)
    if shape.hidden_dropout:  # which elements are left: a factor for each on a CPU, a truth value on a GPU
        attention.append(stream * (compute if batch.device == "cpu" else 1))
        mlp.append(stream * (compute if batch.device == "cpu" else 1))
    return Kept(attention=attention, mlp=mlp, behind=after)


def _kept_compiled(shape: ModelShape, widths: Widths, batch: Batch) -> Kept:
    """What the compiler keeps: the input of the layer, inputs of products and what attention needs; of a block's result as
    much as the next norm is made from. Norms keep their roots alone, and the activation is computed again from the gate."""
    tokens = batch.tokens
    stream, inner = tokens * shape.hidden * widths.compute, tokens * shape.ffn * widths.compute
    roots = [4 * tokens] * (2 if shape.norm_has_bias else 1)  # and of a LayerNorm the mean
    attention = [
        tokens * shape.hidden * widths.stream,
        *roots,
        stream,
        *_kept_by_attention(shape, widths, batch),
        stream,
    ]
    mlp = [*roots, stream] + [inner] * (3 if shape.gated_mlp else 2)
    if shape.norms_per_layer == 4:
        attention += roots
        mlp += [stream, *roots]
    if shape.head_norms:
        attention += [tokens * size * widths.compute for size in (shape.query_size, shape.kv_size)]
        attention += [4 * tokens * heads for heads in (shape.heads, shape.kv_heads)]
    if shape.hidden_dropout:
        attention.append(tokens * shape.hidden)
        mlp.append(tokens * shape.hidden)
    return Kept(attention=attention, mlp=mlp, behind=[])


def kept_by_last_norm(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """Behind all layers."""
    return _norms(shape, widths, batch.tokens)[0]


def kept_once(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None = None) -> list[int]:
    """For all layers together: sine and cosine of the positions, and the mask. Gemma 3 has two kinds of each."""
    kinds = 2 if shape.model_type.startswith("gemma3") else 1
    rotation = [] if shape.learned_positions else [batch.tokens * shape.head_dim * widths.stream] * 2
    kernel = kernel or attention_kernel(shape, widths, batch)
    width = widths.stream if kernel == "eager" else 1 if kernel == "masked" else 0
    return (rotation + [batch.tokens * batch.length * width] * (width > 0)) * kinds


def _norms(shape: ModelShape, widths: Widths, tokens: int) -> tuple[list[int], list[int]]:
    """What the norm before a block keeps, and that behind it where there is one."""
    stream = tokens * shape.hidden
    if shape.norm_has_bias:  # LayerNorm: its input, mean and deviation
        return [stream * widths.stream, 4 * tokens, 4 * tokens], []
    before = _rms(shape, widths, stream, tokens, widths.stream)
    return before, _rms(shape, widths, stream, tokens, widths.compute) if shape.norms_per_layer == 4 else []


def _rms(shape: ModelShape, widths: Widths, size: int, roots: int, width: int) -> list[int]:
    """RMSNorm, spelled out, over `size` elements of `width` bytes: its input, the roots, and for its weights the normed
    input."""
    if widths.adapters is not None:
        return [size * widths.norm, roots * widths.norm]
    normed = widths.norm if shape.model_type.startswith("gemma") else width  # others round before the last product
    return [size * widths.norm, size * normed, roots * widths.norm]


def _inputs(widths: Widths, size: int, products: int) -> list[int]:
    """The normed input of a block's first products: one for all, or a cast for each."""
    if widths.adapters is not None:  # frozen products keep no input, their adapters keep it in float32
        return [4 * size] * products if widths.compute != 4 else [4 * size]
    return [widths.compute * size] * (products if widths.casts else 1)


def _kept_by_attention(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """Query, key, value and result, and either the scores or what a fused kernel needs to find them again."""
    tokens, width = batch.tokens, widths.compute
    query, kv = tokens * shape.query_size * width, tokens * shape.kv_size * width
    log_sums = tokens * shape.heads * max(4, width)
    scores = tokens * shape.heads * batch.length
    kernel = attention_kernel(shape, widths, batch)
    result = [query] * (widths.adapters is None or width == 4)  # an adapter keeps it in float32 instead
    if kernel == "eager":  # the capped scores, and their softmax in float32 and in the type of the products
        return [query] * 3 + result + [scores * width, scores * 4] + [scores * width] * (width != 4)
    if kernel == "math":  # in float32 at least
        dropped = 2 if shape.attention_dropout else 0  # what dropout leaves of the softmax, and which it leaves
        return [query // width * widths.norm] * 3 + result + [scores * widths.norm] * (1 + dropped)
    if kernel == "masked":  # the mask is kept as numbers, once per layer
        repeated = (
            kv if shape.kv_heads == 1 else query
        )  # key-value heads that several share; a single one is only seen so
        return [query] * 2 + [repeated] * 2 + [log_sums, tokens * batch.length * width]
    return [query, query, kv, kv, log_sums]


def attention_kernel(shape: ModelShape, widths: Widths, batch: Batch) -> str:
    """Which attention the engine and torch will choose: `fused` (no mask), `masked`, `math` or `eager` (scores exist)."""
    narrow, cuda = widths.compute == 2, batch.device != "cpu"
    ours = cuda and batch.modern and not shape.attention_dropout and shape.head_dim <= 256
    if shape.capped_scores:
        return "fused" if ours and widths.compute != 8 else "eager"
    if ours and narrow:
        return "fused"
    if not cuda:
        return "math" if shape.attention_dropout else "masked" if batch.packed else "fused"
    if widths.compute == 8 or batch.deterministic:  # torch's memory-efficient kernel knows neither
        return "math"
    if batch.packed:
        return "masked"
    return "fused" if shape.heads == shape.kv_heads else "math"  # nor heads that share keys and values


def generating_kernel(shape: ModelShape, widths: Widths, batch: Batch) -> str:
    """The same for answers, which keep a cache, mask the padding of shorter questions and drop nothing at random: never one
    without a mask."""
    if shape.capped_scores:
        return "eager"
    # The memory-efficient kernel knows no heads that share keys and values; others know 16-bit numbers and newer GPUs alone.
    shared = shape.heads != shape.kv_heads and (widths.compute == 4 or not batch.modern)
    cannot = widths.compute == 8 or batch.deterministic or shared
    return "math" if batch.device != "cpu" and cannot else "masked"


def _kept_by_mlp(shape: ModelShape, widths: Widths, batch: Batch) -> list[int]:
    """Gate, activated gate, up and their product; or the five operands of a spelled-out GELU; or input and output."""
    size, width = batch.tokens * shape.ffn, widths.compute
    products = [] if widths.adapters is not None else [size * width]  # the input of the last product
    if shape.gated_mlp:
        return [size * width] * 3 + products
    if not shape.composite_activation:
        return [size * width, *products]
    if batch.device != "cpu" and widths.casts:  # on CUDA, autocast raises powers in float32
        return [size * 4] * 3 + [size * width] + products
    return [size * width] * 4 + products


# --- besides what is kept --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment in the backward pass of one layer."""

    kept: int
    """What of the layer's own is still there, in bytes."""
    in_flight: int
    """Bytes of gradients of activations, and of the weight that is just computed."""
    done: int
    """Elements of the layer's matrices whose gradient is complete."""
    casts: int
    """Elements of its matrices whose cast is still there."""
    updating: bool = False
    """The last matrix is just updated and its gradient not yet dropped: with an update in the backward pass."""


def backward_moments(shape: ModelShape, widths: Widths, batch: Batch) -> list[Moment]:
    """Where the backward pass of a layer can be largest: at its end, behind the activation, at it, in attention, at the
    beginning."""
    kept = kept_by_layer(shape, widths, batch)
    tokens, width = batch.tokens, widths.compute
    stream, inner = tokens * shape.hidden, tokens * shape.ffn * width
    matrices = tensors_of(shape).matrices
    last, attention = elements(matrices[-1:]), elements(matrices[: 4 if shape.gated_mlp else 2])
    everything = elements(matrices)
    upstream = stream * widths.stream + stream * width * (widths.casts or shape.norms_per_layer == 4)
    if widths.adapters is None:
        product, weight = inner, last * (width + widths.stream * widths.casts)
    else:  # the adapter keeps the product in float32, and gives its gradient in it
        product, weight = 4 * tokens * shape.ffn, 4 * tokens * shape.ffn
    whole = sum(kept.all)
    in_mlp = whole - sum(kept.behind)
    return [
        Moment(kept=whole, in_flight=upstream + 2 * stream * widths.norm, done=0, casts=everything),
        Moment(kept=in_mlp, in_flight=upstream + inner + weight, done=0, casts=everything),
        Moment(
            kept=in_mlp - product,
            in_flight=upstream + inner + last * widths.stream,
            done=0,
            casts=everything,
            updating=True,
        ),
        Moment(
            kept=in_mlp - product,
            in_flight=upstream + (2 if batch.compiled else 3) * inner,  # the compiler writes over one of them
            done=last,
            casts=everything,
        ),
        Moment(
            kept=sum(kept.attention),
            in_flight=upstream + _through_attention(shape, widths, batch),
            done=everything - attention,
            casts=attention,
        ),
        Moment(kept=0, in_flight=3 * stream * widths.norm + upstream, done=everything, casts=0),
    ]


def _through_attention(shape: ModelShape, widths: Widths, batch: Batch) -> int:
    """Gradients of result, query, key, value, and of the scores where they exist."""
    tokens, width = batch.tokens, widths.compute
    query, kv = tokens * shape.query_size * width, tokens * shape.kv_size * width
    kernel = attention_kernel(shape, widths, batch)
    if kernel == "fused":
        return 2 * query + 2 * kv
    scores = 2 * tokens * shape.heads * batch.length * widths.norm
    return 4 * query + (scores if kernel in ("math", "eager") else 0)


def forward_of_one_layer(shape: ModelShape, widths: Widths, batch: Batch, kernel: str | None = None) -> list[int]:
    """Bytes of the tensors alive at once where nothing is kept, at the widest point of a layer; beside `kept_once`."""
    tokens, width = batch.tokens, widths.compute
    stream = [tokens * shape.hidden * widths.stream] * 3  # the residual, its norm and the block's result
    kernel = kernel or attention_kernel(shape, widths, batch)
    mask = [tokens * batch.length * width] if kernel == "masked" else []  # as numbers
    mlp = [tokens * shape.ffn * width] * (3 if shape.gated_mlp else 4)
    if widths.adapters is not None:  # what an adapter adds is computed in float32, scaled, and then summed
        mlp = [tokens * shape.ffn * width] * 2 + [tokens * shape.ffn * 4] * 2 + [tokens * shape.hidden * 4, stream[0]]
    # Scores and their softmax; before it, spelled out, those with the mask.
    of_scores = {"math": 3 if width == 2 else 2, "eager": 3}.get(kernel, 0)
    scores = [tokens * shape.heads * batch.length * widths.norm] * of_scores
    # Query, key, value, and the halves of their rotation, by numbers of the type that layers pass on.
    rotated = tokens * shape.query_size * (width if shape.learned_positions else max(width, widths.stream))
    attention = [rotated] * (12 if kernel == "math" else 6) + scores  # without a kernel: repeated, and scaled
    return stream + mask + max(mlp, attention, key=sum)

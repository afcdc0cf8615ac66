"""The sizes of a decoder: enough to count every parameter and every activation a step saves."""

import math
from dataclasses import dataclass
from typing import NamedTuple

Dimensions = tuple[int, ...]


class Cost(NamedTuple):
    """Bytes of a traced step."""

    token: float
    token_and_length: float
    """Of each token, by the length of its row."""
    casts: float
    """Of weights in the compute dtype, however many tokens there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A model of any family, as `engines/torch/tracer.py` saw it: its tensors, and the memory of a step in one precision."""

    layers: tuple[tuple[Dimensions, ...], ...]
    """Parameters of each layer."""
    others: tuple[Dimensions, ...]
    """Parameters beside layers, token embedding and lm_head."""
    expert_parameters: int
    active_experts: float
    """Fraction of the experts that a token uses; 1 without experts."""
    saved: Cost
    """By autograd, in a layer on average, with the casts of its weights."""
    forward: Cost
    """Alive at the peak of a layer's forward pass."""
    backward: Cost
    """Alive at the peak of a layer's backward pass, beside what was saved."""
    once: Cost
    """Saved before the first layer."""
    behind: Cost
    """Saved behind the last layer."""
    own_logits: bool = False
    """More than the weight of the lm_head turns hidden states into logits, so the loss is not computed in chunks."""

    @property
    def largest(self) -> tuple[Dimensions, ...]:
        """The parameters of the largest layer."""
        return max(self.layers, key=lambda layer: sum(map(math.prod, layer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer, stored as two tensors for all of them."""

    count: int
    active: int
    """Experts that a token uses."""
    ffn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder. `parameters` is exact; a tied head is counted once."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    largest_head: int = 0
    """Of the model, where layers differ: it decides the attention kernel of all of them."""
    ffn: int
    vocab: int
    max_positions: int
    learned_positions: bool = False
    """Positions are a trained embedding (GPT-2), not a rotation."""
    gated_mlp: bool
    composite_activation: bool = False
    """The activation consists of single operations (`gelu_new`), each of which saves its input."""
    tied_head: bool
    pre_norms: bool = True
    """Norms before attention and MLP."""
    post_norms: bool = False
    """Norms behind them."""
    norm_has_bias: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    norm_in_float32: bool = False
    """RMSNorm multiplies by its weight before it rounds to the compute dtype (Gemma, OLMo)."""
    head_norms: bool = False
    """Queries and keys are normalized."""
    head_norms_span_heads: bool = False
    """The norm of queries is over all heads together, and so is that of keys (OLMo)."""
    fused_matrices: bool = False
    """Query, key and value are one matmul, and so are gate and up (Phi-3)."""
    query_bias: bool
    """Query, key and value projections have a bias."""
    output_bias: bool
    """The output projection of attention has a bias."""
    mlp_bias: bool
    layer_kinds: int = 1
    """Kinds of layers with a rotation of their own (Gemma 3: 2)."""
    window: int | None = None
    """Sliding window of some layers."""
    sliding_layers: int = 0
    """How many layers have it."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    capped_scores: bool = False
    """Soft-capped attention scores (Gemma 2): transformers' attention materializes them."""
    capped_logits: bool = False
    norm_saves_squares: bool = False
    """RMSNorm takes a power of the mean square, and saves both (Gemma 4)."""
    value_norm: bool = False
    """Values are normalized, without a weight (Gemma 4)."""
    value_is_key: bool = False
    """Values are the result of the key projection."""
    shares_kv: bool = False
    """Keys and values are those of an earlier layer."""
    layer_input: int = 0
    """Size of the embedding that each layer has of its own (Gemma 4), 0 without one."""
    layer_inputs: int = 0
    """Of all layers together: the width of their embedding."""
    layer_input_vocab: int = 0
    experts: Experts | None = None
    """Beside the MLP."""
    kinds: tuple["ModelShape", ...] = ()
    """Where layers differ: the shape of each kind, with the number of such layers. Sizes of the model are then the largest."""
    order: tuple[int, ...] = ()
    """Where layers differ: for each layer the index of its kind."""
    trace: Trace | None = None
    """Of a model whose family has no row: sizes of its blocks are then not known, and what is planned is traced."""

    @property
    def norms_per_layer(self) -> int:
        """Norms over the hidden size in one layer."""
        extra = (self.layer_input > 0) + 3 * (self.experts is not None)
        return 2 * (self.pre_norms + self.post_norms) + extra

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def stack(self) -> tuple["ModelShape", ...]:
        """The kinds of layers; a model of equal layers is one."""
        return self.kinds or (self,)

    @property
    def kv_matrices(self) -> int:
        """Projections of keys and values."""
        return 0 if self.shares_kv else 1 if self.value_is_key else 2

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters in the matmuls of one layer, on average; of experts, those that a token uses."""
        if self.trace is not None:
            matrices = sum(math.prod(one) for layer in self.trace.layers for one in layer if len(one) > 1)
            idle = round(self.trace.expert_parameters * (1 - self.trace.active_experts))
            return (matrices - idle) // self.layers
        if self.kinds:
            inside = sum(kind.layers * kind.layer_matrix_parameters for kind in self.kinds)
            return inside // self.layers + self.layer_input * self.hidden
        attention = self.hidden * (2 * self.query_size + self.kv_matrices * self.kv_size)
        dense = self.hidden * (self.ffn * (3 if self.gated_mlp else 2) + 2 * self.layer_input)
        return attention + dense + self._expert_matrices(active=True)

    def _expert_matrices(self, *, active: bool) -> int:
        """With the projection of the router."""
        if (experts := self.experts) is None:
            return 0
        used = experts.active if active else experts.count
        return self.hidden * (3 * used * experts.ffn + experts.count)

    @property
    def idle_parameters(self) -> int:
        """Parameters of experts that a token does not use."""
        if self.trace is not None:
            return round(self.trace.expert_parameters * (1 - self.trace.active_experts))
        each = (
            (kind.layers, kind._expert_matrices(active=False), kind._expert_matrices(active=True))
            for kind in self.stack
        )
        return sum(layers * (whole - used) for layers, whole, used in each)

    @property
    def embedding_parameters(self) -> int:
        """The token embedding, once."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        if self.trace is not None:
            counted = sum(math.prod(one) for layer in self.trace.layers for one in layer)
            counted += sum(map(math.prod, self.trace.others))
            return counted + self.embedding_parameters * (1 if self.tied_head else 2)
        norm = self.hidden * (2 if self.norm_has_bias else 1)
        embeddings = self.embedding_parameters * (1 if self.tied_head else 2)
        embeddings += self.max_positions * self.hidden * self.learned_positions
        embeddings += self.layer_inputs * (self.layer_input_vocab + self.hidden) + self.layer_input
        return embeddings + sum(kind.layers * kind._layer_parameters for kind in self.stack) + norm

    @property
    def _layer_parameters(self) -> int:
        """Of one layer, where all are alike."""
        norm = self.hidden * (2 if self.norm_has_bias else 1)
        layer = self.layer_matrix_parameters + self.norms_per_layer * norm
        layer += self._expert_matrices(active=False) - self._expert_matrices(active=True)
        if self.experts is not None:  # the scales of the router
            layer += self.hidden + self.experts.count
        spanned = (
            self.query_size + self.kv_size if self.head_norms_span_heads else self.head_dim * (1 + (not self.shares_kv))
        )
        layer += spanned * self.head_norms
        layer += (self.query_size + self.kv_matrices * self.kv_size) * self.query_bias + self.hidden * self.output_bias
        return layer + (self.ffn * (2 if self.gated_mlp else 1) + self.hidden) * self.mlp_bias

"""What a `config.json` says about a model's size: enough to count every parameter and everything a step keeps.

Only families whose count is proven equal to transformers' own are known; anything else is refused by name. A key that is
left out has the default of the transformers class of that family, because that is what would be loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder. `parameters` is exact; a tied head is counted once."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    learned_positions: bool
    """Positions are a trained table (GPT-2), not a rotation."""
    gated_mlp: bool
    composite_activation: bool
    """The activation is spelled out in single operations (`gelu_new`), each of which keeps its input."""
    tied_head: bool
    norms_per_layer: int
    """Norms over the hidden size in one layer; those over single heads are `head_norms`."""
    norm_has_bias: bool
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    head_norms: bool
    query_bias: bool
    """Query, key and value projections have a bias."""
    output_bias: bool
    """So has the projection after attention."""
    mlp_bias: bool
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    capped_scores: bool = False
    """Soft-capped attention scores (Gemma 2): attention is spelled out and its scores exist."""
    capped_logits: bool = False

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of the products of one layer: what costs arithmetic per token."""
        attention = self.hidden * (2 * self.query_size + 2 * self.kv_size)
        return attention + self.hidden * self.ffn * (3 if self.gated_mlp else 2)

    @property
    def embedding_parameters(self) -> int:
        """The vocabulary table, once."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        norm = self.hidden * (2 if self.norm_has_bias else 1)
        layer = self.layer_matrix_parameters + self.norms_per_layer * norm
        layer += 2 * self.head_dim * self.head_norms
        layer += (self.query_size + 2 * self.kv_size) * self.query_bias + self.hidden * self.output_bias
        layer += (self.ffn * (2 if self.gated_mlp else 1) + self.hidden) * self.mlp_bias
        tables = self.embedding_parameters * (1 if self.tied_head else 2)
        tables += self.max_positions * self.hidden * self.learned_positions
        return tables + self.layers * layer + norm


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that `config` (the content of a `config.json`) describes, or an InputError."""
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise InputError(
            f"model_type {model_type!r}: its memory cannot be predicted", fix=f"use one of: {', '.join(_FAMILIES)}"
        )
    return family(config)


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    if config.get("add_cross_attention"):
        raise InputError("a gpt2 with cross attention is no plain decoder", fix="use a causal language model")
    hidden = _size(config, "n_embd", "hidden_size", default=768)
    heads = _size(config, "n_head", "num_attention_heads", default=12)
    if hidden % heads:
        raise InputError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}", fix="correct config.json")
    return ModelShape(
        model_type="gpt2",
        layers=_size(config, "n_layer", "num_hidden_layers", default=12),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=_size(config, "n_inner", default=4 * hidden),
        vocab=_size(config, "vocab_size", default=50257),
        max_positions=_size(config, "n_positions", "max_position_embeddings", default=1024),
        learned_positions=True,
        gated_mlp=False,
        composite_activation=config.get("activation_function", "gelu_new") == "gelu_new",
        tied_head=bool(config.get("tie_word_embeddings", True)),
        norms_per_layer=2,
        norm_has_bias=True,
        head_norms=False,
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_dropout=_share(config, "attn_pdrop", default=0.1),
        hidden_dropout=_share(config, "resid_pdrop", default=0.1),
    )


def _rotary(config: Mapping[str, Any], defaults: Mapping[str, Any], **fixed: Any) -> ModelShape:
    """Families with rotary positions, RMSNorm and a gated MLP differ in defaults, norms and biases only."""
    hidden = _size(config, "hidden_size", default=defaults["hidden_size"])
    heads = _size(config, "num_attention_heads", default=defaults["num_attention_heads"])
    kv_heads = _size(config, "num_key_value_heads", default=defaults["num_key_value_heads"] or heads)
    if heads % kv_heads:
        raise InputError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads", fix="correct config.json"
        )
    settings: dict[str, Any] = {
        "norms_per_layer": 2,
        "head_norms": False,
        "query_bias": bool(config.get("attention_bias")),
        "output_bias": bool(config.get("attention_bias")),
        "mlp_bias": False,
    }
    return ModelShape(
        model_type=str(config["model_type"]),
        layers=_size(config, "num_hidden_layers", default=defaults["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", default=defaults["head_dim"] or hidden // heads),
        ffn=_size(config, "intermediate_size", default=defaults["intermediate_size"]),
        vocab=_size(config, "vocab_size", default=defaults["vocab_size"]),
        max_positions=_size(config, "max_position_embeddings", default=defaults["max_position_embeddings"]),
        learned_positions=False,
        gated_mlp=True,
        composite_activation=False,
        tied_head=bool(config.get("tie_word_embeddings", defaults["tie_word_embeddings"])),
        norm_has_bias=False,
        attention_dropout=_share(config, "attention_dropout", default=0.0),
        **(settings | fixed),
    )


def _defaults(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int | None, head_dim: int | None,
    positions: int, tied: bool,
) -> Mapping[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim,
        "max_position_embeddings": positions, "tie_word_embeddings": tied,
    }  # fmt: skip


# Defaults of the configuration classes of transformers 5.22, in the order of `_defaults`.
_LLAMA = _defaults(32_000, 4096, 11_008, 32, 32, None, None, 2048, False)
_QWEN2 = _defaults(151_936, 4096, 22_016, 32, 32, 32, None, 32_768, False)
_QWEN3 = _defaults(151_936, 4096, 22_016, 32, 32, 32, 128, 32_768, False)
_GEMMA = _defaults(256_000, 3072, 24_576, 28, 16, 16, 256, 8192, True)
_GEMMA2 = _defaults(256_000, 2304, 9216, 26, 8, 4, 256, 8192, True)
_GEMMA3 = _defaults(262_208, 2304, 9216, 26, 8, 4, 256, 131_072, True)


def _llama(config: Mapping[str, Any]) -> ModelShape:
    return _rotary(config, _LLAMA, mlp_bias=bool(config.get("mlp_bias")))


def _qwen2(config: Mapping[str, Any]) -> ModelShape:
    return _rotary(config, _QWEN2, query_bias=True, output_bias=False)


def _qwen3(config: Mapping[str, Any]) -> ModelShape:
    return _rotary(config, _QWEN3, head_norms=True)


def _gemma(config: Mapping[str, Any]) -> ModelShape:
    return _rotary(config, _GEMMA)


def _gemma2(config: Mapping[str, Any]) -> ModelShape:
    return _rotary(
        config,
        _GEMMA2,
        norms_per_layer=4,
        capped_scores=config.get("attn_logit_softcapping", 50.0) is not None,
        capped_logits=config.get("final_logit_softcapping", 30.0) is not None,
    )


def _gemma3(config: Mapping[str, Any]) -> ModelShape:
    return _rotary(
        config,
        _GEMMA3,
        norms_per_layer=4,
        head_norms=True,
        capped_scores=config.get("attn_logit_softcapping") is not None,
        capped_logits=config.get("final_logit_softcapping") is not None,
    )


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelShape]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def _size(config: Mapping[str, Any], *names: str, default: int) -> int:
    """The first of `names` that is set, a whole number above 0."""
    name, value = next(((name, config[name]) for name in names if config.get(name) is not None), (names[0], default))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"config.json: {name} is {value!r}, not a size", fix="fetch the model's config.json again")
    return value


def _share(config: Mapping[str, Any], name: str, *, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"config.json: {name} is {value!r}, not a share", fix="fetch the model's config.json again")
    return float(value)

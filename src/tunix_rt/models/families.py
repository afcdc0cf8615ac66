"""Model families: one row per `model_type`, read by the planner, the tokenizer and both engines.

A row contains what `config.json` leaves to the class of the model: defaults of its keys, the kind of norm, biases, sliding
windows, soft caps. A family with the tensors of Llama (rotary positions, RMSNorm, gated MLP) needs nothing but a row; one with
tensors of its own also needs a layout in `plan/shape.py`. `tests/unit/test_families.py` compares every row with transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunix_rt.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as `layer_types` of a config.json spells them."""

Config = Mapping[str, Any]
Layout = Literal["llama", "gpt2", "gemma4"]
Norm = Literal["rms", "rms_float32", "rms_plus_one", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """The facts of one family that its config.json does not contain."""

    model_type: str
    class_name: str
    """Class of transformers for causal language modeling."""
    defaults: Mapping[str, Any]
    """Every key that affects shape or computation, with the value that transformers uses where config.json has none. Other
    keys have no effect in this family."""
    layout: Layout = "llama"
    """Names and shapes of the tensors. `gpt2`: fused query, key and value, matrices stored [in, out], learned positions.
    `gemma4`: layers that differ."""
    norm: Norm = "rms"
    """`rms`: x * w. `rms_float32`: x * w, multiplied in float32. `rms_plus_one`: x * (1 + w), multiplied in float32. `layer`:
    LayerNorm with a bias."""
    pre_norms: bool = True
    """The inputs of attention and MLP are normalized."""
    post_norms: bool = False
    """The outputs of attention and MLP are normalized before they are added to the residual."""
    qk_norm: Literal["head", "all"] | None = None
    """Queries and keys are normalized: each head, or all heads together."""
    fused_matrices: bool = False
    """Query, key and value are one matrix, and so are gate and up."""
    qkv_bias: bool | None = None
    """Query, key and value have a bias and the output projection has none. None: `attention_bias` applies to all four."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    gelu_is_tanh: bool = False
    """config.json spells the tanh approximation `gelu`."""
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    """Base of the rotation in sliding-window layers, where they have their own."""
    slides: "Callable[[Family, Config, int], bool] | None" = None
    """Whether the layer of an index has a sliding window, where `layer_types` is absent. None: no layer has one."""
    one_mask: bool = False
    """All layers have the window or none has: config.json has no `layer_types`, and the model takes one mask."""
    static_cache: bool = True
    """Generation has a preallocated KV cache: each layer has keys and values of its own, and its attention is causal, with a
    window or a soft cap at most. Otherwise transformers' growing cache."""
    needs_bos: bool = False
    """Sequences must begin with the BOS token even if the tokenizer does not add it."""
    engines: tuple[str, ...] = ("torch",)
    """Engines with this family; `tunix` is `model.implementation: tunix` of the JAX engine."""
    gguf: str | None = None
    """`general.architecture` of GGUF files that transformers can convert."""
    llama_cpp: str | None = None
    """`general.architecture` of the GGUF files that are written of it."""
    gguf_layers_without_scale: int | None = None
    """Number of layers of the variant whose attention scale a GGUF file does not contain."""

    @property
    def masks_by_layer_type(self) -> bool:
        """The model takes prepared attention masks as a dict by layer type, not as one tensor."""
        return self.slides is not None and not self.one_mask

    @property
    def equal_layers(self) -> bool:
        """All layers have one shape: they are compiled by default, with one graph for all."""
        return self.layout in ("llama", "gpt2")

    def value(self, config: Config, key: str) -> Any:
        """`key` of `config`, or its default; None if the family has no such key. An explicit null overrides the default."""
        return config.get(key, self.defaults[key]) if key in self.defaults else None

    def size(self, config: Config, *keys: str, least: int = 1) -> int:
        """The first of `keys` that has a value, else the default of the first one: an integer, at least `least`."""
        named = ((key, config[key]) for key in keys if config.get(key) is not None)
        key, value = next(named, (keys[0], self.defaults[keys[0]]))
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"config.json: {key} is {value!r}, not a size", fix="fetch the model's config.json again")
        return value

    def layer_types(self, config: Config, layers: int) -> list[Any]:
        """`full_attention` or `sliding_attention` for each layer. A list in config.json is returned unchecked."""
        named = config.get("layer_types")
        switched_off = "use_sliding_window" in self.defaults and not self.value(config, "use_sliding_window")
        if self.slides is None or switched_off:
            return [FULL] * layers
        if named is not None and not self.one_mask:
            return named if isinstance(named, list) else [named]
        return [SLIDING if self.slides(self, config, layer) else FULL for layer in range(layers)]

    def window(self, config: Config, layers: int) -> int | None:
        """Size of the sliding window, if any layer has one."""
        window = self.value(config, "sliding_window")
        valid = isinstance(window, int) and not isinstance(window, bool) and window > 0
        return window if valid and SLIDING in self.layer_types(config, layers) else None


def _sizes(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None, head_dim: int | None,
    positions: int, *, tied: bool, **more: Any,
) -> Mapping[str, Any]:  # fmt: skip
    """Defaults of the keys that all families with the layout of Llama have."""
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": positions, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0, "pad_token_id": None, **more,
    }  # fmt: skip


_GPT2 = {
    "vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_pdrop": 0.1,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "scale_attn_weights": True,
}  # fmt: skip
_SILU = {"hidden_act": "silu"}
_GEMMA = {"pad_token_id": 0, "attention_bias": False}
_GEMMA_FAMILY: Mapping[str, Any] = {
    "norm": "rms_plus_one", "scaled_embedding": True, "needs_bos": True, "engines": ("torch", "jax", "tunix"),
}  # fmt: skip
_GEMMA_2 = {
    **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA_3 = {
    **_GEMMA_2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA_4 = {
    **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "final_logit_softcapping": None,
    "use_bidirectional_attention": None, "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
    "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None, "global_head_dim": 512,
    "num_global_key_value_heads": None,
}  # fmt: skip
_QWEN = {**_SILU, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_HAS_WINDOW: Mapping[str, Any] = {
    "slides": lambda family, config, layer: family.value(config, "sliding_window") is not None
}  # fmt: skip
_OLMO: Mapping[str, Any] = {"norm": "rms_float32", "pre_norms": False, "post_norms": True, "qk_norm": "all"}
_MISTRAL = {**_SILU, "sliding_window": 4096}
_MINISTRAL3 = {**_SILU, "sliding_window": None, "rms_norm_eps": 1e-5, "pad_token_id": 11}
_PHI3 = {
    **_SILU, "pad_token_id": 32_000, "sliding_window": None, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_OLMO2 = {**_SILU, "pad_token_id": 1, "attention_bias": False, "rms_norm_eps": 1e-5}
_GRANITE = {
    **_SILU, "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
_CWM = {**_SILU, "mlp_bias": False, "rms_norm_eps": 1e-5, "sliding_window": 8192}
_SMOLLM3 = {
    **_SILU, "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": None,
    "no_rope_layer_interval": 4, "pad_token_id": 128_004,
}  # fmt: skip

# Defaults are those of the configuration classes of transformers 5.22.
_ROWS = (
    Family(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        llama_cpp="gpt2",
        defaults=_GPT2,
        layout="gpt2",
        norm="layer",
        engines=("torch", "jax"),
        gguf="gpt2",
    ),
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        llama_cpp="llama",
        defaults=_sizes(
            32_000, 4096, 11_008, 32, 32, None, None, 2048, tied=False, **_SILU, attention_bias=False, mlp_bias=False
        ),
        engines=("torch", "jax"),
        gguf="llama",
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        llama_cpp="qwen2",
        defaults=_sizes(151_936, 4096, 22_016, 32, 32, 32, None, 32_768, tied=False, **_QWEN),
        qkv_bias=True,
        slides=lambda family, config, layer: layer >= family.size(config, "max_window_layers", least=0),
        gguf="qwen2",
    ),
    Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        llama_cpp="qwen3",
        defaults=_sizes(151_936, 4096, 22_016, 32, 32, 32, 128, 32_768, tied=False, **_QWEN, attention_bias=False),
        qk_norm="head",
        slides=lambda family, config, layer: layer >= family.size(config, "max_window_layers", least=0),
        gguf="qwen3",
    ),
    Family(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        llama_cpp="smollm3",
        defaults=_sizes(128_256, 2048, 11_008, 36, 16, 4, None, 32_768, tied=True, **_SMOLLM3),
        rope_theta=2_000_000.0,
        # Windows, where they are switched on, belong to the layers without rotary positions (NoPE).
        slides=lambda family, config, layer: (layer + 1) % family.size(config, "no_rope_layer_interval") == 0,
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        llama_cpp="llama",
        defaults=_sizes(32_000, 4096, 14_336, 32, 32, 8, None, 131_072, tied=False, **_MISTRAL),
        one_mask=True,
        **_HAS_WINDOW,
        gguf="mistral",
    ),
    Family(
        model_type="ministral",
        class_name="MinistralForCausalLM",
        defaults=_sizes(32_000, 4096, 14_336, 32, 32, 8, None, 131_072, tied=False, **_MISTRAL),
        **_HAS_WINDOW,
    ),
    Family(
        model_type="ministral3",
        class_name="Ministral3ForCausalLM",
        defaults=_sizes(131_072, 4096, 14_336, 34, 32, 8, 128, 262_144, tied=False, **_MINISTRAL3),
        rope_theta=1_000_000.0,
        one_mask=True,
        **_HAS_WINDOW,
    ),
    Family(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        llama_cpp="phi3",
        defaults=_sizes(32_064, 3072, 8192, 32, 32, None, None, 4096, tied=False, **_PHI3),
        fused_matrices=True,
        one_mask=True,
        **_HAS_WINDOW,
        gguf="phi3",
    ),
    Family(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        llama_cpp="olmo2",
        defaults=_sizes(50_304, 4096, 11_008, 32, 32, None, None, 2048, tied=False, **_OLMO2),
        **_OLMO,
    ),
    Family(
        model_type="olmo3",
        class_name="Olmo3ForCausalLM",
        defaults=_sizes(50_304, 4096, 11_008, 32, 32, None, None, 2048, tied=False, **_OLMO2, sliding_window=4096),
        rope_theta=500_000.0,
        local_rope_theta=500_000.0,
        slides=lambda family, config, layer: (layer + 1) % 4 != 0,
        **_OLMO,
    ),
    Family(
        model_type="granite",
        class_name="GraniteForCausalLM",
        llama_cpp="granite",
        defaults=_sizes(32_000, 4096, 11_008, 32, 32, None, None, 2048, tied=False, **_GRANITE),
    ),
    Family(
        model_type="cwm",
        class_name="CwmForCausalLM",
        defaults=_sizes(128_256, 6144, 21_504, 64, 48, 8, 128, 131_072, tied=False, **_CWM),
        rope_theta=1_000_000.0,
        slides=lambda family, config, layer: layer % 4 != 0,
    ),
    Family(
        model_type="gemma",
        class_name="GemmaForCausalLM",
        llama_cpp="gemma",
        defaults=_sizes(
            256_000, 3072, 24_576, 28, 16, 16, 256, 8192, tied=True, **_GEMMA, hidden_act="gelu_pytorch_tanh"
        ),
        gelu_is_tanh=True,
        **_GEMMA_FAMILY,
    ),
    Family(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        llama_cpp="gemma2",
        defaults=_sizes(256_000, 2304, 9216, 26, 8, 4, 256, 8192, tied=True, **_GEMMA_2),
        post_norms=True,
        slides=lambda family, config, layer: (layer + 1) % 2 != 0,
        **_GEMMA_FAMILY,
        gguf="gemma2",
        gguf_layers_without_scale=46,
    ),
    Family(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        llama_cpp="gemma3",
        defaults=_sizes(262_208, 2304, 9216, 26, 8, 4, 256, 131_072, tied=True, **_GEMMA_3),
        post_norms=True,
        qk_norm="head",
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        slides=lambda family, config, layer: (layer + 1) % family.size(config, "sliding_window_pattern") != 0,
        **_GEMMA_FAMILY,
        gguf="gemma3",
        gguf_layers_without_scale=62,
    ),
    Family(
        model_type="gemma4_text",
        class_name="Gemma4ForCausalLM",
        defaults=_sizes(262_144, 2304, 9216, 30, 8, 4, 256, 131_072, tied=True, **_GEMMA_4),
        layout="gemma4",
        norm="rms_float32",
        post_norms=True,
        qk_norm="head",
        scaled_embedding=True,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        # The last layer has full attention whatever the pattern.
        slides=lambda family, config, layer: (
            (layer + 1) % 6 != 0 and layer + 1 != family.size(config, "num_hidden_layers")
        ),
        needs_bos=True,
    ),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ROWS}


def family_of(config: Config) -> Family:
    """The family of a config.json, or an InputError that lists the known ones."""
    model_type = config.get("model_type")
    if (family := FAMILIES.get(str(model_type))) is None:
        raise InputError(
            f"model_type {model_type!r}: its memory cannot be predicted", fix=f"use one of: {', '.join(FAMILIES)}"
        )
    return family


def families_of(engine: str) -> tuple[str, ...]:
    """Model types that `engine` has, sorted."""
    return tuple(sorted(family.model_type for family in _ROWS if engine in family.engines))

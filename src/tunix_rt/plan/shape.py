"""The sizes of a model from its `config.json`: enough to count every parameter and every activation a step saves.

Sizes come from the row of the family (`models/families.py`), whose defaults replace keys that config.json leaves out. A family
with tensors of its own has a layout function here. Other model types are refused by name.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES, FULL, SLIDING, Config, Family, family_of
from tunix_rt.models.safetensors import read_header
from tunix_rt.plan.sizes import Experts, ModelShape

MOST_LAYERS = 10_000
UNLIMITED = 2**31 - 1
"""Positions of a model without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What config.json and the headers of the weights say about a model of any family."""

    model_type: str
    vocab: int
    max_positions: int
    parameters: int
    """Of the stored tensors; 0 without weights."""


def outline_of(config: Config, files: Iterable[Path] = ()) -> "ModelShape | Outline":
    """The shape of a model by the row of its family, or its outline: enough to tokenize and to generate. Parameters are
    counted in the weight `files`."""
    kind, vocab = str(config.get("model_type")), config.get("vocab_size")
    if kind in FAMILIES:
        return shape_of(config)
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        problem = f"config.json has no vocab_size (model_type {kind!r})"
        raise InputError(problem, fix="use a causal language model")
    limits = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    limit = next((value for value in limits if isinstance(value, int) and value > 0), UNLIMITED)
    stored = sum(math.prod(tensor.shape) for file in files for tensor in read_header(file)[0].values())
    return Outline(model_type=kind, vocab=vocab, max_positions=limit, parameters=stored)


def shape_of(config: Config) -> ModelShape:
    """The shape of the model that `config` (the content of a `config.json`) describes, or an InputError."""
    family = family_of(config)
    return LAYOUTS[family.layout](family, config)


def _llama(family: Family, config: Config) -> ModelShape:
    """Rotary positions, RMSNorm and a gated MLP: every family that is no GPT-2."""
    hidden, heads = family.size(config, "hidden_size"), family.size(config, "num_attention_heads")
    kv_heads = _size_or(family, config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads", fix="correct config.json"
        )
    layers = _layers(family, config, "num_hidden_layers")
    named = config.get("layer_types")
    if isinstance(named, list) and len(named) != layers:
        problem = f"config.json: layer_types names {len(named)} layers, num_hidden_layers is {layers}"
        raise InputError(problem, fix="correct config.json: a shortened model has fewer of both")
    attention_bias = bool(family.value(config, "attention_bias"))
    return ModelShape(
        model_type=family.model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size_or(family, config, "head_dim", hidden // heads),
        ffn=family.size(config, "intermediate_size"),
        vocab=family.size(config, "vocab_size"),
        max_positions=family.size(config, "max_position_embeddings"),
        gated_mlp=True,
        tied_head=bool(family.value(config, "tie_word_embeddings")),
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        norm_in_float32=family.norm != "rms",
        head_norms=family.qk_norm is not None,
        head_norms_span_heads=family.qk_norm == "all",
        fused_matrices=family.fused_matrices,
        query_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(family.value(config, "mlp_bias")),
        layer_kinds=1 if family.local_rope_theta is None else 2,
        window=(window := family.window(config, layers)),
        sliding_layers=0 if window is None else family.layer_types(config, layers).count(SLIDING),
        attention_dropout=_probability(family, config, "attention_dropout"),
        hidden_dropout=_probability(family, config, "resid_pdrop") if "resid_pdrop" in family.defaults else 0.0,
        capped_scores=family.value(config, "attn_logit_softcapping") is not None,
        capped_logits=family.value(config, "final_logit_softcapping") is not None,
    )


def _gemma4(family: Family, config: Config) -> ModelShape:
    """Layers with full attention have larger heads; the last layers may take keys and values of an earlier one; each layer
    may have an embedding of its own, or experts beside its MLP."""
    plain = _llama(family, config)
    layers, ahead = plain.layers, family.value(config, "use_bidirectional_attention")
    if ahead == "all":
        raise InputError(
            "config.json: use_bidirectional_attention 'all' is no decoder", fix="use a causal language model"
        )
    types = [*family.layer_types(config, layers)[:-1], FULL]  # as the class forces the last one
    key_is_value = bool(family.value(config, "attention_k_eq_v"))
    first_shared = layers - family.size(config, "num_kv_shared_layers", least=0)
    wide = bool(family.value(config, "use_double_wide_mlp"))
    experts = None
    if family.value(config, "enable_moe_block"):
        experts = Experts(
            count=family.size(config, "num_experts"),
            active=family.size(config, "top_k_experts"),
            ffn=family.size(config, "moe_intermediate_size"),
        )
    own = family.size(config, "hidden_size_per_layer_input", least=0)
    if own and family.size(config, "vocab_size_per_layer_input") < plain.vocab:
        raise InputError("config.json: vocab_size_per_layer_input is less than vocab_size", fix="correct config.json")
    base = replace(
        plain,
        norm_saves_squares=True,
        value_norm=True,
        layer_input=own,
        layer_inputs=layers * own,
        layer_input_vocab=family.size(config, "vocab_size_per_layer_input"),
        experts=experts,
    )
    each = []
    for layer, kind in enumerate(types):
        full, shared = kind == FULL, 0 <= first_shared <= layer
        heads = _heads_of_layer(family, config, layer, full=full and key_is_value)
        each.append(
            replace(
                base,
                layers=1,
                layer_kinds=1,
                head_dim=_head_dim_of_layer(family, config, layer, full=full),
                kv_heads=heads,
                ffn=plain.ffn * (2 if wide and shared and first_shared > 0 else 1),
                value_is_key=key_is_value and full,
                shares_kv=shared,
                window=None if full else plain.window,
                sliding_layers=int(not full and plain.window is not None),
            )
        )
    return _of_layers(base, each)


def _of_layers(base: ModelShape, each: list[ModelShape]) -> ModelShape:
    """`base` with layers that differ, in their order."""
    if base.heads % min(one.kv_heads for one in each) or any(base.heads % one.kv_heads for one in each):
        raise InputError("config.json: the attention heads cannot share the key-value heads", fix="correct config.json")
    largest = max(one.head_dim for one in each)
    each = [replace(one, largest_head=largest) for one in each]
    kinds = list(dict.fromkeys(each))
    return replace(
        base,
        head_dim=largest,
        kv_heads=max(one.kv_heads for one in kinds),
        ffn=max(one.ffn for one in kinds),
        kinds=tuple(
            replace(kind, layers=count, sliding_layers=count * kind.sliding_layers)
            for kind in kinds
            if (count := each.count(kind))
        ),
        order=tuple(kinds.index(one) for one in each),
    )


def _of_layer(config: Config, layer: int) -> Config:
    """What transformers writes for one layer, in place of keys for all layers with full attention."""
    written = config.get("per_layer_config")
    if not isinstance(written, Mapping) or not all(str(key).isdecimal() for key in written):
        raise InputError(
            "config.json: per_layer_config does not name layers by their number",
            fix="fetch the model's config.json again",
        )
    found: Any = next((of for key, of in written.items() if int(key) == layer), {})
    return found if isinstance(found, Mapping) else {}


def _head_dim_of_layer(family: Family, config: Config, layer: int, *, full: bool) -> int:
    if "per_layer_config" in config:
        return family.size({**config, **_of_layer(config, layer)}, "head_dim")
    return family.size(config, "global_head_dim" if full else "head_dim")


def _heads_of_layer(family: Family, config: Config, layer: int, *, full: bool) -> int:
    if "per_layer_config" in config:
        return family.size({**config, **_of_layer(config, layer)}, "num_key_value_heads")
    keys = ("num_global_key_value_heads",) if full and config.get("num_global_key_value_heads") else ()
    return family.size(config, *keys, "num_key_value_heads")


def _gpt2(family: Family, config: Config) -> ModelShape:
    if config.get("add_cross_attention"):
        raise InputError("config.json: a GPT-2 with cross attention is no decoder", fix="use a causal language model")
    hidden, heads = family.size(config, "n_embd", "hidden_size"), family.size(config, "n_head", "num_attention_heads")
    if hidden % heads:
        raise InputError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}", fix="correct config.json")
    return ModelShape(
        model_type=family.model_type,
        layers=_layers(family, config, "n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=_size_or(family, config, "n_inner", 4 * hidden),
        vocab=family.size(config, "vocab_size"),
        max_positions=family.size(config, "n_positions", "max_position_embeddings"),
        learned_positions=True,
        gated_mlp=False,
        composite_activation=family.value(config, "activation_function") == "gelu_new",
        tied_head=bool(family.value(config, "tie_word_embeddings")),
        norm_has_bias=family.norm == "layer",
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_dropout=_probability(family, config, "attn_pdrop"),
        hidden_dropout=_probability(family, config, "resid_pdrop"),
    )


LAYOUTS: Mapping[str, Callable[[Family, Config], ModelShape]] = {"llama": _llama, "gpt2": _gpt2, "gemma4": _gemma4}


def _layers(family: Family, config: Config, *keys: str) -> int:
    layers = family.size(config, *keys)
    if layers > MOST_LAYERS:
        problem = f"config.json: {keys[0]} is {layers:,}, at most {MOST_LAYERS:,} layers are planned"
        raise InputError(problem, fix="fetch the model's config.json again")
    return layers


def _size_or(family: Family, config: Config, key: str, otherwise: int) -> int:
    """The size under `key`; `otherwise` where neither config.json nor the family has one."""
    absent = config.get(key) is None and family.defaults[key] is None
    return otherwise if absent else family.size(config, key)


def _probability(family: Family, config: Config, key: str) -> float:
    value = family.defaults[key] if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        problem = f"config.json: {key} is {value!r}, not a probability"
        raise InputError(problem, fix="fetch the model's config.json again")
    return float(value)

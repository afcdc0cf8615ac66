"""How a model computes, read from its `config.json`: plain numbers and switches from which `model.py` is built.

Sizes are those of `plan/shape.py`, defaults and switches those of the family's row (`models/families.py`). What these models do
not support is refused by name. Nothing here imports jax.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES, FULL, SLIDING, Config, Family, families_of
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape

ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
}
_DROPOUT = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
_FIX = "use another model, or training.backend: torch"
_FETCH = "fetch the model's config.json again"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Window and rotation, which may differ between the layers of one model."""

    window: int | None
    """A token sees itself and the `window - 1` before it; None: all before it."""
    frequencies: tuple[float, ...]
    """Inverse frequencies of the rotary embedding; empty: no rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder: its sizes and how it computes. Hashable, so that it may be a static argument of compiled code."""

    shape: ModelShape
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]
    """For each layer, the index of its kind in `kinds`."""
    activation: str
    """`gelu_tanh`, `gelu` or `silu`."""
    norm: str
    """`rms`, `rms_plus_one` or `layer`, as in `models/families.py`."""
    epsilon: float
    post_norms: bool
    """The outputs of attention and MLP are normalized before they are added to the residual (Gemma 2 and 3)."""
    query_scale: float
    score_cap: float | None
    logit_cap: float | None
    embedding_scale: float
    padding_id: int | None
    """`padding_idx` of the embedding: this token's row gets no gradient from the lookup, but still from a tied lm_head."""
    dropout: float
    """The largest dropout probability in config.json. These models have no dropout: the engine refuses one above 0."""

    @property
    def input_first(self) -> bool:
        """Matrices are stored [in, out], with query, key and value in one (GPT-2); else [out, in] and separate."""
        return FAMILIES[self.shape.model_type].layout == "gpt2"


def architecture_of(config: Config) -> Architecture:
    """The architecture that `config` (the content of a `config.json`) describes, or an InputError that names the key."""
    model_type, known = config.get("model_type"), families_of("jax")
    if model_type not in known:
        raise InputError(
            f"model_type {model_type!r} is not supported by the JAX engine",
            fix=f"use one of: {', '.join(known)}; or training.backend: torch",
        )
    for key in ("use_bidirectional_attention", "scale_attn_by_inverse_layer_idx"):
        if config.get(key):
            raise InputError(f"config.json: {key} is {config[key]!r}, which the JAX engine does not support", fix=_FIX)
    family, shape = FAMILIES[str(model_type)], shape_of(config)
    kinds, pattern = _layer_kinds(family, config, shape)
    padding = family.value(config, "pad_token_id")
    return Architecture(
        shape=shape,
        kinds=kinds,
        pattern=pattern,
        activation=_activation(family, config),
        norm=family.norm,
        epsilon=_default(family, config, "layer_norm_epsilon" if family.norm == "layer" else "rms_norm_eps"),
        post_norms=family.post_norms,
        query_scale=_query_scale(family, config, shape),
        score_cap=_cap(family, config, "attn_logit_softcapping"),
        logit_cap=_cap(family, config, "final_logit_softcapping"),
        embedding_scale=math.sqrt(shape.hidden) if family.scaled_embedding else 1.0,
        padding_id=padding if isinstance(padding, int) else None,
        dropout=max(_default(family, config, key) for key in _DROPOUT if key in family.defaults),
    )


def _query_scale(family: Family, config: Config, shape: ModelShape) -> float:
    if "query_pre_attn_scalar" in family.defaults:
        return _default(family, config, "query_pre_attn_scalar") ** -0.5
    unscaled = "scale_attn_weights" in family.defaults and not family.value(config, "scale_attn_weights")
    return 1.0 if unscaled else float(shape.head_dim**-0.5)


# --- kinds of layers -------------------------------------------------------------------------------------------------


def _layer_kinds(family: Family, config: Config, shape: ModelShape) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of layers in the order in which they occur, and the index of each layer's kind."""
    types = family.layer_types(config, shape.layers)
    if len(types) != shape.layers or set(types) - {SLIDING, FULL}:
        raise InputError(
            f"config.json: layer_types must name {SLIDING} or {FULL} for each of {shape.layers} layers, not {types!r}",
            fix=_FETCH,
        )
    names = tuple(dict.fromkeys(types))
    if SLIDING in names and shape.window is None:
        window = family.value(config, "sliding_window")
        raise InputError(f"config.json: layers of {SLIDING}, but sliding_window is {window!r}", fix=_FETCH)
    kinds = tuple(
        LayerKind(
            window=shape.window if name == SLIDING else None, frequencies=_frequencies(family, config, shape, name)
        )
        for name in names
    )
    return kinds, tuple(names.index(name) for name in types)


def _frequencies(family: Family, config: Config, shape: ModelShape, layer_type: str) -> tuple[float, ...]:
    """Computed in float32 in the order of torch: at large positions the last digit matters."""
    if shape.learned_positions:
        return ()
    settings = _rotary_settings(family, config, layer_type)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"config.json: rotary positions of type {kind!r} with {dict(settings)} are not supported by the JAX engine",
            fix=_FIX,
        )
    base, size = np.float32(_number(settings, "rope_theta", family.rope_theta)), shape.head_dim
    turns = np.float32(1) / base ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    if kind == "linear":
        turns = turns / np.float32(_number(settings, "factor"))
    elif kind == "llama3":
        turns = _stretched(turns, settings, shape.max_positions)
    return tuple(float(turn) for turn in turns)


def _rotary_settings(family: Family, config: Config, layer_type: str) -> Mapping[str, Any]:
    """Settings of the rotation for one type of layer, from the newer key `rope_parameters` or from the older ones."""
    newer, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    by_type = family.local_rope_theta is not None
    if bool(newer) and by_type != bool(set(newer) <= {SLIDING, FULL}):
        expected = f"those of {SLIDING} and {FULL}" if by_type else "one for all layers"
        raise InputError(
            f"config.json: rope_parameters of a {family.model_type} are {expected}; it has {sorted(newer)}", fix=_FETCH
        )
    if not by_type:
        return {"rope_theta": config.get("rope_theta") or family.rope_theta} | (older or newer)
    if "type" in older and "rope_type" not in older:
        raise InputError(
            f"config.json: rope_scaling has `type`, which transformers ignores in a {family.model_type}",
            fix="rename it to rope_type if these layers are to be scaled, or remove rope_scaling",
        )
    # Only layers of full attention are scaled, and only they read the older key of the base.
    if layer_type != FULL:
        base = {"rope_theta": config.get("rope_local_base_freq") or family.local_rope_theta}
        return base | (newer.get(layer_type) or {})
    base = {"rope_theta": config.get("rope_theta") or family.rope_theta}
    return base | (newer.get(layer_type) or {}) | older


def _stretched(turns: npt.NDArray[np.float32], settings: Mapping[str, Any], longest: int) -> npt.NDArray[np.float32]:
    """`rope_type: llama3`: low frequencies are divided by `factor`, high ones stay, those between are interpolated."""
    factor, low = _number(settings, "factor"), _number(settings, "low_freq_factor")
    high, old = _number(settings, "high_freq_factor"), _number(settings, "original_max_position_embeddings", longest)
    lengths = 2 * math.pi / turns
    blend = (old / lengths - low) / (high - low)
    between = (1 - blend) * turns / factor + blend * turns
    slowed = np.where(lengths > old / low, turns / factor, turns)
    is_between = (lengths >= old / high) & (lengths <= old / low)
    return np.asarray(np.where(is_between, between, slowed), dtype=np.float32)


# --- single keys -----------------------------------------------------------------------------------------------------


def _activation(family: Family, config: Config) -> str:
    key = next(key for key in ("hidden_activation", "hidden_act", "activation_function") if key in family.defaults)
    name = family.value(config, key)
    if name == "gelu" and family.gelu_is_tanh:
        name = "gelu_pytorch_tanh"
    if name not in ACTIVATIONS:
        raise InputError(f"config.json: {key} {name!r} is not supported by the JAX engine", fix=_FIX)
    return ACTIVATIONS[name]


def _default(family: Family, config: Config, key: str) -> float:
    return _number(config, key, family.defaults[key])


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(f"config.json: {key} is {value!r}, not a number of 0 or more", fix=_FETCH)
    return float(value)


def _cap(family: Family, config: Config, key: str) -> float | None:
    """A soft cap; null switches off the default of the family."""
    return None if family.value(config, key) is None else _default(family, config, key)

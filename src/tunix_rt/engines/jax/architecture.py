"""What a `config.json` says about how a model computes: plain numbers and switches, from which `model.py` is built.

Sizes are those of `plan.shape`. A key that is left out has the default of the transformers class of that family, and what
these models do not do is refused by name. Nothing here imports jax.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.errors import InputError
from tunix_rt.plan.shape import ModelShape, shape_of

FAMILIES = ("gemma", "gemma2", "gemma3_text", "gpt2", "llama")

ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
}
SLIDING, FULL = "sliding_attention", "full_attention"
_FIX = "use a model of another kind, or the PyTorch engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What layers of one model may differ in."""

    window: int | None
    """A token sees itself and the `window - 1` before it; None: all before it."""
    frequencies: tuple[float, ...]
    """Of the rotation of queries and keys, by which a pair of numbers turns per position; empty: nothing is turned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder: its sizes and how it computes. Can be hashed, so that it may be a static argument of compiled code."""

    shape: ModelShape
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]
    """For each layer, which of `kinds` it is."""
    activation: str
    """`gelu_tanh`, `gelu` or `silu`."""
    norm: str
    """`rms`: times w; `rms_plus_one`: times 1 + w; `layer`: mean taken off, times w, plus a bias."""
    epsilon: float
    post_norms: bool
    """What attention and MLP give is normed once more before it is added (Gemma 2 and 3)."""
    query_scale: float
    score_cap: float | None
    logit_cap: float | None
    embedding_scale: float
    padding_id: int | None
    """A token whose row learns nothing from being looked up, as in torch; the head may still move it."""
    dropout: float
    """The largest rate that config.json asks for in training. The models here have none: it is for the engine to refuse."""

    @property
    def input_first(self) -> bool:
        """Matrices are [in, out] and those of query, key and value are one, as GPT-2 stores them; else [out, in], apart."""
        return self.shape.model_type == "gpt2"


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that `config` (the content of a `config.json`) describes, or an InputError that names the key."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(
            f"model_type {family!r} is not one that the JAX engine knows",
            fix=f"use one of: {', '.join(FAMILIES)}; or the PyTorch engine",
        )
    for key in ("use_bidirectional_attention", "scale_attn_by_inverse_layer_idx"):
        if config.get(key):
            raise InputError(f"config.json: {key} is {config[key]!r}, which the JAX engine does not do", fix=_FIX)
    shape = shape_of(config)
    return _gpt2(config, shape) if family == "gpt2" else _rotary(config, shape)


def _gpt2(config: Mapping[str, Any], shape: ModelShape) -> Architecture:
    return Architecture(
        shape=shape,
        kinds=(LayerKind(window=None, frequencies=()),),
        pattern=(0,) * shape.layers,
        activation=_activation(config, "activation_function", "gelu_new"),
        norm="layer",
        epsilon=_number(config, "layer_norm_epsilon", 1e-5),
        post_norms=False,
        query_scale=shape.head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0,
        score_cap=None,
        logit_cap=None,
        embedding_scale=1.0,
        padding_id=None,
        dropout=max(_number(config, name, 0.1) for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")),
    )


def _rotary(config: Mapping[str, Any], shape: ModelShape) -> Architecture:
    """Llama and the Gemmas."""
    family = shape.model_type
    gemma, capped = family != "llama", {"gemma2": (50.0, 30.0)}.get(family, (None, None))
    kinds, pattern = _layer_kinds(config, shape)
    if family == "llama":
        activation = _activation(config, "hidden_act", "silu")
    elif family == "gemma":  # the first releases say "gelu" and mean its approximation
        known = dict(config) | ({"hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") == "gelu" else {})
        activation = _activation(known, "hidden_act", "gelu_pytorch_tanh")
    else:
        activation = _activation(config, "hidden_activation", "gelu_pytorch_tanh")
    scaled_by_key = family in ("gemma2", "gemma3_text")
    # Learning nothing from padding is a property of torch's table, which Gemma's classes give token 0 if none is named.
    padding = config.get("pad_token_id", 0 if gemma else None)
    return Architecture(
        shape=shape,
        kinds=kinds,
        pattern=pattern,
        activation=activation,
        norm="rms_plus_one" if gemma else "rms",
        epsilon=_number(config, "rms_norm_eps", 1e-6),
        post_norms=scaled_by_key,
        query_scale=(_number(config, "query_pre_attn_scalar", 256.0) if scaled_by_key else shape.head_dim) ** -0.5,
        score_cap=_cap(config, "attn_logit_softcapping", capped[0]) if scaled_by_key else None,
        logit_cap=_cap(config, "final_logit_softcapping", capped[1]) if scaled_by_key else None,
        embedding_scale=math.sqrt(shape.hidden) if gemma else 1.0,
        padding_id=padding if isinstance(padding, int) else None,
        dropout=shape.attention_dropout,
    )


# --- kinds of layers -------------------------------------------------------------------------------------------------


def _layer_kinds(config: Mapping[str, Any], shape: ModelShape) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of layers there are, in the order in which they occur, and which of them each layer is."""
    types = _layer_types(config, shape)
    names = tuple(dict.fromkeys(types))
    window = config.get("sliding_window", 4096)
    if SLIDING in names and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise InputError(
            f"config.json: layers of {SLIDING}, but sliding_window is {window!r}",
            fix="fetch the model's config.json again",
        )
    kinds = tuple(
        LayerKind(window=window if name == SLIDING else None, frequencies=_frequencies(config, shape, name))
        for name in names
    )
    return kinds, tuple(names.index(name) for name in types)


def _layer_types(config: Mapping[str, Any], shape: ModelShape) -> list[str]:
    if shape.model_type not in ("gemma2", "gemma3_text"):
        return [FULL] * shape.layers
    named = config.get("layer_types")
    if named is None:
        every = 2 if shape.model_type == "gemma2" else int(_number(config, "sliding_window_pattern", 6))
        return [SLIDING if (layer + 1) % every else FULL for layer in range(shape.layers)]
    if not isinstance(named, list) or len(named) != shape.layers or set(named) - {SLIDING, FULL}:
        raise InputError(
            f"config.json: layer_types must name {SLIDING} or {FULL} for each of {shape.layers} layers, not {named!r}",
            fix="fetch the model's config.json again",
        )
    return named


def _frequencies(config: Mapping[str, Any], shape: ModelShape, layer_type: str) -> tuple[float, ...]:
    """In float32, step by step as torch computes them: at far positions the last digit shows."""
    settings = _rotary_settings(config, shape.model_type, layer_type)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"config.json: rotary positions of type {kind!r} with {dict(settings)} are not known to the JAX engine",
            fix=_FIX,
        )
    base, size = np.float32(_number(settings, "rope_theta", 10_000.0)), shape.head_dim
    turns = np.float32(1) / base ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    if kind == "linear":
        turns = turns / np.float32(_number(settings, "factor"))
    elif kind == "llama3":
        turns = _stretched(turns, settings, shape.max_positions)
    return tuple(float(turn) for turn in turns)


def _rotary_settings(config: Mapping[str, Any], family: str, layer_type: str) -> Mapping[str, Any]:
    """Settings of the rotation for one type of layer, of the newer key `rope_parameters` or of the older ones."""
    newer, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    by_type = family == "gemma3_text"
    if bool(newer) and by_type != bool(set(newer) <= {SLIDING, FULL}):
        wanted = f"those of {SLIDING} and {FULL}" if by_type else "one for all layers"
        raise InputError(
            f"config.json: rope_parameters of a {family} are {wanted}; it has {sorted(newer)}",
            fix="fetch the model's config.json again",
        )
    if not by_type:
        return {"rope_theta": config.get("rope_theta") or 10_000.0} | (older or newer)
    if "type" in older and "rope_type" not in older:
        raise InputError(
            "config.json: rope_scaling has `type`, which transformers does not heed in a gemma3_text",
            fix="call it rope_type, if these layers are to be scaled, or leave rope_scaling out",
        )
    # Only layers that see everything are scaled, and they alone take the older key for the base.
    is_full = layer_type == FULL
    named = config.get("rope_theta" if is_full else "rope_local_base_freq")
    base = {"rope_theta": named or (1_000_000.0 if is_full else 10_000.0)}
    return base | (newer.get(layer_type) or {}) | (older if is_full else {})


def _stretched(turns: npt.NDArray[np.float32], settings: Mapping[str, Any], longest: int) -> npt.NDArray[np.float32]:
    """Llama 3.1's longer context: slow rotations are slowed by `factor`, fast ones kept, and those between blended."""
    factor, low = _number(settings, "factor"), _number(settings, "low_freq_factor")
    high, old = _number(settings, "high_freq_factor"), _number(settings, "original_max_position_embeddings", longest)
    lengths = 2 * math.pi / turns
    blend = (old / lengths - low) / (high - low)
    between = (1 - blend) * turns / factor + blend * turns
    slowed = np.where(lengths > old / low, turns / factor, turns)
    is_between = (lengths >= old / high) & (lengths <= old / low)
    return np.asarray(np.where(is_between, between, slowed), dtype=np.float32)


# --- single keys -----------------------------------------------------------------------------------------------------


def _activation(config: Mapping[str, Any], key: str, default: str) -> str:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise InputError(f"config.json: {key} {name!r} is not known to the JAX engine", fix=_FIX)
    return ACTIVATIONS[name]


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(
            f"config.json: {key} is {value!r}, not a number of 0 or more", fix="fetch the model's config.json again"
        )
    return float(value)


def _cap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """A soft cap; null turns one off that the family has by default."""
    value = config.get(key, default)
    return None if value is None else _number(config, key, default)

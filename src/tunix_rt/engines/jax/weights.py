"""Weights of the JAX engine: which arrays a model has, read from a folder in Hugging Face layout or drawn from a seed.

Matrices have the layout of the file. The reader is strict: it refuses a tensor that is missing, left over, of another shape or
dtype, in two shards or in none, before it reads a value.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.errors import InputError
from tunix_rt.models.multimodal import text_names
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.safetensors import INDEX, read_header, refuse_incomplete
from tunix_rt.models.secrets import one_line

SINGLE = "model.safetensors"
TYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Buffers that older files contain beside the parameters; transformers ignores them too."""
_FETCH = "the weights do not belong to this config.json, or are corrupt; fetch the model again"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array of the parameters: `key` in their dictionary, its name in a file, and its shape."""

    key: str
    name: str
    """With `{layer}` in it for an array of layers, which is one tensor of the file for each layer."""
    shape: tuple[int, ...]
    """Of one layer, for an array of layers."""

    @property
    def of_layers(self) -> bool:
        return "{layer}" in self.name

    def names(self, layers: int) -> list[str]:
        return [self.name.format(layer=layer) for layer in range(layers)] if self.of_layers else [self.name]


def entries(architecture: Architecture) -> list[Entry]:
    """Every array of a model, in the order of its forward pass."""
    return _gpt2(architecture) if architecture.input_first else _rotary(architecture)


def parameter_shapes(architecture: Architecture) -> dict[str, Any]:
    """The tree of parameters with shapes in place of arrays, for the compiler."""
    layers = architecture.shape.layers
    return _tree((entry, (layers, *entry.shape) if entry.of_layers else entry.shape) for entry in entries(architecture))


def abstract_parameters(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """The same with shapes and dtypes, as jax describes arrays."""
    shapes = parameter_shapes(architecture)
    return jax.tree.map(partial(jax.ShapeDtypeStruct, dtype=dtype), shapes, is_leaf=lambda at: isinstance(at, tuple))


def _tree(pairs: Iterator[tuple[Entry, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {"layers": {}}
    for entry, value in pairs:
        (tree["layers"] if entry.of_layers else tree)[entry.key] = value
    return tree


def _rotary(architecture: Architecture) -> list[Entry]:
    """Llama and the Gemmas. `post_attention_layernorm` stands before the MLP, unless there are norms after as well."""
    shape, listed = architecture.shape, []
    hidden, head = (shape.hidden,), (shape.head_dim,)

    def layer(key: str, name: str, size: tuple[int, ...]) -> None:
        listed.append(Entry(key=key, name=f"model.layers.{{layer}}.{name}", shape=size))

    def linear(key: str, name: str, size: tuple[int, int], *, bias: bool) -> None:
        layer(key, f"{name}.weight", size)
        if bias:
            layer(f"{key}_bias", f"{name}.bias", size[:1])

    listed.append(Entry(key="embedding", name="model.embed_tokens.weight", shape=(shape.vocab, shape.hidden)))
    layer("attention_norm", "input_layernorm.weight", hidden)
    for key, rows in (("query", shape.query_size), ("key", shape.kv_size), ("value", shape.kv_size)):
        linear(key, f"self_attn.{key[0]}_proj", (rows, shape.hidden), bias=shape.query_bias)
    if shape.head_norms:
        layer("query_norm", "self_attn.q_norm.weight", head)
        layer("key_norm", "self_attn.k_norm.weight", head)
    linear("output", "self_attn.o_proj", (shape.hidden, shape.query_size), bias=shape.output_bias)
    if architecture.post_norms:
        layer("after_attention_norm", "post_attention_layernorm.weight", hidden)
        layer("mlp_norm", "pre_feedforward_layernorm.weight", hidden)
    else:
        layer("mlp_norm", "post_attention_layernorm.weight", hidden)
    for key in ("gate", "up"):
        linear(key, f"mlp.{key}_proj", (shape.ffn, shape.hidden), bias=shape.mlp_bias)
    linear("down", "mlp.down_proj", (shape.hidden, shape.ffn), bias=shape.mlp_bias)
    if architecture.post_norms:
        layer("after_mlp_norm", "post_feedforward_layernorm.weight", hidden)
    listed.append(Entry(key="last_norm", name="model.norm.weight", shape=hidden))
    return listed + _untied_head(architecture)


def _gpt2(architecture: Architecture) -> list[Entry]:
    shape = architecture.shape
    wide = {"ln_1": "attention_norm", "attn.c_attn": "query_key_value", "attn.c_proj": "output"}
    wide |= {"ln_2": "mlp_norm", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    sizes: dict[str, tuple[int, ...]] = {
        "attn.c_attn": (shape.hidden, 3 * shape.hidden),
        "attn.c_proj": (shape.hidden, shape.hidden),
        "mlp.c_fc": (shape.hidden, shape.ffn),
        "mlp.c_proj": (shape.ffn, shape.hidden),
    }
    listed = [
        Entry(key="embedding", name="transformer.wte.weight", shape=(shape.vocab, shape.hidden)),
        Entry(key="positions", name="transformer.wpe.weight", shape=(shape.max_positions, shape.hidden)),
    ]
    for name, key in wide.items():
        size, place = sizes.get(name, (shape.hidden,)), f"transformer.h.{{layer}}.{name}"
        listed.append(Entry(key=key, name=f"{place}.weight", shape=size))
        listed.append(Entry(key=f"{key}_bias", name=f"{place}.bias", shape=size[-1:]))
    for key, kind in (("last_norm", "weight"), ("last_norm_bias", "bias")):
        listed.append(Entry(key=key, name=f"transformer.ln_f.{kind}", shape=(shape.hidden,)))
    return listed + _untied_head(architecture)


def _untied_head(architecture: Architecture) -> list[Entry]:
    shape = architecture.shape
    return [] if shape.tied_head else [Entry(key="head", name="lm_head.weight", shape=(shape.vocab, shape.hidden))]


# --- from a folder ---------------------------------------------------------------------------------------------------


def load_weights(source: ModelSource, architecture: Architecture, *, dtype: str | None = None) -> dict[str, Any]:
    """The parameters in host memory, layers stacked, in `dtype` or else in the dtype of the file.

    Tensors of several dtypes are refused, unless `dtype` represents each of them exactly.
    """
    refuse_incomplete(source.name, source.folder)
    try:
        with contextlib.ExitStack() as open_files:
            stored = _open(source, architecture, open_files)
            _refuse_others(source, architecture, stored)
            kind = _refuse_mixed(source, stored, None if dtype is None else np.dtype(dtype))
            _refuse_other_head(source, architecture, stored)
            layers = architecture.shape.layers
            return _tree((entry, _read(stored, entry, layers, kind)) for entry in entries(architecture))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{source.name}: cannot be loaded: {one_line(error)}", fix="fetch the model again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in an open file."""

    file: Any
    file_name: str
    name: str
    """In the file, where the prefix of the model may be missing."""
    shape: tuple[int, ...]
    type: str

    def read(self) -> Array:
        return self.file.get_tensor(self.name)


def _open(source: ModelSource, architecture: Architecture, stack: contextlib.ExitStack) -> dict[str, _Stored]:
    """Every tensor of the folder, by its name in transformers."""
    prefix = "transformer." if architecture.input_first else "model."
    stored: dict[str, _Stored] = {}
    for file_name in _files(source):
        _refuse_unknown_dtypes(source, file_name)
        file = stack.enter_context(safe_open(source.folder / file_name, framework="np"))
        for name in sorted(file.keys()):
            if _BUFFERS.search(name):
                continue
            if name in stored:
                raise InputError(f"{source.name}: {name} is in {stored[name].file_name} and in {file_name}", fix=_FETCH)
            view = file.get_slice(name)
            stored[name] = _Stored(
                file=file, file_name=file_name, name=name, shape=tuple(view.get_shape()), type=view.get_dtype()
            )
    _refuse_other_index(source, stored)
    if ours := text_names(stored):
        return {ours[name]: one for name, one in stored.items() if name in ours}
    if any(name.startswith(prefix) for name in stored):
        return stored
    # A file of the model without its head, as GPT-2 was published.
    return {name if name == "lm_head.weight" else prefix + name: one for name, one in stored.items()}


def _refuse_unknown_dtypes(source: ModelSource, file_name: str) -> None:
    """Name the first tensor whose dtype is not in `TYPES`, from the header: NumPy and safetensors fail without its name."""
    for name, tensor in read_header(source.folder / file_name)[0].items():
        if str(tensor.dtype) not in TYPES and not _BUFFERS.search(name):
            raise InputError(
                f"{source.name}: {name} in {file_name} has dtype {tensor.dtype}; weights are {', '.join(TYPES)}",
                fix="use the model that this one was quantized from, or convert the weights to bfloat16",
            )


def _files(source: ModelSource) -> list[str]:
    """`model.safetensors`, or the shards that the index names; a shard that it does not name is refused."""
    there = sorted(path.name for path in source.weight_files())
    if not (source.folder / INDEX).is_file():
        if SINGLE in there:
            return [SINGLE]
        raise InputError(
            f"{source.name}: neither {SINGLE} nor {INDEX} in {source.folder}, but {', '.join(there) or 'no weights'}",
            fix="fetch the model again, with its index",
        )
    if SINGLE in there:
        raise InputError(
            f"{source.name}: {SINGLE} and {INDEX} are both in {source.folder}; only one can be the model",
            fix="delete the one that is left over",
        )
    named = sorted(set(_index(source).values()))
    if strays := [name for name in there if re.fullmatch(r"model-.*\.safetensors", name) and name not in named]:
        raise InputError(f"{source.name}: {strays[0]} is not named by {INDEX}", fix=_FETCH)
    return named


def _index(source: ModelSource) -> dict[str, str]:
    return dict(json.loads((source.folder / INDEX).read_text(encoding="utf-8"))["weight_map"])


def _refuse_other_index(source: ModelSource, stored: Mapping[str, _Stored]) -> None:
    """The index and the shards must agree."""
    if not (source.folder / INDEX).is_file():
        return
    named = {name: file for name, file in _index(source).items() if not _BUFFERS.search(name)}
    for name in sorted(named.keys() | stored.keys()):
        recorded, actual = named.get(name), stored[name].file_name if name in stored else None
        if recorded != actual:
            raise InputError(
                f"{source.name}: tensor {name} is in {actual or 'no shard'}, but {INDEX} maps it to {recorded or 'none'}",
                fix=_FETCH,
            )


def _refuse_others(source: ModelSource, architecture: Architecture, stored: Mapping[str, _Stored]) -> None:
    """Name the first tensor that is missing, left over, or of another shape."""
    wanted = {name: entry.shape for entry in entries(architecture) for name in entry.names(architecture.shape.layers)}
    if missing := [name for name in wanted if name not in stored]:
        raise InputError(
            f"{source.name}: {len(missing)} of {len(wanted)} tensors are missing, first {missing[0]}", fix=_FETCH
        )
    tied = {"lm_head.weight"} if architecture.shape.tied_head else set()
    if extra := sorted(stored.keys() - wanted.keys() - tied):
        where = stored[extra[0]].file_name
        raise InputError(
            f"{source.name}: {len(extra)} tensors have no place in a {architecture.shape.model_type} of this size, "
            f"first {extra[0]} in {where}",
            fix=_FETCH,
        )
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise InputError(
                f"{source.name}: {name} in {stored[name].file_name} has shape {list(stored[name].shape)}; "
                f"config.json implies {list(shape)}",
                fix=_FETCH,
            )


def _refuse_mixed(source: ModelSource, stored: Mapping[str, _Stored], dtype: np.dtype[Any] | None) -> np.dtype[Any]:
    """The dtype of the parameters."""
    first: dict[str, str] = {}
    for name, tensor in stored.items():
        first.setdefault(tensor.type, name)
    if len(first) > 1 and not (dtype is not None and all(_holds(dtype, TYPES[kind]) for kind in first)):
        listed = ", ".join(
            f"{kind} ({sum(t.type == kind for t in stored.values())}, first {name})" for kind, name in first.items()
        )
        raise InputError(
            f"{source.name}: its tensors have several dtypes: {listed}",
            fix=f"load it with {'float64' if 'F64' in first else 'float32'} weights, which represent all of them",
        )
    return dtype if dtype is not None else TYPES[next(iter(first))]


def _holds(wide: np.dtype[Any], narrow: np.dtype[Any]) -> bool:
    """Whether `wide` represents every number of `narrow`."""
    return wide == narrow or (wide.itemsize > narrow.itemsize and wide.itemsize >= 4)


def _refuse_other_head(source: ModelSource, architecture: Architecture, stored: Mapping[str, _Stored]) -> None:
    """The file may contain a tied lm_head too, but it must equal the embedding."""
    head = stored.get("lm_head.weight")
    if head is None or not architecture.shape.tied_head:
        return
    embedding = stored[entries(architecture)[0].name]
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise InputError(
            f"{source.name}: lm_head.weight in {head.file_name} is not {embedding.name}, to which config.json ties it",
            fix="set tie_word_embeddings: false in config.json if the lm_head has its own weight",
        )


def _read(stored: Mapping[str, _Stored], entry: Entry, layers: int, kind: np.dtype[Any]) -> Array:
    if not entry.of_layers:
        return stored[entry.name].read().astype(kind, copy=False)
    stacked = np.empty((layers, *entry.shape), dtype=kind)
    for layer, name in enumerate(entry.names(layers)):
        stacked[layer] = stored[name].read()
    return stacked


# --- drawn from the seed ---------------------------------------------------------------------------------------------


DEFAULT_RANGE = 0.02


def init_weights(
    architecture: Architecture, config: Mapping[str, Any], shapes: Mapping[str, Any], shardings: Any, *, seed: int
) -> dict[str, Any]:
    """Random parameters, initialized on their devices as transformers does: matrices and embeddings are normal with
    `initializer_range`, norms are the identity, biases and the padding row are 0.

    An array depends on the seed and its name alone, not on the number of devices."""
    std = float(config.get("initializer_range") or DEFAULT_RANGE)

    def drawn(entry: Entry) -> Any:
        expected, sharding = ((tree["layers"] if entry.of_layers else tree)[entry.key] for tree in (shapes, shardings))
        smaller = architecture.input_first and entry.key in ("output", "down")  # GPT-2: before a residual addition
        own_std = std / math.sqrt(2 * architecture.shape.layers) if smaller else std
        draw = partial(_initial, architecture, entry.key, expected.shape, expected.dtype, own_std)
        number = int.from_bytes(hashlib.sha256(entry.name.encode()).digest()[:4], "big")
        return jax.jit(draw, out_shardings=sharding)(jax.random.fold_in(jax.random.key(seed), number))

    return _tree((entry, drawn(entry)) for entry in entries(architecture))


def _initial(architecture: Architecture, kind: str, shape: tuple[int, ...], dtype: Any, std: float, key: Any) -> Any:
    if kind.endswith("_bias"):
        return jnp.zeros(shape, dtype)
    if kind.endswith("norm"):
        return jnp.full(shape, 0 if architecture.norm == "rms_plus_one" else 1, dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    values = jax.random.normal(key, shape, wide) * jnp.asarray(std, wide)
    if kind == "embedding" and architecture.padding_id is not None:
        values = values.at[architecture.padding_id].set(0)
    return values.astype(dtype)

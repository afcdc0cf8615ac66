"""Weights of the JAX engine from and to a folder in Hugging Face layout, by names alone: matrices lie as they are stored.

The reader is strict: a tensor that is missing, left over, of another shape or type, in two shards or in none is named before
anything is read. Nothing here imports jax or torch.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.safetensors import INDEX, refuse_incomplete
from tunix_rt.models.secrets import one_line
from tunix_rt.storage import storage

SINGLE = "model.safetensors"
TYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Constants that older files carry beside the parameters; transformers leaves them out too."""
_FETCH = "the weights do not belong to this config.json, or are damaged; fetch the model again"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array of the parameters: `key` in their dictionary, its name in a file, and its shape."""

    key: str
    name: str
    """Of a layer's array with `{layer}` in it: one tensor in a file for every layer."""
    shape: tuple[int, ...]
    """Of one layer, where it is of layers."""

    @property
    def of_layers(self) -> bool:
        return "{layer}" in self.name

    def names(self, layers: int) -> list[str]:
        return [self.name.format(layer=layer) for layer in range(layers)] if self.of_layers else [self.name]


def entries(architecture: Architecture) -> list[Entry]:
    """Every array of a model, in the order of its forward pass."""
    return _gpt2(architecture) if architecture.shape.model_type == "gpt2" else _rotary(architecture)


def parameter_shapes(architecture: Architecture) -> dict[str, Any]:
    """The tree of parameters with shapes in place of arrays: what a compiler needs to know of them."""
    layers = architecture.shape.layers
    return _tree((entry, (layers, *entry.shape) if entry.of_layers else entry.shape) for entry in entries(architecture))


def _tree(pairs: Iterator[tuple[Entry, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {"layers": {}}
    for entry, value in pairs:
        (tree["layers"] if entry.of_layers else tree)[entry.key] = value
    return tree


def _rotary(architecture: Architecture) -> list[Entry]:
    """Llama and the Gemmas. `post_attention_layernorm` stands before the MLP, unless there are norms after as well."""
    shape, found = architecture.shape, []
    hidden, head = (shape.hidden,), (shape.head_dim,)

    def layer(key: str, name: str, size: tuple[int, ...]) -> None:
        found.append(Entry(key=key, name=f"model.layers.{{layer}}.{name}", shape=size))

    def linear(key: str, name: str, size: tuple[int, int], *, bias: bool) -> None:
        layer(key, f"{name}.weight", size)
        if bias:
            layer(f"{key}_bias", f"{name}.bias", size[:1])

    found.append(Entry(key="embedding", name="model.embed_tokens.weight", shape=(shape.vocab, shape.hidden)))
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
    found.append(Entry(key="last_norm", name="model.norm.weight", shape=hidden))
    return found + _untied_head(architecture)


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
    found = [
        Entry(key="embedding", name="transformer.wte.weight", shape=(shape.vocab, shape.hidden)),
        Entry(key="positions", name="transformer.wpe.weight", shape=(shape.max_positions, shape.hidden)),
    ]
    for name, key in wide.items():
        size, place = sizes.get(name, (shape.hidden,)), f"transformer.h.{{layer}}.{name}"
        found.append(Entry(key=key, name=f"{place}.weight", shape=size))
        found.append(Entry(key=f"{key}_bias", name=f"{place}.bias", shape=size[-1:]))
    for key, kind in (("last_norm", "weight"), ("last_norm_bias", "bias")):
        found.append(Entry(key=key, name=f"transformer.ln_f.{kind}", shape=(shape.hidden,)))
    return found + _untied_head(architecture)


def _untied_head(architecture: Architecture) -> list[Entry]:
    shape = architecture.shape
    return [] if shape.tied_head else [Entry(key="head", name="lm_head.weight", shape=(shape.vocab, shape.hidden))]


# --- from a folder ---------------------------------------------------------------------------------------------------


def load_weights(source: ModelSource, architecture: Architecture, *, dtype: str | None = None) -> dict[str, Any]:
    """The parameters in host memory, layers stacked; of the type `dtype`, else of the one they are stored in.

    Tensors of several types are refused, unless `dtype` can hold each of them exactly.
    """
    refuse_incomplete(source.name, source.folder)
    with contextlib.ExitStack() as open_files, _readable(source):
        stored = _open(source, architecture, open_files)
        _refuse_others(source, architecture, stored)
        kind = _refuse_mixed(source, stored, None if dtype is None else _type_named(dtype))
        _refuse_other_head(source, architecture, stored)
        layers = architecture.shape.layers
        return _tree((entry, _read(stored, entry, layers, kind)) for entry in entries(architecture))


@contextlib.contextmanager
def _readable(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise InputError(f"{source.name}: cannot be loaded: {one_line(error)}", fix="fetch the model again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor that lies in an open file."""

    file: Any
    file_name: str
    name: str
    """In the file, where the model's own prefix may be left out."""
    shape: tuple[int, ...]
    type: str

    def read(self) -> Array:
        return self.file.get_tensor(self.name)


def _open(source: ModelSource, architecture: Architecture, stack: contextlib.ExitStack) -> dict[str, _Stored]:
    """Every tensor of the folder, by the name that transformers gives it."""
    prefix = "transformer." if architecture.shape.model_type == "gpt2" else "model."
    found: dict[str, _Stored] = {}
    for file_name in _files(source):
        file = stack.enter_context(safe_open(source.folder / file_name, framework="np"))
        for name in sorted(file.keys()):
            if _BUFFERS.search(name):
                continue
            if name in found:
                raise InputError(f"{source.name}: {name} is in {found[name].file_name} and in {file_name}", fix=_FETCH)
            view = file.get_slice(name)
            found[name] = _Stored(
                file=file, file_name=file_name, name=name, shape=tuple(view.get_shape()), type=view.get_dtype()
            )
    _refuse_other_index(source, found)
    if any(name.startswith(prefix) for name in found):
        return found
    # A file of the model without its head, as GPT-2 was published.
    return {name if name == "lm_head.weight" else prefix + name: stored for name, stored in found.items()}


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


def _refuse_other_index(source: ModelSource, found: Mapping[str, _Stored]) -> None:
    """The index and the shards must say the same."""
    if not (source.folder / INDEX).is_file():
        return
    named = {name: file for name, file in _index(source).items() if not _BUFFERS.search(name)}
    for name in sorted(named.keys() | found.keys()):
        said, lies = named.get(name), found[name].file_name if name in found else None
        if said != lies:
            raise InputError(
                f"{source.name}: {name} is in {lies or 'no shard'}, and {INDEX} says {said or 'nothing of it'}",
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
                f"config.json asks for {list(shape)}",
                fix=_FETCH,
            )


def _refuse_mixed(source: ModelSource, stored: Mapping[str, _Stored], asked: np.dtype[Any] | None) -> np.dtype[Any]:
    """The type that the parameters get. One that is no floating-point number is refused whatever is asked for."""
    first: dict[str, str] = {}
    for name, tensor in stored.items():
        first.setdefault(tensor.type, name)
    for kind, name in first.items():
        if kind not in TYPES:
            raise InputError(
                f"{source.name}: {name} is of type {kind}; weights are of {', '.join(TYPES)}",
                fix="use the model as it was before it was quantised",
            )
    if len(first) > 1 and not (asked is not None and all(_holds(asked, TYPES[kind]) for kind in first)):
        said = ", ".join(
            f"{kind} ({sum(t.type == kind for t in stored.values())}, first {name})" for kind, name in first.items()
        )
        raise InputError(
            f"{source.name}: its tensors are of several types: {said}",
            fix=f"ask for {'float64' if 'F64' in first else 'float32'} weights, which hold all of them",
        )
    return asked if asked is not None else TYPES[next(iter(first))]


def _holds(wide: np.dtype[Any], narrow: np.dtype[Any]) -> bool:
    """Whether every number of `narrow` is one of `wide`."""
    return wide == narrow or (wide.itemsize > narrow.itemsize and wide.itemsize >= 4)


def _type_named(dtype: str) -> np.dtype[Any]:
    known = {kind.name: kind for kind in TYPES.values()}
    if dtype not in known:
        raise InputError(f"weights of type {dtype} are not known", fix=f"use one of {', '.join(known)}")
    return known[dtype]


def _refuse_other_head(source: ModelSource, architecture: Architecture, stored: Mapping[str, _Stored]) -> None:
    """A tied head may lie in the file once more, but must be the table it is tied to."""
    head = stored.get("lm_head.weight")
    if head is None or not architecture.shape.tied_head:
        return
    table = stored[entries(architecture)[0].name]
    if head.shape != table.shape or not np.array_equal(head.read(), table.read()):
        raise InputError(
            f"{source.name}: lm_head.weight in {head.file_name} is not {table.name}, which config.json says is the head",
            fix="set tie_word_embeddings: false in config.json if the head is one of its own",
        )


def _read(stored: Mapping[str, _Stored], entry: Entry, layers: int, kind: np.dtype[Any]) -> Array:
    if not entry.of_layers:
        return stored[entry.name].read().astype(kind, copy=False)
    stacked = np.empty((layers, *entry.shape), dtype=kind)
    for layer, name in enumerate(entry.names(layers)):
        stacked[layer] = stored[name].read()
    return stacked


# --- to a folder -----------------------------------------------------------------------------------------------------


def named_tensors(params: Mapping[str, Any], architecture: Architecture) -> Iterator[tuple[str, Array]]:
    """Every tensor by the name that transformers gives it, in host memory. Those of layers are views of the stacked ones."""
    for entry in entries(architecture):
        array = np.asarray((params["layers"] if entry.of_layers else params)[entry.key])
        if not entry.of_layers:
            yield entry.name, array
            continue
        yield from zip(entry.names(architecture.shape.layers), array, strict=True)


def save_weights(
    params: Mapping[str, Any], architecture: Architecture, folder: Path, *, config: Mapping[str, Any]
) -> None:
    """`model.safetensors` and `config.json`, as plain transformers loads them. `config` is that of the base model."""
    tensors = {name: np.ascontiguousarray(array) for name, array in named_tensors(params, architecture)}
    said = {key: value for key, value in config.items() if key != "torch_dtype"}  # the older name of the same
    said["dtype"] = params["embedding"].dtype.name
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        except SafetensorError as error:  # what the disk says, in an error that is no OSError
            raise OSError(None, one_line(error), str(folder / SINGLE)) from error
        (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

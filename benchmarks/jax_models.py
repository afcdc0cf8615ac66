"""Parameters of the JAX engine as tensors with the names of transformers, as a folder, and as a model of google-tunix.

For comparisons alone: the program saves with `engines/jax/save.py` and computes with `engines/jax/tunix.py`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tunix_rt.engines.jax import tunix as jax_tunix
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.model import Params
from tunix_rt.engines.jax.weights import SINGLE, entries
from tunix_rt.errors import ConfigError, InputError

Array = Any


def named_tensors(params: Mapping[str, Any], architecture: Architecture) -> Iterator[tuple[str, Array]]:
    """Every tensor with its name in transformers, in host memory. Those of layers are views of the stacked ones."""
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
    written = {key: value for key, value in config.items() if key != "torch_dtype"}  # the older name of dtype
    written["dtype"] = params["embedding"].dtype.name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


# --- google-tunix ----------------------------------------------------------------------------------------------------


def model_of(params: Params, architecture: Architecture) -> Any:
    """Tunix's model, an nnx module, with these weights in their type."""
    from flax import nnx

    graph = nnx.split(jax_tunix.empty_model(architecture))[0]
    return nnx.merge(graph, {
        "embedder": {"input_embedding": jnp.asarray(params["embedding"])},
        "layers": {
            layer: jax_tunix.layer_state(weights, architecture)
            for layer, weights in enumerate(jax_tunix.split_layers(params["layers"], architecture))
        },
        "final_norm": {"scale": jnp.asarray(params["last_norm"])},
    })  # fmt: skip


def params_of(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Our tree of the weights of a model of Tunix, in their type."""
    from flax import nnx

    state = nnx.state(model, nnx.Param).to_pure_dict()
    layers = [_layer_weights(state["layers"][layer], architecture) for layer in range(architecture.shape.layers)]
    return {
        "embedding": state["embedder"]["input_embedding"],
        "layers": {key: jnp.stack([one[key] for one in layers]) for key in layers[0]},
        "last_norm": state["final_norm"]["scale"],
    }


def _layer_weights(state: Mapping[str, Any], architecture: Architecture) -> dict[str, Array]:
    """The way back."""
    shape, attention = architecture.shape, state["attn"]

    def heads_together(array: Array) -> Array:
        return array.swapaxes(1, 2).reshape(-1, shape.hidden)

    if shape.heads == shape.kv_heads:
        query, key, value = attention["qkv_einsum"]["w"]
    else:
        query, (key, value) = attention["q_einsum"]["w"], attention["kv_einsum"]["w"]
    found = {"query": heads_together(query), "key": heads_together(key), "value": heads_together(value)}
    found["output"] = attention["attn_vec_einsum"]["w"].reshape(shape.query_size, shape.hidden).T
    found |= {ours: attention[theirs]["scale"] for ours, theirs in jax_tunix.HEAD_NORMS.items() if shape.head_norms}
    found |= {ours: state["mlp"][theirs]["kernel"].T for ours, theirs in jax_tunix.MLP.items()}
    return found | {ours: state[theirs]["scale"] for ours, theirs in jax_tunix.norm_names(architecture).items()}


def open_in_tunix(folder: Path, architecture: Architecture, *, dtype: str | None = None) -> Any:
    """A saved folder as a model of Tunix, by Tunix's own loader; weights of the type `dtype`, else of their own.

    Gemma 2 and 3 load by `create_model_from_safe_tensors` as anyone calls it. Gemma 1 needs the key map of this file."""
    config = jax_tunix.config_of(architecture)
    _refuse_unreported(folder, architecture)
    from tunix.models.gemma import params_safetensors as gemma
    from tunix.models.gemma3 import params_safetensors as gemma3

    kind = None if dtype is None else jnp.dtype(dtype)
    if jax_tunix.is_gemma3(architecture):
        return gemma3.create_model_from_safe_tensors(str(folder), config, dtype=kind, mode="optimized")
    if architecture.post_norms:
        return gemma.create_model_from_safe_tensors(str(folder), config, dtype=kind, mode="optimized")
    return gemma.safetensors_loader.load_and_create_model(
        str(folder), gemma.model_lib.Gemma, config, gemma1_keys,
        preprocess_fn=gemma._make_preprocess_fn(config), dtype=kind, mode="optimized",
    )  # fmt: skip


def gemma1_keys(config: Any) -> dict[str, Any]:
    """Tunix's key map with the one entry that is wrong for Gemma 1."""
    from tunix.models.gemma import params_safetensors as gemma

    found = dict(gemma._get_key_and_transform_mapping(config))
    name = r"model\.layers\.([0-9]+)\.post_attention_layernorm\.weight"
    if name not in found:
        raise ConfigError(
            f"google-tunix has no key {name} to correct", fix=f"pip install google-tunix=={jax_tunix.WRITTEN_FOR}"
        )
    return found | {name: (r"layers.\1.pre_ffw_norm.scale", None)}


def _refuse_unreported(folder: Path, architecture: Architecture) -> None:
    """A tensor that is missing, and tensors of several types: Tunix's loader does not name them."""
    types: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            types |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    wanted = [name for entry in entries(architecture) for name in entry.names(architecture.shape.layers)]
    if missing := [name for name in wanted if name not in types]:
        raise InputError(
            f"{folder}: {len(missing)} of {len(wanted)} tensors are missing, first {missing[0]}",
            fix="fetch or save the model again",
        )
    if len(found := sorted(set(types.values()))) > 1:
        raise InputError(
            f"{folder}: its tensors are of several types: {', '.join(found)}; Tunix's loader reads one",
            fix="save it in one type first (`tunix-rt export`)",
        )

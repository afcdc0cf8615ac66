"""google-tunix's own Gemma models in the loop of this engine (`model.implementation: tunix`): the one file that imports it.

Parameters stay the tree of `jax_models`, so optimizer, checkpoints, sharding and saved folders are the same; `forward` lays
them out as Tunix has them, layer by layer and in the type of the products, and calls Tunix's embedder, layers and last norm.
Written against google-tunix 0.1.7. What goes wrong in it without a word is handled here, or refused by name:

- Gemma 2 measures its window between a position and a place in the row, so positions that restart there are wrong past the
  window. It gets places as positions, and a mask with the boundaries: only distances count in a rotation.
- Gemma 3 has five layers with a window before each without, whatever config.json says; no model reads config.json at all.
- Tunix has one type for everything and no master weights. Here weights keep theirs, and each use of a layer is a cast.
- Its constraints on activations (`shard`) do nothing on a CPU and name an axis `tp`. Here they name the axes of our mesh.
- Its loader puts Gemma 1's norm before the MLP where Gemma 2 has one after attention, fails on tensors of several types and
  does not say which one is missing; with `mode="original"` it leaves them empty, so that is never used.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.chunked_loss import head_loss
from tunix_rt.engines.jax.mesh import FSDP, ROWS
from tunix_rt.engines.jax.model import Batch, Params, Remat, head_table
from tunix_rt.engines.jax.weights import entries
from tunix_rt.errors import ConfigError, InputError

Array = Any
WRITTEN_FOR = "0.1.7"
FAMILIES = ("gemma", "gemma2", "gemma3_text")
ATTENTION = "tunix"
"""What the plan of a step calls the attention inside of Tunix's layers."""
WHY = "Tunix's own: a mask of tokens x tokens, scores and softmax in the type of the products"
CYCLE = 6
"""Every sixth layer of Tunix's Gemma 3 has no window."""
_OURS = "leave model.implementation out: our own model computes it"


# --- what Tunix can be asked -----------------------------------------------------------------------------------------


def require() -> None:
    """Refuse by name where google-tunix is missing or of another version than this file was written for."""
    if importlib.util.find_spec("tunix") is None:
        raise ConfigError(
            "model.implementation: tunix needs google-tunix, which is not installed here",
            fix='pip install "tunix-rt[tunix]" in an environment of its own (`scripts/tunix` makes one), or leave it out',
        )
    found = importlib.metadata.version("google-tunix")
    if found != WRITTEN_FOR:
        raise ConfigError(
            f"model.implementation: tunix was written for google-tunix {WRITTEN_FOR}; {found} is installed",
            fix=f"pip install google-tunix=={WRITTEN_FOR}",
        )


def config_of(architecture: Architecture) -> Any:
    """Tunix's ModelConfig of the same model, or a ConfigError that names what Tunix's model does otherwise."""
    require()
    _refuse(architecture)
    return _gemma3_config(architecture) if _is_gemma3(architecture) else _gemma_config(architecture)


def _is_gemma3(architecture: Architecture) -> bool:
    return architecture.shape.model_type == "gemma3_text"


def _refuse(architecture: Architecture) -> None:
    shape = architecture.shape
    if shape.model_type not in FAMILIES:
        raise ConfigError(
            f"model.implementation: tunix is there for {', '.join(FAMILIES)}, not for a {shape.model_type}", fix=_OURS
        )
    scales = [shape.head_dim**-0.5]
    if _is_gemma3(architecture):
        scales.append((shape.hidden // shape.heads) ** -0.5)
    wrong = {
        f"an activation {architecture.activation}; it has gelu_tanh": architecture.activation != "gelu_tanh",
        # A GGUF file has it in float32.
        f"rms_norm_eps {architecture.epsilon:g}; it has 1e-06": not np.isclose(
            architecture.epsilon, 1e-6, rtol=1e-6, atol=0
        ),
        "a head of its own; its head is the table of the tokens": not shape.tied_head,
        "biases; it has none": shape.query_bias or shape.output_bias or shape.mlp_bias,
        f"scores times {architecture.query_scale:g}; it has {' or '.join(f'{one:g}' for one in scales)}": (
            not np.isclose(architecture.query_scale, scales, rtol=1e-12).any()
        ),
        "soft-capped scores in a Gemma 3; it has none": _is_gemma3(architecture) and architecture.score_cap is not None,
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(f"model.implementation: tunix: this model has {found[0]}", fix=_OURS)


def _gemma_config(architecture: Architecture) -> Any:
    """Of Gemma 1 and 2."""
    for kind in architecture.kinds:
        if _rotation(kind.frequencies) != (10_000, 1.0):
            raise ConfigError(
                "model.implementation: tunix: this model has a rotation of its own; Tunix's Gemma 1 and 2 have base 10000",
                fix=_OURS,
            )
    from tunix.models.gemma import model as gemma

    types = gemma.AttentionType
    windows = [architecture.kinds[kind].window for kind in architecture.pattern]
    return gemma.ModelConfig(
        **_sizes(architecture),
        final_logit_softcap=architecture.logit_cap,
        attn_logits_soft_cap=architecture.score_cap,
        use_post_attn_norm=architecture.post_norms,
        use_post_ffw_norm=architecture.post_norms,
        attention_types=tuple(types.GLOBAL if window is None else types.LOCAL_SLIDING for window in windows),
        sliding_window_size=next((window for window in windows if window is not None), None),
        shd_config=gemma.ShardingConfig(**_axes(), score_weight_d1=(FSDP, None)),
        remat_config=gemma.RematConfig.NONE,
    )


def _gemma3_config(architecture: Architecture) -> Any:
    shape = architecture.shape
    windows = [architecture.kinds[kind].window for kind in architecture.pattern]
    wanted = [(layer + 1) % CYCLE != 0 for layer in range(shape.layers)]
    if [window is not None for window in windows] != wanted:
        said = ", ".join("all" if window is None else str(window) for window in windows)
        raise ConfigError(
            f"model.implementation: tunix: the windows of this model's layers are {said}; Tunix's Gemma 3 has five layers "
            "with a window before each without",
            fix=_OURS,
        )
    turns = {
        windows[layer] is None: _rotation(architecture.kinds[kind].frequencies)
        for layer, kind in enumerate(architecture.pattern)
    }
    from tunix.models.gemma3 import model as gemma3

    local, everywhere = turns[False], turns.get(True, turns[False])
    norms = gemma3.QueryPreAttentionNormalisation
    by_head = np.isclose(architecture.query_scale, shape.head_dim**-0.5, rtol=1e-12)
    return gemma3.ModelConfig(
        **_sizes(architecture),
        sliding_window_size=windows[0],
        local_base_frequency=local[0],
        local_scale_factor=local[1],
        global_base_frequency=everywhere[0],
        global_scale_factor=everywhere[1],
        query_pre_attn_norm=(
            norms.BY_ONE_OVER_SQRT_HEAD_DIM if by_head else norms.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
        ),
        shd_config=gemma3.ShardingConfig(
            **_axes(), vision_proj=(FSDP, None), vision_soft_emb_norm_weight=(None,), siglip=None
        ),
        remat_config=gemma3.RematConfig.NONE,
        param_dtype=jnp.float32,
    )


def _sizes(architecture: Architecture) -> dict[str, int]:
    shape = architecture.shape
    return {
        "num_layers": shape.layers, "num_embed": shape.vocab, "embed_dim": shape.hidden, "hidden_dim": shape.ffn,
        "num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip


def _axes() -> dict[str, tuple[Any, ...]]:
    """How weights and activations lie, in the axes of our mesh, which has no `tp`: by these names Tunix asks for them."""
    return {
        "emb_vd": (FSDP, None), "q_weight_ndh": (None, FSDP, None), "kv_weight_cndh": (None, None, FSDP, None),
        "qkv_weight_cndh": (None, None, FSDP, None), "o_weight_nhd": (None, None, FSDP), "ffw_weight_df": (FSDP, None),
        "ffw_weight_fd": (None, FSDP), "rms_norm_weight": (None,), "act_btd": (ROWS, None, None),
        "act_btf": (ROWS, None, None), "act_btnh": (ROWS, None, None, None),
    }  # fmt: skip


def _rotation(frequencies: tuple[float, ...]) -> tuple[float, float]:
    """Base and factor that Tunix makes these frequencies of; a ConfigError where it makes others of any."""
    given, pairs = np.asarray(frequencies, np.float64), len(frequencies)
    factor = float(round(1 / given[0], 6))
    # The slowest rotation tells the base best. Bases are whole numbers, of which float32 leaves a trace of a fraction.
    base = (given[0] / given[-1]) ** (pairs / (pairs - 1)) if pairs > 1 else 10_000.0
    base = float(round(base)) if abs(base - round(base)) < 1e-5 * base else base
    made = base ** -(np.arange(pairs) / pairs) / factor
    if factor < 1 or not np.allclose(given, made, rtol=2e-6, atol=0):
        raise ConfigError(
            "model.implementation: tunix: this model's rotation is not made of a base and one factor of 1 or more",
            fix=_OURS,
        )
    return base, factor


# --- the model in a step ---------------------------------------------------------------------------------------------


def summed_loss(
    params: Params,
    batch: Batch,
    architecture: Architecture,
    *,
    compute: Any,
    remat: Remat = "none",
    chunk: int | None = None,
    attention: Any = None,
) -> Array:
    """As that of `jax_models`, with hidden states from Tunix's model. The loss head is ours."""
    states = forward(
        params, batch.ids, batch.positions, batch.segments, architecture,
        compute=compute, remat=remat, attention=attention,
    )  # fmt: skip
    return head_loss(
        states, head_table(params), batch.targets, batch.weights,
        compute=compute, softcap=architecture.logit_cap, chunk=chunk,
    )  # fmt: skip


def forward(
    params: Params,
    ids: Array,
    positions: Array,
    segments: Array,
    architecture: Architecture,
    *,
    compute: Any,
    remat: Remat = "none",
    attention: Any = None,
) -> Array:
    """Hidden states [rows, tokens, hidden] of the type `compute` after Tunix's last norm; the call is that of `jax_models`.

    `attention` must be None: Tunix's layers bring their own. Layers are not scanned but follow each other."""
    if attention is not None:
        raise ConfigError("model.implementation: tunix takes no other attention than Tunix's own", fix=_OURS)
    parts = _parts(architecture)
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)
    seen = (places[:, None] >= places[None, :]) & (segments[:, :, None] == segments[:, None, :])
    is_gemma2 = architecture.shape.model_type == "gemma2"
    turned_by = jnp.broadcast_to(places, ids.shape) if is_gemma2 else positions
    states = _encoded(parts, params, ids, architecture).astype(compute)

    def through(graph: Any, weights: Mapping[str, Array], states: Array) -> Array:
        module = _merged(graph, _layer_state({key: one.astype(compute) for key, one in weights.items()}, architecture))
        return module(states, turned_by, None, seen)[1]

    for graph, weights in zip(parts.layers, _of_each_layer(params["layers"], architecture), strict=True):
        states = _kept_less(functools.partial(through, graph), remat)(weights, states)
    return _merged(parts.last_norm, {"scale": params["last_norm"].astype(compute)})(states)


def _encoded(parts: "_Parts", params: Params, ids: Array, architecture: Architecture) -> Array:
    """Rows of the table in its own type. As in `jax_models`, padding teaches nothing and an id outside gives no number."""
    found = _merged(parts.embedder, {"input_embedding": jnp.asarray(params["embedding"])}).encode(ids)
    if architecture.padding_id is not None:
        found = jnp.where((ids == architecture.padding_id)[..., None], jax.lax.stop_gradient(found), found)
    outside = (ids < 0) | (ids >= architecture.shape.vocab)
    return jnp.where(outside[..., None], jnp.asarray(jnp.nan, found.dtype), found)


def _kept_less(layer: Callable[..., Array], remat: Remat) -> Callable[..., Array]:
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "products" else policies.nothing_saveable
    return jax.checkpoint(layer, policy=policy)


def _of_each_layer(stacked: Mapping[str, Array], architecture: Architecture) -> list[dict[str, Array]]:
    """By one cut of each array: its gradient is one joining, where that of single reads would be a sum over layers."""
    layers = architecture.shape.layers
    cut = {key: jax.lax.split(jnp.asarray(array), (1,) * layers, axis=0) for key, array in stacked.items()}
    return [{key: parts[layer][0] for key, parts in cut.items()} for layer in range(layers)]


class _Parts(NamedTuple):
    """What a model of Tunix is made of, without its weights."""

    embedder: Any
    layers: tuple[Any, ...]
    last_norm: Any


@functools.lru_cache(maxsize=8)
def _parts(architecture: Architecture) -> _Parts:
    from flax import nnx

    model = _empty(architecture)
    return _Parts(
        embedder=nnx.split(model.embedder)[0],
        layers=tuple(nnx.split(layer)[0] for layer in model.layers),
        last_norm=nnx.split(model.final_norm)[0],
    )


def _empty(architecture: Architecture) -> Any:
    """Tunix's model with shapes in place of weights."""
    from flax import nnx
    from tunix.models.gemma.model import Gemma
    from tunix.models.gemma3.model import Gemma3

    kind, config = Gemma3 if _is_gemma3(architecture) else Gemma, config_of(architecture)
    return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(params=0)))


def _merged(graph: Any, state: Mapping[str, Any]) -> Any:
    from flax import nnx

    return nnx.merge(graph, state)


# --- weights: our tree and Tunix's state -----------------------------------------------------------------------------


def model_of(params: Params, architecture: Architecture) -> Any:
    """Tunix's model, an nnx module, with these weights in their type."""
    from flax import nnx

    graph = nnx.split(_empty(architecture))[0]
    return nnx.merge(graph, {
        "embedder": {"input_embedding": jnp.asarray(params["embedding"])},
        "layers": {
            layer: _layer_state(weights, architecture)
            for layer, weights in enumerate(_of_each_layer(params["layers"], architecture))
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


def _norms(architecture: Architecture) -> dict[str, str]:
    """Our name of a layer's norm -> Tunix's. Gemma 1 has no norms after, so what transformers calls
    `post_attention_layernorm` is the norm before its MLP."""
    names = {"attention_norm": "pre_attention_norm", "mlp_norm": "pre_ffw_norm"}
    if architecture.post_norms:
        after = "post_attention_norm" if _is_gemma3(architecture) else "post_attn_norm"
        names |= {"after_attention_norm": after, "after_mlp_norm": "post_ffw_norm"}
    return names


_HEAD_NORMS = {"query_norm": "_query_norm", "key_norm": "_key_norm"}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _layer_state(weights: Mapping[str, Array], architecture: Architecture) -> dict[str, Any]:
    """One layer as Tunix has it: products read [in, out], heads apart, keys and values (and queries) in one array."""
    shape = architecture.shape

    def heads_apart(name: str) -> Array:
        return weights[name].reshape(-1, shape.head_dim, shape.hidden).swapaxes(1, 2)

    query, key, value = (heads_apart(name) for name in ("query", "key", "value"))
    output = weights["output"].T.reshape(shape.heads, shape.head_dim, shape.hidden)
    attention: dict[str, Any] = {"attn_vec_einsum": {"w": output}}
    if shape.heads == shape.kv_heads:
        attention["qkv_einsum"] = {"w": jnp.stack([query, key, value])}
    else:
        attention |= {"q_einsum": {"w": query}, "kv_einsum": {"w": jnp.stack([key, value])}}
    attention |= {theirs: {"scale": weights[ours]} for ours, theirs in _HEAD_NORMS.items() if shape.head_norms}
    mlp = {theirs: {"kernel": weights[ours].T} for ours, theirs in _MLP.items()}
    norms = {theirs: {"scale": weights[ours]} for ours, theirs in _norms(architecture).items()}
    return {"attn": attention, "mlp": mlp, **norms}


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
    found |= {ours: attention[theirs]["scale"] for ours, theirs in _HEAD_NORMS.items() if shape.head_norms}
    found |= {ours: state["mlp"][theirs]["kernel"].T for ours, theirs in _MLP.items()}
    return found | {ours: state[theirs]["scale"] for ours, theirs in _norms(architecture).items()}


# --- a saved folder in Tunix -----------------------------------------------------------------------------------------


def open_in_tunix(folder: Path, architecture: Architecture, *, dtype: str | None = None) -> Any:
    """A saved folder as a model of Tunix, by Tunix's own loader; weights of the type `dtype`, else of their own.

    Gemma 2 and 3 load by `create_model_from_safe_tensors` as anyone calls it. Gemma 1 needs the key map of this file."""
    config = config_of(architecture)
    _refuse_what_fails_in_silence(folder, architecture)
    from tunix.models.gemma import params_safetensors as gemma
    from tunix.models.gemma3 import params_safetensors as gemma3

    kind = None if dtype is None else jnp.dtype(dtype)
    if _is_gemma3(architecture):
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
            f"google-tunix has no key {name} to be mended", fix=f"pip install google-tunix=={WRITTEN_FOR}"
        )
    return found | {name: (r"layers.\1.pre_ffw_norm.scale", None)}


def _refuse_what_fails_in_silence(folder: Path, architecture: Architecture) -> None:
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

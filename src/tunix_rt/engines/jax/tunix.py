"""The Gemma models of google-tunix in the loop of this engine (`model.implementation: tunix`): the one file that imports it.

Parameters stay the tree of `model.py`, so optimizer, checkpoints, sharding and saved folders are the same; `forward` converts
them to the layout of Tunix, layer by layer and in the compute dtype, and calls its embedder, layers and last norm. Written
against google-tunix 0.1.7. Where it is silently wrong, this file corrects it, or refuses the model:

- Gemma 2 measures its window between a position and an index in the row, so restarting positions are wrong past the window. It
  gets indices as positions, and a mask with document boundaries: RoPE depends on distances only.
- Gemma 3 has five sliding-window layers before each full one, whatever config.json contains, which no model reads.
- Tunix has one dtype for everything and no master weights. Here weights keep their dtype, and each use of a layer is a cast.
- Its constraints on activations (`shard`) do nothing on a CPU and name an axis `tp`. Here they name the axes of our mesh.
- Its loader maps a norm of Gemma 1 as in Gemma 2, fails on tensors of several dtypes, and does not name a missing tensor
  (`benchmarks/jax_models.py` corrects it).
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix_rt.engines.jax import model as jax_model
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.mesh import FSDP, ROWS
from tunix_rt.engines.jax.model import Params, Remat
from tunix_rt.errors import ConfigError
from tunix_rt.models.families import families_of

Array = Any
WRITTEN_FOR = "0.1.7"
ATTENTION = "tunix"
"""The attention of Tunix's layers in the plan of a step."""
WHY = "Tunix's own: a mask of tokens x tokens, scores and softmax in the compute dtype"
CYCLE = 6
"""Every sixth layer of Tunix's Gemma 3 has full attention."""
_OURS = "leave model.implementation out: the models of tunix-rt support it"


# --- what Tunix supports ---------------------------------------------------------------------------------------------


def require() -> None:
    """ConfigError where google-tunix is missing, or of another version than this file is written for."""
    if importlib.util.find_spec("tunix") is None:
        raise ConfigError(
            "model.implementation: tunix needs google-tunix, which is not installed here",
            fix='pip install "tunix-rt[tunix]" in an environment of its own (`scripts/tunix` makes one), or leave it out',
        )
    installed = importlib.metadata.version("google-tunix")
    if installed != WRITTEN_FOR:
        raise ConfigError(
            f"model.implementation: tunix is written for google-tunix {WRITTEN_FOR}; {installed} is installed",
            fix=f"pip install google-tunix=={WRITTEN_FOR}",
        )


def config_of(architecture: Architecture) -> Any:
    """Tunix's ModelConfig of the same model, or a ConfigError with what its model does not support."""
    require()
    _refuse(architecture)
    return _gemma3_config(architecture) if is_gemma3(architecture) else _gemma_config(architecture)


def is_gemma3(architecture: Architecture) -> bool:
    return architecture.shape.model_type == "gemma3_text"


def _refuse(architecture: Architecture) -> None:
    shape = architecture.shape
    known = families_of("tunix")
    if shape.model_type not in known:
        raise ConfigError(f"model.implementation: tunix supports {', '.join(known)}, not {shape.model_type}", fix=_OURS)
    scales = [shape.head_dim**-0.5]
    if is_gemma3(architecture):
        scales.append((shape.hidden // shape.heads) ** -0.5)
    wrong = {
        f"an activation {architecture.activation}; it has gelu_tanh": architecture.activation != "gelu_tanh",
        # A GGUF file has it in float32.
        f"rms_norm_eps {architecture.epsilon:g}; it has 1e-06": not np.isclose(
            architecture.epsilon, 1e-6, rtol=1e-6, atol=0
        ),
        "an lm_head weight of its own; its lm_head is the embedding": not shape.tied_head,
        "biases; it has none": shape.query_bias or shape.output_bias or shape.mlp_bias,
        f"scores times {architecture.query_scale:g}; it has {' or '.join(f'{one:g}' for one in scales)}": (
            not np.isclose(architecture.query_scale, scales, rtol=1e-12).any()
        ),
        "soft-capped scores in a Gemma 3; it has none": is_gemma3(architecture) and architecture.score_cap is not None,
    }
    if problems := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(f"model.implementation: tunix: this model has {problems[0]}", fix=_OURS)


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
        listed = ", ".join("all" if window is None else str(window) for window in windows)
        raise ConfigError(
            f"model.implementation: tunix: the windows of this model's layers are {listed}; Tunix's Gemma 3 has five layers "
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
    """Shardings of weights and activations in the axes of our mesh, which has no `tp`, under the names of Tunix."""
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
    # The lowest frequency determines the base best. Bases are integers, up to the rounding of float32.
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
    """Hidden states [rows, tokens, hidden] of dtype `compute` after Tunix's last norm; the signature is that of `model.py`.

    `attention` must be None: Tunix's layers have their own. Layers are unrolled, not scanned."""
    if attention is not None:
        raise ConfigError("model.implementation: tunix has its own attention", fix=_OURS)
    parts = _parts(architecture)
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)
    seen = (places[:, None] >= places[None, :]) & (segments[:, :, None] == segments[:, None, :])
    is_gemma2 = architecture.shape.model_type == "gemma2"
    turned_by = jnp.broadcast_to(places, ids.shape) if is_gemma2 else positions
    states = _encoded(parts, params, ids, architecture).astype(compute)

    def through(graph: Any, weights: Mapping[str, Array], states: Array) -> Array:
        module = _merged(graph, layer_state({key: one.astype(compute) for key, one in weights.items()}, architecture))
        return module(states, turned_by, None, seen)[1]

    for graph, weights in zip(parts.layers, split_layers(params["layers"], architecture), strict=True):
        states = _checkpointed(functools.partial(through, graph), remat)(weights, states)
    return _merged(parts.last_norm, {"scale": params["last_norm"].astype(compute)})(states)


summed_loss = functools.partial(jax_model.summed_loss, body=forward)
"""As that of `model.py`, with hidden states of Tunix's model and our loss head."""


def _encoded(parts: "_Parts", params: Params, ids: Array, architecture: Architecture) -> Array:
    """Embeddings in their dtype. As in `model.py`, padding has no gradient, and an id outside the vocabulary gives NaN."""
    states = _merged(parts.embedder, {"input_embedding": jnp.asarray(params["embedding"])}).encode(ids)
    if architecture.padding_id is not None:
        states = jnp.where((ids == architecture.padding_id)[..., None], jax.lax.stop_gradient(states), states)
    outside = (ids < 0) | (ids >= architecture.shape.vocab)
    return jnp.where(outside[..., None], jnp.asarray(jnp.nan, states.dtype), states)


def _checkpointed(layer: Callable[..., Array], remat: Remat) -> Callable[..., Array]:
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "products" else policies.nothing_saveable
    return jax.checkpoint(layer, policy=policy)


def split_layers(stacked: Mapping[str, Array], architecture: Architecture) -> list[dict[str, Array]]:
    """By one split of each array: its gradient is one concatenation, where that of single reads is a sum over layers."""
    layers = architecture.shape.layers
    split = {key: jax.lax.split(jnp.asarray(array), (1,) * layers, axis=0) for key, array in stacked.items()}
    return [{key: parts[layer][0] for key, parts in split.items()} for layer in range(layers)]


class _Parts(NamedTuple):
    """The modules of a Tunix model, without weights."""

    embedder: Any
    layers: tuple[Any, ...]
    last_norm: Any


@functools.lru_cache(maxsize=8)
def _parts(architecture: Architecture) -> _Parts:
    from flax import nnx

    model = empty_model(architecture)
    return _Parts(
        embedder=nnx.split(model.embedder)[0],
        layers=tuple(nnx.split(layer)[0] for layer in model.layers),
        last_norm=nnx.split(model.final_norm)[0],
    )


def empty_model(architecture: Architecture) -> Any:
    """Tunix's model with shapes in place of arrays."""
    from flax import nnx
    from tunix.models.gemma.model import Gemma
    from tunix.models.gemma3.model import Gemma3

    kind, config = Gemma3 if is_gemma3(architecture) else Gemma, config_of(architecture)
    return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(params=0)))


def _merged(graph: Any, state: Mapping[str, Any]) -> Any:
    from flax import nnx

    return nnx.merge(graph, state)


# --- a layer of the parameters as Tunix has it -----------------------------------------------------------------------------


def norm_names(architecture: Architecture) -> dict[str, str]:
    """Our name of a layer's norm -> Tunix's. Gemma 1 has no post-norms: `post_attention_layernorm` of transformers is the norm
    before its MLP."""
    names = {"attention_norm": "pre_attention_norm", "mlp_norm": "pre_ffw_norm"}
    if architecture.post_norms:
        after = "post_attention_norm" if is_gemma3(architecture) else "post_attn_norm"
        names |= {"after_attention_norm": after, "after_mlp_norm": "post_ffw_norm"}
    return names


HEAD_NORMS = {"query_norm": "_query_norm", "key_norm": "_key_norm"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def layer_state(weights: Mapping[str, Array], architecture: Architecture) -> dict[str, Any]:
    """One layer in the layout of Tunix: matrices [in, out], heads separate, keys and values (and queries) in one array."""
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
    attention |= {theirs: {"scale": weights[ours]} for ours, theirs in HEAD_NORMS.items() if shape.head_norms}
    mlp = {theirs: {"kernel": weights[ours].T} for ours, theirs in MLP.items()}
    norms = {theirs: {"scale": weights[ours]} for ours, theirs in norm_names(architecture).items()}
    return {"attn": attention, "mlp": mlp, **norms}

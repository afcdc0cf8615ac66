"""The optimizers of the JAX engine: AdamW and Adafactor as docs/concepts/optimizers.md defines them, over trees of arrays.

Arrays of `layers` are stacked, and each layer of them is a tensor of its own: a stacked vector is still a vector, and of a
stacked matrix Adafactor keeps rows and columns, and measures the step, layer by layer.

The corrections for a start at 0 are not those of optax: it takes 1 - 0.999^t in float32, which is off by 5e-5 in the first
step. Here they are exact to the type.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tunix_rt.config.settings import Training
from tunix_rt.engines.jax.mesh import is_of_layers
from tunix_rt.errors import ConfigError
from tunix_rt.plan.optimizers import state_tensors
from tunix_rt.plan.precision import recipe_of

Array = Any
Tree = Any
Path = tuple[Any, ...]
Moments = dict[str, Any]

ADAMW_NAMES = ("exp_avg", "exp_avg_sq")
ADAFACTOR_NAMES = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
LARGEST = float(jnp.finfo(jnp.bfloat16).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """Which rule, and its constants. Can be hashed."""

    kind: str
    """`adamw` or `adafactor`."""
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    stochastic: bool
    """bfloat16 weights are rounded at random; else to the nearest."""


def optim_of(training: Training) -> Optim:
    """What `training` asks for, or a ConfigError that names what this engine does not do."""
    if training.optim == "adamw_8bit":
        raise ConfigError(
            "training.optim: adamw_8bit is not there for the JAX engine",
            fix="use adafactor, which keeps less still, or adamw; or training.backend: torch",
        )
    if training.optim_in_backward:
        raise ConfigError(
            "training.optim_in_backward is not there for the JAX engine",
            fix="leave it out, or use training.backend: torch",
        )
    return Optim(
        kind=training.optim,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        weight_decay=training.weight_decay,
        stochastic=recipe_of(training).rounding == "stochastic",
    )


def work_type(dtype: Any) -> Any:
    """The type in which weights of `dtype` are updated and their moments kept."""
    return jnp.promote_types(dtype, jnp.float32)


def init(params: Tree, optim: Optim) -> dict[str, Tree]:
    """The state before the first step: zeros, by name of the moment and then as `params`, None where there is none."""

    def zeros(path: Path, array: Array) -> dict[str, Array]:
        kept, one = array.shape[: _stacked(path)], array.shape[_stacked(path) :]
        names = state_tensors(one, optim.kind, array.dtype.name)
        return {name: jnp.zeros((*kept, *shape), dtype) for name, (shape, dtype) in names.items()}

    return _by_name(optim, params, jax.tree_util.tree_map_with_path(zeros, params))


def update(
    params: Tree,
    gradients: Tree,
    state: dict[str, Tree],
    *,
    step: Array,
    rate: Array,
    scale: Array,
    key: Array,
    optim: Optim,
) -> tuple[Tree, dict[str, Tree]]:
    """Parameters and state after one step, the one with number `step` from 1 on. Gradients are multiplied by `scale`.

    `key` is that of the step: each array draws its random bits from it and its place among the parameters."""
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    slopes = structure.flatten_up_to(gradients)
    states = {name: structure.flatten_up_to(tree) for name, tree in state.items()}
    rule = _adamw if optim.kind == "adamw" else _adafactor
    changed, kept = [], []
    for place, (path, array) in enumerate(flat):
        wide = work_type(array.dtype)
        weights, moments = array.astype(wide), {name: found[place] for name, found in states.items()}
        own_step, own_rate = jnp.asarray(step, wide), jnp.asarray(rate, wide)
        slope = slopes[place].astype(wide) * jnp.asarray(scale, wide)
        toward, moments = rule(slope, moments, own_step, _stacked(path), optim)
        decay = optim.weight_decay if array.ndim - _stacked(path) >= 2 else 0.0
        weights = weights - own_rate * decay * weights - own_rate * toward
        changed.append(_rounded(weights, array.dtype, jax.random.fold_in(key, place), stochastic=optim.stochastic))
        kept.append(moments)
    rebuilt = {name: structure.unflatten([moments[name] for moments in kept]) for name in state}
    return structure.unflatten(changed), rebuilt


# --- the two rules ---------------------------------------------------------------------------------------------------


def _adamw(slope: Array, moments: Moments, step: Array, stacked: int, optim: Optim) -> tuple[Array, Moments]:
    first = optim.beta1 * moments["exp_avg"] + (1 - optim.beta1) * slope
    second = optim.beta2 * moments["exp_avg_sq"] + (1 - optim.beta2) * jnp.square(slope)
    of_first, of_second = _corrected(optim.beta1, step), _corrected(optim.beta2, step)
    toward = (first / of_first) / (jnp.sqrt(second / of_second) + optim.epsilon)
    return toward, {"exp_avg": first, "exp_avg_sq": second}


def _corrected(beta: float, step: Array) -> Array:
    """1 - beta^step, without the difference of two numbers that are nearly the same."""
    return -jnp.expm1(step * math.log(beta)) if beta > 0 else jnp.ones_like(step)


def _adafactor(slope: Array, moments: Moments, step: Array, stacked: int, optim: Optim) -> tuple[Array, Moments]:
    share = jnp.power(step, -0.8)  # of this step in the second moment: all of it at first
    square = jnp.square(slope) + 1e-30
    if moments["exp_avg_sq_row"] is not None:
        rows = _moved(moments["exp_avg_sq_row"], square.mean(-1), share)
        columns = _moved(moments["exp_avg_sq_col"], square.mean(-2), share)
        # R C is never formed: of two means without a gradient it would be 1e-60.
        down = jnp.sqrt(rows.mean(-1, keepdims=True)) * jax.lax.rsqrt(rows)
        toward = slope * down[..., :, None] * jax.lax.rsqrt(columns)[..., None, :]
        kept = {"exp_avg_sq_row": rows, "exp_avg_sq_col": columns, "exp_avg_sq": None}
    else:
        whole = _moved(moments["exp_avg_sq"], square, share)
        toward = slope * jax.lax.rsqrt(whole)
        kept = {"exp_avg_sq_row": None, "exp_avg_sq_col": None, "exp_avg_sq": whole}
    of_tensor = tuple(range(stacked, slope.ndim))
    size = jnp.sqrt(jnp.square(toward).mean(of_tensor, keepdims=True))
    return toward / jnp.maximum(1.0, size), kept


def _moved(mean: Array, towards: Array, share: Array) -> Array:
    return (1 - share) * mean + share * towards


# --- what they share -------------------------------------------------------------------------------------------------


def _stacked(path: Path) -> int:
    """How many first dimensions of an array count tensors that are each by itself: 1 of layers, else 0."""
    return int(is_of_layers(path))


def _by_name(optim: Optim, params: Tree, found: Tree) -> dict[str, Tree]:
    """A tree of dictionaries as a dictionary of trees."""
    structure = jax.tree.structure(params)
    leaves = structure.flatten_up_to(found)
    names = ADAMW_NAMES if optim.kind == "adamw" else ADAFACTOR_NAMES
    return {name: structure.unflatten([leaf.get(name) for leaf in leaves]) for name in names}


def _rounded(weights: Array, dtype: Any, key: Array, *, stochastic: bool) -> Array:
    """`weights` in the type in which they are kept."""
    if dtype != jnp.bfloat16 or not stochastic:
        return weights.astype(dtype)
    return round_to_bfloat16(weights, key)


def round_to_bfloat16(values: Array, key: Array) -> Array:
    """float32 as bfloat16, each the neighbour above or below at random, so that the mean over many is the number itself.

    16 random bits are added to its pattern, and the lower half is cut away. From the largest bfloat16 on nothing is
    random: a finite number never becomes Inf, Inf stays Inf and NaN stays NaN."""
    pattern = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    pattern = jnp.where(jnp.abs(values) < LARGEST, pattern + noise, pattern)
    return jax.lax.bitcast_convert_type((pattern >> 16).astype(jnp.uint16), jnp.bfloat16)

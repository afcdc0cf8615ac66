"""The optimizers of the JAX engine, as docs/concepts/optimizers.md defines them, over trees of arrays.

The updates are those of `engines/optimizers/`. Arrays of `layers` are stacked, and each layer of them is a tensor of its own: a
stacked vector is still a vector, and Adafactor has rows, columns and the size of the step per layer.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tunix_rt.config.capabilities import refuse_unsupported
from tunix_rt.config.optimizers import state_tensors
from tunix_rt.config.settings import Training
from tunix_rt.engines.jax.mesh import is_of_layers
from tunix_rt.engines.optimizers import module_of
from tunix_rt.plan.precision import recipe_of

Array = Any
Tree = Any
Path = tuple[Any, ...]

LARGEST = float(jnp.finfo(jnp.bfloat16).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """Which rule, and its constants. Can be hashed."""

    kind: str
    """As in `training.optim`."""
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    stochastic: bool
    """Stochastic rounding of bfloat16 weights; otherwise to nearest."""


def optim_of(training: Training) -> Optim:
    """The optimizer settings of `training`. Refuses what this engine does not support."""
    refuse_unsupported(training, "jax")
    return Optim(
        kind=training.optim,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        weight_decay=training.weight_decay,
        stochastic=recipe_of(training).rounding == "stochastic",
    )


def work_type(dtype: Any) -> Any:
    """The dtype in which weights of `dtype` are updated, which is that of their optimizer states."""
    return jnp.promote_types(dtype, jnp.float32)


def init(params: Tree, optim: Optim) -> dict[str, Tree]:
    """The optimizer states before the first step: zeros, by name and then as `params`, None where there is none."""

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
    lr: Array,
    scale: Array,
    key: Array,
    optim: Optim,
) -> tuple[Tree, dict[str, Tree]]:
    """Parameters and optimizer states after step number `step`, from 1 on. Gradients are multiplied by `scale`.

    `key` is that of the step: each array draws its random bits from it and its place among the parameters."""
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = structure.flatten_up_to(gradients)
    states = {name: structure.flatten_up_to(tree) for name, tree in state.items()}
    rule = module_of(optim.kind).jax_update
    changed, stored = [], []
    for place, (path, array) in enumerate(flat):
        wide = work_type(array.dtype)
        weights, own = array.astype(wide), {name: of[place] for name, of in states.items()}
        own_step, own_lr = jnp.asarray(step, wide), jnp.asarray(lr, wide)
        gradient = leaves[place].astype(wide) * jnp.asarray(scale, wide)
        direction, own = rule(gradient, own, step=own_step, stacked=_stacked(path), optim=optim)
        decay = optim.weight_decay if array.ndim - _stacked(path) >= 2 else 0.0
        weights = weights - own_lr * decay * weights - own_lr * direction
        changed.append(_rounded(weights, array.dtype, jax.random.fold_in(key, place), stochastic=optim.stochastic))
        stored.append(own)
    rebuilt = {name: structure.unflatten([own[name] for own in stored]) for name in state}
    return structure.unflatten(changed), rebuilt


def _stacked(path: Path) -> int:
    """How many first dimensions of an array count tensors that are each by itself: 1 of layers, else 0."""
    return int(is_of_layers(path))


def _by_name(optim: Optim, params: Tree, leaves: Tree) -> dict[str, Tree]:
    """A tree of dictionaries as a dictionary of trees."""
    structure = jax.tree.structure(params)
    found = structure.flatten_up_to(leaves)
    names = {**state_tensors((1, 1), optim.kind, "float32"), **state_tensors((1,), optim.kind, "float32")}
    return {name: structure.unflatten([leaf.get(name) for leaf in found]) for name in names}


def _rounded(weights: Array, dtype: Any, key: Array, *, stochastic: bool) -> Array:
    """`weights` in the dtype in which they are stored."""
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

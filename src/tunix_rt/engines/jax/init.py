"""Random weights of the JAX engine: drawn from the seed where they belong, as the classes of transformers begin.

What is drawn for an array depends on the seed and its name alone, not on how many devices it lies on.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.weights import entries

DEFAULT_RANGE = 0.02


def drawn_weights(
    architecture: Architecture, config: Mapping[str, Any], shapes: Mapping[str, Any], shardings: Any, *, seed: int
) -> dict[str, Any]:
    """The tree of parameters. Matrices and tables are normal with `initializer_range`; norms leave what they scale as it
    is; biases are 0, and so is the row of the padding."""
    spread = float(config.get("initializer_range") or DEFAULT_RANGE)
    found: dict[str, Any] = {"layers": {}}
    for entry in entries(architecture):
        of_layers = entry.of_layers
        wanted, sharding = (
            (shapes["layers"][entry.key], shardings["layers"][entry.key])
            if of_layers
            else (shapes[entry.key], shardings[entry.key])
        )
        draw = partial(
            _values, architecture, entry.key, wanted.shape, wanted.dtype, _spread_of(architecture, entry.key, spread)
        )
        key = jax.random.fold_in(jax.random.key(seed), _number(entry.name))
        (found["layers"] if of_layers else found)[entry.key] = jax.jit(draw, out_shardings=sharding)(key)
    return found


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _spread_of(architecture: Architecture, key: str, spread: float) -> float:
    """GPT-2 begins with smaller matrices where they are added to what came before."""
    smaller = architecture.shape.model_type == "gpt2" and key in ("output", "down")
    return spread / math.sqrt(2 * architecture.shape.layers) if smaller else spread


def _values(architecture: Architecture, kind: str, shape: tuple[int, ...], dtype: Any, spread: float, key: Any) -> Any:
    if kind.endswith("_bias"):
        return jnp.zeros(shape, dtype)
    if kind.endswith("norm"):
        return jnp.full(shape, 0 if architecture.norm == "rms_plus_one" else 1, dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    values = jax.random.normal(key, shape, wide) * jnp.asarray(spread, wide)
    if kind == "embedding" and architecture.padding_id is not None:
        values = values.at[architecture.padding_id].set(0)
    return values.astype(dtype)

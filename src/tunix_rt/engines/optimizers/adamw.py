"""AdamW with decoupled weight decay:

m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
w <- w - lr decay w - lr m' / (sqrt(v') + epsilon)      m' = m / (1 - beta1^step), v' = v / (1 - beta2^step)
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_rt.engines.optimizers import Array, Expectation, Hyperparameters, States

if TYPE_CHECKING:
    import torch

    from tunix_rt.engines.jax.optim import Optim
    from tunix_rt.engines.torch.update_rules import StepSettings, Update


def torch_update(update: "Update") -> None:
    """By PyTorch's fused kernel."""
    first, second = update.full("exp_avg"), update.full("exp_avg_sq")
    for at in update.slices():
        weights = update.take(at)
        update.fused_adamw(weights, update.scaled_gradient(at), first[at], second[at])
        update.put(at, weights)


def torch_update_many(
    weights: "list[torch.Tensor]",
    gradients: "list[torch.Tensor]",
    states: "Sequence[dict[str, torch.Tensor]]",
    **settings: "StepSettings | float | torch.Tensor | None",
) -> None:
    """Every tensor in one call. All are given as columns, with gradients that are already scaled."""
    from tunix_rt.engines.torch import update_rules

    moments = ([update_rules.column(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
    update_rules.fused_kernel(weights, gradients, *moments, **settings)  # type: ignore[arg-type]


def jax_update(
    gradient: Array, states: States, *, step: Array, stacked: int, optim: "Optim"
) -> tuple[Array, dict[str, Any]]:
    """The bias corrections are exact to the dtype, unlike those of optax: it computes 1 - 0.999^step in float32, which is off
    by 5e-5 in the first step."""
    import jax.numpy as jnp

    first = optim.beta1 * states["exp_avg"] + (1 - optim.beta1) * gradient
    second = optim.beta2 * states["exp_avg_sq"] + (1 - optim.beta2) * jnp.square(gradient)
    direction = (first / _correction(optim.beta1, step)) / (
        jnp.sqrt(second / _correction(optim.beta2, step)) + optim.epsilon
    )
    return direction, {"exp_avg": first, "exp_avg_sq": second}


def _correction(beta: float, step: Array) -> Array:
    """1 - beta^step, without the difference of two numbers that are nearly the same."""
    import jax.numpy as jnp

    return -jnp.expm1(step * math.log(beta)) if beta > 0 else jnp.ones_like(step)


def reference(parameter: Array, states: States, gradient: Array, at: Hyperparameters) -> dict[str, Array]:
    first = at.beta1 * states.get("exp_avg", 0.0) + (1.0 - at.beta1) * gradient
    second = at.beta2 * states.get("exp_avg_sq", 0.0) + (1.0 - at.beta2) * gradient**2
    first_unbiased = first / (1.0 - at.beta1**at.step)
    second_unbiased = second / (1.0 - at.beta2**at.step)
    decayed = parameter * (1.0 - at.lr * at.decay)
    return {
        "parameter": decayed - at.lr * first_unbiased / (np.sqrt(second_unbiased) + at.epsilon),
        "exp_avg": first,
        "exp_avg_sq": second,
    }


def expectations(
    before: States, gradient: Array, after: States, at: Hyperparameters, *, weights_unit: float, unit: float
) -> list[Expectation]:
    """Kernels subtract a float32 beta from 1: off by half a unit of the beta, hence by 500 units of the difference 0.001.
    `exp_avg_sq` is that times a square, and its root is in the update."""
    wide = {name: values.astype(np.float64) for name, values in before.items()}
    want = reference(wide.pop("parameter"), wide, gradient, at)
    parameter, first, second = tolerances(want, at, weights_unit=weights_unit, unit=unit)
    return [
        ("parameter", after["parameter"], want["parameter"], *parameter),
        ("exp_avg", after["exp_avg"], want["exp_avg"], *first),
        ("exp_avg_sq", after["exp_avg_sq"], want["exp_avg_sq"], *second),
    ]


def tolerances(
    want: States, at: Hyperparameters, *, weights_unit: float, unit: float
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Relative and absolute, of the parameter and both states."""
    short1, short2 = (unit / (1 - beta) for beta in (at.beta1, at.beta2))
    size = float(np.abs(want["exp_avg"]).max())
    return (
        (2 * weights_unit, (8 * unit + short2 / 2) * at.lr),
        (2 * unit, (4 * unit + short1) * size),
        (4 * unit + short2, 0.0),
    )

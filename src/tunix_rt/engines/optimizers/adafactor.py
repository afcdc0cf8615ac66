"""Adafactor without a first moment:

v <- mean of g^2 over steps, with the share step^-0.8 for the newest; of a matrix only the means of rows and columns
u = g / sqrt(v)             w <- w - lr decay w - lr u / max(1, RMS(u))
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_rt.engines.optimizers import Array, Expectation, Hyperparameters, States

if TYPE_CHECKING:
    import torch

    from tunix_rt.engines.jax.optim import Optim
    from tunix_rt.engines.torch.update_rules import Update

    Factor = Callable[[slice], torch.Tensor]

STATES = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")


# --- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_update(update: "Update") -> None:
    """`across` and `down` are what g is multiplied with to be u: element by element, and row by row."""
    import torch

    across, down = (_factored if "exp_avg_sq_row" in update.state else _unfactored)(update)
    squares = torch.zeros((), dtype=update.work, device=update.weights.device)
    for at in update.slices():
        of_rows = torch.linalg.vector_norm(update.gradient[at] * across(at), dim=1, keepdim=True)
        squares += of_rows.mul_(down(at)).square_().sum()
    elements = update.whole * update.weights.shape[1]
    pace = -update.now.lr / (update.total(squares) / elements).sqrt_().clamp_(min=1.0)
    decayed = torch.full_like(pace, 1.0 - update.now.lr * update.decay)
    if update.finite is not None:
        decayed = torch.where(update.finite, decayed, 1.0)
    for at in update.slices():
        weights, moved, speed = update.take(at), update.gradient[at] * across(at), down(at) * pace
        if update.finite is not None:  # both: NaN times 0 would be NaN
            moved, speed = (torch.where(update.finite, values, 0.0) for values in (moved, speed))
        if update.decay:
            weights.mul_(decayed)
        update.put(at, weights.addcmul_(moved, speed))


def _factored(update: "Update") -> "tuple[Factor, Factor]":
    """Move the means of rows and columns of g^2. v is their outer product over the mean of the rows."""
    import torch

    height, width = update.weights.shape
    rows = torch.empty(height, dtype=update.work, device=update.weights.device)
    columns = torch.zeros(width, dtype=update.work, device=update.weights.device)
    for at in update.slices():
        rows[at] = torch.linalg.vector_norm(update.gradient[at], dim=1, dtype=update.work)
        columns += torch.linalg.vector_norm(update.gradient[at], dim=0, dtype=update.work).square_()
    columns, scale = update.total(columns), update.scale_or_one()
    rows = _moved(update, update.state["exp_avg_sq_row"], rows.mul_(scale).square_().div_(width))
    means = columns.mul_(scale).mul_(scale).div_(update.whole)
    columns = _moved(update, update.state["exp_avg_sq_col"], means).rsqrt_()
    # The mean over a row could be too large for float32.
    down = (update.mean_of_rows(rows).sqrt() * rows.rsqrt() * scale).view(-1, 1)
    return lambda _: columns, lambda at: down[at]


def _unfactored(update: "Update") -> "tuple[Factor, Factor]":
    """Move the mean of g^2 of every element."""
    second, scale = update.full("exp_avg_sq"), update.scale_or_one()
    for at in update.slices():
        _moved(update, second[at], update.scaled_gradient(at).square())
    return lambda at: second[at].rsqrt(), lambda _: scale


def _moved(update: "Update", mean: "torch.Tensor", towards: "torch.Tensor") -> "torch.Tensor":
    """`mean` moved `towards` (overwritten) by the share of this step: all of the way at the first. Stored where finite."""
    moved = mean.lerp(towards.add_(1e-30), update.now.step**-0.8)
    update.keep(mean, moved)
    return moved


# --- JAX -------------------------------------------------------------------------------------------------------------


def jax_update(
    gradient: Array, states: States, *, step: Array, stacked: int, optim: "Optim"
) -> tuple[Array, dict[str, Any]]:
    """Of stacked layers each is a tensor of its own: rows, columns and the size of the update are per layer."""
    import jax
    import jax.numpy as jnp

    share = jnp.power(step, -0.8)
    square = jnp.square(gradient) + 1e-30
    new: dict[str, Any] = dict.fromkeys(STATES)
    if states["exp_avg_sq_row"] is not None:
        rows = new["exp_avg_sq_row"] = _mean(states["exp_avg_sq_row"], square.mean(-1), share)
        columns = new["exp_avg_sq_col"] = _mean(states["exp_avg_sq_col"], square.mean(-2), share)
        # The outer product is never formed: of two means without a gradient it would be 1e-60.
        down = jnp.sqrt(rows.mean(-1, keepdims=True)) * jax.lax.rsqrt(rows)
        direction = gradient * down[..., :, None] * jax.lax.rsqrt(columns)[..., None, :]
    else:
        whole = new["exp_avg_sq"] = _mean(states["exp_avg_sq"], square, share)
        direction = gradient * jax.lax.rsqrt(whole)
    of_tensor = tuple(range(stacked, gradient.ndim))
    size = jnp.sqrt(jnp.square(direction).mean(of_tensor, keepdims=True))
    return direction / jnp.maximum(1.0, size), new


def _mean(mean: Array, towards: Array, share: Array) -> Array:
    return (1 - share) * mean + share * towards


# --- float64 ---------------------------------------------------------------------------------------------------------


def reference(parameter: Array, states: States, gradient: Array, at: Hyperparameters) -> dict[str, Array]:
    """Shares no code with the engines."""
    share = at.step**-0.8
    square = gradient**2 + 1e-30
    if gradient.ndim == 2:
        means = {"exp_avg_sq_row": square.mean(axis=1), "exp_avg_sq_col": square.mean(axis=0)}
    else:
        means = {"exp_avg_sq": square}
    new = {name: (1.0 - share) * states.get(name, 0.0) + share * mean for name, mean in means.items()}
    if gradient.ndim == 2:
        rows, columns = new.values()
        second = np.outer(rows, columns) / rows.mean()
    else:
        second = new["exp_avg_sq"]
    update = gradient / np.sqrt(second)
    update /= max(1.0, float(np.sqrt((update**2).mean())))
    return {"parameter": parameter * (1.0 - at.lr * at.decay) - at.lr * update, **new}


def expectations(
    before: States, gradient: Array, after: States, at: Hyperparameters, *, weights_unit: float, unit: float
) -> list[Expectation]:
    """Means of squares, all of one sign: their roundings wander, and half of it is in the update."""
    wide = {name: values.astype(np.float64) for name, values in before.items()}
    parameter = wide.pop("parameter")
    want = reference(parameter, wide, gradient, at)
    wander = (8 + 4 * math.sqrt(gradient.size)) * unit
    moved = float(np.abs(want["parameter"] - parameter * (1.0 - at.lr * at.decay)).max())
    return [
        ("parameter", after["parameter"], want["parameter"], 2 * weights_unit, wander * moved),
        *((name, after[name], want[name], wander, 0.0) for name in STATES if name in want),
    ]

"""AdamW whose states are 8-bit codes, dequantized for the update and quantized again. PyTorch only.

A block of elements has a scale, the largest magnitude in it, and a code for each element: a level between 0 and 1, eight to
every doubling. `exp_avg_sq` has 256 levels, `exp_avg` 128 for each sign, shifted so that the lowest is 0. A value is rounded up
or down to a level at random: at most one step off, and on average not at all.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_rt.config.optimizers import BLOCK
from tunix_rt.engines.optimizers import Array, Expectation, Hyperparameters, States
from tunix_rt.engines.optimizers.adamw import reference, tolerances

__all__ = ["expectations", "reference", "torch_update"]

if TYPE_CHECKING:
    from tunix_rt.engines.torch.update_rules import Update


def torch_update(update: "Update") -> None:
    from tunix_rt.engines.torch import update_rules as codes

    state, (signed, unsigned) = update.state, codes.tables(update.weights.device)
    for at in update.slices():
        blocks, elements = slice(at.start // BLOCK, -(-at.stop // BLOCK)), at.stop - at.start
        first = codes.decode(state["exp_avg"][blocks], state["exp_avg_absmax"][blocks], signed)
        second = codes.decode(state["exp_avg_sq"][blocks], state["exp_avg_sq_absmax"][blocks], unsigned)
        weights, first, second = update.take(at), first.to(update.work), second.to(update.work)
        moments = (moment.view(-1, 1)[:elements] for moment in (first, second))  # the last block may go beyond the end
        update.fused_adamw(weights, update.scaled_gradient(at), *moments)
        update.put(at, weights)
        encoders = (("exp_avg", first, codes.encode_signed), ("exp_avg_sq", second, codes.encode_unsigned))
        for name, moment, encode in encoders:
            coded, absmax = encode(moment.float(), update.bits)
            update.keep(state[name][blocks], coded)
            update.keep(state[f"{name}_absmax"][blocks], absmax)


# --- the self-test: codes read with NumPy, independently of PyTorch's ------------------------------------------------

HEADROOM = 1.0 - 2.0**-20
"""The scale is so much below the last level."""
STEPS = 1.6
"""Steps between levels that a state may be off; a correct one uses less than two thirds of that."""


def _levels(count: int) -> Any:
    below = np.arange(count)[::-1]  # how many levels below the last, which is 1
    return np.exp2(-np.ceil(below / 8)) * (1.0 + (-below % 8) / 8)


FOOT = float(_levels(128)[0])


def _decoded(states: States, name: str, shape: tuple[int, ...]) -> Any:
    """A state in float64; 0 where there is none yet."""
    if name not in states:
        return np.zeros(shape)
    codes = states[name].astype(np.int64)
    if name == "exp_avg":  # the upper half of the codes is for negative numbers
        levels = (_levels(128) - FOOT) / ((1.0 - FOOT) * HEADROOM)
        shares = np.concatenate([levels, -levels])[codes]
    else:
        shares = _levels(256)[codes] / HEADROOM
    return (shares * states[f"{name}_absmax"]).reshape(-1)[: math.prod(shape)].reshape(shape)


def expectations(
    before: States, gradient: Array, after: States, at: Hyperparameters, *, weights_unit: float, unit: float
) -> list[Expectation]:
    """As of AdamW, computed in float32 always, and the rounding to levels."""
    unit = 2.0**-24
    parameter = before["parameter"].astype(np.float64)
    old = {name: _decoded(before, name, gradient.shape) for name in ("exp_avg", "exp_avg_sq")}
    want = reference(parameter, old, gradient, at)
    allowed, *of_states = tolerances(want, at, weights_unit=weights_unit, unit=unit)
    parts: list[Expectation] = [("parameter", after["parameter"], want["parameter"], *allowed)]
    for (name, tolerance), signed in zip(zip(old, of_states, strict=True), (True, False), strict=True):
        parts += _quantized(after, name, want[name], *tolerance, signed=signed)
    return parts


def _quantized(
    after: States, name: str, want: Any, relative: float, absolute: float, *, signed: bool
) -> list[Expectation]:
    actual = _decoded(after, name, want.shape)
    blocks = np.resize(np.abs(want), -(-want.size // BLOCK) * BLOCK)
    blocks[want.size :] = 0.0
    largest = blocks.reshape(-1, BLOCK).max(axis=1)
    scale = np.repeat(largest, BLOCK)[: want.size].reshape(want.shape)
    step = _step(np.abs(want) / scale, signed=signed) * scale
    drift = float(((actual - want) * np.sign(want) / step).mean())
    return [
        (f"{name}_absmax", after[f"{name}_absmax"].reshape(-1), largest, relative, absolute),
        (name, actual, want, relative, absolute + STEPS * step),
        # The variance of one element is a quarter of a squared step at most.
        (f"{name}, mean of its roundings in steps", drift, 0.0, 0.0, 5 * 0.5 / math.sqrt(want.size)),
    ]


def _step(shares: Any, *, signed: bool) -> Any:
    """Distance of the two levels around a share of the largest magnitude."""
    if not signed:
        return np.exp2(np.floor(np.log2(shares * HEADROOM)) - 3) / HEADROOM
    span = (1.0 - FOOT) * HEADROOM
    return np.exp2(np.floor(np.log2(shares * span + FOOT)) - 3) / span

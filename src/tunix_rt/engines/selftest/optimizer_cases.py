"""What kernels are compared with: numpy in float64, every gradient written out by hand. No engine takes part."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix_rt.doctor.selftest import Proved
from tunix_rt.engines.selftest.cases import normal, rounded
from tunix_rt.engines.selftest.reference import Adafactor, Adam, adafactor_step, adamw_step
from tunix_rt.engines.selftest.runner import UNIT, Setting, compare
from tunix_rt.plan.optimizers import BLOCK

RATE, BETA1, BETA2, EPSILON, DECAY = 0.25, 0.9, 0.999, 0.25, 0.5
"""Large enough that rate, decay, bias correction and epsilon all show in bfloat16."""
SCALES = (1.0, 0.25)
"""What the gradients of the first and the second update are multiplied with, as clipping does."""

State = Mapping[str, Any]
"""`parameter`, and what is kept of it by the names of `state_tensors`: nothing before the first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSample:
    """A matrix and a vector, and gradients of two updates, not yet scaled. The vector is not decayed.

    Two updates, because the first of Adam is the same whatever the size of the gradient. The second gradient is larger, so
    that Adafactor has an update to clip."""

    parameters: Mapping[str, Any]
    gradients: tuple[Mapping[str, Any], ...]

    def judge(self, setting: Setting, got: Sequence[Mapping[str, State]]) -> list[Proved]:
        """`got` has, after each update, the state of every parameter."""
        judge = _judge_adafactor if setting.optim == "adafactor" else _judge_adamw
        before: Mapping[str, State] = {name: {"parameter": values} for name, values in self.parameters.items()}
        found = []
        for step, (gradients, after) in enumerate(zip(self.gradients, got, strict=True)):
            for name, unscaled in gradients.items():
                gradient, decay = unscaled.astype(np.float64) * SCALES[step], DECAY if unscaled.ndim == 2 else 0.0
                parts = judge(setting, before[name], gradient, after[name], step=step, decay=decay)
                found += [
                    compare(f"update {step + 1} of {name}, {part}", values, want, relative=relative, absolute=absolute)
                    for part, values, want, relative, absolute in parts
                ]
            before = after
        return found


_Parts = list[tuple[str, Any, Any, float, Any]]
"""Name, what came, what should have come, and how far it may be off: relatively, and in addition to that."""


def optimizer_sample(setting: Setting) -> OptimizerSample:
    generator = np.random.default_rng(4)
    # The matrix is no multiple of an 8-bit block; the vector is too small to have any.
    shapes = {"matrix": (64, 97), "vector": (96,)}
    parameters = {name: normal(generator, shape, setting.weights) for name, shape in shapes.items()}

    def gradient(shape: tuple[int, ...], size: float) -> Any:
        drawn = size * generator.uniform(0.5, 2.0, shape) * generator.choice([-1.0, 1.0], shape)
        return rounded(drawn, setting.weights)

    gradients = tuple({name: gradient(shape, 1 / scale**2) for name, shape in shapes.items()} for scale in SCALES)
    return OptimizerSample(parameters=parameters, gradients=gradients)


def _judge_adamw(setting: Setting, before: State, gradient: Any, after: State, *, step: int, decay: float) -> _Parts:
    """Kernels subtract a beta in float32 from 1: off by half a unit of the beta, hence by 500 units of the difference
    0.001. The second moment is that times a square, and its root is in the update."""
    coded = "exp_avg_absmax" in after
    work = UNIT["float32"] if coded else setting.sum_unit  # what codes stand for is computed in float32 always
    short1, short2 = (work / (1 - beta) for beta in (BETA1, BETA2))
    old = Adam(
        parameter=before["parameter"].astype(np.float64),
        first=_moment(before, "exp_avg", gradient.shape),
        second=_moment(before, "exp_avg_sq", gradient.shape),
        step=step,
    )
    want = adamw_step(old, gradient, rate=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, decay=decay)
    absolute = (8 * work + short2 / 2) * RATE
    size = float(np.abs(want.first).max())
    return [
        ("parameter", after["parameter"], want.parameter, 2 * UNIT[setting.weights], absolute),
        *_moment_parts(after, "exp_avg", want.first, 2 * work, (4 * work + short1) * size),
        *_moment_parts(after, "exp_avg_sq", want.second, 4 * work + short2, 0.0),
    ]


def _judge_adafactor(
    setting: Setting, before: State, gradient: Any, after: State, *, step: int, decay: float
) -> _Parts:
    """Means of squares, all of one sign: their roundings wander, and half of it is in the update."""
    slots = {"rows": "exp_avg_sq_row", "columns": "exp_avg_sq_col", "whole": "exp_avg_sq"}
    old = {name: before[slot].astype(np.float64) for name, slot in slots.items() if slot in before}
    parameter = before["parameter"].astype(np.float64)
    want = adafactor_step(Adafactor(parameter=parameter, step=step, **old), gradient, rate=RATE, decay=decay)
    wander = (8 + 4 * math.sqrt(gradient.size)) * setting.sum_unit
    moved = float(np.abs(want.parameter - parameter * (1.0 - RATE * decay)).max())
    parts: _Parts = [("parameter", after["parameter"], want.parameter, 2 * UNIT[setting.weights], wander * moved)]
    for name, slot in slots.items():
        if (values := getattr(want, name)) is not None:
            parts.append((slot, after[slot], values, wander, 0.0))
    return parts


# --- moments in 8 bits ------------------------------------------------------------------------------------------------
#
# A block of elements has a scale, the largest magnitude in it, and a code for each element: a level between 0 and 1, eight
# to every doubling. Of the second moment there are 256 levels, of the first 128 for each sign, moved down so that the
# lowest is 0. A moment is rounded up or down to a level at random: at most one step off, and on average not at all.

HEADROOM = 1.0 - 2.0**-20
"""The scale is so much below the last level."""
STEPS = 1.6
"""Steps between levels that a moment may be off; a right one uses less than two thirds of that."""


def _levels(count: int) -> Any:
    below = np.arange(count)[::-1]  # how many levels below the last, which is 1
    return np.exp2(-np.ceil(below / 8)) * (1.0 + (-below % 8) / 8)


FOOT = float(_levels(128)[0])


def _moment(state: State, slot: str, shape: tuple[int, ...]) -> Any:
    """A moment in float64, whether it is kept whole or in codes; 0 where there is none yet."""
    if slot not in state:
        return np.zeros(shape)
    if f"{slot}_absmax" not in state:
        return state[slot].astype(np.float64)
    codes = state[slot].astype(np.int64)
    if slot == "exp_avg":  # the upper half of the codes is for negative numbers
        levels = (_levels(128) - FOOT) / ((1.0 - FOOT) * HEADROOM)
        shares = np.concatenate([levels, -levels])[codes]
    else:
        shares = _levels(256)[codes] / HEADROOM
    return (shares * state[f"{slot}_absmax"]).reshape(-1)[: math.prod(shape)].reshape(shape)


def _moment_parts(after: State, slot: str, want: Any, relative: float, absolute: float) -> _Parts:
    found = _moment(after, slot, want.shape)
    if f"{slot}_absmax" not in after:
        return [(slot, found, want, relative, absolute)]
    blocks = np.resize(np.abs(want), -(-want.size // BLOCK) * BLOCK)
    blocks[want.size :] = 0.0
    largest = blocks.reshape(-1, BLOCK).max(axis=1)
    scale = np.repeat(largest, BLOCK)[: want.size].reshape(want.shape)
    step = _step(np.abs(want) / scale, signed=slot == "exp_avg") * scale
    drift = float(((found - want) * np.sign(want) / step).mean())
    return [
        (f"{slot}_absmax", after[f"{slot}_absmax"].reshape(-1), largest, relative, absolute),
        (slot, found, want, relative, absolute + STEPS * step),
        # Of one element the variance is a quarter of a squared step at most.
        (f"{slot}, mean of its roundings in steps", drift, 0.0, 0.0, 5 * 0.5 / math.sqrt(want.size)),
    ]


def _step(shares: Any, *, signed: bool) -> Any:
    """Distance of the two levels around a share of the largest magnitude."""
    if not signed:
        return np.exp2(np.floor(np.log2(shares * HEADROOM)) - 3) / HEADROOM
    span = (1.0 - FOOT) * HEADROOM
    return np.exp2(np.floor(np.log2(shares * span + FOOT)) - 3) / span


# --- weights in bfloat16 ----------------------------------------------------------------------------------------------

ROUNDING_RATE = 2.0**-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingSample:
    """Equal bfloat16 weights, whose first update leads to a number between two neighbours."""

    parameter: Any
    gradient: Any
    want: float
    below: float
    above: float

    def judge(self, got: Any) -> list[Proved]:
        """As many are rounded up as the number is on its way there; five standard deviations are allowed."""
        share = (self.want - self.below) / (self.above - self.below)
        strangers = int(((got != self.below) & (got != self.above)).sum())
        allowed = 5 * math.sqrt(share * (1 - share) / got.size)
        up = float((got == self.above).mean())
        return [
            compare("weights rounded to no neighbour", strangers, 0.0, relative=0.0, absolute=0.0),
            compare("share of weights rounded up", up, share, relative=0.0, absolute=allowed),
        ]


def rounding_sample(setting: Setting) -> RoundingSample:
    """The gradient is 1: Adam moves by rate / (1 + epsilon), Adafactor by the rate."""
    start, step = 1.5, 2.0**-7  # the distance of bfloat16 numbers between 1 and 2
    moved = ROUNDING_RATE / (1.0 if setting.optim == "adafactor" else 1.0 + EPSILON)
    weights = np.full(65_536, start, dtype=np.float32)
    return RoundingSample(
        parameter=weights, gradient=np.ones_like(weights), want=start - moved, below=start - step, above=start
    )

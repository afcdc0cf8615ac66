"""The optimizers of `training.optim`, one row each. Known without torch and without JAX.

The settings, the planner, both engines and the kernel self-test read this table. The update of an optimizer, for both engines
and in float64, is the module of the same name in `engines/optimizers/`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunix_rt.config.settings import Training

Shape = tuple[int, ...]
States = dict[str, tuple[Shape, str]]
"""Name -> (shape, dtype) of the optimizer states of one parameter."""

BLOCK = 256
"""Neighbouring elements that share one scale in 8-bit optimizer states."""
FULL_BELOW = 4096
"""A tensor of fewer elements has full-precision states under `adamw_8bit`: norms and biases, where there is nothing to save."""

_BYTES = {"uint8": 1, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer: what it stores, where it runs, and what an update costs."""

    title: str
    states: Callable[[Shape, str], States]
    """The states of a parameter of this shape; the second argument is the full-precision dtype."""
    engines: tuple[str, ...] = ("torch", "jax")
    ignores: tuple[str, ...] = ()
    """Fields of `training` without effect. A run that sets one is refused."""
    small: str | None = None
    """The optimizer of tensors with fewer than `FULL_BELOW` elements; None is this one."""
    factored: bool = False
    """The states of a matrix are per row and per column, so an update needs the matrix and not only its elements."""
    quantized: bool = False
    """States are 8-bit codes."""
    fused: bool = False
    """PyTorch has one call that updates many tensors in place, for weights that are not bfloat16."""
    triton: tuple[str, ...] = ("bfloat16",)
    """dtypes of weights for which `engines/torch/triton` has a kernel."""
    workspace: tuple[float, float]
    """Temporaries of a PyTorch update without a kernel, in copies of the elements updated at a time, in the dtype of the
    update: for weights of that dtype, and for bfloat16 weights, which are cast to it and rounded back."""
    departure: int | None = None
    """How far the result departs from that of AdamW, as the planner ranks it beside its other changes (`plan/knobs.py`). It
    proposes optimizers that depart further than the configured one; None is never proposed."""
    change: str | None = None
    """What a run gives up with it, in words of the planner."""


WHOLE_STATE = "exp_avg_sq_col"
"""The state that every rank has as a whole, where the rows of a parameter are shared: one value per column."""


def _adamw_states(shape: Shape, full: str) -> States:
    return {"exp_avg": (shape, full), "exp_avg_sq": (shape, full)}


def _adamw_8bit_states(shape: Shape, full: str) -> States:
    blocks = -(-math.prod(shape) // BLOCK)
    codes, scales = ((blocks, BLOCK), "uint8"), ((blocks, 1), "float32")
    return {"exp_avg": codes, "exp_avg_absmax": scales, "exp_avg_sq": codes, "exp_avg_sq_absmax": scales}


def _adafactor_states(shape: Shape, full: str) -> States:
    if len(shape) == 2:
        return {"exp_avg_sq_row": (shape[:1], full), WHOLE_STATE: (shape[1:], full)}
    return {"exp_avg_sq": (shape, full)}


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(title="AdamW", states=_adamw_states, fused=True, workspace=(1.0, 3.25), departure=0),
    "adamw_8bit": OptimizerSpec(
        title="AdamW with 8-bit states",
        states=_adamw_8bit_states,
        engines=("torch",),
        small="adamw",
        quantized=True,
        triton=("bfloat16", "float32"),
        workspace=(4.25, 6.5),
        departure=2,
        change="8-bit AdamW states",
    ),
    "adafactor": OptimizerSpec(
        title="Adafactor",
        states=_adafactor_states,
        ignores=("adam_beta1", "adam_beta2", "adam_epsilon"),
        factored=True,
        workspace=(2.0, 4.25),
        departure=16,
        change="Adafactor instead of AdamW",
    ),
}
"""By the value of `training.optim`."""


def optimizers_of(engine: str) -> tuple[str, ...]:
    """Values of `training.optim` that `engine` implements."""
    return tuple(name for name, spec in OPTIMIZERS.items() if engine in spec.engines)


def optimizer_of(name: str, shape: Shape) -> str:
    """The optimizer that updates a parameter of `shape` in a run with `training.optim: name`."""
    small = OPTIMIZERS[name].small
    return small if small is not None and math.prod(shape) < FULL_BELOW else name


def state_tensors(shape: Shape, name: str, dtype: str) -> States:
    """The states that `name` stores for a parameter of `shape` with weights of `dtype`.

    Full-precision states have the dtype in which an update is computed: float32 for bfloat16 weights."""
    full = "float64" if dtype == "float64" else "float32"
    return OPTIMIZERS[optimizer_of(name, shape)].states(shape, full)


@lru_cache(maxsize=4096)  # a plan asks for every tensor of every layer, hundreds of times
def state_bytes(shape: Shape, name: str, dtype: str) -> int:
    """Bytes of `state_tensors`."""
    return states_bytes(state_tensors(shape, name, dtype))


def states_bytes(states: States) -> int:
    return sum(math.prod(of) * _BYTES[stored] for of, stored in states.values())


def total_at(step: int, ends: Sequence[int], total: int) -> int:
    """Steps of the schedule that `step` belongs to, in a run that was extended: `ends` are those it was planned for in turn."""
    return next((end for end in ends if step <= end), total)


def learning_rate(step: int, *, total: int, training: "Training") -> float:
    """Learning rate of step `step` (counted from 1) of `total`. Warm-up ends at the full rate. No step has rate 0 but the first
    of a warm-up from zero."""
    asked = training.warmup_steps
    warmup = math.ceil(asked * total) if asked < 1 else int(asked)
    done = step - 1
    if done < warmup:
        return training.learning_rate * (done if training.warmup_from_zero else step) / warmup
    progress = (done - warmup) / max(1, total - warmup)
    if training.lr_scheduler_type == "linear":
        return training.learning_rate * (1 - progress)
    if training.lr_scheduler_type == "cosine":
        return training.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return training.learning_rate

"""The updates of the optimizers, one module each, named as in `config/optimizers.py`. A module has:

    torch_update(update)       one update of one parameter, in place (`engines/torch/update_rules.py`)
    jax_update(gradient, states, *, step, stacked, optim)
                               the direction of the update and the new states
    reference(parameter, states, gradient, at)
                               the same update in float64 by NumPy, which both engines are compared with
    expectations(before, gradient, after, at, *, weights_unit, unit)
                               what the kernel self-test compares, and how far each value may be off

and, where PyTorch has one call for many tensors, `torch_update_many`. torch and JAX are imported inside functions: neither
engine needs the library of the other.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Array = Any
States = Mapping[str, Any]
"""Optimizer states by their names; one that is missing is 0, as before the first update."""
Expectation = tuple[str, Any, Any, float, Any]
"""Name, actual, expected, relative and absolute tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """The constants of one update in float64."""

    step: int
    """From 1 on."""
    lr: float
    decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


def module_of(name: str) -> ModuleType:
    """The module of optimizer `name`."""
    return importlib.import_module(f"{__name__}.{name}")

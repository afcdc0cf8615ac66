"""What an optimizer keeps of one parameter: names, shapes and types. Known without torch.

The PyTorch engine makes its state from `state_tensors` and holds a checkpoint against it; the planner adds up `state_bytes`.
"""

import math

OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor")

BLOCK = 256
"""Neighbouring elements that share one scale in 8-bit moments."""
WHOLE_BELOW = 4096
"""A tensor of fewer elements keeps whole moments under `adamw_8bit`: norms and biases, where there is nothing to save."""

_BYTES = {"uint8": 1, "float32": 4, "float64": 8}


def state_tensors(shape: tuple[int, ...], kind: str, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, type) of what optimizer `kind` keeps of a parameter of `shape` whose weights are of type `dtype`.

    Moments are kept in the type in which an update is computed: float32 for bfloat16 weights."""
    whole = "float64" if dtype == "float64" else "float32"
    if kind == "adafactor":
        if len(shape) == 2:
            return {"exp_avg_sq_row": (shape[:1], whole), "exp_avg_sq_col": (shape[1:], whole)}
        return {"exp_avg_sq": (shape, whole)}
    if kind == "adamw_8bit" and math.prod(shape) >= WHOLE_BELOW:
        blocks = -(-math.prod(shape) // BLOCK)
        return {
            "exp_avg": ((blocks, BLOCK), "uint8"),
            "exp_avg_absmax": ((blocks, 1), "float32"),
            "exp_avg_sq": ((blocks, BLOCK), "uint8"),
            "exp_avg_sq_absmax": ((blocks, 1), "float32"),
        }
    return {"exp_avg": (shape, whole), "exp_avg_sq": (shape, whole)}


def state_bytes(shape: tuple[int, ...], kind: str, dtype: str) -> int:
    """Bytes that optimizer `kind` keeps of a parameter of `shape` whose weights are of type `dtype`."""
    kept = state_tensors(shape, kind, dtype).values()
    return sum(math.prod(of) * _BYTES[stored] for of, stored in kept)

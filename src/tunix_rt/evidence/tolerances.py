"""How far numbers that are computed again may lie from the recorded ones. In class SAME not at all.

PLACEHOLDER
"""

from dataclasses import dataclass

from tunix_rt.evidence.machine_class import Class


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The most that may lie between a recorded number and the one computed again."""

    loss: float
    """Of a step and of the held-out rows, as a share of the loss, or of 1 where that is more."""
    grad_norm: float
    """As a share of the norm."""
    weights: float
    """Distance of the weights at a checkpoint, as a share of how far they moved since the replay began."""
    texts: float
    """The least share of answers whose text must be the same."""


EXACT = Tolerance(loss=0.0, grad_norm=0.0, weights=0.0, texts=1.0)
LEARNING_RATE = 1e-12
"""As a share, outside class SAME: another mathematical library may round the last bit of a cosine otherwise."""

WIDE = ("float32", "float64")

TOLERANCES: dict[tuple[Class, str], Tolerance] = {
    ("NEAR", "float32"): Tolerance(loss=1e-5, grad_norm=1e-3, weights=1e-3, texts=0.98),
    ("NEAR", "bfloat16"): Tolerance(loss=1e-2, grad_norm=1e-1, weights=1e-1, texts=0.98),
    ("CROSS", "float32"): Tolerance(loss=1e-3, grad_norm=1e-2, weights=1e-2, texts=0.98),
    ("CROSS", "bfloat16"): Tolerance(loss=2e-2, grad_norm=2e-1, weights=2e-1, texts=0.98),
}


def texts_follow(name: Class, compute: str) -> bool:
    """Whether two models trained by machines of this class answer alike. In 16 bits they do not: rounding has moved the
    weights far enough that most texts differ."""
    return name == "SAME" or compute in WIDE


def tolerance_of(name: Class, compute: str) -> Tolerance:
    """For products computed in `compute`: float32 and float64 round alike beside what is allowed, so do both 16-bit types."""
    if name == "SAME":
        return EXACT
    return TOLERANCES[name, "float32" if compute in WIDE else "bfloat16"]

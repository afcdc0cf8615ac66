"""What the PyTorch engine keeps in memory for each parameter, in which type and until when.

Written once: the engine builds itself from it, the planner sums it up.
"""

import math
from dataclasses import dataclass

from tunix_rt.config.settings import Training

FEWEST_LOSS_ROWS = 256
"""Target tokens that meet the vocabulary at once: fewer keep a GPU waiting for memory."""
MOST_LOSS_CHUNKS = 8
"""The head's gradient is rounded once per chunk, in the type of the weights: few chunks keep it exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The memory of a training step. Types are named as torch names them."""

    weights: str
    """Type in which trained parameters are kept and updated, and their gradients are."""
    compute: str
    """Type of the products. Where it is another, weights are cast for the length of a forward and backward pass."""
    frozen: str | None
    """With LoRA, the type of the parameters that are not trained; None: every parameter is trained."""
    optimizer: str
    in_backward: bool
    """A gradient is gone once its tensor is updated; the vocabulary table's alone lives through the backward pass."""
    rounding: str
    """`stochastic` for bfloat16 weights, unless it was turned off; else `nearest`."""
    loss_scaled: bool
    """float16: the loss is multiplied before the backward pass, and a step that overflows is computed again."""
    kept_share: float
    """Share of the layers that keep their activations; the others keep their input and are computed again."""

    @property
    def casts(self) -> bool:
        return self.compute != (self.frozen or self.weights)

    @property
    def words(self) -> str:
        """For the log: types, optimizer, and what of it is not as everywhere."""
        trained = f"weights in {self.weights}"
        if self.weights == "bfloat16":
            trained += f", rounded {'stochastically' if self.rounding == 'stochastic' else 'to nearest: small updates are lost'}"
        if self.frozen is not None:
            trained = f"adapters in {self.weights}, all other weights frozen in {self.frozen}"
        said = f"{trained}; products in {self.compute}; {self.optimizer}"
        if self.in_backward:
            said += " in backward: each tensor is updated and clipped by itself as soon as its gradient is there"
        return said

    def kept_layers(self, layers: int) -> int:
        """The last so many layers keep their activations: theirs are gone again before the first is computed anew."""
        return math.floor(self.kept_share * layers + 1e-9)


def recipe_of(training: Training) -> Recipe:
    """What `training` asks for, spelled out."""
    weights = training.master_dtype or ("float64" if training.dtype == "float64" else "float32")
    asked = training.gradient_checkpointing
    return Recipe(
        weights=weights,
        compute=training.dtype,
        frozen=training.dtype if training.lora_rank is not None else None,
        optimizer=training.optim,
        in_backward=training.optim_in_backward,
        rounding="stochastic" if weights == "bfloat16" and training.stochastic_rounding else "nearest",
        loss_scaled=training.dtype == "float16",
        kept_share=(0.0 if asked else 1.0) if isinstance(asked, bool) else float(asked),
    )


def recipe_to_ask(dtype: str) -> Recipe:
    """A model that is only asked: weights of the type of the products, nothing is trained."""
    return Recipe(
        weights=dtype,
        compute=dtype,
        frozen=None,
        optimizer="adamw",
        in_backward=False,
        rounding="nearest",
        loss_scaled=False,
        kept_share=1.0,
    )


def loss_rows(targets: int) -> int:
    """How many of `targets` meet the vocabulary at once: an eighth, in steps of 128, and not fewer than 256."""
    share = math.ceil(targets / MOST_LOSS_CHUNKS / 128) * 128
    return max(1, min(targets, max(FEWEST_LOSS_ROWS, share)))

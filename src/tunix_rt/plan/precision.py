"""The dtypes of weights, gradients and matmuls, the optimizer and activation checkpointing of a run.

The engines are built from a Recipe, and the planner adds up the memory of the same one.
"""

import math
from dataclasses import dataclass

from tunix_rt.config.settings import Training

FEWEST_LOSS_ROWS = 256
"""Target tokens of a chunk of the loss: with fewer, a GPU waits for memory."""
MOST_LOSS_CHUNKS = 8
"""The lm_head gradient is rounded once per chunk, to the dtype of the weights: few chunks keep it exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a training step computes. dtypes have their torch names."""

    weights: str
    """dtype of trained parameters and their gradients."""
    compute: str
    """dtype of the matmuls. If it differs from `weights`, they are cast for a forward and backward pass."""
    frozen: str | None
    """With LoRA, the dtype of the parameters that are not trained; None: every parameter is trained."""
    four_bit: bool
    """With LoRA, the frozen projections are kept in NF4 and unpacked in `frozen`."""
    optimizer: str
    in_backward: bool
    """A gradient is freed once its tensor is updated; only those of embedding and lm_head live through the backward pass."""
    rounding: str
    """`stochastic` for bfloat16 weights, unless turned off; else `nearest`."""
    loss_scaled: bool
    """float16: the loss is scaled before the backward pass, and a step that overflows is repeated."""
    kept_share: float
    """Fraction of the layers that save their activations; the others save their input and recompute."""

    @property
    def casts(self) -> bool:
        return self.compute != (self.frozen or self.weights)

    def describe(self) -> str:
        """dtypes and optimizer in one line."""
        trained = f"weights in {self.weights}"
        if self.weights == "bfloat16":
            nearest = "rounded to nearest: small updates are lost"
            trained += f", {'stochastic rounding' if self.rounding == 'stochastic' else nearest}"
        if self.frozen is not None:
            trained = f"adapters in {self.weights}, all other weights frozen in {self.frozen}"
        if self.four_bit:
            trained = f"adapters in {self.weights}, projections frozen in NF4, all other weights in {self.frozen}"
        words = f"{trained}; {self.compute} matmuls; {self.optimizer}"
        if self.in_backward:
            words += " in backward: each tensor is clipped and updated as soon as its gradient is complete"
        return words

    def kept_layers(self, layers: int) -> int:
        """The number of layers that save their activations: the last ones, which free them before the first is recomputed."""
        return math.floor(self.kept_share * layers + 1e-9)


def recipe_of(training: Training) -> Recipe:
    """The recipe of `training`."""
    weights = training.master_dtype or ("float64" if training.dtype == "float64" else "float32")
    checkpointed = training.gradient_checkpointing
    return Recipe(
        weights=weights,
        compute=training.dtype,
        frozen=training.dtype if training.lora_rank is not None else None,
        four_bit=training.load_in_4bit,
        optimizer=training.optim,
        in_backward=training.optim_in_backward,
        rounding="stochastic" if weights == "bfloat16" and training.stochastic_rounding else "nearest",
        loss_scaled=training.dtype == "float16",
        kept_share=(0.0 if checkpointed else 1.0) if isinstance(checkpointed, bool) else float(checkpointed),
    )


def recipe_for_inference(dtype: str) -> Recipe:
    """A model that is not trained, with weights and matmuls in `dtype`."""
    return Recipe(
        weights=dtype,
        compute=dtype,
        frozen=None,
        four_bit=False,
        optimizer="adamw",
        in_backward=False,
        rounding="nearest",
        loss_scaled=False,
        kept_share=1.0,
    )


def loss_rows(targets: int) -> int:
    """The targets in a chunk of the loss: an eighth of them, rounded up to a multiple of 128, and at least 256."""
    share = math.ceil(targets / MOST_LOSS_CHUNKS / 128) * 128
    return max(1, min(targets, max(FEWEST_LOSS_ROWS, share)))

"""The learning rate: a pure function of the step, so that resuming needs no scheduler state. Shared by the engines."""

import math

from tunix_rt.config.settings import Training


def learning_rate(step: int, *, total: int, training: Training) -> float:
    """Learning rate of step `step` (counted from 1) of `total`. Warm-up ends at the full rate; no step has rate 0."""
    asked = training.warmup_steps
    warmup = math.ceil(asked * total) if asked < 1 else int(asked)
    done = step - 1
    if done < warmup:
        return training.learning_rate * (done + 1) / warmup
    progress = (done - warmup) / max(1, total - warmup)
    if training.lr_scheduler_type == "linear":
        return training.learning_rate * (1 - progress)
    if training.lr_scheduler_type == "cosine":
        return training.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return training.learning_rate

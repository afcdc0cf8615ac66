"""Whether an update trains what was sampled: the log-probabilities of its own forward pass against those of the sampler.

They differ by rounding alone. Another temperature, a token of the template, a mask, weights of the step before: all of these make
GRPO train another distribution than it sampled, and nothing else of a run would show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.data.packing import IGNORED, MicroBatch, StepBatch
from tunix_rt.errors import TunixError

LARGEST_GAP = 1e-3
"""Of the log-probabilities of any token, in float32 and float64. Rounding gives 5e-5 at most, the mildest defect 0.05."""
LARGEST_RATIO = 1.005
"""Of the mean ratio of probabilities in 16 bits, where the cache and packed rows round differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of one step. `ratio` is the mean over its targets of how many times as likely the one says a token is as the other."""

    logprob_gap: float
    logprob_ratio: float


def agreement(step: int, batch: StepBatch, losses: Sequence[npt.NDArray[Any]], compute: str) -> Agreement:
    """How far the `losses` of the targets, by micro-batch, are from the log-probabilities of the sampler. A TunixError above the
    limit of the `compute` dtype, which names the token that differs most."""
    gaps = [np.abs(-loss - _sampled(micro)) for micro, loss in zip(batch.micro_batches, losses, strict=True)]
    every = np.concatenate(gaps) if gaps else np.zeros(1)
    with np.errstate(over="ignore"):
        found = Agreement(logprob_gap=float(every.max()), logprob_ratio=float(np.exp(every).mean()))
    narrow = compute in ("bfloat16", "float16")
    measured, limit = (found.logprob_ratio, LARGEST_RATIO) if narrow else (found.logprob_gap, LARGEST_GAP)
    if measured <= limit:
        return found
    worst = max(range(len(gaps)), key=lambda number: np.nan_to_num(gaps[number], nan=np.inf).max(initial=0))
    what = "mean ratio of probabilities" if narrow else "largest gap of log-probabilities"
    raise TunixError(
        f"step {step}: the update does not train what was sampled: {what} {measured:.3g}, the limit is {limit}; "
        f"{_named(batch.micro_batches[worst], gaps[worst])}; stopped before the update",
        fix="sampler and trainer compute different things: report it with training_log.txt; the last checkpoint is intact",
    )


def _targets(micro: MicroBatch) -> npt.NDArray[np.bool_]:
    """As the engine selects them: the hidden state at t predicts token t + 1."""
    return micro.labels[:, 1:] != IGNORED


def _sampled(micro: MicroBatch) -> npt.NDArray[Any]:
    assert micro.logprobs is not None
    return np.asarray(micro.logprobs[:, 1:][_targets(micro)])


def _named(micro: MicroBatch, gaps: npt.NDArray[Any]) -> str:
    """The token of `micro` that differs most: of which rollout, and where in it."""
    place = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
    rows, columns = _targets(micro).nonzero()
    row, column = int(rows[place]), int(columns[place]) + 1
    example = int((micro.positions[row, : column + 1] == 0).sum()) - 1
    names = micro.names[row] if row < len(micro.names) else ()
    name = names[example] if example < len(names) else f"row {row} of the micro-batch"
    return f"{name}, token {int(micro.positions[row, column])}: {float(gaps[place]):.3g}"

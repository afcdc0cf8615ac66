"""What a run that trains on its own rollouts records of them: columns of `metrics.jsonl`, and the files beside it."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo
from pydantic_core import PydanticKnownError

from tunix_rt.runs import fields as f

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[f.Many[Token], Field(max_length=1_048_576)]
Ended = Literal["stop", "tag", "length", "time", "context"]


class RolloutColumns(f.Facts):
    """Of a line of `metrics.jsonl`. Rates are 0..1, over the rollouts of the step unless another base is named."""

    reward: f.Maybe[float] = None
    """Mean reward."""
    well_formed: f.Maybe[f.Share] = None
    ended: f.Maybe[f.Share] = None
    """Ended by the model itself."""
    rollout_length: f.Maybe[f.Amount] = None
    """Tokens of a rollout, the ending one included: mean."""
    zero_variance: f.Maybe[f.Share] = None
    """Groups in which all rewards are equal; they are left out of the update."""
    trained_rollouts: f.Maybe[f.Count] = None
    """Rollouts with an advantage other than 0, which the update has."""
    rollout_tokens: f.Maybe[f.Count] = None
    rollout_seconds: f.Maybe[f.Amount] = None
    score_seconds: f.Maybe[f.Amount] = None
    logprob_gap: f.Maybe[f.Amount] = None
    """Largest difference of the log-probability of a token between the sampler and the update."""
    logprob_ratio: f.Maybe[Annotated[float, Field(ge=1)]] = None
    """Mean ratio of the two probabilities."""
    rollouts: f.Maybe[f.Digest] = None
    """SHA-256 of the file with the rollouts of the step."""


def negative_with_rollouts(loss: float, info: ValidationInfo) -> float:
    """Of traces, a cross-entropy is never below 0. Weights of rollouts may be."""
    if loss < 0 and "rollouts" in info.data and info.data["rollouts"] is None:
        raise PydanticKnownError("greater_than_equal", {"ge": 0})
    return loss


class Rollout(f.Facts):
    """`ids` with the token that ended it; `logprobs` by the sampler; `advantage` is its weight in the loss."""

    ids: Tokens
    logprobs: Annotated[f.Many[Annotated[float, Field(le=0)]], Field(max_length=1_048_576)]
    output: str
    ended: Ended
    reward: float
    advantage: float


class RolloutGroup(f.Facts):
    """A line of `rollouts/step-*.jsonl`: the rollouts of one question. `row` is its row in `rows.jsonl`."""

    row: f.Count
    prompt: Tokens
    expected: str
    rollouts: Annotated[f.Many[Rollout], Field(min_length=2, max_length=4096)]


class AlongLine(f.Facts):
    """A line of `eval/along.jsonl`: held-out questions answered greedily, after a step. Counts of `items`, and the alarms."""

    step: f.Count
    items: f.Positive
    correct: f.Count
    well_formed: f.Count
    unfinished: f.Count
    equations: f.Count
    equations_right: f.Count
    mean_output_chars: f.Amount
    reward: f.Maybe[float] = None
    """Mean reward of the rollouts since the line before."""
    alarms: Annotated[f.Many[f.Text], Field(max_length=8)]

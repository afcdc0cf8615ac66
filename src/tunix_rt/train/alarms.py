"""Alarms of reinforcement learning, on held-out questions: signs that the reward rises and the model does not get better.

They are fixed before the run, and follow from `eval/along.jsonl` and `metrics.jsonl`, so that anybody can repeat them.
"""

from collections.abc import Sequence

from tunix_rt.runs.schemas_rollouts import AlongLine

REWARD_RISE = 0.1
"""Of the mean sampled reward since the first evaluation, without one more held-out question right than before training."""
FORM_SHARE = 0.05
"""So many more outputs well-formed, and so many fewer equations right."""
LENGTH_FACTOR = 1.5
UNFINISHED_RISE = 0.1
DESCRIPTION = (
    f"sampled reward up by {REWARD_RISE:g} with no more held-out questions right; form up and right equations down by "
    f"{FORM_SHARE:.0%}; outputs {LENGTH_FACTOR:g} times as long; {UNFINISHED_RISE:.0%} more unfinished; nothing to train"
)


def alarms_of(before: Sequence[AlongLine], now: AlongLine, *, no_signal: bool) -> list[str]:
    """The alarms of an evaluation, given those before it, of which the first is of the untrained model. `no_signal`: since the
    last no step had a group with different rewards."""
    if not before:
        return []
    base, found = before[0], []
    first = next((line.reward for line in before if line.reward is not None), None)
    rise = 0.0 if first is None or now.reward is None else now.reward - first
    if rise >= REWARD_RISE and now.correct <= base.correct:
        found.append(
            f"sampled reward rose by {rise:.2f}, held-out questions right: {now.correct} of {now.items}, "
            f"{base.correct} before training"
        )
    form = (now.well_formed - base.well_formed) / now.items
    drop = _share(base.equations_right, base.equations) - _share(now.equations_right, now.equations)
    if form >= FORM_SHARE and drop >= FORM_SHARE:
        found.append(f"well-formed outputs rose by {form:.0%}, right equations fell by {drop:.0%}")
    if now.mean_output_chars > LENGTH_FACTOR * base.mean_output_chars > 0:
        found.append(
            f"outputs have {now.mean_output_chars:.0f} characters, {base.mean_output_chars:.0f} before training"
        )
    if (now.unfinished - base.unfinished) / now.items >= UNFINISHED_RISE:
        found.append(f"{now.unfinished} of {now.items} outputs are unfinished, {base.unfinished} before training")
    if no_signal:
        found.append("no rollout was trained since the last evaluation: all rewards of a question are equal")
    return found


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def mean_reward(rewards: Sequence[float | None]) -> float | None:
    known = [one for one in rewards if one is not None]
    return sum(known) / len(known) if known else None


def alarm_stop(lines: Sequence[AlongLine], *, stops: bool) -> int | None:
    """The step after whose evaluation alarms end the run."""
    return next((line.step for line in lines if line.alarms), None) if stops else None

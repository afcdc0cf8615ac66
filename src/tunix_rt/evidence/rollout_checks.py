"""What follows from recorded rollouts, computed again without a model: rewards from texts, advantages from rewards, the batch of
every step from ids and advantages, and the columns of the metrics."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix_rt.data.packing import rows_of_step
from tunix_rt.evidence.facts import Run
from tunix_rt.runs.checksums import shown
from tunix_rt.runs.schemas import StepLine
from tunix_rt.runs.schemas_rollouts import RolloutColumns, RolloutGroup
from tunix_rt.scoring.rewards import advantages, reward_of
from tunix_rt.scoring.score import CONTEXT, LENGTH, STOP
from tunix_rt.train.alarms import alarms_of, mean_reward
from tunix_rt.train.rollouts import Group, batch_of_rollouts, columns

MOST_STEPS = 100_000
TIMED = ("rollout_seconds", "score_seconds", "logprob_gap", "logprob_ratio")
"""Columns that only the run states."""


def rollouts(run: Run) -> Iterator[str]:
    """The rollouts of each step have the recorded hash; rewards, advantages, batch and columns are those that they give."""
    there = {name for name in run.record.listing.files if name.startswith("rollouts/")}
    if not run.config.training.samples:
        filled = [line.step for line in run.metrics if any(getattr(line, name) is not None for name in _COLUMNS)]
        if there or filled:
            yield f"{run.where}metrics.jsonl: rollouts in a run that trains on traces"
        return
    names = {f"rollouts/step-{number:06d}.jsonl" for number in range(1, run.total + 1)}
    if run.total > MOST_STEPS or there != names:
        odd = sorted(there ^ names)
        yield f"{run.where}{odd[0] if odd else 'rollouts'}: not the rollouts of the {run.total:,} steps"
        return
    yield from _along_problems(run)
    for line in run.metrics:
        yield from (f"{run.where}metrics.jsonl:{line.step}: {problem}" for problem in _step_problems(run, line))


_COLUMNS = tuple(RolloutColumns.model_fields)


def _along_problems(run: Run) -> Iterator[str]:
    """The alarms are those that the scores on held-out questions and the rewards give."""
    lines, file = run.record.along, f"{run.where}eval/along.jsonl"
    if lines and [line.step for line in lines] != [line.step for line in run.record.heldout]:
        yield f"{file}: not at the steps of eval/heldout.jsonl"
        return
    for number, line in enumerate(lines):
        since = lines[number - 1].step if number else 0
        steps = run.metrics[since : line.step]
        silent = bool(steps) and not any(one.trained_rollouts for one in steps)
        if line.reward != mean_reward([one.reward for one in steps]):
            yield f"{file}:{number + 1}: reward is {line.reward}, not that of the steps before"
        if list(line.alarms) != alarms_of(lines[:number], line, no_signal=silent):
            yield f"{file}:{number + 1}: other alarms than its scores give"


def _step_problems(run: Run, line: StepLine) -> Iterator[str]:
    name = f"rollouts/step-{line.step:06d}.jsonl"
    data = run.record.data(name) or b""
    if hashlib.sha256(data).hexdigest() != line.rollouts:
        yield f"rollouts is not the hash of {name}"
        return
    groups = [group for group in run.record.read(name) if isinstance(group, RolloutGroup)]
    training, config = run.config.training, run.config.data
    assert training.rollouts is not None
    chosen = rows_of_step(
        line.step, row_count=len(run.record.rows), rows_per_step=training.rollouts.prompts,
        seed=run.commitment.seeds.data_seed, mixture=run.mixture,
    )  # fmt: skip
    if [group.row for group in groups] != chosen:
        yield f"{name}: not the questions that seed and rows give"
        return
    for number, group in enumerate(groups, start=1):
        yield from (f"{name}:{number}: {problem}" for problem in _group_problems(run, group))
    plain = [_plain(group) for group in groups]
    rows = run.commitment.batch.rows if run.commitment.batch else training.per_device_train_batch_size
    batch = batch_of_rollouts(plain, packing=config.packing, max_length=config.max_length, rows=rows, pad_id=0)
    expected = columns(plain, run.tags) | {
        "batch": batch.sha256, "tokens": batch.tokens, "target_tokens": batch.target_tokens,
    }  # fmt: skip
    yield from _differing(line, expected)
    if any(getattr(line, column) is None for column in TIMED if batch.target_tokens or "logprob" not in column):
        yield "a column of the rollouts is missing"


def _differing(line: StepLine, expected: Mapping[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        if getattr(line, name) != value:
            yield f"{name} is {shown(str(getattr(line, name)))}, the rollouts give {shown(str(value))}"


def _plain(group: RolloutGroup) -> Group:
    rollouts = [dict(one) for one in group.rollouts]
    return Group(row=group.row, prompt=list(group.prompt), expected=group.expected, rollouts=rollouts)


def _group_problems(run: Run, group: RolloutGroup) -> Iterator[str]:
    settings, method = run.config.training.rollouts, run.config.training.method
    assert settings is not None
    if len(group.rollouts) != settings.samples:
        yield f"{len(group.rollouts)} rollouts, training.rollouts.samples is {settings.samples}"
        return
    rewards = [reward_of(one.output, group.expected, one.ended, run.tags) for one in group.rollouts]
    given = advantages(rewards, settings.advantage, method)
    for sample, (one, reward, advantage) in enumerate(zip(group.rollouts, rewards, given, strict=True)):
        if one.reward != reward:
            yield f"rollout {sample}: reward is {one.reward}, its text gives {reward}"
        elif one.advantage != advantage:
            yield f"rollout {sample}: advantage is {one.advantage}, the rewards give {advantage}"
        full = len(one.ids) == settings.max_new_tokens
        possible = {STOP: 0 < len(one.ids) <= settings.max_new_tokens, LENGTH: full, CONTEXT: not full}
        if len(one.logprobs) != len(one.ids) or not possible.get(one.ended, False):
            yield f"rollout {sample}: {len(one.ids)} tokens with {len(one.logprobs)} log-probabilities ended by {one.ended}"


def answer_problems_of_rows(run: Run, answers: Sequence[str | None]) -> Iterator[str]:
    """The expected answer of every question is that of its row in the dataset."""
    for step in range(1, run.total + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        for number, group in enumerate(run.record.read(name), start=1):
            if group.row >= len(answers) or answers[group.row] != group.expected:
                yield f"{run.where}{name}:{number}: the answer of row {group.row} is another in the dataset"

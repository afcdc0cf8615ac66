"""The rollouts of a step, and the batch that they make: functions of (weights, seed, step).

A step samples from the weights that it then trains, and takes one update from them. GRPO's gradient is that of a cross-entropy in
which every token of a rollout has the advantage of the rollout as its weight, so the step is that of supervised training. Token
ids are never made of text again, and what is trained is selected by position: a model may sample any token, also that of padding.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunix_rt.config.settings import Rollouts, RunConfig
from tunix_rt.data.packing import Row, StepBatch, collate, pack, rows_of_step
from tunix_rt.data.prepare import Prepared
from tunix_rt.data.records import EvalItem
from tunix_rt.data.render import prompt_ids
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.engines.base import Backend, Engine
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.errors import InputError
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.scoring.rewards import advantages, check_reward, reward_of, reward_problems, strict_reward
from tunix_rt.scoring.score import STOP, Tags, is_well_formed
from tunix_rt.storage import json_line, sha256_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one question, as a line of `rollouts/step-*.jsonl` has them."""

    row: int
    prompt: list[int]
    expected: str
    rollouts: list[dict[str, Any]]

    def line(self) -> str:
        return json_line({
            "row": self.row, "prompt": self.prompt, "expected": self.expected, "rollouts": self.rollouts,
        })  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RolloutSource:
    """Samples and scores the rollouts of each step, and packs those with an advantage."""

    backend: Backend
    engine: Engine
    config: RunConfig
    data: Prepared
    tokenizer: Tokenizer
    rows: int
    """Of a micro-batch."""
    generation_rows: int
    record: Callable[[int, str], None] = lambda step, text: None
    """Called with the lines of a step before it is trained."""
    interrupt: Callable[[], None] = lambda: None
    """Called between rollouts and every few tokens; may raise."""
    last: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Columns of the metrics, of the step that was sampled last."""

    @property
    def settings(self) -> Rollouts:
        assert self.config.training.rollouts is not None
        return self.config.training.rollouts

    @property
    def tags(self) -> Tags:
        return Tags(reasoning=self.data.style.reasoning_tag, answer=self.data.style.answer_tag)

    def batch_of(self, step: int) -> StepBatch:
        """The batch of `step`, from the weights that the engine has now: those of the step before."""
        began = time.perf_counter()
        chosen = rows_of_step(
            step, row_count=len(self.data.rows), rows_per_step=self.settings.prompts,
            seed=self.config.training.resolved_data_seed, mixture=self.data.mixture,
        )  # fmt: skip
        items = [self.data.prompts[row] for row in chosen]
        prompts = [prompt_ids(item.prompt, self.tokenizer, self.data.style) for item in items]
        answers = self._sampled(step, prompts)
        sampled = time.perf_counter()
        groups = [
            self._scored(
                row, item, prompt, answers[place * self.settings.samples : (place + 1) * self.settings.samples]
            )
            for place, (row, item, prompt) in enumerate(zip(chosen, items, prompts, strict=True))
        ]
        scored = time.perf_counter()
        text = "".join(group.line() for group in groups)
        self.record(step, text)
        seconds = {"rollout_seconds": sampled - began, "score_seconds": scored - sampled}
        self.last = {step: columns(groups, self.tags) | seconds | {"rollouts": sha256_text(text)}}
        packing, longest = self.config.data.packing, self.config.data.max_length
        return batch_of_rollouts(
            groups, packing=packing, max_length=longest, rows=self.rows, pad_id=self.tokenizer.pad_id
        )

    def decoding(self, step: int) -> Decoding:
        """Temperature 1 and nothing cut off: the update trains exactly this distribution. A rollout ends by the model's own stop
        token, which it has to learn; no closing tag ends it."""
        return Decoding(
            max_new_tokens=self.settings.max_new_tokens, temperature=1.0, seed=self.config.training.seed, step=step,
            samples=self.settings.samples,
        )  # fmt: skip

    def _sampled(self, step: int, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """The rollouts of every prompt, those of one prompt together."""
        found: dict[int, Answer] = {}
        for index, answer in self.backend.generate(
            self.engine, prompts, decoding=self.decoding(step), stop_ids=stop_ids(self.tokenizer, self.data.style),
            pad_id=self.tokenizer.pad_id, decode=self.tokenizer.decode, batch_size_at=lambda length: self.generation_rows,
            logprobs=True,
        ):  # fmt: skip
            found[index] = answer
            self.interrupt()
        return [found[index] for index in range(len(found))]

    def _scored(self, row: int, item: EvalItem, prompt: list[int], answers: Sequence[Answer]) -> Group:
        texts = [self.tokenizer.decode(answer.ids) for answer in answers]
        pairs = zip(texts, answers, strict=True)
        rewards = [reward_of(text, item.answer, answer.ended, self.tags) for text, answer in pairs]
        weights = advantages(rewards, self.settings.advantage, self.config.training.method)
        rollouts = [
            {
                "ids": [*answer.ids, *([] if answer.end is None else [answer.end])], "logprobs": answer.logprobs,
                "output": text, "ended": answer.ended, "reward": reward, "advantage": weight,
            }
            for text, answer, reward, weight in zip(texts, answers, rewards, weights, strict=True)
        ]  # fmt: skip
        return Group(row=row, prompt=prompt, expected=item.answer, rollouts=rollouts)

    def columns(self, step: int) -> Mapping[str, Any]:
        """What the line of `step` in the metrics says of its rollouts."""
        return self.last.get(step, {})


def columns(groups: Sequence[Group], tags: Tags) -> dict[str, Any]:
    """The rollouts of a step in numbers, without times."""
    every = [one for group in groups for one in group.rollouts]
    lengths = [len(one["ids"]) for one in every]
    equal = sum(len({one["reward"] for one in group.rollouts}) == 1 for group in groups)
    return {
        "reward": sum(one["reward"] for one in every) / len(every),
        "well_formed": sum(is_well_formed(one["output"], tags) for one in every) / len(every),
        "ended": sum(one["ended"] == STOP for one in every) / len(every),
        "rollout_length": sum(lengths) / len(every),
        "zero_variance": equal / len(groups),
        "trained_rollouts": sum(one["advantage"] != 0 for one in every),
        "rollout_tokens": sum(lengths),
    }


def rows_of_rollouts(groups: Sequence[Group]) -> Iterator[Row]:
    """The rollouts that have an advantage, one in each row. The ending token is trained like every other."""
    for group in groups:
        for sample, one in enumerate(group.rollouts):
            if one["advantage"] == 0:
                continue
            ids = np.array([*group.prompt, *one["ids"]], dtype=np.int32)
            trained = np.arange(len(ids)) >= len(group.prompt)
            yield Row(
                ids=ids, trained=trained, positions=np.arange(len(ids), dtype=np.int32),
                weights=np.where(trained, one["advantage"], 0.0),
                logprobs=np.concatenate([np.zeros(len(group.prompt)), one["logprobs"]]),
                names=(f"row {group.row}, sample {sample}",),
            )  # fmt: skip


def batch_of_rollouts(groups: Sequence[Group], *, packing: bool, max_length: int, rows: int, pad_id: int) -> StepBatch:
    """The micro-batches of a step, the longest rows first; none where no rollout has an advantage."""
    alone = list(rows_of_rollouts(groups))
    lengths = [len(row.ids) for row in alone]
    if packing and alone:
        packed = [_joined([alone[place] for place in places]) for places in pack(lengths, max_length)]
    else:
        packed = [alone[place] for place in sorted(range(len(alone)), key=lambda place: -lengths[place])]
    micro = tuple(collate(packed[start : start + rows], pad_id=pad_id) for start in range(0, len(packed), rows))
    return StepBatch(
        micro_batches=micro,
        target_tokens=sum(batch.targets for batch in micro),
        tokens=sum(lengths),
        sha256=hashlib.sha256(b"".join(row.sha256 for row in packed)).hexdigest(),
    )


def _joined(parts: Sequence[Row]) -> Row:
    """Several rollouts in one row; none attends to another."""

    def of(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    arrays = {name: of(name) for name in ("ids", "trained", "positions", "weights", "logprobs")}
    return Row(**arrays, names=tuple(name for part in parts for name in part.names))


def require_sound_reward(data: Prepared) -> None:
    """Refuse to train where the reward is denied to right answers of this dataset, or paid to wrong ones."""
    if not data.prompts:
        return
    tags = Tags(reasoning=data.style.reasoning_tag, answer=data.style.answer_tag)
    answers = [item.answer for item in data.prompts]
    classes = check_reward(strict_reward(tags), answers, tags)
    if problems := reward_problems(classes):
        raise InputError(
            f"the reward cannot be trusted on {data.dataset.key}: " + "; ".join(problems),
            fix="`tunix-rt data rewards FILE` lists every kind; write the answers as plain numbers or words",
        )
    right = sum(one.right for one in classes)
    logger.info(
        "Reward: %d spellings of %s right answers are paid, %d kinds of wrong outputs are not",
        right, f"{len(set(answers)):,}", len(classes) - right,
    )  # fmt: skip

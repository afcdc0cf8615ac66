"""The reward of an output, the advantages in a group of them, and whether a reward can be trusted. Pure functions.

The reward is 1 for an output that ended by itself and is right by the strict reading, else 0. Nothing is paid for the form alone,
for a number that is close, or for the right answer somewhere in the text: a model finds whatever a reward pays for.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tunix_rt.scoring.score import STOP, TAGS, Tags, matches_strict

GRPO, RFT = "grpo", "rft"
SIGMA_FLOOR = 1e-4
"""Added to the standard deviation of a group, as in TRL."""
Reward = Callable[[str, str], float]
"""Of an output that ended by itself, and the expected answer."""


def reward_of(output: str, expected: str, ended: str, tags: Tags = TAGS) -> float:
    return float(ended == STOP and matches_strict(output, expected, tags))


def advantages(rewards: Sequence[float], kind: str, method: str = GRPO) -> list[float]:
    """The weight of each rollout of a group in the loss. All 0 where the rewards are equal: nothing distinguishes them.

    `mean` subtracts the mean of the group, `std` also divides by its standard deviation, `rloo` subtracts the mean of the others.
    With `rft` the best rollouts have 1 and the others 0, whatever the `kind`."""
    lowest, highest, count = min(rewards), max(rewards), len(rewards)
    if lowest == highest:
        return [0.0] * count
    if method == RFT:
        return [float(reward == highest) for reward in rewards]
    mean = math.fsum(rewards) / count
    centered = [reward - mean for reward in rewards]
    if kind == "rloo":
        return [one * count / (count - 1) for one in centered]
    if kind == "std":
        sigma = math.sqrt(math.fsum(one * one for one in centered) / (count - 1))
        return [one / (sigma + SIGMA_FLOOR) for one in centered]
    return centered


# --- can the reward be trusted ----------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[0-9]{1,15}")
_MOST_SHOWN = 80


def right_outputs(expected: str, tags: Tags = TAGS) -> Iterator[tuple[str, str]]:
    """(spelling, output) of right outputs; only those spellings that are one of `expected`."""
    spellings = {"as written": expected, "with blanks": f"\n {expected} \n", "with a full stop": f"{expected}."}
    if _INTEGER.fullmatch(expected):
        number = int(expected)
        spellings |= {"with thousands": f"{number:,}", "with decimals": f"{number}.00", "as money": f"${number}"}
    else:
        spellings |= {"in quotes": f'"{expected}"', "in bold": f"**{expected}**", "in a box": f"\\boxed{{{expected}}}"}
    for name, answer in spellings.items():
        yield name, _output("We compute it.", answer, tags)


def wrong_outputs(expected: str, tags: Tags = TAGS) -> Iterator[tuple[str, str]]:
    """(kind, output) of outputs that are wrong, malformed, or right beside something wrong."""
    number = int(expected) if _INTEGER.fullmatch(expected) else None
    other = str(number + 1) if number is not None else f"not {expected}"
    right, wrong = (f"<{tags.answer}>{one}</{tags.answer}>" for one in (expected, other))
    yield "another value", _output("We compute it.", other, tags)
    yield "the sign turned", _output("We compute it.", f"-{number or 1}" if number is not None else f"- {other}", tags)
    yield "a digit appended", _output("We compute it.", f"{expected}7", tags)
    yield "two values", _output("We compute it.", f"{expected} or {other}", tags)
    yield "many values", _output("We compute it.", " ".join([*map(str, range(101)), expected]), tags)
    yield "an empty answer", _output("We compute it.", "", tags)
    yield "no tags", f"We compute it. The answer is {expected}."
    yield "right in the reasoning alone", _output(f"It is {expected}.", other, tags)
    yield "an answer that is not closed", _output("We compute it.", expected, tags).removesuffix(f"</{tags.answer}>")
    yield "a wrong answer before the right one", f"{_output('We compute it.', other, tags)}{right}"
    yield "a wrong answer behind the right one", f"{_output('We compute it.', expected, tags)}{wrong}"


def _output(reasoning: str, answer: str, tags: Tags) -> str:
    return f"<{tags.reasoning}>{reasoning}</{tags.reasoning}><{tags.answer}>{answer}</{tags.answer}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardClass:
    """One spelling of the right answer, or one kind of wrong output, over all answers."""

    name: str
    right: bool
    outputs: int
    failed: int
    """Right ones below the highest reward, or wrong ones above that of a plainly wrong output."""
    example: str = ""
    """The first answer that failed."""


def check_reward(reward: Reward, answers: Iterable[str], tags: Tags = TAGS) -> list[RewardClass]:
    """How `reward` treats every spelling of each right answer, and every kind of wrong output.

    The highest reward is what the answer as written gets, a plainly wrong output is another value in the right form. A reward
    that pays both the same fails on the answer as written."""
    counts: dict[tuple[str, bool], list[int]] = {}
    examples: dict[tuple[str, bool], str] = {}
    for expected in dict.fromkeys(answers):
        right, wrong = (list(made(expected, tags)) for made in (right_outputs, wrong_outputs))
        highest, lowest = reward(right[0][1], expected), reward(wrong[0][1], expected)
        for outputs, is_right in ((right, True), (wrong, False)):
            for name, output in outputs:
                paid = reward(output, expected)
                fails = (paid < highest or highest <= lowest) if is_right else paid > lowest
                count = counts.setdefault((name, is_right), [0, 0])
                count[0] += 1
                count[1] += fails
                if fails:
                    examples.setdefault((name, is_right), expected[:_MOST_SHOWN])
    return [
        RewardClass(name=name, right=is_right, outputs=of, failed=failed, example=examples.get((name, is_right), ""))
        for (name, is_right), (of, failed) in counts.items()
    ]


def strict_reward(tags: Tags = TAGS) -> Reward:
    """The reward of a run, of outputs that ended by themselves."""
    return lambda output, expected: reward_of(output, expected, STOP, tags)


def reward_problems(classes: Sequence[RewardClass]) -> list[str]:
    """A sentence for each class that fails: a reward that is deaf to right answers, or leaks to wrong ones."""
    return [
        f"{one.failed:,} of {one.outputs:,} right answers {one.name} are denied the reward, first {one.example!r}"
        if one.right
        else f"{one.failed:,} of {one.outputs:,} wrong outputs are paid: {one.name}, first for the answer {one.example!r}"
        for one in classes
        if one.failed
    ]

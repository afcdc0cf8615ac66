"""The reward, advantages, and the check that a reward is neither deaf nor leaky."""

import json
import math

import pytest

from tests.program import ROOT, in_process, refused
from tunix_rt.scoring.rewards import (
    advantages,
    check_reward,
    reward_of,
    reward_problems,
    right_outputs,
    strict_reward,
    wrong_outputs,
)
from tunix_rt.scoring.score import LENGTH, STOP, Tags

ANSWERS = ("12", "1600", "0", "7/8", "s l e e p", "blue", "3.5")


def test_the_reward_is_for_right_answers_that_ended_by_themselves():
    right = "<reasoning>6 + 6 = 12</reasoning><answer>12</answer>"
    assert reward_of(right, "12", STOP) == 1.0
    assert reward_of(right, "12", LENGTH) == 0.0
    assert reward_of(right, "13", STOP) == 0.0
    assert reward_of("<think>6 + 6</think><out>12</out>", "12", STOP, Tags("think", "out")) == 1.0


@pytest.mark.parametrize("kind", ["mean", "std", "rloo"])
def test_advantages_add_up_to_nothing(kind):
    found = advantages([1.0, 0.0, 0.0, 1.0, 0.0], kind)
    assert math.fsum(found) == pytest.approx(0, abs=1e-12)
    assert found[0] > 0 > found[1]


def test_each_advantage_is_what_it_is_called():
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert advantages(rewards, "mean") == [0.75, -0.25, -0.25, -0.25]
    assert advantages(rewards, "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert advantages(rewards, "std") == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3])
    assert advantages(rewards, "mean", "rft") == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", ["grpo", "rft"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_have_no_advantage(method, reward):
    assert advantages([reward] * 8, "std", method) == [0.0] * 8


def test_there_are_six_spellings_and_eleven_kinds_of_wrong_output():
    for answer in ANSWERS:
        assert len(list(right_outputs(answer))) == 6
        assert len({name for name, _ in wrong_outputs(answer)}) == 11


def test_the_strict_reward_is_neither_deaf_nor_leaky():
    traces = (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text().splitlines()
    answers = {*ANSWERS, *(json.loads(line)["final_answer"] for line in traces)}
    assert reward_problems(check_reward(strict_reward(), answers)) == []


LEAKS = {
    "the answer anywhere": (lambda output, expected: float(expected in output), "right in the reasoning alone"),
    "the last block": (
        lambda output, expected: float(output.rpartition("<answer>")[2].startswith(f"{expected}<")),
        "a wrong answer before the right one",
    ),
    "form": (lambda output, expected: float(output.startswith("<reasoning>") and bool(output)), "as written"),
    "exact text": (
        lambda output, expected: float(output.endswith(f"<answer>{expected}</answer>")), "with thousands",
    ),
    "never": (lambda output, expected: 0.0, "as written"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKS)
def test_a_leaky_or_deaf_reward_is_found(name):
    reward, found_by = LEAKS[name]
    classes = check_reward(reward, ANSWERS)
    assert found_by in {one.name for one in classes if one.failed}
    assert reward_problems(classes)


def test_the_verb_lists_every_kind(tmp_path):
    done = in_process("data", "rewards", "dev-reasoning-v2", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["answers"] == 550
    assert {kind["failed"] for kind in found["kinds"]} == {0}
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps({"question": "2 + 2?", "answer": "We add.\n#### 4"}) + "\n")
    shown = in_process("data", "rewards", file)
    assert "right answers, denied the reward:" in shown.stdout and shown.returncode == 0


def test_a_dataset_without_answers_is_refused(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"prompt": "Hello", "completion": "Hi"}) + "\n")
    assert "no record has an answer" in refused(in_process("data", "rewards", file), 3)

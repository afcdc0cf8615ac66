"""Runs of more than one process that are honest: on another machine, or past a checkpoint that was damaged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunix_rt.evidence.claims import read_run
from tunix_rt.evidence.gathered import LogLine, Noted, gather
from tunix_rt.evidence.resumed import process_problems, resume_problems
from tunix_rt.evidence.timing import log_step_problems

BUNDLE = Path(__file__).parents[2] / "submission_runs" / "m40_v2"


@pytest.fixture(scope="module")
def real() -> Noted:
    """A real run of one process, with checkpoints at 25 and 50."""
    return gather(read_run(BUNDLE), BUNDLE / "run-SHA256SUMS")


@pytest.fixture
def with_processes(real: Noted) -> Callable[..., Noted]:
    """The run, as if processes that began at `firsts` had taken it; the last is the one that really did."""

    def make(*firsts: int, **machine: Any) -> Noted:
        (one,) = real.processes or ()
        before = [dict(one) | {"first_step": first, "machine": dict(one["machine"]) | machine} for first in firsts[:-1]]
        run = replace(real.run, result=dict(real.run.result) | {"resumed_from": firsts[-1] - 1})
        told = [line for first in firsts[1:] for line in (_said("tunix-rt 0.1.0, run folder x"), _resumed(first - 1))]
        return replace(
            real, run=run, processes=(*before, dict(one) | {"first_step": firsts[-1]}), log=(*real.log[:20], *told)
        )

    def _said(words: str) -> LogLine:
        return replace(real.log[0], words=words)

    def _resumed(step: int) -> LogLine:
        return _said(f"Resumed from step-{step:06d}")

    return make


def test_a_run_that_went_on_upon_another_machine_is_accepted(with_processes):
    """The doctor's report is of the last process; the one before had another GPU, CPU and driver."""
    other = {"name": "NVIDIA A100-SXM4-80GB", "capability": "8.0", "driver": "550.1", "cuda": "12.4", "cudnn": "90100"}
    noted = with_processes(1, 26, gpu=other, cpu="AMD EPYC 7763", python="3.11.9")
    assert list(process_problems(noted)) == []


def test_the_machine_of_the_last_process_is_that_of_the_doctor(with_processes):
    noted = with_processes(1, 26)
    last = dict(noted.processes[-1])
    last["machine"] = dict(last["machine"]) | {"gpu": dict(last["machine"]["gpu"]) | {"driver": "550.1"}}
    (problem,) = process_problems(replace(noted, processes=(*noted.processes[:-1], last)))
    assert "process 2: the GPU's driver is '550.1'" in problem


def test_a_checkpoint_that_was_damaged_and_passed_over_need_not_be_listed(with_processes):
    """The second process went on from step 30, whose checkpoint the third found damaged: it went on from 25."""
    assert list(resume_problems(with_processes(1, 31, 26))) == []


def test_a_process_whose_steps_were_kept_went_on_from_a_listed_checkpoint(with_processes):
    (problem,) = resume_problems(with_processes(1, 20, 26))
    assert "none at step 19" in problem


def test_a_step_that_another_process_took_again_may_be_logged_twice(real):
    """Of both lines the last is that of the metrics."""
    place = next(at for at, line in enumerate(real.log) if line.words.startswith("step 30/50"))
    earlier = replace(real.log[place], words=real.log[place].words.replace("loss 5", "loss 6"))
    begun = replace(real.log[place], words="tunix-rt 0.1.0, run folder x")
    again = replace(real, log=(*real.log[:place], earlier, begun, *real.log[place:]))
    assert list(log_step_problems(again)) == []
    (problem,) = log_step_problems(replace(real, log=(*real.log[:place], earlier, *real.log[place:])))
    assert "step 30 for the second time in one process" in problem

"""Interrupt it anywhere and it continues exactly."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.forging import bases
from tests.integrity import list_problems
from tests.program import ROOT, command, environment, in_process, refused, tunix_rt

STEPS = 14
ARGUMENTS = [
    "smoke_tiny", "--device", "cpu", "--max-steps", STEPS, "--set", "training.save_steps=2",
    "--set", "training.per_device_train_batch_size=2", "--set", "evaluation.enabled=false",
]  # fmt: skip


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "final_model" / "model.safetensors").read_bytes()).hexdigest()


def losses(folder: Path) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tunix_rt("train", *ARGUMENTS, "--output", folder).returncode == 0
    return folder


def stop_after(folder: Path, steps: int, how: signal.Signals, *extra: str) -> int:
    """Start (or continue) the run, send `how` once `steps` lines are in its metrics; its exit code."""
    with subprocess.Popen(
        command("train", *ARGUMENTS, "--output", folder, *extra), env=environment(), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as program:  # fmt: skip
        deadline = time.monotonic() + 300
        metrics = folder / "metrics.jsonl"
        while program.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                program.send_signal(how)
                break
            time.sleep(0.002)
        return program.wait(timeout=300)


SIGNALLED = """
    import os, signal, sys
    from tunix_rt.train import loop as train
    from tunix_rt.cli.main import main
    batch_of_step = train.batch_of_step
    def signalled(rows, step, **named):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of_step(rows, step, **named)
    train.batch_of_step = signalled
    sys.argv = ["tunix-rt", *sys.argv[1:]]
    main()
    """


SHARED = ["smoke_tiny", *bases.STEPS, *bases.ASKED, "--device", "cpu"]
"""Arguments of `tiny_run`, the finished run that all tests share."""


def check_preempted(folder: Path, how: signal.Signals, *, steps: int, before: int) -> int:
    """The steps that a stopped run has completed, which are saved."""
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "preempted" and how.name in result["reason"]
    assert result["steps_completed"] >= steps and result["resumed_from"] == before
    assert list_problems(folder) == []
    return int(result["steps_completed"])


def check_resumed(folder: Path, whole: Path, arguments: list[object], *, before: int) -> None:
    """Resume the run in `folder`: it ends with the bits of `whole`."""
    done = in_process("train", *arguments, "--output", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert weights(folder) == weights(whole)
    assert losses(folder) == losses(whole)
    assert json.loads((folder / "result.json").read_text())["resumed_from"] == before
    assert list_problems(folder) == []


def test_a_signal_saves_the_step_and_the_run_continues_exactly(tmp_path, tiny_run):
    """SIGTERM while the batch of step 5 of 6 is made."""
    folder = tmp_path / "run"
    words = map(str, ["train", *SHARED, "--output", folder])
    script = [sys.executable, "-c", textwrap.dedent(SIGNALLED), *words]
    stopped = subprocess.run(script, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert stopped.returncode == 7, stopped.stderr
    check_resumed(folder, tiny_run, SHARED, before=check_preempted(folder, signal.SIGTERM, steps=3, before=0))


@pytest.mark.slow
def test_each_signal_from_outside_saves_the_step_and_the_run_continues_exactly(tmp_path, uninterrupted):
    """SIGTERM after the third step, SIGINT after the seventh of what goes on from there, then to the end."""
    folder, before = tmp_path / "run", 0
    for steps, how, extra in ((3, signal.SIGTERM, ()), (7, signal.SIGINT, ("--resume",))):
        assert stop_after(folder, steps, how, *extra) == 7
        before = check_preempted(folder, how, steps=steps, before=before)
    check_resumed(folder, uninterrupted, ARGUMENTS, before=before)


# --- the grace -------------------------------------------------------------------------------------------------------

GRACE_SECONDS = 5
SLOW = """
    import hashlib, sys, time
    from tunix_rt.train import checkpointer as saving, loop as train
    from tunix_rt.cli.main import main
    where, marker = sys.argv[1:3]
    def go_on_for_ever():
        open(marker, "w").close()
        if where == "a call":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # a minute and more, and no signal breaks it
        time.sleep(600)
    batch_of_step, stage_checkpoint = train.batch_of_step, saving.stage_checkpoint
    def slow_batch(rows, step, **named):
        if step == 6 and where in ("a step", "a call"):
            go_on_for_ever()
        return batch_of_step(rows, step, **named)
    def slow_save(folder, step, write):
        if step == 6 and where == "a save":
            go_on_for_ever()
        return stage_checkpoint(folder, step, write)
    train.batch_of_step, saving.stage_checkpoint = slow_batch, slow_save
    sys.argv = ["tunix-rt", *sys.argv[3:]]
    main()
    """


@pytest.mark.slow  # by the wall clock; tests/unit/test_stop_request.py sets the alarm off by itself
@pytest.mark.parametrize(
    ("how", "where"),
    [("SIGTERM", "a step"), ("SIGTERM", "a call"), ("SIGTERM", "a save"), ("SIGINT", "a step"), ("SIGINT", "a call")],
)
def test_what_does_not_end_costs_no_finished_step_and_cannot_hold_the_exit(tmp_path, uninterrupted, how, where):
    """A step of ten minutes, and one whose time is spent outside of Python: step 5, finished before it, is saved. A disk that
    does not answer: the run ends within the grace with step 4. It verifies, and continues from there."""
    folder, marker = tmp_path / "run", tmp_path / "stuck"
    arguments = [*ARGUMENTS, "--set", f"training.grace_seconds={GRACE_SECONDS}"]
    told = [where, marker, "train", *arguments, "--output", folder]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW), *map(str, told)], env=environment(), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        try:
            while not marker.exists():
                assert program.poll() is None
                time.sleep(0.01)
            began = time.monotonic()
            program.send_signal(signal.Signals[how])
            said = program.communicate(timeout=60)[1]
            seconds = time.monotonic() - began
        finally:
            program.kill()
    assert program.returncode == 7, said
    assert seconds < GRACE_SECONDS, f"it took {seconds:.2f} s"
    assert "Traceback" not in said
    why, saved = f"stopped by {how}", 5
    if where == "a save":
        why, saved = f"the grace period of {GRACE_SECONDS} s after SIGTERM is over", 4
    assert f"{how}: stopping" in said and why in said and f"step {saved} is saved" in said
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("preempted", 7) and f"step {saved} is saved" in result["reason"]
    assert list_problems(folder) == [] and tunix_rt("evidence", "verify", folder, "--require", "L0").returncode == 0
    assert "the run is preempted" in tunix_rt("evidence", "verify", folder).stdout, "L1 is for completed runs"
    done = tunix_rt("train", *arguments, "--output", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "result.json").read_text())["resumed_from"] == saved
    assert weights(folder) == weights(uninterrupted) and losses(folder) == losses(uninterrupted)


def test_another_configuration_may_not_continue_a_run(tmp_path, tiny_run):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    for ending in ("result.json", "SHA256SUMS"):  # as after a kill
        (folder / ending).unlink()
    changed = in_process("train", *SHARED, "--output", folder, "--resume", "--set", "training.learning_rate=1e-5")
    assert "training.learning_rate is 1e-05, " in refused(changed, 2)
    assert "already contains a run (unfinished)" in refused(in_process("train", *SHARED, "--output", folder), 2)


@pytest.mark.slow
def test_two_programs_do_not_share_a_folder(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        command("train", *ARGUMENTS, "--output", folder), env=environment(), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as first:  # fmt: skip
        while not (folder / "config.yaml").exists():
            assert first.poll() is None
            time.sleep(0.01)
        assert "is in use" in refused(tunix_rt("train", *ARGUMENTS, "--output", folder), 8)
        first.kill()

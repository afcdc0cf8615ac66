"""Whatever moment a run ends at, its folder can be continued or used again, and says what is true."""

import dataclasses
import json
import logging
import mmap
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import write_small_model
from tests.integrity import list_problems
from tests.stores import quiet
from tests.tables import parametrize
from tunix_rt import pipeline
from tunix_rt.cli.train import run_and_show
from tunix_rt.config.load import find_config, load_config
from tunix_rt.engines.base import load_backend
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.errors import ConfigError, DoesNotFitError, EvidenceError, InputError, Preempted, StorageError, TunixError
from tunix_rt.evidence.verify import verify
from tunix_rt.export import roundtrip
from tunix_rt.pipeline import run_pipeline
from tunix_rt.runs import journal
from tunix_rt.runs.folder import RunDir, list_checkpoints
from tunix_rt.storage import read_json
from tunix_rt.train import checkpointer, evaluation
from tunix_rt.train import loop as train
from tunix_rt.train import preemption as stopping

STEPS = 5


def configured(*overrides: str, resume: bool = False):
    fast = ["training.device=cpu", f"training.max_steps={STEPS}", "training.save_steps=2", "data.max_length=128"]
    fast += ["training.per_device_train_batch_size=1", "evaluation.enabled=false", "data.on_overflow=drop"]
    flags = {"training.resume_from_checkpoint": "auto" if resume else None}
    return load_config(find_config("smoke_tiny"), overrides=[*fast, *overrides], flags=flags)


def at(moment: tuple[str, int], do):
    """A progress function that does `do` once `moment` is reached."""
    return lambda what, done, total, note: do() if (what, done) == moment else None


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash() -> None:
    raise KeyboardInterrupt


def losses(run: RunDir) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in run.metrics.read_bytes().splitlines()]


def content(run: RunDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file() and path.name != ".lock"}


pytestmark = pytest.mark.usefixtures("signals_heard_again")


@pytest.fixture(autouse=True)
def no_proof_is_made(monkeypatch):
    """A fresh process that loads the final model takes seconds of each run, and is a promise of its own: runs here say that it
    could not be made, but for the one that nothing interrupts and those of `proofs_are_made`."""
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)


@pytest.fixture
def proofs_are_made(no_proof_is_made, monkeypatch):
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", roundtrip.check_round_trip)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A whole run, and the files that were made durable before its result was."""
    run, synced, real = RunDir(tmp_path_factory.mktemp("whole") / "run"), [], os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
        run_pipeline(configured(), run.root, progress=quiet)
    return run, synced


@pytest.fixture(scope="module")
def crashed_once(tmp_path_factory):
    """A run that crashed right after step 3: its newest checkpoint is of step 2."""
    run = RunDir(tmp_path_factory.mktemp("crashed") / "run")
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(configured(), run.root, progress=at(("train", 3), crash))
    assert read_json(run.result)["status"] == "failed" and list_problems(run.root) == []
    return run


@pytest.fixture
def crashed(crashed_once, tmp_path):
    return RunDir(shutil.copytree(crashed_once.root, tmp_path / "run"))


# --- saving by time ---------------------------------------------------------------------------------------------------


def test_a_run_that_saves_by_time_has_a_checkpoint_of_any_step_and_verifies(tmp_path, uninterrupted, caplog):
    """Every step takes longer than the interval. A direct write needs no copy in memory; the bits are the same."""
    caplog.set_level("INFO", logger="tunix_rt")
    run = RunDir(tmp_path / "run")
    by_time = ("training.save_steps=null", "training.save_minutes=0.00001", "training.save_total_limit=9")
    by_time += ("training.grace_seconds=1",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "MOST_SAVING_SHARE", 1e9)  # saving takes longer than such a step
        patch.setattr(checkpointer, "SLOW_DISK_BYTES_PER_SECOND", 1e6)
        run_pipeline(configured(*by_time), run.root, progress=quiet)
    assert [entry["step"] for entry in read_json(run.checkpoint_list)["checkpoints"]] == [*range(1, STEPS + 1)]
    assert "Checkpoints: every 1e-05 min of training, at each evaluation (every 3 steps), and at the end" in caplog.text
    assert "SIGTERM may cost the steps since the last checkpoint (every 1e-05 min of training)" in caplog.text
    assert losses(run) == losses(uninterrupted[0]) and list_problems(run.root) == []
    assert verify(run.root).level == "L1"


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_the_final_model_is_on_the_disk_before_the_result(uninterrupted):
    run, synced = uninterrupted
    assert read_json(run.result)["final_model"]["proven"] is True
    before_result = {path for path in synced[: synced.index(str(run.root / ".result.json.staged"))]}
    staged = run.root / ".staged-final_model"
    files = {str(staged / path.name) for path in run.final_model.iterdir()}
    assert files and files | {str(staged), str(run.root)} <= before_result


@pytest.mark.parametrize("name", ["SHA256SUMS", "result.json"])
def test_a_crash_while_the_ending_is_written_leaves_a_run_that_can_be_continued(
    tmp_path, uninterrupted, monkeypatch, name
):
    run = RunDir(shutil.copytree(uninterrupted[0].root, tmp_path / "run"))
    for ending in (run.result, run.hashes):
        ending.unlink()
    module = "checksums" if name == "SHA256SUMS" else "journal"
    with monkeypatch.context() as patch:
        patch.setattr(f"tunix_rt.runs.{module}.write_text", lambda path, text: crash())
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(configured(resume=True), run.root, progress=quiet)
    assert list_problems(run.root), "without its ending a run does not verify"
    run_pipeline(configured(resume=True), run.root, progress=quiet)
    assert read_json(run.result)["status"] == "completed" and list_problems(run.root) == []
    assert losses(run) == losses(uninterrupted[0])


def test_a_continued_run_accounts_for_all_its_processes(tmp_path, uninterrupted, caplog):
    caplog.set_level(logging.INFO, logger="tunix_rt")
    run = RunDir(shutil.copytree(uninterrupted[0].root, tmp_path / "run"))
    run.result.unlink()
    run.log.unlink()
    run_pipeline(configured(resume=True), run.root, progress=quiet)
    steps = [json.loads(line) for line in run.metrics.read_bytes().splitlines()]
    result, memory = read_json(run.result), read_json(run.memory)
    assert result["resumed_from"] == STEPS
    assert result["seconds"] > sum(step["seconds"] for step in steps)
    assert memory["measured_bytes"] >= max(step["peak_bytes"] for step in steps)
    assert memory["measured_bytes_before"] == max(step["peak_bytes"] for step in steps)
    phases = memory["phases"]
    assert {"load", "resume", "export"} <= set(phases)
    before = read_json(uninterrupted[0].memory)["phases"]
    assert phases["steps"] == before["steps"], "no step was left to take: as the process before measured them"
    assert "predicted_bytes" not in phases["resume"], "what a checkpoint takes to be read is not predicted"
    said = run.log.read_text()
    assert "Completed" in said and "tokens/s" not in said, "no step was taken, so there is no speed to tell"


def test_a_run_that_is_stopped_after_a_step_goes_on_to_the_same_lists(tmp_path, uninterrupted, caplog):
    run = RunDir(tmp_path / "run")
    with pytest.raises(Preempted, match=r"stopped after step 3 \(--stop-after\); step 3 is saved"):
        run_pipeline(configured(), run.root, progress=quiet, stop_after=3)
    assert (read_json(run.result)["status"], read_json(run.result)["exit_code"]) == ("preempted", 7)
    assert list_problems(run.root) == []
    with pytest.raises(ConfigError, match="--stop-after 2: this process takes steps 4 to 5"):
        run_pipeline(configured(resume=True), run.root, progress=quiet, stop_after=2)
    assert list_problems(run.root) == []
    rows = run.rows.read_bytes()
    run.rows.write_bytes(rows[:-1])
    caplog.set_level(logging.INFO, logger="tunix_rt")
    run_pipeline(configured(resume=True), run.root, progress=quiet)
    assert "Resuming from step-000003: 2 of 5 steps left, about" in caplog.text and "Steps: " not in caplog.text
    assert run.rows.read_bytes() == rows == uninterrupted[0].rows.read_bytes()
    assert [entry["first_step"] for entry in read_json(run.processes)["processes"]] == [1, 4]
    listed, whole = (read_json(one.checkpoint_list)["checkpoints"] for one in (run, uninterrupted[0]))
    assert [entry["step"] for entry in listed] == [entry["step"] for entry in whole] == [2, 3, 4, 5]
    for entry, other in zip(listed, whole, strict=True):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert entry["files"][name] == other["files"][name]
    assert list_problems(run.root) == []


def test_no_signal_halves_the_ending_and_none_is_heard_after_it(tmp_path, uninterrupted, monkeypatch):
    """The first two come while a complete run is written down."""
    run = RunDir(shutil.copytree(uninterrupted[0].root, tmp_path / "run"))
    run.result.unlink()
    write = journal.write_sums
    monkeypatch.setattr(journal, "write_sums", lambda *told, **named: (terminate(), terminate(), write(*told, **named)))
    run_pipeline(configured(resume=True), run.root, progress=quiet)
    terminate()
    assert read_json(run.result)["status"] == "completed" and list_problems(run.root) == []


def test_a_third_signal_does_not_keep_a_stopped_run_from_being_written_down(tmp_path, monkeypatch):
    run, write = RunDir(tmp_path / "run"), journal.write_sums
    monkeypatch.setattr(journal, "write_sums", lambda *told, **named: (terminate(), write(*told, **named)))
    with pytest.raises(Preempted, match="second SIGTERM"):
        run_pipeline(configured(), run.root, progress=at(("train", 3), lambda: (terminate(), terminate())))
    terminate()
    assert read_json(run.result)["status"] == "preempted" and list_problems(run.root) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk here that is always full")
def test_a_disk_that_is_full_under_the_log_ends_the_run_with_one_line(tmp_path, capsys, caplog):
    """The checksums cannot be written either, for the log is a link by then; what is raised is what happened first."""
    caplog.set_level(logging.INFO, logger="tunix_rt")
    run = RunDir(tmp_path / "run")

    def fill_up() -> None:
        opened = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(run.log)]
        with open("/dev/full", "wb") as full:
            for descriptor in opened:
                os.dup2(full.fileno(), int(descriptor))
        run.log.unlink()
        run.log.symlink_to("/dev/full")

    with pytest.raises(StorageError, match=r"training_log\.txt: (No space left on device|Invalid argument)") as caught:
        run_pipeline(configured(), run.root, progress=at(("train", 2), fill_up))
    assert caught.value.exit_code == 8
    assert "Logging error" not in capsys.readouterr().err
    assert read_json(run.result)["exit_code"] == 8 and "SHA256SUMS could not be written" in caplog.text


# --- continuing -------------------------------------------------------------------------------------------------------


def test_a_signal_while_a_continued_run_loads_loses_nothing_that_is_known(crashed, uninterrupted, monkeypatch):
    backend = load_backend("torch")
    real = backend.load
    with monkeypatch.context() as patch:
        patch.setattr(backend, "load", lambda *given, **named: (terminate(), real(*given, **named))[1])
        with pytest.raises(Preempted, match="step 2 is saved"):
            run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    result = read_json(crashed.result)
    assert (result["status"], result["steps_completed"], result["resumed_from"]) == ("preempted", 2, 2)
    assert result["final_loss_hex"] == losses(crashed)[-1] and len(losses(crashed)) == 2
    assert list_problems(crashed.root) == []
    run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    assert losses(crashed) == losses(uninterrupted[0])
    assert list_problems(crashed.root) == []


def test_a_damaged_checkpoint_that_is_passed_over_does_not_keep_the_run_from_verifying(crashed, uninterrupted):
    """Stopped before the next save would have replaced it: what its manifest says of its files is not believed."""
    run = RunDir(shutil.copytree(uninterrupted[0].root, crashed.root.with_name("passed-over")))
    run.result.unlink()
    damaged = list_checkpoints(run.checkpoints)[0] / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(configured("training.max_steps=5", resume=True), run.root, progress=at(("train", 5), crash))
    assert read_json(run.result)["skipped_checkpoints"][0]["problems"] == ["changed: model.safetensors"]
    assert damaged.exists() and list_problems(run.root) == []


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here fails when it is read")
def test_a_checkpoint_that_cannot_be_read_is_not_given_up(crashed, monkeypatch):
    """The memory of this process is a regular file whose first byte is an input/output error. It can only be linked to."""
    monkeypatch.setattr(RunDir, "refuse_links", lambda run: None)
    unreadable = crashed.checkpoints / "step-000002" / "model.safetensors"
    unreadable.unlink()
    before = content(crashed)
    unreadable.symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=r"model\.safetensors: Input/output error") as caught:
        run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    assert caught.value.exit_code == 8
    unreadable.unlink()
    assert content(crashed) == before


def test_a_continuation_refused_for_its_kernels_touches_nothing(crashed, monkeypatch):
    def refuse(*told):
        raise ConfigError("another attention", fix="continue where the run began")

    before = content(crashed)
    monkeypatch.setattr(train, "refuse_other_kernels", refuse)
    with pytest.raises(ConfigError, match="another attention"):
        run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    assert content(crashed) == before and list_problems(crashed.root) == []


def test_to_continue_where_there_is_no_run_starts_one_without_an_alarm(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="tunix_rt")
    run_pipeline(configured("training.max_steps=1", resume=True), tmp_path / "run", progress=quiet)
    (line,) = [one for one in caplog.records if one.getMessage().startswith(f"No run in {tmp_path / 'run'} yet")]
    assert line.levelname == "INFO"


def test_a_continuation_that_is_killed_leaves_no_ending_of_the_process_before(crashed, monkeypatch):
    """As after SIGKILL: nothing of the end is written."""
    monkeypatch.setattr(journal.RunJournal, "_end", lambda *told: None)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(configured(resume=True), crashed.root, progress=at(("train", 4), crash))
    assert not crashed.result.exists() and not crashed.hashes.exists()


def test_another_version_or_device_may_not_continue_a_run_and_touches_nothing(crashed, monkeypatch):
    before = content(crashed)
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "99.0.1")
        with pytest.raises(ConfigError, match=r"another run: versions\.torch, versions\.transformers differ"):
            run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    settle = pipeline.settle_device

    def settle_elsewhere(*given):
        facts, choice = settle(*given)
        return facts, dataclasses.replace(choice, device="cuda", kind="another")

    monkeypatch.setattr(pipeline, "settle_device", settle_elsewhere)
    monkeypatch.setattr(pipeline, "check_kernels", lambda *given: frozenset({"GPU-aa"}))  # as if it had held
    with pytest.raises(ConfigError, match="another run: device differ"):
        run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    assert content(crashed) == before
    assert list_problems(crashed.root) == []


@pytest.mark.slow
def test_a_signal_during_an_evaluation_stops_it_and_the_run_continues_with_it(tmp_path):
    asked = ["evaluation.enabled=true", "evaluation.max_new_tokens=2", "evaluation.per_device_eval_batch_size=4"]
    run, seen = RunDir(tmp_path / "run"), []

    def progress(what, done, total, note):
        seen.append((what, done))
        if seen[-1] in (("evaluate before", 2), ("evaluate after", 2)) and seen.count(seen[-1]) == 1:
            terminate()

    with pytest.raises(Preempted, match="stopped by SIGTERM; nothing was trained yet"):
        run_pipeline(configured(*asked), run.root, progress=progress)
    assert seen[-1] == ("evaluate before", 2) and not run.scores("before").exists()
    with pytest.raises(Preempted, match=f"all {STEPS} steps are saved"):
        run_pipeline(configured(*asked, resume=True), run.root, progress=progress)
    assert seen[-1] == ("evaluate after", 2) and not run.scores("after").exists()
    result = read_json(run.result)
    assert (result["status"], result["steps_completed"], set(result["scores"])) == ("preempted", STEPS, {"before"})
    assert list_problems(run.root) == []
    report = run_pipeline(configured(*asked, resume=True), run.root, progress=progress)
    assert seen.count(("train", 1)) == 1 and seen.count(("evaluate before", 3)) == 1, "neither is done twice"
    assert set(report.scores) == {"before", "after"} and report.comparison is not None
    assert set(read_json(run.result)["scores"]) == {"before", "after"} and list_problems(run.root) == []


# --- the time budget --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # by the wall clock
def test_a_run_stops_by_itself_before_its_time_is_used_up_and_goes_on_to_the_same_end(
    tmp_path, uninterrupted, monkeypatch
):
    """Steps of half a second and 3 s for each process: several are needed, and none takes longer than it may."""
    batch_of_step = train.batch_of_step
    monkeypatch.setattr(
        train, "batch_of_step", lambda *told, **named: (time.sleep(0.7), batch_of_step(*told, **named))[1]
    )
    monkeypatch.setattr(stopping, "program_began", time.monotonic)
    run, budget, kept = RunDir(tmp_path / "run"), stopping.ENDING_SECONDS + 3, []
    while not kept or read_json(run.result)["status"] != "completed":
        assert len(kept) < 12
        began = time.monotonic()
        config = configured(f"training.time_budget={budget}", resume=bool(kept))
        try:
            run_pipeline(config, run.root, progress=quiet)
        except Preempted as stopped:
            assert f"s of {budget:g} s left, stopping" in stopped.problem
            assert (read_json(run.result)["status"], stopped.exit_code) == ("preempted", 7)
        assert time.monotonic() - began < budget
        kept.append(read_json(run.result).get("steps_completed", 0))
        assert list_problems(run.root) == []
    assert len(kept) > 1, "the budget was never used up"
    assert losses(run) == losses(uninterrupted[0])
    weights = [(one.final_model / "model.safetensors").read_bytes() for one in (run, uninterrupted[0])]
    assert weights[0] == weights[1]


@pytest.fixture
def stops(monkeypatch):
    """Every Preemption of a pipeline, in order, so that a test can say when its time is up. A budget begins with the pipeline."""
    made = []
    monkeypatch.setattr(stopping, "program_began", time.monotonic)

    class Noticed(stopping.Preemption):
        def __init__(self, **settings):
            super().__init__(**settings)
            made.append(self)

    monkeypatch.setattr(pipeline, "Preemption", Noticed)
    return made


@pytest.mark.slow
def test_a_measure_that_was_timed_before_the_first_step_is_not_begun_after_the_last_with_less_time_left(
    tmp_path, monkeypatch, stops
):
    run, steps, measure = RunDir(tmp_path / "run"), [], train._evaluate

    def slowly(*told):
        seconds = 0 if steps else 60
        steps.append(told[-1])
        return measure(*told) + seconds

    def progress(what, done, total, note):
        if what == "train" and done == STEPS:
            stops[-1]._deadline = time.monotonic() + stopping.ENDING_SECONDS + 45

    monkeypatch.setattr(train, "_evaluate", slowly)
    once = ["training.time_budget=900", f"training.eval_steps={2 * STEPS}"]
    with pytest.raises(Preempted, match=f"time budget: .* s left, stopping; step {STEPS} is saved"):
        run_pipeline(configured(*once), run.root, progress=progress)
    assert steps == [0]
    run_pipeline(configured(*once, resume=True), run.root, progress=quiet)
    assert steps == [0, STEPS] and read_json(run.result)["status"] == "completed" and list_problems(run.root) == []


@pytest.mark.slow
def test_answers_after_training_are_not_begun_when_those_before_took_longer_than_is_left(
    tmp_path, monkeypatch, caplog, stops
):
    """Their time is known from those before training, also to a process that did not ask them."""
    asked = ["evaluation.enabled=true", "evaluation.max_new_tokens=2", "evaluation.per_device_eval_batch_size=4"]
    run, seen, evaluate = RunDir(tmp_path / "run"), [], evaluation.evaluate_model

    def slowly(*told, when, **named):
        time.sleep(25 if when == "before" else 0)
        return evaluate(*told, when=when, **named)

    def progress(what, done, total, note):
        seen.append((what, done))
        if what == "train" and done == STEPS:  # enough to save what was trained, and not to answer
            stops[-1]._deadline = time.monotonic() + stopping.ENDING_SECONDS + 20

    monkeypatch.setattr(evaluation, "evaluate_model", slowly)
    caplog.set_level(logging.INFO)
    stopped = "s left, stopping; evaluation after training takes about [0-9]+ s; all 5 steps are saved"
    with pytest.raises(Preempted, match=stopped) as caught:
        run_pipeline(configured(*asked, "training.time_budget=900"), run.root, progress=progress)
    assert caught.value.fix == stopping.RESUME and "Evaluation after training will take about" in caplog.text
    took = read_json(run.result)["answering_seconds"]
    assert took > 25 and (run.final_model / "model.safetensors").is_file() and list_problems(run.root) == []
    with pytest.raises(Preempted, match=stopped) as caught:
        run_pipeline(configured(*asked, "training.time_budget=12", resume=True), run.root, progress=progress)
    assert "raise training.time_budget above" in caught.value.fix
    assert not any(what == "evaluate after" for what, _ in seen)
    run_pipeline(configured(*asked, "training.time_budget=900", resume=True), run.root, progress=progress)
    assert read_json(run.result)["answering_seconds"] == took and read_json(run.result)["status"] == "completed"
    assert seen.count(("train", 1)) == 1 and seen.count(("evaluate before", 3)) == 1 and list_problems(run.root) == []


def test_a_budget_that_is_used_up_before_the_first_step_says_so(tmp_path):
    with pytest.raises(Preempted, match="the time budget of 1 s is shorter than the start") as caught:
        run_pipeline(configured("training.time_budget=1"), tmp_path / "run", progress=quiet)
    assert caught.value.fix == "raise training.time_budget"
    assert read_json(RunDir(tmp_path / "run").result)["status"] == "preempted"


# --- after a refusal --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_command_can_be_given_again_after_a_refusal(tmp_path, monkeypatch, capsys):
    """Refused without the model, then while its weights load; then everything is there."""
    run, model = RunDir(tmp_path / "run"), tmp_path / "model"
    config = configured(f"model.model_name_or_path={model}", "model.weights=random", "training.max_steps=1")
    with pytest.raises(InputError):
        run_and_show(config, run.root, as_json=False)
    assert read_json(run.result)["status"] == "refused" and not run.precommit.exists()
    write_small_model("gpt2", model)
    backend = load_backend("torch")

    def fail(*given, **named):
        raise InputError("the weights are torn", fix="fetch them again")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "load", fail)
        with pytest.raises(InputError, match="torn"):
            run_and_show(config, run.root, as_json=False)
    assert read_json(run.result)["status"] == "refused" and run.precommit.exists()
    run_and_show(config, run.root, as_json=False)
    assert read_json(run.result)["status"] == "completed" and list_problems(run.root) == []
    said = capsys.readouterr().out
    assert str(run.root) in said and "samples.md" not in said, "nothing was asked, so there are no answers"


@pytest.mark.parametrize("written", ["[]", '"text"', "3"])
def test_a_precommitment_that_is_no_object_is_told_and_nothing_is_touched(crashed, written):
    crashed.precommit.write_text(written)
    before = content(crashed)
    with pytest.raises(TunixError, match=r"precommit\.json is corrupt: a (list|str|int), not an object"):
        run_pipeline(configured(resume=True), crashed.root, progress=quiet)
    assert content(crashed) == before


def test_another_configuration_is_refused_by_the_names_that_differ_also_without_its_file(crashed):
    """A config.yaml from before a setting existed lacks it; without any there is nothing to name."""
    kept = [line for line in crashed.config.read_text().splitlines() if "grad" not in line]
    crashed.config.write_text("\n".join(kept) + "\n")
    with pytest.raises(ConfigError, match=r"another run: training\.seed is 7, 0 in its"):
        run_pipeline(configured("training.seed=7", resume=True), crashed.root, progress=quiet)
    crashed.config.unlink()
    with pytest.raises(TunixError, match=r"without its config\.yaml"):
        run_pipeline(configured("training.seed=7", resume=True), crashed.root, progress=quiet)


def test_steps_without_their_precommitment_are_not_written_over(crashed):
    crashed.precommit.unlink()
    before = content(crashed)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="contains a run"):
            run_pipeline(configured(resume=resume), crashed.root, progress=quiet)
    assert content(crashed) == before


def test_memory_that_runs_out_is_told_with_its_parts_and_what_to_change(tmp_path, monkeypatch):
    """As torch says it on a CPU, in the second step: never tried again in silence."""
    backend = load_backend("torch")
    real, tried = backend.summed_loss, []

    def exhausted(*given, **named):
        tried.append(named)
        if len(tried) == 3:  # the first is the held-out loss
            taken = mmap.mmap(-1, 144 * 2**20)  # in a process that had room from before, little would have risen
            taken.write(b"1" * len(taken))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return real(*given, **named)

    monkeypatch.setattr(backend, "summed_loss", exhausted)
    run = RunDir(tmp_path / "run")
    with pytest.raises(
        DoesNotFitError, match=r"(?s)out of memory in step 2.*GiB in use and no more available.*weights 0\."
    ) as caught:
        run_pipeline(configured("training.per_device_train_batch_size=4"), run.root, progress=quiet)
    assert "--set " in caught.value.fix and len(tried) == 3
    result = read_json(run.result)
    assert (result["status"], result["exit_code"], result["steps_completed"]) == ("failed", 5, 1)


@pytest.mark.usefixtures("proofs_are_made")
def test_a_final_model_that_is_another_when_reloaded_fails_the_run_and_is_made_anew_by_the_next(tmp_path, monkeypatch):
    """What an earlier refusal put aside is in nobody's way, neither of another refusal nor of the run that completes."""
    run, save = RunDir(tmp_path / "run"), torch_backend.save
    aside = run.root / "final_model-refused"

    def spoilt(engine, folder, **told):
        save(engine, folder, **told)
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith("q_proj.weight"))
        weights[name] = weights[name] * 1.01
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def put_aside_before() -> None:
        aside.mkdir()
        (aside / "model.safetensors").write_bytes(b"of an earlier refusal")

    monkeypatch.setattr(torch_backend, "save", spoilt)
    with pytest.raises(EvidenceError, match=r"is not the model in memory: .*q_proj\.weight"):
        run_pipeline(configured(), run.root, progress=at(("train", STEPS), put_aside_before))
    assert read_json(run.result)["status"] == "failed" and not run.final_model.exists()
    assert load_file(aside / "model.safetensors") and list_problems(run.root) == []
    monkeypatch.setattr(torch_backend, "save", save)
    run_pipeline(configured(resume=True), run.root, progress=quiet)
    assert read_json(run.result)["final_model"]["proven"] is True
    assert run.final_model.is_dir() and not aside.exists()
    assert list_problems(run.root) == []


@pytest.mark.usefixtures("proofs_are_made")
@pytest.mark.slow
def test_a_proof_that_could_not_be_made_is_said_and_is_no_difference(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tunix_rt.export.roundtrip.SECONDS", 0.1)
    monkeypatch.setattr("tunix_rt.export.roundtrip.SECONDS_PER_GIB", 0.0)
    run = RunDir(tmp_path / "run")
    run_pipeline(configured(), run.root, progress=quiet)
    assert read_json(run.result)["final_model"] == {"proven": False} and run.final_model.is_dir()
    assert "was not reloaded: cpu: the process gave no answer within 0.1 s" in caplog.text


@parametrize("package", "setting", "words", "way")
def test_a_package_that_a_setting_needs_is_named_before_anything_runs(
    tmp_path, monkeypatch, package, setting, words, way
):
    monkeypatch.setitem(sys.modules, package, None)
    run = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError, match=words) as caught:
        run_pipeline(configured(setting), run.root, progress=quiet)
    assert way in caught.value.fix
    result = read_json(run.result)
    assert (result["status"], result["exit_code"]) == ("refused", 2)
    assert not run.doctor.exists() and not run.precommit.exists()

"""A run ends early where its held-out loss stops falling; a complete run is extended in its folder; both verify."""

import json
import shutil

import pytest

from tests.bundles import collect, make_repository
from tests.integrity import list_problems
from tests.program import ROOT
from tunix_rt.cli.runs import read_run
from tunix_rt.config.load import find_config, load_config
from tunix_rt.config.optimizers import learning_rate, total_at
from tunix_rt.errors import ConfigError, TunixError
from tunix_rt.evidence.checks import CHECKS
from tunix_rt.evidence.facts import completed_run
from tunix_rt.evidence.verify import verify
from tunix_rt.pipeline import run_pipeline
from tunix_rt.runs.folder import RunDir, list_checkpoints
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import read_json, write_json
from tunix_rt.train import loop
from tunix_rt.train.checkpointer import early_stop
from tunix_rt.train.resume import refuse_occupied


def configured(steps, *overrides, resume=True):
    fast = ["training.device=cpu", "training.save_steps=100", "training.eval_steps=2", "data.max_length=128"]
    fast += ["training.per_device_train_batch_size=1", "evaluation.enabled=false", "data.on_overflow=drop"]
    fast += ["training.save_total_limit=3"]
    flags = {"training.max_steps": steps, "training.resume_from_checkpoint": "auto" if resume else None}
    return load_config(find_config("smoke_tiny"), overrides=[*fast, *overrides], flags=flags)


def train(run, steps, *overrides, crash_at=None, resume=True):
    def progress(what, done, total, note):
        if (what, done) == ("train", crash_at):
            raise KeyboardInterrupt

    run_pipeline(configured(steps, *overrides, resume=resume), run.root, progress=progress)


def lines(run):
    return [json.loads(line) for line in run.metrics.read_bytes().splitlines()]


def failed_checks(run):
    facts = completed_run(RunRecord(run.root))
    return {name for name, check in CHECKS.items() if list(check(facts))}


@pytest.fixture(autouse=True, scope="module")
def no_proof_is_made():
    """A fresh process that loads the final model is a promise of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
        yield


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    run = RunDir(tmp_path_factory.mktemp("complete") / "run")
    train(run, 3, resume=False)
    return run


@pytest.fixture(scope="module")
def extended(complete, tmp_path_factory):
    run = RunDir(shutil.copytree(complete.root, tmp_path_factory.mktemp("extended") / "run"))
    train(run, 5)
    return run


@pytest.fixture
def copied(tmp_path):
    return lambda run: RunDir(shutil.copytree(run.root, tmp_path / "run"))


# --- early stopping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "patience", "stops_after"),
    [
        ([5, 4, 3, 2], 1, None),
        ([5, 4, 4], 1, 3),
        ([5, 6, 4, 4.5, 4.1], 2, 5),
        ([5, 6, 4, 4.5, 3.9, 4], 2, None),
        ([5, 6, 7, 1], 2, 3),
        ([5, 6, 7], None, None),
        ([], 1, None),
    ],
)
def test_a_run_stops_after_as_many_evaluations_in_a_row_without_a_lower_loss(losses, patience, stops_after):
    assert early_stop(losses, patience) == stops_after


def test_patience_without_a_held_out_loss_is_refused(tmp_path):
    one = (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text().splitlines()[0]
    (tmp_path / "one.jsonl").write_text("".join(f"{one.replace('dr2-0001', name)}\n" for name in ("a", "b")))
    for settings, problem in {
        ("training.eval_steps=null",): "training.eval_steps is not set",
        ("data.validation_fraction=0",): "needs held-out traces",
        (
            "data.validation_fraction=0",
            "evaluation.enabled=along",
            "evaluation.evalset=eval_v2",
        ): "patience needs held-out",
        (f"data.dataset={tmp_path / 'one.jsonl'}", "data.validation_fraction=0.5"): "no example is held out",
    }.items():
        with pytest.raises(ConfigError, match=problem) as refused:
            train(RunDir(tmp_path / "run"), 2, "training.patience=1", *settings, resume=False)
        assert "patience out" in refused.value.fix or "eval_steps out" in refused.value.fix


STALLED = ("training.learning_rate=1e-30", "training.eval_steps=1", "training.patience=2")


def test_a_run_that_stopped_early_is_complete_and_verifies_wherever_it_was_killed(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", logger="tunix_rt")
    run, decide = RunDir(tmp_path / "run"), loop._stops_early

    def killed(context, step):
        if step == 2:
            raise KeyboardInterrupt
        return decide(context, step)

    monkeypatch.setattr(loop, "_stops_early", killed)
    with pytest.raises(KeyboardInterrupt):
        train(run, 5, *STALLED, resume=False)
    monkeypatch.undo()
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
    train(run, 5, *STALLED)
    result = read_json(run.result)
    assert (result["status"], result["exit_code"], result["resumed_from"]) == ("completed", 0, 2)
    assert (result["steps_planned"], result["steps_completed"], result["best_step"]) == (5, 2, 1)
    said = "at step 2 of 5: held-out loss has not fallen for 2 evaluations (best 8.0250 at step 0)"
    assert f"Stopped early {said}" in caplog.text and result["reason"] == f"stopped early {said}"
    assert f"for step 1: tunix-rt export {run.root} --best" in caplog.text
    training = configured(5, *STALLED).training
    assert [line["lr"] for line in lines(run)] == [learning_rate(step, total=5, training=training) for step in (1, 2)]
    assert run.final_model.is_dir() and list_problems(run.root) == []
    with pytest.raises(
        ConfigError, match=r"without a lower held-out loss for training\.patience=2: it cannot"
    ) as refused:
        train(run, 9, *STALLED)
    assert f"--model {run.final_model} and another --output" in refused.value.fix

    losses = [json.loads(line) for line in run.heldout.read_bytes().splitlines()]
    losses[2] |= {"loss": losses[2]["loss"] / 2, "loss_hex": (losses[2]["loss"] / 2).hex()}
    run.heldout.write_text("".join(json.dumps(line) + "\n" for line in losses))
    assert "schedule" in failed_checks(run), "these losses stop no run"


# --- extension --------------------------------------------------------------------------------------------------------


def test_a_complete_run_is_extended_in_its_folder_and_verifies(complete, extended):
    assert extended.precommit.read_bytes() == complete.precommit.read_bytes()
    assert extended.config.read_bytes() == complete.config.read_bytes()
    assert extended.metrics.read_bytes().startswith(complete.metrics.read_bytes())
    training = configured(3).training
    for step, line in enumerate(lines(extended), start=1):
        assert line["lr"] == learning_rate(step, total=3 if step <= 3 else 5, training=training)
    heldout = [json.loads(line)["step"] for line in extended.heldout.read_bytes().splitlines()]
    assert heldout == [0, 2, 3, 4, 5]
    result = read_json(extended.result)
    assert (result["steps_planned"], result["steps_completed"], result["resumed_from"]) == (5, 5, 3)
    weights = [(run.final_model / "model.safetensors").read_bytes() for run in (complete, extended)]
    assert weights[0] != weights[1]
    assert list_problems(extended.root) == []
    assert read_run(extended.root).extended == ((3, 5),)


def test_an_interrupted_extension_resumes_exactly_and_can_be_extended_again(complete, extended, copied):
    run = copied(complete)
    with pytest.raises(KeyboardInterrupt):
        train(run, 5, crash_at=5)
    assert list_problems(run.root) == []
    shutil.rmtree(list_checkpoints(run.checkpoints)[0])
    (run.checkpoints / "step-000003" / "model.safetensors").unlink()  # steps of the first total are taken again too
    with pytest.raises(ConfigError, match=r"training\.max_steps is 6, 3 in its"):
        train(run, 6)
    train(run, 5)
    for name in ("loss_hex", "lr", "batch"):
        assert [line[name] for line in lines(run)] == [line[name] for line in lines(extended)]
    assert run.heldout.read_bytes() == extended.heldout.read_bytes()
    assert list_problems(run.root) == []
    train(run, 6)
    assert read_run(run.root).extended == ((3, 5), (5, 6))
    assert list_problems(run.root) == []


def test_a_run_is_extended_as_itself_and_beyond_its_end(complete, copied):
    run = copied(complete)
    before = run.result.read_bytes()
    for steps, more in ((3, ()), (2, ()), (None, ["training.max_steps=-1"])):
        with pytest.raises(ConfigError, match="is complete") as refused:
            train(run, steps, *more)
        assert "--resume --max-steps N with N above 3" in refused.value.fix
    with pytest.raises(ConfigError, match="already contains a run"):
        train(run, 5, resume=False)
    with pytest.raises(ConfigError, match=r"another run: training\.seed is 1, 0 in its"):
        train(run, 5, "training.seed=1")
    assert run.result.read_bytes() == before and not run.extensions.exists()


def test_an_extension_that_was_killed_as_it_began_is_resumed(complete, copied):
    run = copied(complete)
    write_json(run.extensions, {"schema": "tunix-rt/extensions/1", "extensions": [{"after_step": 3, "max_steps": 5}]})
    for steps in (5, 3):
        began, resumed, extensions = refuse_occupied(run, configured(steps))
        assert (began.training.max_steps, resumed, extensions[-1].max_steps) == (3, True, 5)
    run.extensions.write_text("{}")
    with pytest.raises(TunixError, match=r"extensions\.json: schema: missing"):
        refuse_occupied(run, configured(5))


@pytest.mark.parametrize("claimed", [None, [(2, 5)], [(3, 6)], [(3, 4), (4, 5)], [(3, 5), (5, 9)], [(3, 3), (3, 5)]])
def test_other_extensions_than_those_that_were_made_are_found(extended, copied, claimed):
    run = copied(extended)
    run.extensions.unlink()
    if claimed:
        listed = [{"after_step": after, "max_steps": to} for after, to in claimed]
        write_json(run.extensions, {"schema": "tunix-rt/extensions/1", "extensions": listed})
    assert "schedule" in failed_checks(run)


def test_a_step_belongs_to_the_total_that_was_planned_when_it_was_taken():
    assert [total_at(step, (3, 5, 9), 9) for step in (1, 3, 4, 5, 6, 9)] == [3, 3, 5, 5, 9, 9]
    assert total_at(2, (), 7) == 7


# --- a replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bundle_of_an_extended_run_is_reproduced(tmp_path):
    run, bundle = RunDir(tmp_path / "run"), tmp_path / "bundle"
    train(run, 3, "evaluation.enabled=true", resume=False)
    before, after = (run.predictions(when).read_bytes() for when in ("before", "after"))
    train(run, 5, "evaluation.enabled=true")
    assert run.predictions("before").read_bytes() == before and run.predictions("after").read_bytes() != after
    made = collect(run.root, bundle, make_repository(tmp_path / "repository"))
    assert made.returncode == 0, made.stderr
    for folder, level in ((bundle, "L1"), (bundle, "L4"), (run.root, "L3")):
        verdict = verify(folder, level)
        assert verdict.ok and verdict.level == level, (verdict.findings, verdict.notes)


@pytest.mark.slow
def test_a_run_that_stopped_early_is_reproduced(tmp_path):
    run = RunDir(tmp_path / "run")
    train(run, 5, *STALLED, resume=False)
    verdict = verify(run.root, "L4")
    assert verdict.ok and verdict.level == "L4", (verdict.findings, verdict.notes)

"""A run on datasets with weights: exact resume, what it records, and a verifier that draws its batches again."""

import json
import shutil

import pytest

from tests.e2e.test_extending import failed_checks, lines, train
from tests.program import ROOT
from tests.samples import record, write_lines
from tunix_rt.errors import ConfigError
from tunix_rt.evidence.facts import Inputs
from tunix_rt.evidence.verify import Options, verify
from tunix_rt.runs.folder import RunDir
from tunix_rt.storage import read_json, write_json

pytestmark = pytest.mark.slow  # the rules of a mixture: tests/unit/test_mixture.py
SUMS = ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl"


@pytest.fixture(scope="module", autouse=True)
def no_proof_is_made():
    """A fresh process that loads the final model is a promise of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
        yield


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "more.jsonl", *(record(number) for number in range(40)))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, more):
    """Stopped in its third step, and resumed."""
    run, weights = RunDir(tmp_path_factory.mktemp("mixed") / "run"), f"data.dataset={{{SUMS}: 1, {more}: 4}}"
    with pytest.raises(KeyboardInterrupt):
        train(run, 4, weights, "training.save_steps=2", crash_at=3, resume=False)
    with pytest.raises(ConfigError, match=r"contains another run: data\.dataset is"):
        train(run, 4, f"data.dataset={{{SUMS}: 1, {more}: 5}}", "training.save_steps=2")
    train(run, 4, weights, "training.save_steps=2")
    return run, weights


def test_a_resumed_run_takes_the_steps_of_one_that_was_not_stopped_and_records_its_mixture(mixed, more, tmp_path):
    run, weights = mixed
    whole = RunDir(tmp_path / "run")
    train(whole, 4, weights, "training.save_steps=2", resume=False)
    assert read_json(run.result)["resumed_from"] == 2
    exact = ("step", "loss_hex", "batch", "tokens", "target_tokens")
    assert [[line[name] for name in exact] for line in lines(run)] == [
        [line[name] for name in exact] for line in lines(whole)]  # fmt: skip
    assert (run.final_model / "model.safetensors").read_bytes() == (
        whole.final_model / "model.safetensors"
    ).read_bytes()
    recorded = read_json(run.precommit)["dataset"]["mixture"]
    assert [(part["key"], part["weight"]) for part in recorded] == [(str(SUMS), 1.0), (str(more), 4.0)]
    assert failed_checks(run) == set()


@pytest.mark.parametrize("change", ["weight", "rows", "none"])
def test_another_mixture_than_the_recorded_batches_is_found(mixed, tmp_path, change):
    run = RunDir(shutil.copytree(mixed[0].root, tmp_path / "run"))
    facts = read_json(run.precommit)
    parts = facts["dataset"]["mixture"]
    if change == "weight":  # in the settings too
        parts[1]["weight"] = 2.0
        run.config.write_text(run.config.read_text().replace(": 4.0", ": 2.0"))
    elif change == "rows":
        parts[0]["rows"], parts[1]["rows"] = parts[0]["rows"] - 1, parts[1]["rows"] + 1
    else:
        del facts["dataset"]["mixture"]
    write_json(run.precommit, facts)
    assert "batches" in failed_checks(run)


def test_a_verifier_replays_every_step_of_a_mixture(mixed, more):
    inputs = Inputs(data=(str(SUMS), str(more)))
    verdict = verify(mixed[0].root, "L4", Options(inputs=inputs))
    assert verdict.ok, json.dumps([finding.problem for finding in verdict.findings])

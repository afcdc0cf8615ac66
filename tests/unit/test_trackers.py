"""Trackers: a resumed run continues its curves, and one that fails costs a warning, never a run."""

import logging
import sys

import pytest

from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.engines.base import Step
from tunix_rt.errors import ConfigError
from tunix_rt.runs.folder import NOT_OURS, TRACKER_FOLDERS, RunDir
from tunix_rt.train import trackers
from tunix_rt.train.trackers import require_trackers, tracked

CONFIG = RunConfig(training=Training(report_to="tensorboard"))
KEY = "5ecre7" * 7


def step(number):
    return Step(
        step=number, loss=1 / number, lr=0.1, grad_norm=2.0, tokens=64, target_tokens=32, seconds=0.5, peak_bytes=0, batch=""
    )  # fmt: skip


def curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    names = events.Tags()["tensors"]
    return {name: [(one.step, one.tensor_proto.float_val[0]) for one in events.Tensors(name)] for name in names}


def failing(monkeypatch, tmp_path, code):
    """An installation of tensorboard that does `code` when it is imported in the process of the tracker."""
    (tmp_path / "broken" / "tensorboard").mkdir(parents=True)
    (tmp_path / "broken" / "tensorboard" / "__init__.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{':'.join(sys.path)}")


def test_a_resumed_run_continues_its_curves_and_repeated_steps_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    for steps in ((1, 2, 3, 4), (3, 4, 5)):  # killed after step 4, resumed from the checkpoint of step 2
        with tracked(CONFIG, run) as opened:
            opened.heldout(0, 9.0)
            for number in steps:
                opened.step(step(number))
    found = curves(run.root / "tensorboard")
    assert found["train/loss"] == [(number, pytest.approx(1 / number)) for number in range(1, 6)]
    assert found["heldout/loss"] == [(0, 9.0)] and found["train/tokens_per_second"][0] == (1, 128.0)
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert files and not any(KEY.encode() in path.read_bytes() for path in files)
    assert all(NOT_OURS.fullmatch(path.relative_to(run.root).as_posix()) for path in files)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise RuntimeError('no server at token=abcdefgh12345678')", "RuntimeError: no server"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_tracker_that_fails_is_one_warning_without_secrets(tmp_path, monkeypatch, caplog, code, why):
    failing(monkeypatch, tmp_path, code)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    with caplog.at_level(logging.INFO, "tunix_rt"), tracked(CONFIG, run) as opened:
        opened.open[0].process.wait(60)
        for number in range(1, 9):
            opened.step(step(number))
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert why in warning.getMessage() and "the run continues" in warning.getMessage()


def test_a_tracker_that_does_not_read_never_holds_a_step(tmp_path, monkeypatch, caplog):
    failing(monkeypatch, tmp_path, "import time; time.sleep(20)")
    monkeypatch.setattr(trackers, "MOST_WAITING_BYTES", 2**17)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    with tracked(CONFIG, run) as opened:
        for number in range(1, 2_000):
            opened.step(step(number))
    assert [record.getMessage() for record in caplog.records if "has not read" in record.getMessage()]


def test_a_tracker_that_is_not_installed_is_refused_and_names_its_extra(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="trackio is not installed") as caught:
        require_trackers(RunConfig(training=Training(report_to=["trackio", "wandb"])))
    assert "tunix-rt[trackio]" in caught.value.fix


def test_trackers_are_one_name_or_a_list_and_have_folders_that_are_not_part_of_a_run():
    read = {"none": (), "wandb": ("wandb",)}
    assert {value: Training(report_to=value).trackers for value in read} == read
    assert Training(report_to=["wandb", "none", "mlflow", "wandb"]).trackers == ("wandb", "mlflow")
    assert Training(report_to=[]).report_to == "none" and Training(report_to=["wandb"]).report_to == "wandb"
    assert all(NOT_OURS.fullmatch(f"{folder}/x") for folder in TRACKER_FOLDERS.values())

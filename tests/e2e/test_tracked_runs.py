"""A run and its resume in four trackers, read back by the library of each."""

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys

import pytest

from tests.program import tunix_rt
from tunix_rt.evidence.examine import require_verified
from tunix_rt.runs.folder import RunDir, list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
KEY = "5ecre7" * 7


@pytest.fixture(scope="module", params=NAMES)
def tracked_run(request, tmp_path_factory):
    """Stopped after step 5, its newest checkpoint lost, resumed from step 4: step 5 is repeated."""
    pytest.importorskip(request.param)
    run = RunDir(tmp_path_factory.mktemp(request.param) / "run")
    settings = {
        "training.report_to": f"[{request.param}]", "training.eval_steps": 2, "training.save_steps": 2, "data.max_length": 128,
        "data.on_overflow": "drop", "training.per_device_train_batch_size": 1, "evaluation.max_new_tokens": 4,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = ["train", "smoke_tiny", "--output", run.root, "--device", "cpu", "--max-steps", 6, *words]
    keys = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "HF_TOKEN": KEY, "MLFLOW_TRACKING_TOKEN": KEY}
    first = tunix_rt(*command, "--stop-after", 5, **keys)
    assert first.returncode == 7, first.stderr
    shutil.rmtree(list_checkpoints(run.checkpoints)[0])
    second = tunix_rt(*command, "--resume", **keys)
    assert second.returncode == 0, second.stderr
    assert "Resumed from step-000004" in second.stderr and "has failed" not in first.stderr + second.stderr
    return request.param, run


def read_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.root / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    for name in events.Tags()["tensors"]:
        yield from ((name, one.step, one.tensor_proto.float_val[0]) for one in events.Tensors(name))


def read_wandb(run):
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(run.root.glob("wandb/offline-run-*/*.wandb")):
        for data in records_of(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                yield from ((name, row["step"], value) for name, value in row.items() if "/" in name)


def records_of(data):
    """The records of a LevelDB log, in blocks of 32 KiB behind a header of 7 bytes."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_mlflow(run):
    from mlflow import MlflowClient

    folder = run.root / "mlruns"
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "tunix-rt"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["training.max_steps"] == "6"
    for name in found.data.metrics:
        yield from ((name, one.step, one.value) for one in client.get_metric_history(found.info.run_id, name))


def read_trackio(run):
    script = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "(name,) = S.get_runs('tunix-rt')\nprint(json.dumps(S.get_logs('tunix-rt', name)))"
    )
    where = {**os.environ, "TRACKIO_DIR": str(run.root / "trackio")}
    done = subprocess.run([sys.executable, "-c", script], env=where, capture_output=True, text=True, check=True)
    for row in json.loads(done.stdout.splitlines()[-1]):
        yield from ((name, row["step"], value) for name, value in row.items() if "/" in name)


def test_a_run_and_its_resume_are_one_curve_for_the_library_of_the_tracker(tracked_run):
    name, run = tracked_run
    found = list(globals()[f"read_{name}"](run))
    curves = {key: sorted((step, value) for other, step, value in found if other == key) for key, _, _ in found}
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    heldout = {line["step"]: line["loss"] for line in map(json.loads, run.heldout.read_text().splitlines())}
    for key in ("loss", "lr", "grad_norm"):
        assert curves[f"train/{key}"] == [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in steps]
    assert curves["heldout/loss"] == [(step, pytest.approx(heldout[step], rel=1e-6)) for step in (0, 2, 4, 6)]
    assert [step for step, _ in curves["evaluation/accuracy"]] == [0, 6]


def test_no_key_is_in_a_file_of_the_run_and_the_run_still_verifies(tracked_run):
    _, run = tracked_run
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    for path in files:
        if path.suffix == ".db":
            assert KEY not in "\n".join(sqlite3.connect(path).iterdump())
    require_verified(run.root)


def test_a_run_with_a_tracker_that_fails_is_complete(tmp_path):
    broken = tmp_path / "broken" / "tensorboard"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('the server is gone')")
    done = tunix_rt(
        "train", "smoke_tiny", "--output", tmp_path / "run", "--device", "cpu", "--max-steps", 3, "--set",
        "training.report_to=tensorboard", PYTHONPATH=f"{broken.parent}:{':'.join(sys.path)}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "training_log.txt").read_text()
    assert log.count("has failed and gets no more metrics") == 1 and "the server is gone" in log

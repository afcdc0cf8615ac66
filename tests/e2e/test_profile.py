"""`tunix-rt train --profile N`, as a user sees it."""

import gzip
import json
import math

import pytest

from tests.program import in_process, refused, tunix_rt

SMOKE = ["smoke_tiny", "--device", "cpu", "--set", "evaluation.enabled=false"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "profiled"
    done = in_process("train", *SMOKE, "--output", folder, "--profile", 2)
    assert done.returncode == 0, done.stderr
    return done, folder


def losses(folder):
    return [json.loads(line)["loss_hex"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow  # that parts sum to the time of recorded steps is held in tests/invariant too
def test_a_profile_is_a_trace_and_a_table_that_sums_to_the_step(profiled):
    done, folder = profiled
    with gzip.open(folder / "profile" / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"tunix-rt: step", "aten::mm"} <= names
    said = json.loads((folder / "profile" / "profile.json").read_text())
    assert (said["first_step"], said["steps"], said["steps_before"]) == (5, 2, 4), "step 3 is saved, and 4 warms up"
    assert math.fsum(part["milliseconds"] for part in said["parts"]) == pytest.approx(
        said["step_milliseconds"], rel=0.01
    )
    assert math.fsum(part["share"] for part in said["parts"]) == pytest.approx(1)
    assert 0 < said["share_of_dense_product"] < 1.5 and said["flops"]["executed"] >= said["flops"]["model"] > 0
    log = (folder / "training_log.txt").read_text()
    for part in said["parts"]:
        assert part["name"] in log and part["name"] in (folder / "profile" / "profile.md").read_text()
    assert "trace.json.gz" in log and "ui.perfetto.dev" in log and "profile.md" in done.stdout
    assert "USDT" not in done.stderr, "torch's own words about it are kept off the terminal"


@pytest.mark.slow  # that recorded steps are the same steps is held in tests/invariant too
def test_a_profile_changes_no_result_and_the_folder_verifies(profiled, tmp_path):
    done = tunix_rt("train", *SMOKE, "--output", tmp_path / "plain", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert losses(profiled[1]) == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    verified = tunix_rt("evidence", "verify", profiled[1])
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_more_steps_than_the_run_has_are_refused_before_the_model_is_loaded(tmp_path):
    words = refused(in_process("train", *SMOKE, "--output", tmp_path / "run", "--profile", 7), 2)
    assert "--profile 7: more steps than are taken; the run has 6" in words and "--profile 6 or less" in words
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert in_process("train", *SMOKE, "--output", tmp_path / "other", "--profile", 51).returncode == 2

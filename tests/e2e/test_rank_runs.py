"""A run on two ranks: the pipeline in rank 0, the other at its orders; what they leave, and how they end."""

import json
import os
import signal
import socket
import time

import pytest

from tests.forging.ranks import ended_ranks, start_ranks
from tests.program import in_process
from tunix_rt.errors import ConfigError, StorageError
from tunix_rt.ranks import World
from tunix_rt.runs.record import RunRecord

STEPS = 4
RUN = [
    "train", "demo", "--device", "cpu", "--max-steps", str(STEPS), "--set", "training.save_steps=2", "--set",
    "evaluation.max_new_tokens=8", "--set", "training.compile=false",
]  # fmt: skip


def rows(count):
    return ["--set", f"training.per_device_train_batch_size={count}"]


@pytest.mark.slow
def test_two_ranks_leave_a_run_that_one_device_gives_too(tmp_path):
    """Losses, held-out losses and answers; the bundle names both ranks and verifies."""
    both, alone = tmp_path / "both", tmp_path / "alone"
    command = [*RUN, "--output", str(both), *rows(2)]
    assert [code for code, _ in ended_ranks(start_ranks(tmp_path, command, command), tmp_path)] == [0, 0]
    ended_ranks(start_ranks(tmp_path, [*RUN, "--output", str(alone), *rows(4)]), tmp_path)
    found, expected = RunRecord(both), RunRecord(alone)
    for name in ("metrics", "heldout"):
        for one, other in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
    for when in ("before", "after"):
        assert [one.output for one in found.predictions(when)] == [one.output for one in expected.predictions(when)]
    [process] = found.processes
    assert [one.rank for one in process.ranks] == [0, 1] and all(
        one.peak_bytes > 0 and one.host for one in process.ranks
    )
    assert found.commitment.batch.devices == 2 and expected.commitment.batch is None
    assert in_process("evidence", "verify", both, "--require", "L1").returncode == 0


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_ranks_with_its_batch_and_with_no_other(tmp_path):
    run, alone = tmp_path / "run", tmp_path / "alone"
    shared = [*RUN, "--set", "evaluation.enabled=false", "--output"]
    command = [*shared, str(run), *rows(2)]
    stopped = ended_ranks(start_ranks(tmp_path, *[[*command, "--stop-after", "2"]] * 2), tmp_path)
    assert [code for code, _ in stopped] == [7, 7]
    ((code, said),) = ended_ranks(start_ranks(tmp_path, [*shared, str(run), *rows(4), "--resume"]), tmp_path)
    assert code == 2 and "per_device_train_batch_size" in said and "  fix: " in said
    ((code, said),) = ended_ranks(start_ranks(tmp_path, [*command, "--resume"]), tmp_path)
    assert code == 0 and "4 rows, as on the 2 device(s) the run began on; now on 1" in said
    ended_ranks(start_ranks(tmp_path, [*shared, str(alone), *rows(4)]), tmp_path)
    found, expected = RunRecord(run).metrics, RunRecord(alone).metrics
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=1e-5)


def test_ranks_with_two_configurations_are_refused_with_the_setting_that_differs(tmp_path):
    commands = [[*RUN, "--output", str(tmp_path / "run"), "--set", f"training.seed={seed}"] for seed in (1, 2)]
    (code, said), (other, _) = ended_ranks(start_ranks(tmp_path, *commands), tmp_path)
    assert code == other == 2 and "rank 1 has training.seed: 2, rank 0 has 1" in said and "  fix: " in said


@pytest.mark.parametrize(
    "what", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("hangs", signal.SIGSTOP)), signal.SIGKILL]
)
def test_a_rank_that_hangs_is_stopped_or_killed_is_named_with_its_host_and_step(tmp_path, what):
    command = [
        *RUN[:5],
        "500",
        *RUN[6:],
        "--output",
        str(tmp_path / "run"),
        *rows(1),
        "--set",
        "evaluation.enabled=false",
    ]
    hangs = {"HANGS_AT": "4"} if what == "hangs" else {}
    processes = start_ranks(tmp_path, command, command, TUNIX_RT_RANK_TIMEOUT="30", **hangs)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2) and time.monotonic() < until:
        time.sleep(0.05)
    if not hangs:
        os.kill(processes[1].pid, what)
    processes[0].join(300)
    processes[1].kill()
    (code, said), _ = ended_ranks(processes, tmp_path)
    assert code == 1
    assert f"rank 1 on {World().host} (pid {processes[1].pid}) " in said
    assert "step " in said.split("rank 1 on")[0].splitlines()[-1] or "checkpoint" in said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed" and "rank 1" in result["reason"]


def test_a_taken_port_is_named_with_the_variable_to_set(monkeypatch):
    from tunix_rt.engines.torch.orders import open_store

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match=rf"MASTER_PORT: 127.0.0.1:{port} is in use"):
            open_store(World(rank=0, size=2))


def test_an_output_that_is_not_shared_is_refused(monkeypatch, tmp_path):
    from tunix_rt.train import ranks

    monkeypatch.setattr(ranks, "VISIBLE_SECONDS", 0.5)
    (tmp_path / ".shared.staged").write_text("of another run")
    with pytest.raises(StorageError, match="does not appear here"):
        ranks._require_shared(tmp_path, "token")

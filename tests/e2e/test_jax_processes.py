"""The JAX engine on two processes of four virtual devices: the steps of one process of eight, and every way to lose one of them.

Each process compiles: a minute here, so all of it is of the long series."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import ROOT, environment

pytestmark = pytest.mark.slow

SETTINGS = {
    "data.max_length": 64, "data.on_overflow": "drop", "evaluation.enabled": "false", "training.per_device_train_batch_size": 1,
    "training.save_steps": 2, "training.logging_steps": 1,
}  # fmt: skip
SECONDS = 1800
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SLEEPS = """
import time
from tunix_rt.cli.main import main
from tunix_rt.engines.jax import follow
step = follow.ORDERS["step"]
def sleeps(run, order, arrays):
    time.sleep(600 if order["step"] == 4 else 0)
    step(run, order, arrays)
follow.ORDERS = {**follow.ORDERS, "step": sleeps}
main()
"""
"""A follower that hangs before its fourth step, and still reports."""


def process(
    run: Path, *words: object, rank: int | None, devices: int = 4, port: int = 0, program: str = "", **variables: str
) -> subprocess.Popen:
    """One process of a run, in Python of its own if a `program` is given."""
    named = [
        "--model",
        "tiny-gemma3",
        "--data",
        "dev-reasoning-v2",
        "--device",
        "cpu",
        "--backend",
        "jax",
        "--max-steps",
        6,
    ]
    named += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    started = ["-c", program] if program else ["-m", "tunix_rt"]
    place = {} if rank is None else {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    flags = f"--xla_force_host_platform_device_count={devices} {FAST}"
    log = run.with_name(f"{run.name}.{rank}.log").open("w")
    with log:
        return subprocess.Popen(
            [sys.executable, *started, "train", *map(str, [*named, "--output", run, *words])], cwd=ROOT, stdout=log,
            stderr=subprocess.STDOUT, env=environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, **place, **variables),
        )  # fmt: skip


@contextlib.contextmanager
def two(run: Path, *words: object, follower: str = "", **variables: str) -> Iterator[list[subprocess.Popen]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    programs = ("", follower)
    both = [process(run, *words, rank=rank, port=port, program=programs[rank], **variables) for rank in (0, 1)]
    try:
        yield both
    finally:
        for one in both:
            one.kill()
            one.wait()


def lines_of(run: Path) -> list[dict]:
    metrics = run / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def losses_of(run: Path) -> list[str]:
    return [line["loss_hex"] for line in lines_of(run)]


def wait_for_step(run: Path, step: int, both: list[subprocess.Popen]) -> None:
    until = time.monotonic() + SECONDS
    while len(lines_of(run)) < step:
        assert time.monotonic() < until and both[0].poll() is None, log_of(run)
        time.sleep(0.05)


def codes(both: list[subprocess.Popen], seconds: float = SECONDS) -> list[int]:
    return [one.wait(timeout=seconds) for one in both]


def log_of(run: Path, rank: int = 0) -> str:
    return run.with_name(f"{run.name}.{rank}.log").read_text()[-3000:]


FIVE = ("--stop-after", 5)
"""The sixth step, the final model and its checks take as long as the rest."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("jax") / "two"
    with two(run, *FIVE) as both:
        assert codes(both) == [7, 7], log_of(run)
    return run


def test_two_processes_take_the_steps_of_one_with_all_devices_and_either_continues_them(undisturbed, tmp_path):
    one = tmp_path / "one"
    assert process(one, *FIVE, rank=None, devices=8).wait(timeout=SECONDS) == 7
    pairs = list(zip(lines_of(undisturbed), lines_of(one), strict=True))
    assert len(pairs) == 5
    for ours, theirs in pairs:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert (ours["batch"], ours["target_tokens"]) == (theirs["batch"], theirs["target_tokens"])
    held = [json.loads((run / "eval/heldout.jsonl").read_text())["loss"] for run in (undisturbed, one)]
    assert held[0] == pytest.approx(held[1], rel=1e-6)
    names = {path.name for path in (undisturbed / "checkpoints/step-000004").iterdir()}
    assert {"model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"} <= names
    alone = tmp_path / "alone"
    shutil.copytree(undisturbed, alone)
    assert process(alone, "--resume", rank=None, devices=8).wait(timeout=SECONDS) == 0, log_of(alone, None)
    with two(one, "--resume") as both:  # completed and verified
        assert codes(both) == [0, 0], log_of(one)
    assert lines_of(alone)[5]["loss"] == pytest.approx(lines_of(one)[5]["loss"], rel=1e-6)


def test_a_killed_process_ends_the_run_by_name_and_the_same_command_continues_it(undisturbed, tmp_path):
    run = tmp_path / "run"
    with two(run, *FIVE) as both:
        wait_for_step(run, 3, both)
        both[1].send_signal(signal.SIGKILL)
        assert codes(both, 120) == [1, -9], log_of(run)
    result = json.loads((run / "result.json").read_text())
    assert result["exit_code"] == 1 and f"pid {both[1].pid}) has ended" in result["reason"], result["reason"]
    with two(run, *FIVE, "--resume") as both:
        assert codes(both) == [7, 7], log_of(run)
    assert losses_of(run) == losses_of(undisturbed)
    for name in ("model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"):
        path = f"checkpoints/step-000005/{name}"
        assert (run / path).read_bytes() == (undisturbed / path).read_bytes()


def test_a_killed_lead_ends_the_others(tmp_path):
    run = tmp_path / "run"
    with two(run, *FIVE) as both:
        wait_for_step(run, 2, both)
        both[0].send_signal(signal.SIGKILL)
        assert codes(both, 120)[1] in (1, -signal.SIGABRT), log_of(run, 1)  # jax aborts as soon as its service is gone
    words = log_of(run, 1)
    assert "process 0 has ended" in words or "JAX distributed service" in words, words


@pytest.mark.parametrize(("follower", "words"), [(SLEEPS, "a process hangs: process 1"), ("", "has been silent for")])
def test_a_process_that_hangs_or_is_stopped_is_named(tmp_path, follower, words):
    run = tmp_path / "run"
    with two(run, *FIVE, follower=follower, TUNIX_RT_RANK_TIMEOUT="20") as both:
        wait_for_step(run, 3, both)
        if not follower:
            both[1].send_signal(signal.SIGSTOP)
        assert both[0].wait(timeout=120) == 1, log_of(run)
    reason = json.loads((run / "result.json").read_text())["reason"]
    assert words in reason and f"pid {both[1].pid})" in reason, reason


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_process_stops_all_after_one_step_with_one_checkpoint(undisturbed, tmp_path, rank):
    run = tmp_path / "run"
    with two(run, *FIVE) as both:
        wait_for_step(run, 1, both)
        os.kill(both[rank].pid, signal.SIGTERM)
        assert codes(both, 120) == [7, 7], log_of(run)
    done = len(lines_of(run))
    newest = max(path.name for path in (run / "checkpoints").iterdir())
    assert newest == f"step-{done:06d}" and losses_of(run) == losses_of(undisturbed)[:done]


def test_processes_with_two_configurations_are_refused(tmp_path):
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    both = [process(run, "--set", f"training.seed={rank}", rank=rank, port=port) for rank in (0, 1)]
    assert codes(both) == [2, 2], log_of(run)
    assert "another configuration than process 0" in log_of(run), log_of(run)

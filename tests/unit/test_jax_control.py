"""The processes of a JAX run, over loopback: what is announced arrives, and a process that ends, stops or hangs is named."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.program import environment
from tunix_rt.doctor.agreement import HostReport, refuse_disagreement
from tunix_rt.engines.jax import control
from tunix_rt.engines.jax.channel import Channel
from tunix_rt.engines.jax.control import Doing, Lead, hang
from tunix_rt.errors import ConfigError, HardwareError, TunixError

REPORT = {"rank": 1, "host": "node2", "pid": 4711}


def free_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", server.getsockname()[1]


@contextlib.contextmanager
def connected(**acts: Callable[..., None]) -> Iterator[tuple[Lead, Channel]]:
    """A lead and the connection of its only follower."""
    address, made = free_address(), list[Channel]()

    def follow() -> None:
        while not made:
            with contextlib.suppress(ConnectionRefusedError):
                made.append(Channel(socket.create_connection(address)))
        made[0].send("report", report=REPORT)

    lead = Lead(**{"stop": lambda name: None, "end": lambda error: None} | acts)
    following = threading.Thread(target=follow)
    following.start()
    lead.connect(address, 2, lambda: None)
    following.join()
    try:
        yield lead, made[0]
    finally:
        made[0].close()
        lead.finish(exit_code=0, problem="")


def next_of(kind: str, follower: Channel):
    while True:
        message, arrays = follower.receive()
        if message["kind"] == kind:
            return message, arrays


def failure_of(lead: Lead) -> TunixError:
    until = time.monotonic() + 10
    while lead.failure is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return lead.failure


def test_an_announcement_arrives_with_its_arrays_bit_for_bit_and_the_answers_are_collected():
    arrays = {"ids": np.arange(6, dtype=np.int32).reshape(2, 3), "weights": np.array([[np.nan, -0.0]], np.float32)}
    with connected() as (lead, follower):
        number = lead.announce("step", arrays, step=7, rate=0.1)
        message, got = next_of("order", follower)
        assert (message["named"], message["step"], message["number"], message["rate"]) == ("step 7", 7, number, 0.1)
        assert all(
            got[name].tobytes() == array.tobytes() and got[name].shape == array.shape for name, array in arrays.items()
        )
        follower.send("wrote", number=number, files={"a": {"sha256": "0", "bytes": 1}})
        assert lead.collect(number) == {"a": {"sha256": "0", "bytes": 1}}


STRANGERS = (
    "GET / HTTP/1.1", [], {}, {"arrays": [], "report": 3}, {"arrays": [["a", "none", [1]]], "report": REPORT},
    {"arrays": [], "report": {"rank": [1], "host": "", "pid": 1}}, {"arrays": [], "report": {"rank": 1}},
)  # fmt: skip


def test_a_program_that_is_no_process_of_the_run_is_disconnected_soon(monkeypatch):
    monkeypatch.setattr(control, "GREETING_SECONDS", 0.2)
    address, lead = free_address(), Lead(stop=lambda name: None, end=lambda error: None)
    silent, made = socket.socket(), list[Channel]()

    def visit() -> None:
        while silent.connect_ex(address):
            time.sleep(0.01)
        for one in STRANGERS:
            with socket.create_connection(address) as stranger:
                head = one if isinstance(one, str) else json.dumps(one)
                stranger.sendall(struct.pack("<QQ", len(head), 0) + head.encode())
        made.append(Channel(socket.create_connection(address)))
        made[0].send("report", report=REPORT)

    visiting = threading.Thread(target=visit)
    visiting.start()
    began = time.monotonic()
    lead.connect(address, 2, lambda: None)
    assert [peer.report for peer in lead.peers] == [REPORT] and time.monotonic() - began < 30
    visiting.join()
    for one in (silent, made[0]):
        one.close()
    lead.finish(exit_code=0, problem="")


def test_a_process_that_ends_is_named_with_the_step_and_ends_the_computation():
    with connected() as (lead, follower), pytest.raises(TunixError) as caught, lead.computing("step", step=3):
        follower.close()
        raise RuntimeError("a collective was lost")
    assert caught.value.problem == "process 1 (node2, pid 4711) has ended during step 3"
    assert caught.value.exit_code == 1 and "--resume" in caught.value.fix


def test_all_begin_a_computation_once_each_is_ready():
    done = list[str]()
    with connected() as (lead, follower):

        def follow() -> None:
            message, _ = next_of("order", follower)
            done.append("the follower is ready")
            follower.send("wrote", number=message["number"], files={})
            assert next_of("go", follower)[0]["number"] == message["number"]
            done.append("the follower begins")

        following = threading.Thread(target=follow)
        following.start()
        with lead.computing("gather", prepare=lambda: time.sleep(0.1)):
            following.join(timeout=10)
    assert done == ["the follower is ready", "the follower begins"]


def test_a_silent_process_is_named_and_the_waiting_run_is_ended_by_force(monkeypatch):
    monkeypatch.setenv("TUNIX_RT_RANK_TIMEOUT", "0.3")
    monkeypatch.setattr(control, "COURTESY_SECONDS", 0.1)
    ended = list[TunixError]()
    with connected(end=ended.append) as (lead, _):
        lead.announce("step", step=3)
        error = failure_of(lead)
        assert "process 1 (node2, pid 4711) has been silent" in error.problem
        until = time.monotonic() + 10
        while not ended:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert ended == [error]


def test_a_signal_and_a_failure_of_a_follower_reach_the_lead():
    names = list[str]()
    with connected(stop=names.append) as (lead, follower):
        follower.send("signal", name="SIGTERM")
        follower.send("failed", problem="no such model", fix="fetch it", exit_code=3)
        error = failure_of(lead)
        assert names == ["SIGTERM"]
        assert (error.problem, error.fix, error.exit_code) == (
            "process 1 (node2, pid 4711): no such model", "fetch it", 3,
        )  # fmt: skip
        with pytest.raises(TunixError, match="no such model"):
            lead.announce("step", step=4)


LEAD, STEP = Doing(number=9, what="step 5", entered=True, since=100.0), Doing(number=9, what="step 5", entered=True)


@pytest.mark.parametrize(
    ("peer", "seconds", "problem"),
    [
        (STEP, 500, ""),
        (STEP, 601, "all processes are in step 5"),
        (replace(STEP, entered=False), 59, ""),
        (replace(STEP, entered=False), 61, "a process hangs: node2 is in step 5, while the others wait in step 5"),
        (replace(STEP, number=8, what="step 4"), 61, "a process hangs: node2 is in step 4"),
        (replace(STEP, number=8, what="restore"), 61, ""),  # it may read for long
        (replace(STEP, number=8, what="restore"), 1801, "a process hangs: node2 is in restore"),
    ],
)
def test_a_process_hangs_when_the_others_wait_for_it_longer_than_steps_take(peer, seconds, problem):
    found = hang(LEAD, {"node2": peer}, now=100.0 + seconds, slowest=1.0)
    assert found.startswith(problem) if problem else not found
    if peer == replace(STEP, entered=False):  # slow steps have more patience
        assert not hang(LEAD, {"node2": peer}, now=100.0 + seconds, slowest=10.0)


def test_a_follower_ends_with_the_lead_and_its_exit_code():
    """In processes of their own: it ends itself, whatever its main thread does."""
    script = (
        "import sys, time; from tunix_rt.engines.jax import follower as module\n"
        "module.COURTESY_SECONDS = 0.1; Follower = module.Follower\n"
        "follower = Follower(print); follower.connect(('127.0.0.1', int(sys.argv[1])), {'rank': 1, 'host': 'a', 'pid': 1})\n"
        "for order in follower.orders(): time.sleep(60)"
    )
    for ending, code, words in (
        (None, 1, "process 0 has ended"),
        ({"exit_code": 7, "problem": "SIGTERM"}, 7, "ended the run"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-c", script, str(server.getsockname()[1])]
            process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
            server.settimeout(30)
            lead = Channel(server.accept()[0])
            assert lead.receive()[0]["report"]["rank"] == 1
            lead.send("order", what="step", named="step 1", number=1)
            if ending:
                lead.send("end", leave=False, **ending)
            else:
                lead.close()
            assert words in process.communicate(timeout=30)[1] and process.returncode == code
            lead.close()


SAME = HostReport(
    rank=0, host="node1", pid=1, config_sha256="c", device="cuda", kind="L40S", count=4, driver="580", versions={"jax": "0.10.2"}
)  # fmt: skip


@pytest.mark.parametrize(
    ("other", "kind", "words"),
    [
        ({"config_sha256": "d"}, ConfigError, "another configuration than process 0 (node1)"),
        ({"versions": {"jax": "0.10.1"}}, HardwareError, "jax 0.10.1 instead of 0.10.2"),
        ({"versions": {}}, HardwareError, "jax not installed instead of 0.10.2"),
        ({"driver": "570"}, HardwareError, "has NVIDIA driver 570, process 0 (node1) has 580"),
        ({"kind": "L4"}, HardwareError, "4 x L4 (cuda), process 0 (node1) has 4 x L40S"),
        ({"count": 2}, HardwareError, "2 x L40S"),
    ],
)
def test_processes_that_differ_are_refused_with_what_differs(other, kind, words):
    one = replace(SAME, rank=1, host="node2")
    refuse_disagreement([SAME, one])
    with pytest.raises(kind, match="node2") as caught:
        refuse_disagreement([SAME, one, replace(one, rank=2, **other)])
    assert words in caught.value.problem and caught.value.fix
    assert os.path.exists(f"docs/doctor/{getattr(caught.value, 'cause', '') or 'README'}.md")

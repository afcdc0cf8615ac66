"""`tunix-rt doctor --log`: the cause in what runs of this program end with, on ranks of PyTorch and processes of JAX."""

import json
import re
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.program import ROOT, in_process
from tunix_rt.doctor.agreement import HostReport, refuse_disagreement
from tunix_rt.doctor.facts import Ask, Interface, facts_from_json
from tunix_rt.doctor.process_checks import SIGNS, interfaces_exist, known_of
from tunix_rt.engines.jax.control import Doing, hang
from tunix_rt.errors import TunixError
from tunix_rt.ranks import NAMES, TIMEOUT, World

torch = pytest.importorskip("torch")


def endings_of_ranks(monkeypatch):
    """Cause and text of the errors of the PyTorch engine: a watch that hears of rank 1 no more, and a rank without a GPU."""
    from tunix_rt.engines.torch import lead, orders, watch

    errors = list[TunixError]()
    watching = watch.Watch(torch.distributed.HashStore(), World(size=2), on_lost=errors.append)
    monkeypatch.setenv(TIMEOUT, "0.2")
    monkeypatch.setattr(watch.os, "_exit", lambda code: len(errors) >= 4 and watching.end())
    monkeypatch.setattr(watch.logging, "shutdown", lambda: None)
    watching._others[1].beat = {"host": "node2", "pid": 4711, "at": (3, 7)}
    watching._what, watching._at, watching._answering = "step 4", (3, 8), {1}
    watching._judge()
    yield from (("process-hangs", error.problem) for error in errors)
    yield "process-lost", watching.lost(1, "was lost").problem
    watching._others[1].beat = {}
    yield "process-lost", watching.lost(1, "has ended").problem
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TunixError) as refusal:
        lead.start_group("cuda", SimpleNamespace(world=World(rank=1, size=2, local_rank=1)))
    yield "gpu-duplicate", refusal.value.problem
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", str(taken.getsockname()[1]))
        for name, value in zip(NAMES, ("0", "2", "0", *address), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(TunixError) as refusal:
            orders.open_store(World(rank=0, size=2))
    yield "port-taken", refusal.value.problem


def endings_of_processes():
    """The same of the JAX engine."""
    lead, one = (
        Doing(number=3, what="step 3", entered=True),
        {"process 1 (node2, pid 4711)": Doing(number=2, what="step 2")},
    )
    yield "process-hangs", hang(lead, one, now=1e6, slowest=1.0)
    first = HostReport(
        rank=0, host="node1", pid=1, config_sha256="", device="cuda", kind="H100", count=8, driver="580.1", versions={"jax": "1"}
    )  # fmt: skip
    for cause, other in (("mixed-versions", {"versions": {"jax": "2"}}), ("mixed-drivers", {"driver": "570.2"})):
        with pytest.raises(TunixError) as refusal:
            refuse_disagreement([first, replace(first, rank=1, **other)])
        yield cause, refusal.value.problem


def test_the_doctor_knows_the_cause_in_every_ending_of_a_run_on_several_processes(monkeypatch):
    endings = [*endings_of_ranks(monkeypatch), *endings_of_processes()]
    unknown = [(cause, text) for cause, text in endings if not known_of([text]) or not re.search(SIGNS[cause], text)]
    assert unknown == [] and len({text for _, text in endings}) >= 10


@pytest.mark.parametrize(
    ("variable", "value", "verdict"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", "pass"), ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "ib,=eth0", "fail"), ("NCCL_SOCKET_IFNAME", "^docker,lo", "pass"),
        ("NCCL_SOCKET_IFNAME", "^eth0,lo", "fail"), ("GLOO_SOCKET_IFNAME", "eth0", "pass"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"), ("GLOO_SOCKET_IFNAME", "eth0,ib0", "fail"),
    ],
)  # fmt: skip
def test_an_interface_is_named_as_nccl_and_gloo_read_their_variables(variable, value, verdict):
    facts = facts_from_json(json.loads((ROOT / "tests/facts/nccl-interface-unknown.json").read_text())["facts"])
    up = (Interface(name="lo", loopback=True), Interface(name="eth0"), Interface(name="ib0", up=False))
    facts = replace(facts, interfaces=up, environment={variable: value, "WORLD_SIZE": "2"}, log=())
    assert interfaces_exist(facts, Ask(device="cuda")).verdict == verdict


def test_the_cause_in_a_log_is_printed_with_its_line_and_exit_4(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(b"step 3 loss 1.2\n\xff\nerror: step 4: rank 1 on node2 (pid 4711) was lost\n  fix: run it again\n")
    done = in_process("doctor", "--device", "cpu", "--log", log, "--json")
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["cause"]) == (4, "process-lost"), done.stdout
    assert "rank 1 on node2 (pid 4711) was lost" in json.dumps(verdict["checks"])
    log.write_text("step 3 loss 1.2\n")
    assert in_process("doctor", "--device", "cpu", "--log", log).returncode == 0

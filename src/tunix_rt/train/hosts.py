"""A run on several processes of an engine: the first one leads, runs the pipeline and owns the run folder; the others follow."""

import importlib.metadata
import logging
import os
import platform
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor import selection
from tunix_rt.doctor.agreement import HostReport, refuse_disagreement
from tunix_rt.doctor.facts import Ask, Facts
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import leading, load_follower
from tunix_rt.engines.jax.control import Lead, address_of_lead
from tunix_rt.engines.jax.follower import Follower
from tunix_rt.errors import TunixError
from tunix_rt.progress import phase
from tunix_rt.ranks import World, world
from tunix_rt.train.commitment import config_hash
from tunix_rt.train.context import find_model
from tunix_rt.train.device import memory_share
from tunix_rt.train.preemption import Preemption

logger = logging.getLogger(__name__)

PACKAGES = ("tunix-rt", "jax", "jaxlib", "numpy")


def follows(config: RunConfig) -> bool:
    """Whether this process computes what another one announces."""
    return CAPABILITIES[config.training.backend].multi_process and not world().is_lead


@contextmanager
def all_hosts(config: RunConfig, stop: Preemption, facts: Facts, choice: DeviceChoice) -> Iterator[DeviceChoice]:
    """`choice` with the devices of all processes, which end with this block."""
    own = world()
    if own.size == 1 or not CAPABILITIES[config.training.backend].multi_process:
        yield choice
        return
    lead = Lead(stop=stop.request, end=stop.abandon)
    exit_code, problem = 1, "a defect, see the log of process 0"
    stop.on_forced_exit.append(lambda error: lead.finish(exit_code=error.exit_code, problem=error.problem))
    try:
        with phase("wait for the other processes"):
            check = partial(stop.check, stop.saved_state(), starting=True)
            lead.connect(address_of_lead(), own.size, check)
        reports = [report_of(own, config, facts, choice), *(HostReport(**peer.report) for peer in lead.peers)]
        refuse_disagreement(reports)
        for report in reports:
            logger.info("%s: %d x %s", report.name, report.count, report.kind)
        with leading(config.training.backend, lead):
            yield replace(choice, count=choice.count * own.size)
        exit_code, problem = 0, ""
    except TunixError as error:
        exit_code, problem = error.exit_code, error.problem
        raise
    finally:
        stop.on_forced_exit.pop()
        lead.finish(exit_code=exit_code, problem=problem)


def report_of(own: World, config: RunConfig, facts: Facts, choice: DeviceChoice) -> HostReport:
    """Steps may differ: process 0 decides how many there are."""
    training = config.training.model_copy(update={"max_steps": None})
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return HostReport(
        rank=own.rank, host=socket.gethostname(), pid=os.getpid(), device=choice.device,
        config_sha256=config_hash(config.model_copy(update={"training": training})), kind=choice.kind, count=choice.count,
        driver=facts.nvidia.driver_version, versions=versions,
    )  # fmt: skip


def follow(config: RunConfig) -> None:
    """Compute what process 0 announces, until it ends the run. Its exit code is that of this process."""
    own, training = world(), config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    facts = gather_facts(backend=training.backend, device=training.device)
    choice = selection.with_virtual_devices(selection.choose_device(ask, facts), training.backend)
    selection.set_environment(choice.device, training.backend, memory_share=memory_share(training, choice))
    module, (source, _) = load_follower(training.backend), find_model(config)
    with module.computation(own, source) as (follower, compute), _signals_to(follower):
        follower.connect(address_of_lead(), asdict(report_of(own, config, facts, choice)))
        try:
            for order, arrays in follower.orders():
                compute(order, arrays)
        except TunixError as error:
            follower.fail(error)
            raise


@contextmanager
def _signals_to(follower: Follower) -> Iterator[None]:
    """A stop signal to this process stops the run: process 0 saves it, and ends all others."""

    def hand_on(number: int, frame: object) -> None:
        follower.signal(signal.Signals(number).name)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Connections between the processes of a JAX run: process 0, the lead, announces what it computes to all others, the followers,
because a computation over the devices of several processes begins in each of them.

A connection that ends is a process that ended, a silent one a process that is stopped; a follower that reports and does not
begin a computation hangs. jax notices only the first of these, by its heartbeat after 100 s.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tunix_rt.engines.jax.channel import SILENT_SECONDS, Arrays, Channel, Message
from tunix_rt.errors import ConfigError, HardwareError, Preempted, TunixError
from tunix_rt.progress import duration
from tunix_rt.ranks import rank_timeout
from tunix_rt.storage import WrittenFile

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
HANG_SECONDS = 60.0
"""For a process to begin a computation that others wait in; more where steps are slow."""
LONG_SECONDS = 1800.0
"""The same where it may still load, restore or write."""
SLOW_STEPS = 10
CONNECT_SECONDS = 300.0
GREETING_SECONDS = 5.0
"""For the first message of a connection, while which no other one is taken."""
ORDERLY = (0, Preempted.exit_code)
COURTESY_SECONDS = 3.0
"""For the main thread to end by itself, before its process is ended in the middle of a call."""
SEE_LOGS = "its own log has the cause; run the same command with --resume in every process to continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a process does: the number and the name of an announcement, and whether it has begun to compute it."""

    number: int = 0
    what: str = "nothing"
    entered: bool = False
    since: float = 0.0
    """By the clock of the process that keeps this value."""


# --- who hangs --------------------------------------------------------------------------------------------------------


def hang(lead: Doing, peers: Mapping[str, Doing], *, now: float, slowest: float) -> str:
    """Why the computation that the lead is in will not end; empty while it may. Peers are given by name."""
    waited = now - lead.since
    late = {name: one for name, one in peers.items() if (one.number, one.entered) < (lead.number, True)}
    is_step = lead.what.startswith("step") and all(one.what.startswith("step") for one in late.values())
    limit = rank_timeout(max(HANG_SECONDS, SLOW_STEPS * slowest)) if is_step and slowest else LONG_SECONDS
    if not lead.entered or waited <= limit:
        return ""
    if not late:
        problem = f"all processes are in {lead.what} for {duration(waited)}: the network between them does not answer"
        return problem if waited > SLOW_STEPS * limit else ""
    named = ", ".join(f"{name} is in {one.what}" for name, one in late.items())
    return f"a process hangs: {named}, while the others wait in {lead.what} for {duration(waited)}"


# --- the lead ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Peer:
    """A follower, as the lead sees it."""

    rank: int
    channel: Channel
    report: Message
    """What it reported about its host when it connected."""
    doing: Doing = Doing()
    answers: dict[int, Message] = field(default_factory=dict)
    """By number of the announcement: what it wrote."""
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return f"process {self.rank} ({self.report['host']}, pid {self.report['pid']})"


class Lead:
    """Process 0. `stop` is called with the name of a signal that another process received, `end` with the error of a run whose
    main thread waits for a process that is lost."""

    def __init__(self, *, stop: Callable[[str], None], end: Callable[[TunixError], None]) -> None:
        self.peers: list[Peer] = []
        self.leave: Callable[[], None] | None = None
        """Called by all processes together, at the end of a run that no error ends."""
        self.failure: TunixError | None = None
        self._stop, self._end = stop, end
        self._doing, self._slowest = Doing(), 0.0
        self._gate, self._answered = threading.Lock(), threading.Condition()
        self._over = threading.Event()

    def connect(self, address: tuple[str, int], size: int, check: Callable[[], None]) -> None:
        """Wait for all followers. `check` raises once the run must stop."""
        until = time.monotonic() + CONNECT_SECONDS
        with _server(address, size) as server:
            server.settimeout(BEAT_SECONDS)
            while missing := set(range(1, size)) - {peer.rank for peer in self.peers}:
                check()
                if time.monotonic() > until:
                    raise HardwareError(
                        f"{_processes(missing)} of {size} did not connect to {address[0]}:{address[1]} within "
                        f"{duration(CONNECT_SECONDS)}",
                        fix="start the same command in every process, and open the port MASTER_PORT between the hosts",
                    )
                with suppress(TimeoutError):  # none yet
                    if (peer := _greeting(server.accept()[0], missing)) is not None:
                        self.peers.append(peer)
        self.peers.sort(key=lambda peer: peer.rank)
        for peer in self.peers:
            threading.Thread(target=self._listen, args=(peer,), name=f"tunix-rt-{peer.rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="tunix-rt-watch", daemon=True).start()

    # --- announcing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def computing(
        self, what: str, arrays: Arrays | None = None, *, prepare: Callable[[], object] | None = None, **fields: Any
    ) -> Iterator[int]:
        """A computation of all processes, which begin it together once each has done `prepare`: a collective of gloo gives up
        after 30 s. Its number is given; what ends it is explained by the process that is lost."""
        number = self.announce(what, arrays, **fields)
        with self.explained():
            if prepare is not None:
                prepare()
                self.meet(number)
            yield number

    def meet(self, number: int) -> None:
        """Wait until every follower is ready for announcement `number`, and let all begin."""
        self.collect(number)
        self.send_all("go", number=number)

    def announce(self, what: str, arrays: Arrays | None = None, *, step: int | None = None, **fields: Any) -> int:
        with self._gate:
            self.raise_if_failed()
            number = self._doing.number + 1
            named = what if step is None else f"{what} {step}"
            for peer in self.peers:
                self._send(peer, "order", arrays, what=what, named=named, number=number, step=step, **fields)
            self._doing = Doing(number=number, what=named, entered=True, since=time.monotonic())
            return number

    @contextmanager
    def explained(self) -> Iterator[None]:
        """The end of what was announced."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # of jax, when a connection of its collectives is lost
            until = time.monotonic() + COURTESY_SECONDS
            while self.failure is None and time.monotonic() < until and not isinstance(error, TunixError):
                time.sleep(0.05)
            self.raise_if_failed(error)
            raise
        took = time.monotonic() - self._doing.since
        if self._doing.entered and self._doing.what.startswith("step"):
            self._slowest = max(self._slowest, took)
        self._doing = Doing(number=self._doing.number)

    def send_all(self, kind: str, **fields: Any) -> None:
        for peer in self.peers:
            self._send(peer, kind, **fields)

    def collect(self, number: int) -> dict[str, WrittenFile]:
        """The files that the followers wrote for announcement `number`, once all have."""
        written: dict[str, WrittenFile] = {}
        with self._answered:
            while any(number not in peer.answers for peer in self.peers):
                self.raise_if_failed()
                self._answered.wait(BEAT_SECONDS)
            for peer in self.peers:
                written |= peer.answers.pop(number)["files"]
        return written

    def raise_if_failed(self, cause: BaseException | None = None) -> None:
        if self.failure is not None:
            raise self.failure from cause

    def finish(self, *, exit_code: int, problem: str) -> None:
        """End the followers, and wait for them: without the lead, jax aborts them."""
        together = self.leave if self.failure is None and exit_code in ORDERLY else None
        self._over.set()
        for peer in self.peers:
            try:
                peer.channel.send("end", exit_code=exit_code, problem=problem, leave=together is not None)
            except OSError:  # it has ended
                peer.left.set()
        if together is not None:
            together()
        until = time.monotonic() + 2 * COURTESY_SECONDS
        for peer in self.peers:
            peer.left.wait(max(0.0, until - time.monotonic()))
            peer.channel.close()

    def _send(self, peer: Peer, kind: str, arrays: Arrays | None = None, **fields: Any) -> None:
        try:
            peer.channel.send(kind, arrays, **fields)
        except OSError as error:
            self._lose(TunixError(f"{peer.name} has ended", fix=SEE_LOGS))
            raise self.failure or error from error

    # --- threads ------------------------------------------------------------------------------------------------------

    def _listen(self, peer: Peer) -> None:
        try:
            while True:
                message, _ = peer.channel.receive()
                self._take(peer, message)
        except TimeoutError:
            problem = (
                f"{peer.name} has been silent for {duration(rank_timeout(SILENT_SECONDS))}, last in {peer.doing.what}"
            )
            self._lose(TunixError(problem, fix=SEE_LOGS))
        except (EOFError, OSError, ValueError):
            peer.left.set()
            where = f" during {self._doing.what}" if self._doing.entered else ""
            self._lose(TunixError(f"{peer.name} has ended{where}", fix=SEE_LOGS))

    def _take(self, peer: Peer, message: Message) -> None:
        kind = message["kind"]
        if kind == "beat":
            peer.doing = Doing(number=message["number"], what=message["what"], entered=message["entered"])
        elif kind == "wrote":
            with self._answered:
                peer.answers[message["number"]] = message
                self._answered.notify_all()
        elif kind == "signal":
            logger.info("%s received %s", peer.name, message["name"])
            self._stop(message["name"])
        elif kind == "failed":
            self._lose(ended(f"{peer.name}: {message['problem']}", message["fix"], message["exit_code"]))

    def _watch(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            for peer in self.peers:
                try:
                    peer.channel.send("beat")
                except OSError:
                    continue  # its listener reports why
            peers = {peer.name: peer.doing for peer in self.peers}
            if problem := hang(self._doing, peers, now=time.monotonic(), slowest=self._slowest):
                self._lose(TunixError(problem, fix=SEE_LOGS))

    def _lose(self, error: TunixError) -> None:
        """Record the first failure. The main thread raises it at its next announcement, or the process is ended."""
        if self.failure is not None or self._over.is_set():
            return
        self.failure = error
        with self._answered:
            self._answered.notify_all()
        threading.Thread(target=self._end_if_stuck, args=(error,), name="tunix-rt-lost", daemon=True).start()

    def _end_if_stuck(self, error: TunixError) -> None:
        if self._doing.entered and not self._over.wait(2 * COURTESY_SECONDS):
            self._end(error)


def _greeting(connection: socket.socket, missing: set[int]) -> Peer | None:
    """One of the `missing` followers; None for any other program that connects, such as a scan of ports."""
    channel = Channel(connection, silent_seconds=GREETING_SECONDS)
    try:
        report = channel.receive()[0]["report"]
        if {"rank", "host", "pid"} <= report.keys() and report["rank"] in missing:
            channel.allow_silence(SILENT_SECONDS)
            return Peer(rank=report["rank"], channel=channel, report=report)
    except (EOFError, OSError, ValueError, TypeError, AttributeError, KeyError):  # not its form
        logger.debug("a connection of no process of the run")
    channel.close()
    return None


def address_of_lead() -> tuple[str, int]:
    """Where process 0 listens for the others."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ConfigError(f"MASTER_PORT is {port!r}, not a number", fix="give a free port of the host MASTER_ADDR")
    return host, int(port)


def _server(address: tuple[str, int], size: int) -> socket.socket:
    """Listens on `address`, or on every one of this host where that is a name of it only in the network."""
    try:
        try:
            return socket.create_server(address, backlog=size)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", address[1]), backlog=size)
    except OSError as error:
        raise HardwareError(
            f"process 0 cannot listen on {address[0]}:{address[1]}: {error.strerror or error}",
            fix="choose another MASTER_PORT; torchrun keeps it for itself unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set",
        ) from error


def ended(problem: str, fix: str, exit_code: int) -> TunixError:
    """The error of another process, with its exit code."""
    error = TunixError(problem, fix=fix)
    error.exit_code = exit_code
    return error


def _processes(ranks: set[int]) -> str:
    return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"

"""Finds the rank that hangs, was stopped, or is gone, and ends this process with its name, host and step.

A collective that one rank does not join waits on every other one, without an error. So each rank shows every second that it
lives and how many collectives it has joined: the one that has joined the fewest is the one the others wait for.
"""

import contextlib
import datetime
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tunix_rt.errors import TunixError
from tunix_rt.ranks import World, process_exit_code, rank_timeout

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
LEAST_SECONDS = 60.0
"""A rank that shows nothing for as long is given up."""
FIRST_SECONDS = 1800.0
"""The same before the first step is done: it compiles."""
SLOWEST_TIMES = 10.0
"""A step may take as many times as long as the slowest so far."""
FORWARDED_SECONDS = 2.0
"""A launcher sends its signals to every rank: rank 0 has it by then."""
RESUME = "run the same command with --resume: it continues after the last checkpoint"


@dataclass(slots=True)
class Seen:
    """What this rank knows of another one."""

    beat: dict[str, Any] = field(default_factory=dict)
    changed: float = field(default_factory=time.monotonic)
    """When a new beat arrived last."""
    moved: float = field(default_factory=time.monotonic)
    """When it had come further last."""


class Watch:
    """Two threads: one shows this rank's beats and reads those of others, one judges them. Rank 0 watches all, the others it."""

    def __init__(
        self, store: dist.Store, world: World, *, on_stop: Callable[[str], None] = lambda name: None,
        on_lost: Callable[[TunixError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """`on_stop` is called in rank 0 with the name of a signal that another rank has received, `on_lost` with the error of
        one that is given up, before this process ends."""
        self._on_lost = on_lost
        self._store, self._world, self._on_stop = store.clone(), world, on_stop
        self._store.set_timeout(datetime.timedelta(seconds=LEAST_SECONDS))
        self._others = {rank: Seen() for rank in (range(1, world.size) if world.is_lead else (0,))}
        self._ended = threading.Event()
        self._what, self._slowest, self._ticks = "", 0.0, 0
        self._moved = self._round = time.monotonic()
        self._at: tuple[int, int] = (0, 0)
        self._answering: set[int] = set()
        self.number = 0
        """Of the order that this rank is at."""
        self.signal_name = ""
        """A signal that this rank was sent and rank 0 may not have."""

    def start(self) -> None:
        for act in (self._show, self._judge):
            threading.Thread(target=act, name="tunix-rt-ranks", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def busy(self, what: str, number: int) -> Iterator[None]:
        """In this block the rank computes order `number`, for which all ranks are needed."""
        began = time.monotonic()
        self._what, self.number, self._moved = what, number, began
        yield
        if what.startswith("step"):
            self._slowest = max(self._slowest, time.monotonic() - began)
        self._what = ""

    @contextlib.contextmanager
    def awaiting(self, ranks: set[int]) -> Iterator[None]:
        """In this block rank 0 waits for the answers of `ranks`, which compute by themselves."""
        for rank in ranks:
            self._others[rank].moved = time.monotonic()
        self._answering = ranks
        try:
            yield
        finally:
            self._answering = set()

    def tick(self) -> None:
        """This rank has come further without a collective."""
        self._ticks += 1

    # --- the threads

    def _show(self) -> None:
        number = 0
        while not self._ended.wait(min(BEAT_SECONDS, self._least() / 5)):
            number += 1
            self._at = (self.number, _joined())
            beat = {
                "number": number, "at": self._at, "ticks": self._ticks, "host": self._world.host, "pid": os.getpid(),
            }  # fmt: skip
            try:
                self._store.set(f"beat/{self._world.rank}", json.dumps(beat))
                self._read()
            except dist.DistError:
                if not self._ended.is_set():
                    self._give_up(0, "has ended")
                return
            self._round = time.monotonic()

    def _read(self) -> None:
        for rank, seen in self._others.items():
            if not self._store.check([f"beat/{rank}"]):
                continue
            beat = json.loads(self._store.get(f"beat/{rank}"))
            if beat["number"] != seen.beat.get("number"):
                now = time.monotonic()
                moved = any(beat[name] != seen.beat.get(name) for name in ("at", "ticks"))
                seen.moved = now if moved else seen.moved
                seen.beat, seen.changed = beat, now
        if self._world.is_lead:
            self._read_signals()
        elif self._store.check(["end"]):
            self._store.set(f"ended/{self._world.rank}", b"1")
            os._exit(process_exit_code(int(self._store.get("end"))))
        elif self.signal_name:
            self._store.set(f"signal/{self._world.rank}", self.signal_name)
            self.signal_name = ""

    def _read_signals(self) -> None:
        for rank in self._others:
            if self._store.check([f"signal/{rank}"]):
                name = self._store.get(f"signal/{rank}").decode()
                self._store.delete_key(f"signal/{rank}")
                logger.info("Rank %d received %s", rank, name)
                self._on_stop(name)

    def _judge(self) -> None:
        before, at = time.monotonic(), self._at
        while not self._ended.wait(min(BEAT_SECONDS, self._least() / 5)):
            now, least = time.monotonic(), self._least()
            if now - before > least / 2:  # this process was stopped itself, and knows nothing of the others
                self._round = self._moved = now
                for seen in self._others.values():
                    seen.changed = seen.moved = now
            before = now
            if self._at != at:
                at, self._moved = self._at, now
            if now - self._round > least:
                self._give_up(0, f"has not answered for {least:.0f} s")
            for rank, seen in self._others.items():
                if now - seen.changed > least:
                    self._give_up(rank, f"has shown no sign of life for {least:.0f} s")
                if rank in self._answering and now - seen.moved > self._limit():
                    self._give_up(rank, f"has come no further for {self._limit():.0f} s")
            if self._what and now - self._moved > self._limit():
                self._give_up_last()

    def _give_up_last(self) -> None:
        """Give the rank up that has joined the fewest collectives, if that is another one."""
        behind = {rank: tuple(seen.beat["at"]) for rank, seen in self._others.items() if seen.beat}
        last = min(behind, key=lambda rank: behind[rank], default=self._world.rank)
        if last in behind and behind[last] < self._at:
            self._give_up(last, f"has not joined the others for {self._limit():.0f} s")

    def _give_up(self, rank: int, problem: str) -> None:
        error = self.lost(rank, problem)
        logger.warning("%s; %s", error.problem, error.fix)
        self._on_lost(error)
        logging.shutdown()
        os._exit(TunixError.exit_code)

    def lost(self, rank: int, problem: str) -> TunixError:
        """The error that `rank`, in the step of this process, has a `problem`."""
        seen = self._others.get(rank, Seen()).beat
        where = f"rank {rank} on {seen['host']} (pid {seen['pid']})" if seen else f"rank {rank}"
        return TunixError(f"{self._what or 'between steps'}: {where} {problem}", fix=RESUME)

    def silent(self) -> int | None:
        """The rank whose last beat is the oldest, if it is older than two beats."""
        rank = min(self._others, key=lambda one: self._others[one].changed)
        return rank if time.monotonic() - self._others[rank].changed > 2 * BEAT_SECONDS else None

    # --- limits

    def _least(self) -> float:
        return rank_timeout(LEAST_SECONDS)

    def _limit(self) -> float:
        return rank_timeout(max(LEAST_SECONDS, SLOWEST_TIMES * self._slowest) if self._slowest else FIRST_SECONDS)


def _joined() -> int:
    """Collectives that this process has joined, in all groups."""
    groups = list(distributed_c10d._world.pg_names) if dist.is_initialized() else []
    return sum(group._get_sequence_number_for_group() for group in groups)


def is_of_connection(error: RuntimeError) -> bool:
    """Whether a collective or the store has lost another rank."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text


def pass_signals_on(watch: Watch) -> None:
    """Let rank 0 know of SIGTERM and SIGINT that this rank alone received: it stops the run for all."""

    def receive(number: int, frame: Any) -> None:
        def later() -> None:
            time.sleep(FORWARDED_SECONDS)
            watch.signal_name = signal.Signals(number).name

        threading.Thread(target=later, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)

"""Start one process, watch its folder from outside, and kill it with SIGKILL at a moment; what was seen of it.

`series.py` makes series of it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from tests.program import ROOT, environment

POLL_SECONDS, EARLY_POLL_SECONDS = 0.0002, 0.002
"""Between two glances, and before the first step of a process, which writes nothing that is killed for."""
ORPHAN_SECONDS = 5.0
"""A child of a killed process may take so long to notice that it is alone."""
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


class Subject(Protocol):
    """What is killed: how it is started, and what its folder shows of it to somebody who only looks."""

    steps: int
    forks: bool
    """Whether it may be started by a fork."""

    def arguments(self, folder: Path) -> list[str]:
        """What the program is told to begin the run in `folder`, or to go on with it."""

    def command(self, arguments: list[str]) -> list[str]: ...

    def main(self, arguments: list[str]) -> None:
        """What that command does once it has imported everything."""

    def look(self, folder: Path) -> tuple[int, frozenset[tuple[str, int]]]:
        """The newest finished save by its name, and the saves under way, each with what tells it from an earlier one."""

    def usable(self, folder: Path) -> int:
        """The newest save that holds all it should; 0 if none does."""

    def resumed_from(self, said: str) -> int | None:
        """The save that a process went on from, by what it printed; None if it named none."""

    def finished(self, folder: Path) -> bool:
        """Whether there is nothing left to do: a kill can come after the last word and before the end of the process."""

    def outcome(self, folder: Path) -> dict[str, Any]:
        """What two runs that did the same have in common, bit for bit."""

    def wrong_with(self, folder: Path, said: Path) -> str:
        """What is wrong in the folder of an ended run, or nothing."""

    def mend(self, folder: Path, said: str) -> str:
        """Make a resume that failed possible, as a person would; what was done, or nothing when it is given up."""


# --- one process ------------------------------------------------------------------------------------------------------


class Fork:
    """A process that began as a copy of this one. Has of `subprocess.Popen` what is needed here."""

    def __init__(self, run: Callable[[], None], said: Path) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(run, said)

    @staticmethod
    def _become(run: Callable[[], None], said: Path) -> None:
        """Never returns: what called for a fork goes on in the parent alone."""
        code = 1
        try:
            prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            output = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001 (the last frame of this process)
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(POLL_SECONDS)
        return self.returncode or 0

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def program(command: Sequence[str], said: Path) -> "subprocess.Popen[bytes]":
    with said.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment())


def start(subject: Subject, arguments: list[str], said: Path, *, forked: bool) -> Any:
    """A process that does what `arguments` say and prints into the file `said`."""
    return Fork(partial(subject.main, arguments), said) if forked else program(subject.command(arguments), said)


def orphans() -> list[str]:
    """Who outlived the process that was just killed. As the subreaper we are the parent of all that it left behind."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=ORPHAN_SECONDS)
    names = [f"{process.name()} ({process.pid})" for process in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=ORPHAN_SECONDS)
    return names


# --- watch one process, and kill it at its moment ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to kill: `delay` seconds after save `number` of this process began, after step `number`, or after its first."""

    kind: str
    number: int
    delay: float
    seed: str
    """What it was drawn from."""

    def __str__(self) -> str:
        what = {"save": f"save {self.number}", "step": f"step {self.number}", "time": "the first step"}[self.kind]
        return what if self.kind == "step" else f"{what} + {1000 * self.delay:.1f} ms"


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen of one process from outside."""

    code: int = 0
    killed: bool = False
    late: bool = False
    """It was killed because it did not end."""
    steps: int = 0
    """Lines in its metrics after it ended."""
    committed: int = 0
    """Newest finished save that had a name before it ended, or before it was killed."""
    inside: bool = False
    """It ended with a save under way."""
    began: float | None = None
    """Clock of its first step, None when it took none."""
    seconds: float = 0.0
    """From there to its end."""
    saves: list[float] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)


class Watch:
    """Looks at a folder while a process works in it."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder, self.metrics = subject, folder, folder / "metrics.jsonl"
        self.seen = Seen()
        self.seen.committed, self.left = subject.look(folder)
        self.size, self.lines = self._size(), 0
        self.saves: dict[str, float] = {}
        self.begun: set[str] = set()

    def look(self) -> None:
        now, size = time.monotonic(), self._size()
        if size > self.size:
            if self.seen.began is None:
                self.seen.began = now
            self.lines = count_lines(self.metrics)
        self.size = size
        newest, under_way = self.subject.look(self.folder)
        self.seen.committed = max(self.seen.committed, newest)
        names = {name for name, _ in under_way - self.left}
        for name in names - self.saves.keys():
            self.saves[name] = now
        self.begun |= names
        for name in self.saves.keys() - names:
            self.seen.saves.append(now - self.saves.pop(name))

    def due(self, moment: Moment) -> float | None:
        """The clock at which to kill, once it is known."""
        began = self.seen.began
        if moment.kind == "save":
            return max(self.saves.values()) + moment.delay if self.saves and len(self.begun) >= moment.number else None
        if began is None or (moment.kind == "step" and self.lines < moment.number):
            return None
        return began + moment.delay if moment.kind == "time" else 0.0

    def _size(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def watch(process: Any, subject: Subject, folder: Path, moment: Moment | None, *, limit: float) -> Seen:
    """Look until the process has ended, by itself or killed at `moment`; a process over `limit` seconds is killed too."""
    looking, started = Watch(subject, folder), time.monotonic()
    seen, due = looking.seen, None
    while process.poll() is None:
        looking.look()
        due = looking.due(moment) if moment else None
        seen.late = time.monotonic() > started + limit
        if due is not None:
            time.sleep(max(0.0, due - time.monotonic()))
            seen.committed = max(seen.committed, subject.look(folder)[0])
        if due is not None or seen.late:
            process.kill()
            break
        time.sleep(EARLY_POLL_SECONDS if seen.began is None else POLL_SECONDS)
    seen.code = process.wait()
    seen.killed = seen.code == -signal.SIGKILL
    seen.seconds = time.monotonic() - seen.began if seen.began else 0.0
    seen.steps = count_lines(looking.metrics)
    seen.inside = bool(subject.look(folder)[1] - looking.left)
    seen.orphans = orphans()
    return seen

"""Stopping a run: on a signal within the grace period, or before its time budget is used up.

A stop is checked between steps, so that the current step is finished and saved. Work that does not get there in time, such as
a compilation, a very long step or a save to a dead disk, is interrupted: first by an alarm, which Python delivers between
two instructions; then, for a call that does not return to Python, by a thread that ends the process.
"""

import atexit
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

from tunix_rt.engines.base import Progress
from tunix_rt.errors import ConfigError, Preempted

logger = logging.getLogger(__name__)

ALARM_SHARE, FORCE_SHARE, EXIT_SHARE = 0.7, 0.75, 0.95
"""Fractions of the grace period: after the first, the alarm interrupts the work, which leaves the rest for the ending; after
the second, the thread writes the ending itself; after the third it exits, whatever is not yet written."""
ENDING_SECONDS = 5.0
"""Reserved of a time budget for writing the result and its checksums, and for leaving Python."""
RESUME = "run the same command with --resume to continue"

_ALARM = getattr(signal, "SIGALRM", None)
"""Not on Windows, where the thread alone ends the process."""


class Preemption:
    """Set by SIGTERM or SIGINT, by a time budget that runs out, or by the step after which to stop."""

    def __init__(
        self, *, grace_seconds: float = 25.0, time_budget: float | None = None, after_step: int | None = None
    ) -> None:
        self.signal_name = ""
        self.after_step = after_step
        self.step = 0
        """The last step taken; the run stops when it reaches `after_step`."""
        self.saved_state: Callable[[], str] = lambda: "what was saved before is kept"
        """Names the state to resume from, for a stop at any time."""
        self.on_forced_exit: list[Callable[[Preempted], None]] = []
        """Called in another thread, the last first, when the process is ended in the middle of a call."""
        self.now = False
        """Wait for nothing any more: the grace period is over, or a second signal came."""
        self._grace = grace_seconds
        self._budget = time_budget
        self._deadline = math.inf if time_budget is None else program_began() + time_budget
        self._held: Preempted | None = None
        self._holding = False
        self._ended = threading.Event()
        self._forced = self._ending = False
        self._gate = threading.Lock()

    @property
    def has_budget(self) -> bool:
        return self._budget is not None

    # --- checked between pieces of work--------------------------------------------------------------------------------

    def why(self, *, needed_seconds: float = 0.0) -> str:
        """The reason to stop now; empty when work that takes `needed_seconds` may begin."""
        if self.signal_name:
            return f"stopped by {self.signal_name}"
        if self.after_step is not None and self.step >= self.after_step:
            return f"stopped after step {self.after_step} (--stop-after)"
        left = self._deadline - time.monotonic()
        if left >= needed_seconds + ENDING_SECONDS:
            return ""
        return f"time budget: {max(0.0, left):.0f} s of {self._budget:g} s left, stopping"

    def refuse_if_never(self, *, done: int, total: int) -> None:
        """Refuse a --stop-after that this process never reaches."""
        if self.after_step is not None and not done < self.after_step <= total:
            taken = f"steps {done + 1} to {total}" if done < total or not done else "no step"
            problem = f"--stop-after {self.after_step}: this process takes {taken}"
            raise ConfigError(problem, fix="name one of them, or leave it out")

    def check_time(self, seconds: float, what: str, kept: str, *, in_vain: bool) -> None:
        """Before `what`, which takes so many seconds and is lost unless it is finished. `in_vain`: a resumed process would get no
        further than this one."""
        if not (why := self.why(needed_seconds=seconds)):
            return
        if self.signal_name:
            raise Preempted(f"{why}; {kept}", fix=RESUME)
        took = 0.0 if self._budget is None else self._budget - (self._deadline - time.monotonic())
        least = took + seconds + ENDING_SECONDS
        # A process that took no step would be followed by one that stops at the same place.
        never = in_vain or (self._budget is not None and self._budget <= seconds + ENDING_SECONDS)
        fix = f"raise training.time_budget above {least:.0f} s, and {RESUME}" if never else RESUME
        raise Preempted(f"{why}; {what} takes about {seconds:.0f} s; {kept}", fix=fix)

    def check(self, kept: str, *, fix: str = RESUME, starting: bool = False) -> None:
        """Raise Preempted if the run must stop. While `starting`, before the first step, a time budget that is used up would
        be used up again: the fix is to raise it."""
        if not (why := self.why()):
            return
        if starting and not self.signal_name and self._budget is not None:
            took = self._budget - (self._deadline - time.monotonic())
            why = f"the time budget of {self._budget:g} s is shorter than the start ({took:.0f} s)"
            why += f" and the {ENDING_SECONDS:g} s kept for the ending" if took < self._budget else ""
            fix = "raise training.time_budget"
        raise Preempted(f"{why}; {kept}", fix=fix)

    @contextlib.contextmanager
    def deferring_signals(self) -> Iterator[None]:
        """A block that must not be interrupted, such as a metrics line and the result of the same step. An interruption is raised
        right after it."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._held is not None:
            raise self._held

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The block that writes the ending. No signal interrupts it; the thread cuts it off when it outlasts the grace period.
        A process that was signalled ignores further signals afterwards: it only exits."""
        with self._gate:
            self._ending = not self._forced
        if self._forced:
            _wait_for_the_end()
        yield

    # --- signals ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self) -> Iterator["Preemption"]:
        numbers = [signal.SIGTERM, signal.SIGINT, *([_ALARM] if _ALARM is not None else [])]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            with self._watched():
                yield self
        finally:
            if _ALARM is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._ending and self.signal_name else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._forced:
            _wait_for_the_end()
        elif self._ended.is_set():
            return
        elif number == _ALARM:
            if not self._ending:
                self._interrupt(f"the grace period of {self._grace:g} s after {self.signal_name} is over")
        elif self._ending:
            self.signal_name = self.signal_name or name
        elif self.signal_name:  # a second signal: stop now
            self._interrupt(f"stopped at once by a second {name}")
        else:
            self.signal_name = name
            # At exit Python collects cycles in everything imported, which takes seconds of the grace period.
            atexit.register(gc.freeze)
            if _ALARM is not None:
                signal.setitimer(signal.ITIMER_REAL, self._grace * ALARM_SHARE)

    def _interrupt(self, why: str) -> None:
        self.now = True
        error = Preempted(f"{why}; {self.saved_state()}", fix=f"{RESUME} from the newest checkpoint")
        if not self._holding:
            raise error
        self._held = error

    # --- the thread ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """The system also wakes a thread on signals: the main thread may be in a call that does not return."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watching = threading.Thread(target=self._watch, args=(reader,), name="tunix-rt-grace", daemon=True)
        self._ended.clear()
        watching.start()
        try:
            yield
        finally:
            try:
                self._conclude()
            finally:  # a signal may arrive even here, and none may be written to a closed socket
                signal.set_wakeup_fd(before)
                writer.close()
                self._conclude()
                watching.join()
                reader.close()

    def _conclude(self) -> None:
        """From here on the main thread ends the run, or waits for the thread that does."""
        with self._gate:
            if not self._forced:
                self._ended.set()
        if self._forced:
            _wait_for_the_end()

    def _watch(self, reader: socket.socket) -> None:
        while number := reader.recv(1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                break
        else:
            return
        if self._ended.wait(self._grace * FORCE_SHARE):
            return
        with self._gate:
            if self._ended.is_set():
                return
            self.now, self._forced = True, not self._ending
        if not self._forced:  # the main thread is writing the ending already
            if self._ended.wait(self._grace * (EXIT_SHARE - FORCE_SHARE)):
                return
            os._exit(Preempted.exit_code)
        if _ALARM is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, _ALARM)  # back in Python, it stops there
        ending = threading.Thread(target=self._end_by_force, args=(signal.Signals(number[0]).name,), daemon=True)
        ending.start()
        ending.join(self._grace * (EXIT_SHARE - FORCE_SHARE))
        os._exit(Preempted.exit_code)  # no other way out of a call that does not return

    def _end_by_force(self, name: str) -> None:
        """In a thread of its own: the main one may hold a lock that this needs."""
        why = f"the grace period of {self._grace:g} s after {name} is over and the current call does not return"
        error = Preempted(f"{why}; {self.saved_state()}", fix=f"{RESUME} from the newest checkpoint")
        logger.warning("%s", error.problem)
        for act in reversed(self.on_forced_exit):
            act(error)


def stoppable(progress: Progress, stop: Preemption, *, fix: str = "run it again", starting: bool = False) -> Progress:
    """`progress` that raises once a stop is requested: tokenizing a large dataset takes a while."""

    def report(what: str, done: int, total: int, note: str) -> None:
        progress(what, done, total, note)
        stop.check("the data was being prepared, nothing of it is saved", fix=fix, starting=starting)

    return report


def _wait_for_the_end() -> None:
    """Another thread is ending the process."""
    while True:
        time.sleep(60)


def program_began() -> float:
    """When this process started, by the monotonic clock and to a second: importing libraries is part of its time."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())

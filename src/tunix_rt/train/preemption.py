"""A run ends when it is asked to: by a signal within its grace, by itself before its time budget is used up.

A stop is looked for between steps, so that the step under way is finished and kept. What does not get there in time, such
as a compilation, a very long step or a save to a dead disk, is given up: first by an alarm, which Python delivers between
two instructions; then, for a call that does not return to Python, by a thread that ends the program.
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

from tunix_rt.errors import ConfigError, Preempted

logger = logging.getLogger(__name__)

ALARM_SHARE, FORCE_SHARE, EXIT_SHARE = 0.7, 0.75, 0.95
"""Shares of the grace: after the first, what is being done is interrupted, so that the rest is left for the ending; after the
second, one that could not be interrupted is ended by the thread; after the third that exits, whatever is not yet written."""
ENDING_SECONDS = 5.0
"""Of a time budget, what is kept for writing the result and its hashes, and for leaving Python."""
RESUME = "run the same command with --resume to continue"

_ALARM = getattr(signal, "SIGALRM", None)
"""Not on Windows; the thread alone ends a program there."""


class StopRequest:
    """Set by SIGTERM or SIGINT, by a time budget that runs out, or by the step after which to stop."""

    def __init__(
        self, *, grace_seconds: float = 25.0, time_budget: float | None = None, after_step: int | None = None
    ) -> None:
        self.signal_name = ""
        self.after_step = after_step
        self.step = 0
        """The last that this process has taken; once it is `after_step`, the run is asked to stop."""
        self.kept: Callable[[], str] = lambda: "what was saved before is kept"
        """Tells what the run could be continued from, for a stop that comes anywhere."""
        self.last_acts: list[Callable[[Preempted], None]] = []
        """Done in another thread, the last first, when the program is ended in the middle of a call."""
        self.now = False
        """Nothing may be waited for any more: the grace is over, or the person asked twice."""
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

    # --- asked between pieces of work ---------------------------------------------------------------------------------

    def why(self, *, needed_seconds: float = 0.0) -> str:
        """Why to stop now, in words; empty when work that takes `needed_seconds` may begin."""
        if self.signal_name:
            return f"stopped by {self.signal_name}"
        if self.after_step is not None and self.step >= self.after_step:
            return f"stopped after step {self.after_step}, as asked"
        left = self._deadline - time.monotonic()
        if left >= needed_seconds + ENDING_SECONDS:
            return ""
        return f"stopped by itself: of the time budget of {self._budget:g} s {max(0.0, left):.0f} s are left"

    def refuse_if_never(self, *, done: int, total: int) -> None:
        """A step to stop after that this process does not take is a mistake, not a wish."""
        if self.after_step is not None and not done < self.after_step <= total:
            taken = f"steps 1 to {total}" if not done else f"steps {done + 1} to {total}" if done < total else "no step"
            raise ConfigError(
                f"--stop-after {self.after_step}: this process takes {taken}", fix="name one of them, or leave it out"
            )

    def raise_if_too_long(self, seconds: float, what: str, kept: str, *, in_vain: bool) -> None:
        """Before work that is lost unless it is whole: `what`, which takes so many seconds. `in_vain` says that a
        continuation would come no further than this process did."""
        if not (why := self.why(needed_seconds=seconds)):
            return
        if self.signal_name:
            raise Preempted(f"{why}; {kept}", fix=RESUME)
        took = 0.0 if self._budget is None else self._budget - (self._deadline - time.monotonic())
        least = took + seconds + ENDING_SECONDS
        # Where this process took no step, the next one would stop at the same place.
        never = in_vain or (self._budget is not None and self._budget <= seconds + ENDING_SECONDS)
        fix = f"raise training.time_budget above {least:.0f} s, and {RESUME}" if never else RESUME
        raise Preempted(f"{why}, and {what} take about {seconds:.0f} s; {kept}", fix=fix)

    def raise_if_asked(self, kept: str, *, fix: str = RESUME, starting: bool = False) -> None:
        """Asked while `starting`, before the first step: a budget that ends there ends there every time."""
        if not (why := self.why()):
            return
        if starting and not self.signal_name and self._budget is not None:
            took = self._budget - (self._deadline - time.monotonic())
            why = f"the time budget of {self._budget:g} s is shorter than the start ({took:.0f} s)"
            why += f" and the {ENDING_SECONDS:g} s kept for the ending" if took < self._budget else ""
            fix = "raise training.time_budget"
        raise Preempted(f"{why}; {kept}", fix=fix)

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """A block that belongs together, such as a line of metrics and what the result says of it. Whatever would stop the
        program in the middle of it comes right after."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._held is not None:
            raise self._held

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The block that writes how the run ended. No signal interrupts it; one that outlasts the grace is cut off by the
        thread. Once asked to stop, the program hears no signal afterwards: it has nothing left to do but exit."""
        with self._gate:
            self._ending = not self._forced
        if self._forced:
            _wait_for_the_end()
        yield

    # --- signals ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        numbers = [signal.SIGTERM, signal.SIGINT, *([_ALARM] if _ALARM is not None else [])]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            with self._watched():
                yield self
        finally:
            if _ALARM is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._ending and self.signal_name else handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._forced:
            _wait_for_the_end()
        elif self._ended.is_set():
            return
        elif number == _ALARM:
            if not self._ending:
                self._interrupt(f"the grace of {self._grace:g} s after {self.signal_name} is over")
        elif self._ending:
            self.signal_name = self.signal_name or name
        elif self.signal_name:  # asked twice: the person means now
            self._interrupt(f"stopped at once by a second {name}")
        else:
            self.signal_name = name
            # When Python ends it looks for cycles in all that was imported, which takes seconds of the grace.
            atexit.register(gc.freeze)
            if _ALARM is not None:
                signal.setitimer(signal.ITIMER_REAL, self._grace * ALARM_SHARE)

    def _interrupt(self, why: str) -> None:
        self.now = True
        error = Preempted(f"{why}; {self.kept()}", fix=f"{RESUME} from the newest checkpoint")
        if not self._holding:
            raise error
        self._held = error

    # --- the thread ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Signals are also told to a thread, by the system itself: the main one may be in a call that does not return."""
        ears, mouth = socket.socketpair()
        mouth.setblocking(False)
        before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        watching = threading.Thread(target=self._watch, args=(ears,), name="tunix-rt-grace", daemon=True)
        self._ended.clear()
        watching.start()
        try:
            yield
        finally:
            try:
                self._conclude()
            finally:  # a last signal may come even here, and no signal may be told to a closed socket
                signal.set_wakeup_fd(before)
                mouth.close()
                self._conclude()
                watching.join()
                ears.close()

    def _conclude(self) -> None:
        """From here on the main thread ends the run, or waits for the one that is ending it."""
        with self._gate:
            if not self._forced:
                self._ended.set()
        if self._forced:
            _wait_for_the_end()

    def _watch(self, ears: socket.socket) -> None:
        while number := ears.recv(1):
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
            signal.pthread_kill(threading.main_thread().ident or 0, _ALARM)  # back in Python, it goes no further
        saying = threading.Thread(target=self._end_by_force, args=(signal.Signals(number[0]).name,), daemon=True)
        saying.start()
        saying.join(self._grace * (EXIT_SHARE - FORCE_SHARE))
        os._exit(Preempted.exit_code)  # no other way out of a call that does not return

    def _end_by_force(self, name: str) -> None:
        """In a thread of its own: the main one may hold a lock that this needs."""
        why = f"the grace of {self._grace:g} s after {name} is over, and what was being done does not end"
        error = Preempted(f"{why}; {self.kept()}", fix=f"{RESUME} from the newest checkpoint")
        logger.warning("%s", error.problem)
        for act in reversed(self.last_acts):
            act(error)


def _wait_for_the_end() -> None:
    """The program is being ended by another thread."""
    while True:
        time.sleep(60)


def program_began() -> float:
    """When this process started, by the monotonic clock and to a second: importing libraries is part of its time."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())

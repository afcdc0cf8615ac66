"""Stopping a run: on a signal, or before its time budget is used up. No finished step is lost.

The main thread checks for a stop between steps and saves the step it finished. A thread answers the signal at once, whatever
the main thread does. Where no check follows within a second, that thread saves the last finished step, which the weights
still hold until the update of the next, and then ends what is in progress: by an alarm, which Python delivers between two
instructions; or, in a call that does not return to Python, by ending the process. A second signal ends it without saving.
SIGTERM has a deadline, the grace period; Ctrl-C has none.
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
from typing import Protocol

import psutil

from tunix_rt.errors import ConfigError, Preempted, TunixError
from tunix_rt.progress import Progress

logger = logging.getLogger(__name__)

COURTESY_SECONDS = 1.0
"""For the main thread to stop by itself between two steps, and again to leave the call it is in."""
LEAVE_SHARE, EXIT_SHARE = 0.75, 0.95
"""Fractions of the grace period: after the first, nothing more is waited for; after the second the process exits, whatever is
not yet written."""
LEAST_GRACE_SECONDS = 25.0
"""After SIGTERM, unless a setting or the measured times say otherwise: schedulers kill after 30 s."""
ENDING_SECONDS = 5.0
"""Reserved of a time budget for writing the result and its checksums, and for leaving Python."""
RESUME = "run the same command with --resume to continue"

_ALARM = getattr(signal, "SIGALRM", None)
"""Not on Windows, where the thread alone ends the process."""


class Training(Protocol):
    """The training loop, as a stop sees it from another thread."""

    def stop_plan(self) -> str:
        """What happens to the steps on a first signal."""

    def save_finished(self) -> bool:
        """Save the last finished step, waiting for an update in progress. Whether every finished step is on disk."""

    def stop_seconds(self) -> float:
        """How long saving everything takes, from any moment."""


class Preemption:
    """Set by SIGTERM or SIGINT, by a time budget that runs out, or by the step after which to stop."""

    def __init__(
        self, *, grace_seconds: float | None = None, time_budget: float | None = None, after_step: int | None = None,
        fix: str = RESUME,
    ) -> None:  # fmt: skip
        """`fix` is the way out that an interrupted call names."""
        self.signal_name = ""
        self.after_step = after_step
        self.step = 0
        """The last step taken; the run stops when it reaches `after_step`."""
        self.saved_state: Callable[[], str] = lambda: "what was saved before is kept"
        """Names the state to resume from, for a stop at any time."""
        self.on_forced_exit: list[Callable[[TunixError], None]] = []
        """Called in another thread, the last first, when the process is ended in the middle of a call."""
        self.now = False
        """Wait for nothing any more: the grace period is over, or a second signal came."""
        self.training: Training | None = None
        """Set while steps are taken."""
        self._given_grace = grace_seconds
        self._fix, self._why = fix, ""
        """Why the main thread must leave what it does."""
        self._delivered = 0
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

    @property
    def grace(self) -> float:
        """Seconds from SIGTERM to the exit: as configured, or as long as saving every finished step was measured to take."""
        if self._given_grace is not None:
            return self._given_grace
        needed = 0.0 if (training := self.training) is None else training.stop_seconds()
        return max(LEAST_GRACE_SECONDS, 1.5 * needed + ENDING_SECONDS)

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
    def while_training(self, training: Training) -> Iterator[None]:
        """A signal in this block saves the last finished step of `training`."""
        self.training = training
        try:
            yield
        finally:
            self.training = None

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
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._ending and self.signal_name else handler)

    def request(self, name: str) -> None:
        """Stop as on SIGTERM, which another process of the run received. A signal to this process later is not a second one."""
        if not self.signal_name:
            self.signal_name = name
            self._tell_thread(_REQUESTED)

    def abandon(self, error: TunixError) -> None:
        """End the process from another thread with `error` as the ending: the main thread waits for what never comes."""
        with self._gate:
            if self._ended.is_set() or self._ending or self._forced:
                return
            self._forced = True
        self._write_ending(error)
        os._exit(error.exit_code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, once it is back in Python."""
        name = signal.Signals(number).name
        if self._forced:
            _wait_for_the_end()
        elif self._ended.is_set():
            return
        elif self._ending:
            self.signal_name = self.signal_name or name
        elif number == _ALARM:
            self._interrupt(self._why)
        else:
            self.signal_name = self.signal_name or name
            self._delivered += 1
            if self._delivered > 1:
                self._interrupt(_at_once(name))
            # At exit Python collects cycles in everything imported, which takes seconds of the grace period.
            atexit.register(gc.freeze)

    def _interrupt(self, why: str) -> None:
        self.now = True
        error = Preempted(f"{why}; {self.saved_state()}", fix=self._fix)
        if not self._holding:
            raise error
        self._held = error

    # --- the thread ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """The system also wakes a thread on signals: the main thread may be in a call that does not return."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watching = threading.Thread(target=self._watch, args=(reader,), name="tunix-rt-grace", daemon=True)
        self._ended.clear()
        self._delivered = 0
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
        """Answer the first signal, save what is finished, and see that the process ends."""
        if (first := _next_event(reader, math.inf)) == _ENDED:
            return
        name = self.signal_name if first == _REQUESTED else signal.Signals(first).name
        began, self.signal_name = time.monotonic(), self.signal_name or name
        grace = self.grace if first != signal.SIGINT else math.inf
        self._answer(name)
        why = self._saved_or_late(reader, began, grace, name, requested=first == _REQUESTED)
        if why:
            self._leave(reader, why, _courtesy(grace), began + EXIT_SHARE * grace)

    def _answer(self, name: str) -> None:
        plan = f"stopping; {self.saved_state()}" if (training := self.training) is None else training.stop_plan()
        again = "Ctrl-C again" if name == "SIGINT" else "A second signal"
        logger.info("%s: %s. %s exits at once (%s)", name, plan, again, self.saved_state())

    def _saved_or_late(self, reader: socket.socket, began: float, grace: float, name: str, *, requested: bool) -> str:
        """Wait until the main thread has ended the run: returns nothing. Or until it must leave what it does: returns why."""
        save_at, leave_at = began + _courtesy(grace), began + LEAVE_SHARE * grace
        while True:
            event = _next_event(reader, min(save_at, leave_at))
            if event == _ENDED:
                return ""
            if event == _SAVED:
                return f"stopped by {name}"
            if event == _REQUESTED:
                continue
            if event != _TIME and requested:  # the first one to this process
                requested = False
                continue
            if event != _TIME:
                return _at_once(signal.Signals(event).name)
            if time.monotonic() >= leave_at:
                return f"the grace period of {grace:g} s after {name} is over"
            save_at = math.inf
            threading.Thread(target=self._save_finished, name="tunix-rt-stop", daemon=True).start()

    def _save_finished(self) -> None:
        if (training := self.training) is None or training.save_finished():
            self._tell_thread(_SAVED)

    def _tell_thread(self, event: int) -> None:
        with contextlib.suppress(OSError):  # the run has ended meanwhile
            self._writer.send(bytes([event]))

    def _leave(self, reader: socket.socket, why: str, courtesy: float, exit_at: float) -> None:
        """End the main thread's work: by the alarm if it is in Python, else with the process."""
        with self._gate:
            if self._ended.is_set():
                return
            self.now, self._why = True, why
        if _ALARM is not None and not self._ending:
            signal.pthread_kill(threading.main_thread().ident or 0, _ALARM)
        leave_at = time.monotonic() + courtesy
        while not self._ending and time.monotonic() < leave_at:
            if self._ended.wait(0.01):
                return
        with self._gate:
            if self._ended.is_set():
                return
            self._forced = not self._ending
        if self._forced:
            threading.Thread(target=self._end_by_force, args=(why,), daemon=True).start()
        patient_until = time.monotonic() + ENDING_SECONDS
        while (event := _next_event(reader, exit_at)) not in (_TIME, _WRITTEN):
            if event == _ENDED:  # the main thread wrote the ending
                return
            if event != _SAVED and time.monotonic() > patient_until:  # another signal: the ending hangs
                break
        os._exit(Preempted.exit_code)  # no other way out of a call that does not return

    def _end_by_force(self, why: str) -> None:
        """In a thread of its own: the main one may hold a lock that this needs."""
        self._write_ending(Preempted(f"{why}, in a call that does not return; {self.saved_state()}", fix=self._fix))
        self._tell_thread(_WRITTEN)

    def _write_ending(self, error: TunixError) -> None:
        logger.warning("%s", error.problem)
        for act in reversed(self.on_forced_exit):
            try:
                act(error)
            except TunixError as failure:  # the next act and the exit do not depend on it
                logger.warning("%s", failure.problem)


_ENDED, _TIME, _REQUESTED, _SAVED, _WRITTEN = -1, 0, 253, 254, 255
"""Events beside the numbers of signals: the main thread ended the run; the time is over; another process was signalled; the last
finished step is saved; the ending is written."""


def _next_event(reader: socket.socket, until: float) -> int:
    """The next SIGTERM or SIGINT, or one of the events above; alarms are none."""
    while True:
        left = until - time.monotonic()
        reader.settimeout(None if left == math.inf else max(0.001, left))
        try:
            received = reader.recv(1)
        except TimeoutError:
            return _TIME
        if not received:
            return _ENDED
        if received[0] in (signal.SIGTERM, signal.SIGINT, _REQUESTED, _SAVED, _WRITTEN):
            return received[0]


def _courtesy(grace: float) -> float:
    """Seconds for the main thread to leave by itself; of a short grace period, less."""
    return min(COURTESY_SECONDS, 0.1 * grace)


def _at_once(name: str) -> str:
    return f"stopped at once by a second {name}"


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

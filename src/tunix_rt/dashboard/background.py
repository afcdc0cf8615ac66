"""Work that takes seconds: one piece at a time in a thread, while its page shows for how long it has been going on."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tunix_rt.errors import TunixError

MOST_OUTCOMES = 1000
FAILED = {"problem": "the work failed", "fix": "the output of `tunix-rt dashboard` has the error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the work returned, or the error that it ended with. `stamp` is the state of what was worked on."""

    stamp: str
    finished: str
    seconds: float
    value: Any = None
    problem: str = ""
    fix: str = ""


class Background:
    """One thread at most. The last outcome of each key is kept, for the latest keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[str, float] | None = None
        self._outcomes: dict[str, Outcome] = {}

    def start(self, key: str, stamp: str, work: Callable[[], Any]) -> threading.Thread | None:
        """The thread that does the work; None, and nothing is started, while other work is going on."""
        with self._lock:
            if self._running is not None:
                return None
            self._running = (key, time.monotonic())
        thread = threading.Thread(target=self._run, args=(key, stamp, work), daemon=True)
        thread.start()
        return thread

    def running(self, key: str = "") -> float | None:
        """For how many seconds the work of that key, or any, has been going on; None where it is not."""
        with self._lock:
            here = self._running is not None and key in ("", self._running[0])
            return time.monotonic() - self._running[1] if here and self._running else None

    def outcome(self, key: str) -> Outcome | None:
        with self._lock:
            return self._outcomes.get(key)

    def _run(self, key: str, stamp: str, work: Callable[[], Any]) -> None:
        started, ended = time.monotonic(), dict[str, Any](FAILED)
        try:
            ended = {"value": work()}
        except TunixError as error:
            ended = {"problem": error.problem, "fix": error.fix}
        finally:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            made = Outcome(stamp=stamp, finished=now, seconds=time.monotonic() - started, **ended)
            with self._lock:
                kept = [item for item in self._outcomes.items() if item[0] != key][1 - MOST_OUTCOMES :]
                self._outcomes, self._running = dict([*kept, (key, made)]), None

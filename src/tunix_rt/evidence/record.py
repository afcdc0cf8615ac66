"""How a run is written down: its log while it goes, its result and hashes when it ends, however it ends.

A continuation writes nothing until it is known to be the run that began in the folder: a refused one leaves every file
as it was, and the run still verifies.
"""

import logging
import logging.handlers
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunix_rt.errors import TunixError
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.rundir import RunDir, json_text, storage, sync_folder, write_text

logger = logging.getLogger(__name__)


def _log_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """A warning of a library is a line of the log: one about the GPU must not pass unnoticed. Without its place on disk."""
    logger.warning("%s: %s", category.__name__, " ".join(str(message).split()))


@dataclass(slots=True, kw_only=True)
class Record:
    """What is known of the run so far; `result.json` is written from it whatever happens."""

    run: RunDir
    continued: bool
    facts: dict[str, Any] = field(default_factory=dict)
    training_began: bool = False
    seconds_before: float = 0.0
    """Of the steps that earlier processes took and this one does not take again."""
    held_back: list[Callable[[], None]] = field(default_factory=list)
    accepted: bool = False

    def write(self, write: Callable[[Path, Any], None], path: Path, value: Any) -> None:
        """Write `value` to `path`, in a continuation once it is accepted."""
        self._when_accepted(lambda: write(path, value))

    def accept(self) -> None:
        """This is the run that began here: its old ending goes, and what was held back is written."""
        self.accepted = True
        with storage(self.run.root):
            for stale in (self.run.result, self.run.hashes):  # without a result it counts as unfinished
                stale.unlink(missing_ok=True)
            sync_folder(self.run.root)
        for write in self.held_back:
            write()
        self.held_back.clear()

    def _when_accepted(self, do: Callable[[], None]) -> None:
        if self.continued and not self.accepted:
            self.held_back.append(do)
        else:
            do()

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Everything said also goes to `training_log.txt`; a continued run appends."""
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        # Passes each record on at once when it has a target, and keeps them all while it has none.
        gate = logging.handlers.MemoryHandler(capacity=1, flushOnClose=False)
        opened: list[logging.Handler] = []

        def open_file() -> None:
            with storage(self.run.log):
                opened.append(logging.FileHandler(self.run.log, encoding="utf-8"))
            opened[0].setFormatter(formatter)
            gate.setTarget(opened[0])
            gate.flush()

        self._when_accepted(open_file)
        package = logging.getLogger("tunix_rt")
        package.addHandler(gate)
        show = warnings.showwarning
        warnings.showwarning = _log_warning
        try:
            yield
        finally:
            warnings.showwarning = show
            package.removeHandler(gate)
            for handler in (gate, *opened):
                handler.close()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Write `result.json` and the hashes at the end, however it ends. The one broad except of tunix-rt."""
        started, clock = datetime.now(UTC), time.monotonic()
        try:
            yield
        except TunixError as error:
            refused = error.exit_code in (2, 3, 4, 5) and not self.training_began
            status = "preempted" if error.exit_code == 7 else "refused" if refused else "failed"
            logger.error("%s: %s", status, error.problem)
            self._end(status, error.exit_code, error.problem, started, clock)
            raise
        except BaseException as error:  # our own defects: recorded, then raised on
            logger.exception("failed")
            self._end("failed", 1, f"{type(error).__name__}: {error}", started, clock)
            raise
        logger.info("Completed")
        self._end("completed", 0, "all steps taken", started, clock)

    def _end(self, status: str, exit_code: int, reason: str, started: datetime, clock: float) -> None:
        if self.continued and not self.accepted:
            return
        result = {
            "schema": "tunix-rt/result/1",
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds_before + time.monotonic() - clock, 3),
            **self.facts,
        }
        # The hashes first, with that of the result to come: a crash in between leaves a run without a result, which is
        # unfinished and can be continued. The other way round it would be complete and never verify.
        text = json_text(result)
        write_hashes(self.run, to_come={self.run.result: text})
        write_text(self.run.result, text)

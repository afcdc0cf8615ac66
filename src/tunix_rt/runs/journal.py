"""How a run is written down: its log while it goes, its result and hashes when it ends, however it ends.

A continuation writes nothing until it is known to be the run that began in the folder: a refused one leaves every file
as it was, and the run still verifies.
"""

import logging
import logging.handlers
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunix_rt.errors import StorageError, TunixError
from tunix_rt.models.secrets import redacted
from tunix_rt.runs.checksums import write_sums
from tunix_rt.runs.folder import RunDir
from tunix_rt.storage import json_text, read_json, storage, sync_folder, write_text

logger = logging.getLogger(__name__)


MOST_WARNINGS, LONGEST_WARNING = 50, 500
"""Of those that `result.json` lists, and characters of each."""


class LogFile(logging.Handler):
    """`training_log.txt`, unbuffered: what a full disk refused must not arrive after the file was hashed.

    The first line that cannot be written ends the run with a StorageError, once; `failure` keeps it where it must not be
    raised, in another thread or while the run ends.
    """

    failure: StorageError | None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self.failure, self.raises = path, None, True
        with storage(path):
            self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        if self.failure is not None:
            return
        left = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        try:
            with storage(self._path):
                while left:
                    left = left[self._file.write(left) :]
        except StorageError as error:
            self.failure = error
            if self.raises and threading.current_thread() is threading.main_thread():
                raise

    def close(self) -> None:
        super().close()
        with storage(self._path):
            self._file.close()


class WithoutSecrets(logging.Formatter):
    """Strikes tokens of the hub from what libraries say, and writes ~ for the folder of whoever runs it: a log is for
    strangers."""

    def format(self, record: logging.LogRecord) -> str:
        return without_home(redacted(super().format(record)))


def without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(f"{home}{os.sep}", f"~{os.sep}") if len(home) > 1 else text


@dataclass(slots=True, kw_only=True)
class Record:
    """What is known of the run so far; `result.json` is written from it whatever happens."""

    run: RunDir
    continued: bool
    facts: dict[str, Any] = field(default_factory=dict)
    training_began: bool = False
    seconds_before: float = 0.0
    """Of the steps that earlier processes took and this one does not take again."""
    sound: set[Path] = field(default_factory=set)
    """Checkpoints that this process verified or committed; the files of others are read when the run ends."""
    ending: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds the writing of the ending, so that no signal halves it."""
    warnings: list[str] = field(default_factory=list)
    """Distinct warnings of libraries, and of what a reader of the result must know."""
    log: LogFile | None = None
    held_back: list[Callable[[], None]] = field(default_factory=list)
    accepted: bool = False

    def write(self, write: Callable[[Path, Any], None], path: Path, value: Any) -> None:
        """Write `value` to `path`, in a continuation once it is accepted."""
        self._when_accepted(lambda: write(path, value))

    def warn(self, text: str) -> None:
        """One line in the log; in `result.json` once, on one line, without secrets."""
        logger.warning("%s", text)
        plain = " ".join("".join(one if one.isprintable() else " " for one in text).split())
        self.warnings = _distinct([*self.warnings, without_home(redacted(plain))])

    def _show_warning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """A warning of a library is a line of the log: one about the GPU must not pass unnoticed. Without its place on disk."""
        self.warn(f"{category.__name__}: {' '.join(str(message).split())}")

    def accept(self) -> None:
        """This is the run that began here: its old ending goes, and what was held back is written."""
        self.accepted = True
        self.warnings = _distinct([*_warnings_of(self.run.result), *self.warnings])
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
        formatter = WithoutSecrets("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        # Passes each record on at once when it has a target, and keeps them all while it has none.
        gate = logging.handlers.MemoryHandler(capacity=1, flushOnClose=False)

        def open_file() -> None:
            self.log = LogFile(self.run.log)
            self.log.setFormatter(formatter)
            gate.setTarget(self.log)
            gate.flush()

        self._when_accepted(open_file)
        package = logging.getLogger("tunix_rt")
        package.addHandler(gate)
        show = warnings.showwarning
        warnings.showwarning = self._show_warning
        try:
            yield
        finally:
            warnings.showwarning = show
            package.removeHandler(gate)
            gate.close()
            if self.log is not None:
                self.log.close()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Write `result.json` and the hashes at the end, however it ends. The one broad except of tunix-rt."""
        started, clock = datetime.now(UTC), time.monotonic()
        try:
            yield
            logger.info("Completed")
            if self.log is not None and self.log.failure is not None:
                raise self.log.failure
        except TunixError as error:
            with self.ending():
                refused = error.exit_code in (2, 3, 4, 5) and not self.training_began
                status = "preempted" if error.exit_code == 7 else "refused" if refused else "failed"
                self._end_after(error, status, error.exit_code, error.problem, started, clock)
            raise
        except BaseException as error:  # our own defects: recorded, then raised on
            with self.ending():
                self._end_after(error, "failed", 1, f"{type(error).__name__}: {error}", started, clock)
            raise
        with self.ending():
            self._end("completed", 0, "all steps taken", started, clock)

    def _end_after(
        self, error: BaseException, status: str, exit_code: int, reason: str, started: datetime, clock: float
    ) -> None:
        """Write the ending after `error`, which stays the one that is raised, whatever happens to the disk meanwhile."""
        if self.log is not None:
            self.log.raises = False
        if isinstance(error, TunixError):
            logger.error("%s: %s", status, error.problem)
        else:
            logger.exception("failed")
        try:
            self._end(status, exit_code, reason, started, clock)
        except TunixError as another:
            logger.error("how the run ended could not be written down: %s", another.problem)

    def _end(self, status: str, exit_code: int, reason: str, started: datetime, clock: float) -> None:
        if self.continued and not self.accepted:
            return
        result = {
            "schema": "tunix-rt/result/1",
            "status": status,
            "exit_code": exit_code,
            "reason": redacted(reason),
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds_before + time.monotonic() - clock, 3),
            "warnings": self.warnings,
            **self.facts,
        }
        # The hashes first, with that of the result to come: a crash in between leaves a run without a result, which is
        # unfinished and can be continued. The other way round it would be complete and never verify.
        text = json_text(result)
        write_sums(self.run, pending={self.run.result: text}, verified=self.sound)
        write_text(self.run.result, text)


def _distinct(found: list[str]) -> list[str]:
    return list(dict.fromkeys(one[:LONGEST_WARNING] for one in found))[:MOST_WARNINGS]


def _warnings_of(result: Path) -> list[str]:
    """Those that the process before this one listed; none where it was killed."""
    try:
        listed = read_json(result)["warnings"]
    except (TunixError, KeyError, TypeError):
        return []
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []

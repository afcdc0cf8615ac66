"""The journal of a run: its log while it runs, its result and checksums when it ends, however it ends.

A resumed run writes nothing until it is known to be the run that began in the folder: a refused one leaves every file
unchanged, and the run still verifies.
"""

import logging
import logging.handlers
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunix_rt.errors import Preempted, StorageError, TunixError
from tunix_rt.models.secrets import redacted
from tunix_rt.progress import phase
from tunix_rt.runs.checksums import write_sums
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.schemas_host import Extension
from tunix_rt.storage import json_text, read_json, storage, sync_files, sync_folder, to_plain, write_json, write_text

logger = logging.getLogger(__name__)


MOST_WARNINGS, LONGEST_WARNING = 50, 500
"""Warnings listed in `result.json`, and characters of each."""


class LogFile(logging.Handler):
    """`training_log.txt`, unbuffered: no line may reach the disk after the file was hashed. A sealed one takes no lines.

    The first line that cannot be written ends the run with a StorageError, once; `failure` keeps the error where it must not
    be raised, in another thread or while the run ends.
    """

    failure: StorageError | None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self.failure, self.raises, self._sealed = path, None, True, False
        with storage(path):
            self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        if self.failure is not None or self._sealed:
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

    def seal(self, sealed: bool) -> None:
        """Returns after the line that another thread is writing."""
        self.acquire()
        self._sealed = sealed
        self.release()

    def close(self) -> None:
        super().close()
        with storage(self._path):
            self._file.close()


class WithoutSecrets(logging.Formatter):
    """Redacts hub tokens and replaces the home folder by ~: strangers read this log."""

    def format(self, record: logging.LogRecord) -> str:
        return without_home(redacted(super().format(record)))


def without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(f"{home}{os.sep}", f"~{os.sep}") if len(home) > 1 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of a run; `available_bytes` of one that was predicted not to fit."""

    predicted_bytes: int
    measured_bytes: int | None = None
    available_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The facts in `result.json`, filled in by the stages. How far the run came decides which are set; `Result` in
    `schemas.py` is the closed schema."""

    device: str | None = None
    parameters: int | None = None
    run_id: str | None = None
    memory: Footprint | None = None
    oom_attempt: Footprint | None = None
    steps_planned: int | None = None
    steps_completed: int | None = None
    resumed_from: int | None = None
    skipped_checkpoints: list[dict[str, Any]] | None = None
    final_loss: float | None = None
    final_loss_hex: str | None = None
    metrics_head: str | None = None
    final_state: str | None = None
    best_step: int | None = None
    best_heldout_loss: float | None = None
    answering_seconds: float | None = None
    scores: dict[str, dict[str, float]] | None = None
    gpu_memory: list[dict[str, Any]] | None = None
    final_model: dict[str, Any] | None = None

    def set(self, **values: Any) -> None:
        """Several fields at once; an unknown name is an AttributeError."""
        for name, value in values.items():
            setattr(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """The fields that are set."""
        given = {one.name: to_plain(getattr(self, one.name)) for one in fields(self)}
        return {name: without_none(value) for name, value in given.items() if value is not None}


def without_none(value: Any) -> Any:
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


@dataclass(slots=True, kw_only=True)
class RunJournal:
    """The open record of a run; `result.json` is written from it whatever happens."""

    run: RunDir
    continued: bool
    """Whether this process resumes a run that began in an earlier one."""
    extensions: tuple[Extension, ...] = ()
    """Of a run that was extended, the last perhaps by this process."""
    result: RunResult = field(default_factory=RunResult)
    reason: str = "all steps taken"
    """Why the run completed."""
    training_began: bool = False
    seconds_before: float = 0.0
    """Seconds of the steps that earlier processes took and this one does not repeat."""
    verified: set[Path] = field(default_factory=set)
    """Checkpoints that this process verified or committed; the files of others are hashed when the run ends."""
    ending: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds the writing of the ending, so that no signal halves it."""
    verify: Callable[[Path], None] = lambda folder: None
    """Raises if the run that has just completed does not verify: it is a failed run."""
    before_end: list[Callable[[str], None]] = field(default_factory=list)
    """Called with the status before `result.json` is written."""
    warnings: list[str] = field(default_factory=list)
    """Distinct warnings of libraries, and those that a reader of the result must know."""
    log: LogFile | None = None
    held_back: list[Callable[[], None]] = field(default_factory=list)
    accepted: bool = False
    began: tuple[datetime, float] = field(default_factory=lambda: (datetime.now(UTC), time.monotonic()))

    def write(self, write: Callable[[Path, Any], None], path: Path, value: Any) -> None:
        """Write `value` to `path`; in a resumed run, once it is accepted."""
        self._when_accepted(lambda: write(path, value))

    def warn(self, text: str) -> None:
        """One line in the log; in `result.json` once, on one line, without secrets."""
        logger.warning("%s", text)
        plain = " ".join("".join(one if one.isprintable() else " " for one in text).split())
        self.warnings = _distinct([*self.warnings, without_home(redacted(plain))])

    def _show_warning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """Log a library's warning without its source path."""
        self.warn(f"{category.__name__}: {' '.join(str(message).split())}")

    def accept(self) -> None:
        """This is the run that began here: delete its old ending and write what was held back."""
        self.accepted = True
        self.warnings = _distinct([*_warnings_of(self.run.result), *self.warnings])
        if self.extensions:  # before the old ending goes: the run would be another one without it
            listed = [one.model_dump() for one in self.extensions]
            write_json(self.run.extensions, {"schema": "tunix-rt/extensions/1", "extensions": listed})
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
        """Copy log records to `training_log.txt`; a resumed run appends."""
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
        """Write `result.json` and the checksums at the end, however it ends."""
        self.began = datetime.now(UTC), time.monotonic()
        try:
            yield
            logger.info("Completed")
            if self.log is not None and self.log.failure is not None:
                raise self.log.failure
            with self.ending(), phase("checksums"):
                self._end("completed", 0, self.reason)
                self.verify(self.run.root)
        except TunixError as error:
            with self.ending():
                refused = error.exit_code in (2, 3, 4, 5) and not self.training_began
                status = "preempted" if error.exit_code == 7 else "refused" if refused else "failed"
                self._end_after(error, status, error.exit_code, error.problem)
            raise
        except BaseException as error:  # our own defects: recorded, then raised on
            with self.ending():
                self._end_after(error, "failed", 1, f"{type(error).__name__}: {error}")
            raise

    def end_now(self, error: TunixError) -> None:
        """Write the ending from another thread: the main thread is in a call that does not return."""
        self._end("preempted" if isinstance(error, Preempted) else "failed", error.exit_code, error.problem)

    def _end_after(self, error: BaseException, status: str, exit_code: int, reason: str) -> None:
        """Write the ending after `error`, which is raised whatever happens to the disk meanwhile."""
        if self.log is not None:
            self.log.raises = False
            self.log.seal(False)
        if isinstance(error, TunixError):
            logger.error("%s: %s\n  fix: %s", status, error.problem, error.fix)
        else:
            logger.exception("failed")
        try:
            self._end(status, exit_code, reason)
        except TunixError as another:
            logger.error("result.json could not be written: %s", another.problem)

    def _end(self, status: str, exit_code: int, reason: str) -> None:
        if self.continued and not self.accepted:
            return
        for act in self.before_end:
            act(status)
        started, clock = self.began
        result = {
            "schema": "tunix-rt/result/1",
            "status": status,
            "exit_code": exit_code,
            "reason": redacted(reason),
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds_before + time.monotonic() - clock, 3),
            "warnings": self.warnings,
            **self.result.to_json(),
        }
        # The checksums first, with that of the result to come: a crash in between leaves a run without a result, which is
        # unfinished and can be resumed. The other way round it would be complete and never verify.
        text = json_text(result)
        if self.log is not None:
            self.log.seal(True)
        try:
            sync_files(self.run.metrics, self.run.heldout, self.run.samples_along, self.run.log)
            write_sums(self.run, pending={self.run.result: text}, verified=self.verified)
        except TunixError as error:
            if status == "completed":
                raise
            logger.error("SHA256SUMS could not be written: %s", error.problem)
        write_text(self.run.result, text)


def _distinct(found: list[str]) -> list[str]:
    return list(dict.fromkeys(one[:LONGEST_WARNING] for one in found))[:MOST_WARNINGS]


def _warnings_of(result: Path) -> list[str]:
    """Warnings that the previous process listed; none where it was killed."""
    try:
        listed = read_json(result)["warnings"]
    except (TunixError, KeyError, TypeError):
        return []
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []

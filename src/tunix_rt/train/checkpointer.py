"""Asynchronous checkpoints: a snapshot is taken at once, a thread writes and commits it and prunes all but the newest and the
best by held-out loss."""

import contextlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import Backend, Engine
from tunix_rt.errors import StorageError, TunixError
from tunix_rt.progress import duration, phase
from tunix_rt.ranks import world
from tunix_rt.runs.folder import (
    RunDir,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    prune_checkpoints,
    publish_checkpoint,
    stage_checkpoint,
)
from tunix_rt.storage import WrittenFile, require_space, storage, write_json
from tunix_rt.train.preemption import COURTESY_SECONDS, Preemption

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 * 2**20
"""Disk space that a checkpoint leaves for metrics, logs and the result."""
SLOW_DISK_BYTES_PER_SECOND = 200e6
"""Assumed speed of a save before one was timed: a cloud disk, hashing included."""
Write = Callable[[Path], Mapping[str, WrittenFile] | None]
LONG_WAIT_SECONDS = 1.0
GATE_SECONDS = 2.0
"""How long an abandoned save may take to finish its rename."""


class Checkpointer:
    """At most one save is in progress. A failed one is raised at the next step or at the end, never lost and never hidden.

    A context manager: leaving it waits for the save in progress, also after an error, unless the run must end now.
    """

    def __init__(
        self,
        backend: Backend,
        engine: Engine,
        optimizer: object,
        *,
        run: RunDir,
        keep: int,
        start: int,
        sync_metrics: Callable[[], None],
        stop: Preemption,
        verified: set[Path] | None = None,
        published: Callable[[Path], None] = lambda checkpoint: None,
    ) -> None:
        """Committed checkpoints are added to `verified`: their files were hashed, and need not be at the end. `published` is
        called with each before an older one is deleted."""
        self._backend, self._engine, self._optimizer = backend, engine, optimizer
        self._run, self._keep, self._sync_metrics, self._stop = run, keep, sync_metrics, stop
        self._verified = set() if verified is None else verified
        self._published = published
        self._steps = [start] if start else []
        self._longest = self._guess = 0.0
        self.blocked_seconds = 0.0
        """How long the last save held training up."""
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()  # Thread.join takes a running thread for ended once a signal has interrupted it
        self._idle.set()
        self._failure: BaseException | None = None
        self._gate, self._saving = threading.Lock(), threading.Lock()
        self._given_up = self._warned = False

    # --- what is saved ------------------------------------------------------------------------------------------------

    @property
    def requested(self) -> int:
        """The last step that was to be saved, or resumed from."""
        return self._steps[-1] if self._steps else 0

    @property
    def committed(self) -> int:
        """The newest step of this run that lies in the folder under its name; 0 when there is none."""
        there = (s for s in self._steps if os.path.isfile(self._run.checkpoints / checkpoint_name(s) / "MANIFEST.json"))
        return max(there, default=0)

    def saved_state(self) -> str:
        return f"step {self.committed} is saved" if self.committed else "nothing is saved yet"

    @property
    def longest_seconds(self) -> float:
        """Of the saves so far; before the first, a guess from its size."""
        if not self._guess:
            self._guess = self._backend.snapshot_bytes(self._engine, self._optimizer) / SLOW_DISK_BYTES_PER_SECOND
        return self._longest or self._guess

    @property
    def stop_seconds(self) -> float:
        """To have another step on disk; the save in progress ends first."""
        return self.longest_seconds * (1 if self._idle.is_set() else 2)

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any], *, direct: bool = False) -> None:
        """Save the engine after `step`, with `state`. Returns before it is on disk, unless it is written `direct`ly, without a
        snapshot in host memory. A step that is saved already, or by another thread, is not saved again."""
        with self._saving:
            failed = self._idle.is_set() and self.committed != step
            if self.requested != step or failed:
                began = time.monotonic()
                self._save(step, state, direct=direct)
                self.blocked_seconds = time.monotonic() - began

    def _save(self, step: int, state: dict[str, Any], *, direct: bool) -> None:
        self.wait()
        began, backend = time.monotonic(), self._backend
        size = backend.snapshot_bytes(self._engine, self._optimizer)
        what = f"the checkpoint of step {step}, with a margin,"
        require_space(self._run.checkpoints, size + SPARE_BYTES, what=what, keep=self._keep)
        previous = self.committed
        self._steps = [s for s in (previous, step) if s]
        commit = partial(self._commit, step, previous=previous, state=state, began=began)
        if not direct and not backend.host_has_room(size):
            self._warn_once(size)
            direct = True
        if direct:
            commit(partial(backend.write_direct, self._engine, self._optimizer))
            return
        write = backend.snapshot(self._engine, self._optimizer).write
        # A daemon: a forced exit does not wait for it, and a half-written checkpoint does not count.
        self._idle.clear()
        self._thread = threading.Thread(target=self._try, args=(commit, write), name="tunix-rt-save", daemon=True)
        self._thread.start()

    def _warn_once(self, size: int) -> None:
        if not self._warned:
            logger.warning(
                "Checkpoints block training: a snapshot needs %.2f GiB of host memory, %.2f GiB are free",
                size / 2**30, host_facts().ram_available_bytes / 2**30,
            )  # fmt: skip
        self._warned = True

    def _try(self, commit: Callable[[Write], None], write: Write) -> None:
        try:
            commit(write)
        except BaseException as error:  # noqa: BLE001  whatever it is, the thread that trains raises it
            self._failure = error
        finally:
            self._idle.set()

    def _commit(self, step: int, write: Write, *, previous: int, state: dict[str, Any], began: float) -> None:
        """Metrics first: a checkpoint that outlives its metrics in a power cut cannot be resumed from."""

        def write_all(folder: Path) -> Mapping[str, WrittenFile] | None:
            write_json(folder / "state.json", state)
            return write(folder)

        folder = self._run.checkpoints
        self._sync_metrics()
        staged = stage_checkpoint(folder, step, write_all)
        with self._gate:
            if self._given_up:  # the result already names the last checkpoint
                shutil.rmtree(staged, ignore_errors=True)
                return
            committed = publish_checkpoint(staged)
            self._verified.add(committed)
            self._published(committed)
            self._prune(step, previous)
        self._longest = max(self._longest, time.monotonic() - began)

    def _prune(self, newest: int, previous: int) -> None:
        try:
            best = best_checkpoint(self._run).get("best_step")
            prune_checkpoints(self._run.checkpoints, self._keep, newest=newest, previous=previous, best=best)
        except StorageError as error:  # the new one is saved; pruning is tried again after the next save
            logger.warning("Older checkpoints could not be deleted: %s", error.problem)

    # --- waiting, failing, ending -------------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Until the save in progress is committed; raises its error."""
        began = time.monotonic()
        if not self._idle.is_set():
            with phase("save the checkpoint"):
                self._idle.wait()
        if (waited := time.monotonic() - began) > LONG_WAIT_SECONDS:
            logger.info("Waited %s for the checkpoint of step %d", duration(waited), self.requested)
        self.raise_if_failed()

    def give_up(self, error: TunixError | None = None) -> None:
        """Abandon the save in progress: nothing is committed or deleted from now on."""
        held = self._gate.acquire(timeout=GATE_SECONDS)
        self._given_up = True
        if held:
            self._gate.release()

    def finish(self) -> None:
        """Wait for the last save, then prune once more: the last held-out loss may have made another the best."""
        self.wait()
        if step := self.committed:
            self._prune(step, step)

    def __enter__(self) -> "Checkpointer":
        self._stop.saved_state = self.saved_state
        self._stop.on_forced_exit.append(self.give_up)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._stop.now:
                self._idle.wait()
        finally:
            self.give_up()
            self._stop.on_forced_exit.remove(self.give_up)
            # The last evaluation needs the memory of the optimizer; `committed` reads the folder.
            del self._engine, self._optimizer
        if error is None:
            self.raise_if_failed()
        elif self._failure is not None and self._failure is not error:
            logger.error("The checkpoint of step %d failed as well: %s", self.requested, self._failure)


class FinishedStep:
    """The last finished step, which the weights hold until the next update begins. Another thread may save it until then.

    The lock is held by the main thread while the weights belong to no finished step, and for good by a thread that saves them
    because the run stops."""

    def __init__(self, saver: Checkpointer, *, direct: bool) -> None:
        self._saver, self.direct, self._lock = saver, direct, threading.Lock()
        self._state: dict[str, Any] | None = None
        self._locked_at = self._longest = 0.0

    def before_update(self) -> None:
        """The weights change from here on, until `finished`."""
        self._lock.acquire()
        self._locked_at = time.monotonic()

    def finished(self, state: dict[str, Any]) -> None:
        """The weights are those of the step with `state`."""
        self._state, self._longest = state, max(self._longest, time.monotonic() - self._locked_at)
        self._lock.release()

    def stop_seconds(self) -> float:
        return self._longest + self._saver.stop_seconds

    def stop_plan(self) -> str:
        save = f"takes about {duration(self._saver.longest_seconds)}"
        if self._lock.locked():
            most = f" (up to {duration(self._longest)})" if self._longest else ""
            return f"stopping after the current step{most}; saving it {save}"
        if self._state is None or self._saver.committed == self._state["step"]:
            return f"stopping; {self._saver.saved_state()}"
        step = self._state["step"]
        return f"stopping; saving step {step}, or {step + 1} if it ends within {COURTESY_SECONDS:g} s, {save}"

    def save(self) -> None:
        """Save the step, unless it is saved, and wait for it."""
        if self._state is not None:
            self._saver.save(self._state["step"], self._state, direct=self.direct)
            self._saver.wait()

    def save_finished(self) -> bool:
        """In another thread. An update that began is waited for; none begins afterwards. Above one rank only the main thread
        saves: the others compute in its order."""
        if world().size > 1:
            return False
        self._lock.acquire()
        try:
            self.save()
        except Exception as error:  # noqa: BLE001  the lock must be released, whatever it is
            logger.error("The last finished step could not be saved: %s", error)
            self._lock.release()  # the main thread finishes the next step and tries to save that
            return False
        return True


# --- the best ---------------------------------------------------------------------------------------------------------


def best_checkpoint(run: RunDir) -> dict[str, Any]:
    """`best_step` and `best_heldout_loss` of `result.json`: the lowest, the earlier of two; empty without a checkpoint."""
    losses = heldout_losses(run)
    saved = sorted(step for step in map(checkpoint_step, list_checkpoints(run.checkpoints)) if step in losses)
    if not saved:
        return {}
    best = min(saved, key=lambda step: losses[step])
    return {"best_step": best, "best_heldout_loss": losses[best]}


def early_stop(losses: Iterable[float], patience: int | None) -> int | None:
    """The number of evaluations after which a run with these held-out losses stops early; None where it goes on."""
    best, since = math.inf, 0
    for number, loss in enumerate(losses, start=1):
        best, since = (loss, 0) if loss < best else (best, since + 1)
        if since == patience:
            return number
    return None


def heldout_losses(run: RunDir) -> dict[int, float]:
    """Step -> held-out loss. Torn lines are left out."""
    losses: dict[int, float] = {}
    for record, _ in whole_lines(run.heldout):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            losses[int(record["step"])] = float(record["loss"])
    return losses


def whole_lines(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """The objects in a JSONL file, each with its line; without torn lines. Empty where there is no file."""
    found: list[tuple[dict[str, Any], bytes]] = []
    with storage(path):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line), dict):
                    found.append((record, line))
    return found

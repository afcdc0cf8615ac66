"""Work on a stream of batches in several processes: results in order, and only a few batches in memory at a time."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tunix_rt.errors import TunixError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HAS_GROUPS = os.name == "posix"
AHEAD = 2
"""Batches per process that are read before the first of them is back."""


def in_order(
    work: Callable[[Batch], Result],
    batches: Iterable[Batch],
    *,
    processes: int,
    begin: Callable[..., None],
    settings: tuple[Any, ...],
) -> Iterator[Result]:
    """`work` of every batch, in their order. `begin(*settings)` runs once in each process before.

    One process is this one. More are started afresh, not forked: a fork of a process with threads may hang.
    """
    if processes == 1:
        begin(*settings)
        yield from map(work, batches)
        return
    pool = ProcessPoolExecutor(
        max_workers=processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_alone,
        initargs=(begin, settings),
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            with _signals_wait():  # a process that is being started has them wait too, until it is ready for them
                waiting.append(pool.submit(work, batch))
            if len(waiting) >= AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise TunixError(
            "a process that prepares the data ended without a word; the system may have run out of memory",
            fix="free some memory and run it again; nothing half-made was kept",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    if not _HAS_GROUPS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_alone(begin: Callable[..., None], settings: tuple[Any, ...]) -> None:
    """In a new process: leave signals to the parent, end when it ends, and use one thread.

    A terminal and many schedulers signal the whole group, so the process leaves it. The parent stops its workers by
    itself, for which they must still listen to SIGTERM: one that ignored it could never be ended after another had died.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # forgets one that came to the group while we were starting
    if _HAS_GROUPS:
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begin(*settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

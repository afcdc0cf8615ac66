"""Reads a trace of the PyTorch profiler: what ran when, and inside what."""

import bisect
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tunix_rt.errors import InputError

# What the engine calls the parts of its step in a trace.
STEP = "tunix-rt: step"
BATCH = "tunix-rt: batch"
FORWARD = "tunix-rt: forward"
HEAD = "tunix-rt: loss head"
BACKWARD = "tunix-rt: backward"
OPTIMIZER = "tunix-rt: optimizer"
REGIONS = (STEP, BATCH, FORWARD, HEAD, BACKWARD, OPTIMIZER)


class Span(NamedTuple):
    """Something that ran on a thread of the program, in microseconds."""

    start: float
    end: float
    name: str


class Kernel(NamedTuple):
    """Something that ran on the GPU; `launch` is the number it shares with the call that launched it."""

    start: float
    end: float
    name: str
    kind: str
    launch: int


@dataclass(slots=True)
class Trace:
    """What the table needs of a trace."""

    threads: dict[int, list[Span]]
    """Regions and operations of each thread."""
    kernels: list[Kernel]
    launches: dict[int, tuple[float, int]]
    """When and on which thread."""


def read_trace(path: Path) -> Trace:
    """The trace in a gzipped file. An event is discarded once it is parsed: that of a large model has more than a million."""
    trace = Trace(threads=defaultdict(list), kernels=[], launches={})

    def take(parsed: dict[str, Any]) -> dict[str, Any] | None:
        if "ph" not in parsed:
            return parsed
        _take(trace, parsed)
        return None

    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            _ = json.load(file, strict=False, object_hook=take)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read as a trace: {error!r}", fix="record it again") from error
    return trace


def _take(trace: Trace, event: dict[str, Any]) -> None:
    kind = event.get("cat")
    if event.get("ph") != "X" or kind not in _TAKEN:
        return
    start, name = float(event["ts"]), str(event["name"])
    end = start + float(event["dur"])
    if kind == "cpu_op" or (kind == "user_annotation" and name in REGIONS):
        trace.threads[int(event["tid"])].append(Span(start, end, name))
        return
    launch = int((event.get("args") or {}).get("correlation") or 0)
    if kind in ("cuda_runtime", "cuda_driver"):
        if launch:
            trace.launches.setdefault(launch, (start, int(event["tid"])))
    elif kind in _ON_GPU:
        trace.kernels.append(Kernel(start, end, name, kind, launch))


_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_TAKEN = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", *_ON_GPU)


# --- what runs when ---------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """A time in which `names`, from the outermost in, were under way on a thread, and nothing inside the last of them."""

    start: float
    end: float
    names: tuple[str, ...]


def stretches(spans: Sequence[Span]) -> list[Stretch]:
    """The time of one thread, cut where its innermost span changes. Spans lie inside each other or apart."""
    found: list[Stretch] = []
    under_way: list[tuple[float, tuple[str, ...]]] = []
    reached = 0.0

    def advance(to: float) -> None:
        nonlocal reached
        if under_way and to > reached:
            found.append(Stretch(reached, to, under_way[-1][1]))
        reached = max(reached, to)

    def leave(until: float) -> None:
        while under_way and under_way[-1][0] <= until:
            advance(under_way[-1][0])
            under_way.pop()

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        leave(span.start)
        advance(span.start)
        outer = under_way[-1][1] if under_way else ()
        under_way.append((span.end, (*outer, span.name)))
    leave(math.inf)
    return found


def last_begun(thread: Sequence[Stretch], moment: float) -> int:
    """The index of the last stretch that begins at `moment` or before; -1: none does."""
    return bisect.bisect_right(thread, (moment, math.inf)) - 1


def under_way(thread: Sequence[Stretch], moment: float) -> tuple[str, ...]:
    """What the thread did at `moment`, from the outermost in."""
    place = last_begun(thread, moment)
    return thread[place].names if place >= 0 and moment < thread[place].end else ()


def region_of(names: Sequence[str]) -> str | None:
    return next((name for name in reversed(names) if name in REGIONS), None)

"""`metrics.jsonl` as columns of numbers that grow with the file, and the buckets that a chart shows of them.

The file may be live, huge or hostile. It is read in chunks, up to the first line that does not fit; nothing in it raises.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic_core import SchemaValidator
from pydantic_core import core_schema as cs

from tunix_rt.runs import checksums
from tunix_rt.runs.schemas import StepLine
from tunix_rt.runs.tail import sample_objects

FILE = "metrics.jsonl"
CHUNK = checksums.LONGEST_LINE
MOST_BYTES = 2 * 2**30
MOST_STEPS = 2_500_000
AT_ONCE = 8 * 2**20
"""Bytes that a page waits for. More is read by a thread, and a sample is shown meanwhile."""
KEPT_BYTES = 256 * 2**20
IN_USE_SECONDS = 60.0
"""Columns that were used since are not dropped: pages that show more than is kept would read the same files again and again."""
SAMPLED = 400
HEAD_START = 0.2
"""Seconds for the page with the sample, before a thread takes the processor from it."""
THREADS = threading.BoundedSemaphore(2)

Column = NDArray[np.float64]


def _numeric_fields() -> dict[str, bool]:
    """The numbers that a step declares: name -> whether a line may lack it. Those that every line has come first."""
    found = {}
    hints = get_type_hints(StepLine)
    for name in StepLine.model_fields:
        kinds = set(get_args(hints[name]) or (hints[name],))
        if kinds <= {int, float, type(None)}:
            found[name] = type(None) in kinds
    return dict(sorted(found.items(), key=lambda field: field[1]))


def _ratio(above: Column, below: Column) -> Column:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


FIELDS = _numeric_fields()
DERIVED: Mapping[str, Callable[[Mapping[str, Column], float], Column]] = {
    "tokens_per_second": lambda new, before: _ratio(new["tokens"], new["seconds"]),
    "total_tokens": lambda new, before: before + np.cumsum(new["tokens"]),
    "total_seconds": lambda new, before: before + np.cumsum(new["seconds"]),
}
"""From the columns of new steps, and the value of the step before them."""
TOTALS = ("total_tokens", "total_seconds")
"""Known only where every step is read."""
NAMES = (*FIELDS, *DERIVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Columns by name, all of one length; NaN where a line lacks an optional number."""

    columns: Mapping[str, Column] = field(default_factory=dict)
    is_sample: bool = False
    """A few hundred steps, spread evenly over the file."""
    reading: bool = False
    """A thread reads the whole file; look again."""
    problem: str = ""

    @property
    def steps(self) -> int:
        return len(self.columns["step"]) if self.columns else 0


# --- reading ----------------------------------------------------------------------------------------------------------


def _validator() -> SchemaValidator:
    """Of a list of steps: the declared numbers alone, each a finite float. It stops at the first step that does not fit."""
    number = cs.float_schema(strict=True, allow_inf_nan=False)
    fields = {
        name: cs.typed_dict_field(cs.with_default_schema(number, default=np.nan) if optional else number)
        for name, optional in FIELDS.items()
    }
    return SchemaValidator(cs.list_schema(cs.typed_dict_schema(fields, extra_behavior="ignore"), fail_fast=True))


_STEPS = _validator()


def _table(rows: list[dict[str, float]]) -> NDArray[np.float64]:
    """A row for every field."""
    values = chain.from_iterable(map(dict.values, rows))
    return np.fromiter(values, np.float64, len(rows) * len(FIELDS)).reshape(-1, len(FIELDS)).T


def _parse(lines: bytes) -> NDArray[np.float64]:
    """The columns of these lines. A ValueError unless each of them is an object with the numbers of a step."""
    rows = _STEPS.validate_json(b"[" + lines.replace(b"\n", b",") + b"]")
    if len(rows) != lines.count(b"\n") + 1:
        raise ValueError("not one object a line")
    return _table(rows)


def _parse_valid(lines: bytes) -> NDArray[np.float64]:
    """The columns of the lines up to the first that does not fit."""
    try:
        return _parse(lines)
    except ValueError:
        tables = [np.empty((len(FIELDS), 0))]
    for line in lines.split(b"\n"):
        try:
            tables.append(_parse(line))
        except ValueError:
            break
    return np.concatenate(tables, axis=1)


class MetricsFile:
    """The columns of one run's metrics, and how far the file is read."""

    def __init__(self, root: Path) -> None:
        self.root, self.used, self._lock = root, monotonic(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        self._values = np.empty((len(NAMES), 1024))
        self._present = np.array([not FIELDS.get(name, False) for name in NAMES])
        """Columns with a number. The others take no memory: nothing is written to them."""
        self._count, self._offset, self._last_line, self._inode, self.problem = 0, 0, b"", 0, ""
        self._stamp: tuple[int, int, int] | None = None
        """Inode, size and time of the file when it was read last."""

    @property
    def kept_bytes(self) -> int:
        return self._count * int(self._present.sum()) * 8

    def curves(self, *, may_thread: bool = True) -> Curves:
        """What the file contains now; a sample where that takes longer than a page may."""
        self.used = monotonic()
        reading = self._thread is not None and self._thread.is_alive()
        if not reading and self.read(AT_ONCE):
            with self._lock:
                places = np.flatnonzero(self._present)
                columns = {NAMES[place]: self._values[place, : self._count] for place in places}
                return Curves(columns=columns if self._count else {}, problem=self.problem)
        sample = _sample(self.root)
        if not reading and may_thread and not self.problem:
            self._thread = threading.Timer(HEAD_START, self._read_all)
            self._thread.daemon = True
            self._thread.start()
            reading = True
        return Curves(columns=sample, is_sample=True, reading=reading, problem=self.problem)

    def _read_all(self) -> None:
        with THREADS:
            self.read()

    def read(self, most: int | None = None) -> bool:
        """Read what is new. False, and nothing is read, where that is more than `most` bytes or the file is too large."""
        with self._lock:
            try:
                descriptor = checksums.open_regular(self.root, FILE)
            except OSError as error:
                self._forget()
                gone = isinstance(error, FileNotFoundError)
                self.problem = "" if gone else f"{FILE}: {checksums.UNREAD}: {error.strerror or error}"
                return True
            try:
                return self._read_on(descriptor, most)
            finally:
                os.close(descriptor)

    def _read_on(self, file: int, most: int | None) -> bool:
        found = os.fstat(file)
        stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
        if stamp == self._stamp:
            return found.st_size <= MOST_BYTES
        if found.st_ino != self._inode or found.st_size < self._offset or not self._ends_as_before(file):
            self._forget()  # a resumed run has truncated its metrics to the checkpoint
            self._inode = found.st_ino
        if found.st_size > MOST_BYTES:
            self.problem = f"{FILE}: {found.st_size:,} bytes, at most {MOST_BYTES:,} are read; the curves are a sample"
            self._stamp = stamp
            return False
        if most is not None and not self.problem and found.st_size - self._offset > most:
            return False
        self.problem = ""
        while self._offset < found.st_size and self._take(os.pread(file, CHUNK, self._offset)):
            pass
        self._stamp = stamp
        return True

    def _ends_as_before(self, file: int) -> bool:
        start = self._offset - len(self._last_line)
        return os.pread(file, len(self._last_line), start) == self._last_line

    def _take(self, data: bytes) -> bool:
        """Take the whole lines of a chunk. False: there is nothing more to read, and `problem` says why unless a torn line
        waits for its end."""
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            if len(data) >= CHUNK:
                self.problem = (
                    f"{FILE}:{self._count + 1}: a line of more than {CHUNK:,} bytes; the curves end before it"
                )
            return False
        table, count = _parse_valid(whole), whole.count(b"\n") + 1
        rises = np.diff(table[_STEP], prepend=self._values[_STEP, self._count - 1] if self._count else 0.0) > 0
        valid = len(rises) if rises.all() else int(np.argmin(rises))
        taken = min(valid, MOST_STEPS - self._count)
        if taken < count:
            whole = b"\n".join(whole.split(b"\n")[:taken])
        if taken:
            self._append(table[:, :taken])
            self._offset += len(whole) + 1
            self._last_line = whole[whole.rfind(b"\n") + 1 :] + b"\n"
        if taken < count:
            what = "its step does not rise" if valid < len(rises) else "not an object with the finite numbers of a step"
            what = what if taken == valid else f"more than {MOST_STEPS:,} steps"
            self.problem = f"{FILE}:{self._count + 1}: {what}; the curves end before it"
        return taken == count

    def _append(self, table: NDArray[np.float64]) -> None:
        before, after = self._count, self._count + table.shape[1]
        if after > self._values.shape[1]:  # curves that were given out keep the old array
            grown = np.empty((len(NAMES), min(max(2 * self._values.shape[1], after), MOST_STEPS)))
            for known in np.flatnonzero(self._present):
                grown[known, :before] = self._values[known, :before]
            self._values = grown
        for place, values in enumerate(table):
            if not self._present[place] and not np.isnan(values).all():
                self._present[place], self._values[place, :before] = True, np.nan
            if self._present[place]:
                self._values[place, before:after] = values
        new = dict(zip(FIELDS, table, strict=True))
        with np.errstate(over="ignore"):
            for place, derive in enumerate(DERIVED.values(), start=len(FIELDS)):
                last = float(self._values[place, before - 1]) if before else 0.0
                self._values[place, before:after] = derive(new, last)
        self._count = after


_STEP = NAMES.index("step")


def _sample(root: Path) -> dict[str, Column]:
    """The columns of some steps. Their totals are not known."""
    tables, last = [], 0.0
    for one in sample_objects(root, FILE, SAMPLED):
        try:
            table = _table(_STEPS.validate_python([one]))
        except ValueError:
            continue
        if table[_STEP, 0] > last:
            last = float(table[_STEP, 0])
            tables.append(table)
    if not tables:
        return {}
    new = dict(zip(FIELDS, np.concatenate(tables, axis=1), strict=True))
    new = {name: values for name, values in new.items() if not (FIELDS[name] and np.isnan(values).all())}
    unknown = np.full(len(tables), np.nan)
    return {**new, **{name: unknown if name in TOTALS else derive(new, 0.0) for name, derive in DERIVED.items()}}


class CurveStore:
    """The columns of the runs that were looked at last. Nothing of it is written down."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        self._files: OrderedDict[Path, MetricsFile] = OrderedDict()

    def get(self, root: Path) -> Curves:
        with self._lock:
            file = self._files.pop(root, None) or MetricsFile(root)
            self._files[root] = file
            others = [one for one in self._files.values() if one is not file]
            kept = sum(one.kept_bytes for one in self._files.values())
            for one in others:  # least recently used first
                if kept > self._most_bytes and monotonic() - one.used > IN_USE_SECONDS:
                    kept -= self._files.pop(one.root).kept_bytes
        return file.curves(may_thread=kept <= self._most_bytes)


# --- buckets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Neighbouring points, summarized. Every extreme is in the lowest or highest value of its bucket."""

    first: Column
    """The x of the first point of each bucket."""
    last: Column
    lowest: Column
    highest: Column
    mean: Column
    points: NDArray[np.int64]
    ends: tuple[float, float] = (0.0, 0.0)
    """The y of the very first point and of the very last."""

    def __len__(self) -> int:
        return len(self.points)

    def coarser(self, count: int) -> "Buckets":
        """At most `count` buckets of the same points."""
        if len(self) <= count:
            return self
        edges = np.arange(count) * len(self) // count
        points = np.add.reduceat(self.points, edges)
        with np.errstate(over="ignore"):
            sums = self.mean * self.points
        return _reduced(edges, self.first, self.last, self.lowest, self.highest, sums, points, self.ends)


def _reduced(
    edges: NDArray[np.int64], first: Column, last: Column, lowest: Column, highest: Column, sums: Column,
    points: NDArray[np.int64], ends: tuple[float, float],
) -> Buckets:  # fmt: skip
    """Buckets that begin at `edges`; `points` are how many each has."""
    low, high = np.minimum.reduceat(lowest, edges), np.maximum.reduceat(highest, edges)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduceat(sums, edges) / points
    mean = np.where(np.isfinite(mean), np.clip(mean, low, high), low / 2 + high / 2)
    until = np.append(edges[1:], len(lowest)) - 1
    return Buckets(first=first[edges], last=last[until], lowest=low, highest=high, mean=mean, points=points, ends=ends)


def bucketed(x: Column, y: Column, low: float, high: float, count: int) -> Buckets:
    """The points with `low` <= x <= `high` in at most `count` buckets; x rises, and y is left out where it is not finite.

    A bucket is 2^k points from a multiple of 2^k on: it stays as it is while the file grows.
    """
    start, stop = int(np.searchsorted(x, low, "left")), int(np.searchsorted(x, high, "right"))
    x, y = x[start:stop], y[start:stop]
    finite = np.isfinite(y)
    if not finite.all():
        x, y, start = x[finite], y[finite], 0
    if not len(y):
        return Buckets(first=y, last=y, lowest=y, highest=y, mean=y, points=np.empty(0, np.int64))
    end, width = start + len(y) - 1, 1
    while end // width - start // width + 1 > count:
        width *= 2
    edges = np.maximum(np.arange(start // width, end // width + 1) * width - start, 0)
    points = np.diff(np.append(edges, len(y)))
    return _reduced(edges, x, x, y, y, y, points, (float(y[0]), float(y[-1])))

"""The recorded errors of memory predictions on this computer: a line for every finished run, and the range they span.

The record is in the user's cache, not in a run folder; a run continues without it if the cache cannot be written.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from filelock import FileLock, Timeout

from tunix_rt.assets import cache_root

logger = logging.getLogger(__name__)

SCHEMA = "tunix-rt/seen-error/1"
TINY_BYTES = 512 * 2**20
"""Of a smaller run, libraries and the allocator take a share that no plan of its model predicts: its error is stated in MiB and
not recorded."""
FEWEST_RUNS, SIMILAR_SIZE = 2, 2.0
"""Runs that make a band, and how many times more or fewer parameters they may have."""
LOCK_SECONDS = 2.0
"""How long to wait for another process that writes."""
LONGEST_READ = 16 * 2**20
"""Of a longer record, more than about 40,000 runs, the newest part is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenError:
    """Predicted and measured bytes of one run, and what the run was."""

    device: str
    """Device name, as the doctor has it."""
    backend: str
    layers: str
    """How the plan ran them: `plain` (eager), `compiled` or `recorded` (CUDA graphs). Their errors differ."""
    recipe: str
    """dtypes and optimizer."""
    model: str
    parameters: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: below 0 the run used more than predicted."""
        return self.predicted_bytes / max(1, self.measured_bytes) - 1


def describe_error(predicted: int, measured: int) -> str:
    """How much higher the prediction is than the measurement: in percent, for tiny sizes in MiB."""
    if max(predicted, measured) < TINY_BYTES:
        return f"{round((predicted - measured) / 2**20):+,d} MiB"
    return f"{100 * (predicted / max(1, measured) - 1):+.1f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The errors of similar runs: their number, the lowest, the median and the highest."""

    runs: int
    lowest: float
    median: float
    highest: float

    def describe(self) -> str:
        low, middle, high = (f"{100 * error:+.1f} %" for error in (self.lowest, self.median, self.highest))
        return f"median error {middle} over {self.runs:,} similar runs ({low} to {high})"


def record_path() -> Path:
    return cache_root() / "seen_errors.jsonl"


def add(seen: SeenError) -> Path | None:
    """Append `seen` to the record and return its path; None, with a warning, if it cannot be written."""
    path = record_path()
    line = {"schema": SCHEMA, "at": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(seen)}
    text = json.dumps(line, sort_keys=True, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS),
            path.open("ab+", buffering=0) as file,
        ):
            if file.seek(0, os.SEEK_END) and _last_byte(path) != b"\n":
                text = b"\n" + text  # keep a truncated line of a crash apart
            file.write(text)  # in one call, so that a reader sees all of it or nothing
    except Timeout:
        logger.warning("The error of the memory prediction is not saved: %s is locked by another process", path)
        return None
    except OSError as error:
        logger.warning("The error of the memory prediction is not saved: %s: %s", path, error.strerror or error)
        return None
    return path


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def seen_errors() -> list[SeenError]:
    """All recorded errors, oldest first. Corrupt lines are skipped with one warning."""
    path = record_path()
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LONGEST_READ))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("The recorded prediction errors cannot be read: %s: %s", path, error.strerror or error)
        return []
    whole = size <= LONGEST_READ
    found: list[SeenError] = []
    corrupt: list[int] = []
    for number, line in enumerate(lines, start=1):
        if (seen := _parsed(line)) is not None:
            found.append(seen)
        elif line.strip() and (whole or number > 1):  # the first may be the end of a line
            corrupt.append(number)
    if corrupt:
        named = ", ".join(map(str, corrupt[:5])) + (" ..." if len(corrupt) > 5 else "")
        counted = "" if whole else f", counted in its last {LONGEST_READ // 2**20} MiB"
        logger.warning("%s: %d corrupt line(s) skipped: %s%s", path, len(corrupt), named, counted)
    return found


def _parsed(line: bytes) -> SeenError | None:
    try:
        fields = json.loads(line)
        if fields["schema"] != SCHEMA:
            return None
        seen = SeenError(**{name: fields[name] for name in SeenError.__slots__})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    words = (seen.device, seen.backend, seen.layers, seen.recipe, seen.model)
    sizes = (seen.parameters, seen.predicted_bytes, seen.measured_bytes)
    valid = all(isinstance(one, str) for one in words) and all(type(one) is int and 0 < one < 2**63 for one in sizes)
    return seen if valid else None


def similar(device: str, backend: str, *, layers: str, recipe: str, parameters: int) -> list[SeenError]:
    """Recorded runs of `backend` on devices of this name, with such `layers` (`MemoryPlan.layers`), the same `recipe`, and about
    as many `parameters`, oldest first."""
    kind = (device, backend, layers, recipe)
    return [
        seen
        for seen in seen_errors()
        if (seen.device, seen.backend, seen.layers, seen.recipe) == kind
        and parameters / SIMILAR_SIZE <= seen.parameters <= parameters * SIMILAR_SIZE
    ]


def band_of(seen: Sequence[SeenError]) -> Band | None:
    """The range of their errors. None with fewer than two: one run says nothing about the next."""
    errors = [one.error for one in seen]
    if len(errors) < FEWEST_RUNS:
        return None
    return Band(runs=len(errors), lowest=min(errors), median=median(errors), highest=max(errors))


def band(device: str, backend: str, *, layers: str, recipe: str, parameters: int) -> Band | None:
    """The errors of `similar` runs."""
    return band_of(similar(device, backend, layers=layers, recipe=recipe, parameters=parameters))

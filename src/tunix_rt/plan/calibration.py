"""How wrong predictions were on this computer: a line for every run that was measured to its end, and the band they span.

The record belongs to the person, not to a run: it lies in the cache, and a run goes on without it where nothing can be
written there.
"""

import json
import logging
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tunix_rt.assets import cache_root

logger = logging.getLogger(__name__)

SCHEMA = "tunix-rt/seen-error/1"
LOCK_SECONDS = 2.0
"""How long a line waits for another process to write its own."""
LONGEST_READ = 16 * 2**20
"""Of a record that grew beyond this, about 40,000 runs, the newest part is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenError:
    """What was predicted of one run and what was measured, in bytes, and what the run was."""

    device: str
    """The name of the device, as the doctor gives it."""
    backend: str
    layers: str
    """What its plan took to compute them: `plain`, `compiled` or `recorded`. Each kind has errors of its own."""
    recipe: str
    """Types and optimizer, in words."""
    model: str
    parameters: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: below 0 the run took more than was predicted."""
        return self.predicted_bytes / max(1, self.measured_bytes) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The errors of all runs of one kind: how many there were, the lowest and the highest."""

    runs: int
    lowest: float
    highest: float

    @property
    def words(self) -> str:
        runs = "1 run" if self.runs == 1 else f"{self.runs:,} runs"
        if self.runs == 1:
            return f"{runs}, error {100 * self.lowest:+.1f} %"
        return f"{runs}, error between {100 * self.lowest:+.1f} % and {100 * self.highest:+.1f} %"


def record_path() -> Path:
    return cache_root() / "seen_errors.jsonl"


def add(seen: SeenError) -> Path | None:
    """Append `seen` to the record, and where that lies; None, said in one line, where it cannot be written."""
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
                text = b"\n" + text  # a line that a crash has torn stays by itself
            file.write(text)  # at once, so that a reader sees all of it or nothing
    except Timeout:
        logger.warning("How wrong the prediction was is not recorded: %s is held by another process", path)
        return None
    except OSError as error:
        logger.warning("How wrong the prediction was is not recorded: %s: %s", path, error.strerror or error)
        return None
    return path


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def seen_errors() -> list[SeenError]:
    """All that is recorded, oldest first. Damaged lines are named, together in one line, and passed over."""
    path = record_path()
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LONGEST_READ))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("What earlier runs measured cannot be read: %s: %s", path, error.strerror or error)
        return []
    whole = size <= LONGEST_READ
    found: list[SeenError] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        if (seen := _parsed(line)) is not None:
            found.append(seen)
        elif line.strip() and (whole or number > 1):  # the first of a part may be the end of a line
            damaged.append(number)
    if damaged:
        named = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        counted = "" if whole else f", counted in its last {LONGEST_READ // 2**20} MiB"
        logger.warning("%s: %d damaged line(s) passed over: %s%s", path, len(damaged), named, counted)
    return found


def _parsed(line: bytes) -> SeenError | None:
    try:
        told = json.loads(line)
        if told["schema"] != SCHEMA:
            return None
        seen = SeenError(**{name: told[name] for name in SeenError.__slots__})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    words = (seen.device, seen.backend, seen.layers, seen.recipe, seen.model)
    sizes = (seen.parameters, seen.predicted_bytes, seen.measured_bytes)
    sound = all(isinstance(one, str) for one in words) and all(type(one) is int and 0 < one < 2**63 for one in sizes)
    return seen if sound else None


def band(device: str, backend: str, layers: str | None = None) -> Band | None:
    """What the runs of `backend` on devices of this name were off by; those with such `layers` alone where they are given
    (`MemoryPlan.layers`). None where there was no such run."""
    errors = [
        seen.error
        for seen in seen_errors()
        if (seen.device, seen.backend) == (device, backend) and layers in (None, seen.layers)
    ]
    if not errors:
        return None
    return Band(runs=len(errors), lowest=min(errors), highest=max(errors))

"""The runs below a folder: found, summarized, and kept in memory until their files change. Never writes."""

import contextlib
import hashlib
import math
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tunix_rt.errors import InputError
from tunix_rt.runs.folder import MARKS, RunDir, locked_folders
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.schemas import Commitment
from tunix_rt.runs.tail import last_objects, sample_objects

RUNNING, UNFINISHED = "running", "running or interrupted"
"""A process holds the folder; or the run has no result, and whether one does is not known."""
DEFAULT_FOLDER = "runs"
CURVE_POINTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of a list of runs. Unknown values are None."""

    folder: str
    status: str
    model: str | None = None
    weights: str | None = None
    """`pretrained` or `random`, before training."""
    evalset: str | None = None
    questions: int | None = None
    """Of the eval set, by which accuracies are measured."""
    steps_completed: int | None = None
    steps_planned: int | None = None
    final_loss: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    lenient_before: float | None = None
    lenient_after: float | None = None
    tokens_per_second: float | None = None
    """Of the last steps."""
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    device: str | None = None
    when: str | None = None
    """When the run finished; of an unfinished run, its last write."""
    is_bundle: bool = False
    losses: tuple[float, ...] = ()
    """Of some steps, from the first to the last."""
    damaged: tuple[str, ...] = ()


def summary_of(record: RunRecord, *, running: bool = False) -> RunSummary:
    """Read without the lines of metrics and rows: it takes as long for a million steps as for ten."""
    result = record.result
    before, after = (_accuracies(record, when) for when in ("before", "after"))
    recent = last_objects(record.root, "metrics.jsonl", 8 * 1024)
    losses = [_number(line.get("loss")) for line in sample_objects(record.root, "metrics.jsonl", CURVE_POINTS)]
    memory, commitment = (result.memory if result else None) or record.memory, record.commitment
    return RunSummary(
        folder=str(record.root),
        status=RUNNING if running else _status(record),
        model=commitment.base_model.name if commitment else _configured_model(record),
        weights=commitment.base_model.weights if commitment else None,
        **_exam(commitment),
        steps_completed=result.steps_completed if result else _whole(recent[-1].get("step")) if recent else None,
        **known(result, "steps_planned", "final_loss", "device"),
        accuracy_before=before[0],
        accuracy_after=after[0],
        lenient_before=before[1],
        lenient_after=after[1],
        tokens_per_second=_speed(recent),
        **known(memory, "predicted_bytes", "measured_bytes"),
        when=result.finished if result else _last_write(record.root),
        is_bundle=record.is_bundle,
        losses=tuple(loss for loss in losses if loss is not None),
        damaged=tuple(sorted(record.problems)),
    )


def _configured_model(record: RunRecord) -> str | None:
    """Of a run that was refused before it was committed to anything."""
    return record.config.model.model_name_or_path if record.config else None


def _exam(commitment: Commitment | None) -> dict[str, Any]:
    """What the accuracies are of: an eval set, or the validation file; runs with another one are not comparable."""
    facts = commitment and (commitment.evalset or commitment.dataset.validation)
    return {"evalset": facts.key, "questions": facts.items} if facts else {}


def _accuracies(record: RunRecord, when: Literal["before", "after"]) -> tuple[float | None, float | None]:
    """Strict and lenient; of a run that has not ended, as far as they are known."""
    if record.result is not None and record.result.scores and when in record.result.scores:
        known = record.result.scores[when]
        return known.get("accuracy"), known.get("accuracy_lenient")
    scores = record.scores(when)
    return (scores.accuracy, scores.accuracy_lenient) if scores else (None, None)


def _status(record: RunRecord) -> str:
    if (result := record.result) is not None:
        return result.status
    return "unknown" if "result.json" in record else UNFINISHED


def _speed(lines: list[dict[str, Any]]) -> float | None:
    """Tokens per second of these steps together."""
    tokens, seconds = (sum(_number(line.get(name)) or 0.0 for line in lines) for name in ("tokens", "seconds"))
    return tokens / seconds if seconds else None


def _number(value: object) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if plain and math.isfinite(value) else None  # type: ignore[arg-type]


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def known(facts: Any, *names: str) -> dict[str, Any]:
    """The fields of these names; None where there is no such file."""
    return {name: getattr(facts, name, None) for name in names}


def _last_write(root: Path) -> str | None:
    times = [stat[2] for stat in _stamp(root) if stat is not None]
    return datetime.fromtimestamp(max(times) / 1e9, UTC).isoformat(timespec="seconds") if times else None


# --- below a folder ---------------------------------------------------------------------------------------------------


def run_folders(below: Path) -> Iterator[Path]:
    """Folders that contain a run, without descending into one. Links are not followed."""
    return (Path(folder) for folder, _ in _stamped_folders(below))


def _stamped_folders(below: Path) -> Iterator[tuple[str, "Stamp"]]:
    ahead = [str(below)]  # no recursion: folders may be nested deeper than calls
    while ahead:
        stamp = _stamp(folder := ahead.pop())
        if _holds_a_run(stamp):
            yield folder, stamp
            continue
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            inner = (one.name for one in entries if not one.name.startswith(".") and one.is_dir(follow_symlinks=False))
            ahead += (f"{folder}/{name}" for name in sorted(inner, reverse=True))


def is_training_in(folder: Path) -> bool:
    """Whether a process holds a run of this folder, not of folders below: cheap enough for each request of a server."""
    held = locked_folders()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(_identity(one.path) in held and RunDir(Path(one.path)).holds_a_run() for one in entries)
    return False


def list_runs(folder: Path | None) -> list[RunSummary]:
    """The runs below `folder`, newest first. InputError if a named folder does not exist."""
    below = folder if folder is not None else Path(DEFAULT_FOLDER)
    if not below.is_dir():
        if folder is None:
            return []
        raise InputError(f"{below}: no such folder", fix="give the parent of the run folders")
    return newest_first(found.summary for found in RunIndex(below).runs())


def newest_first(runs: Iterable[RunSummary]) -> list[RunSummary]:
    return sorted(runs, key=lambda run: (run.when or "", run.folder), reverse=True)


def find_run(name: Path) -> Path:
    """The run folder `name`, or the one of that name below `runs`."""
    for candidate in (name, Path(DEFAULT_FOLDER) / name):
        if candidate.is_dir() and RunDir(candidate).holds_a_run():
            return candidate
    known = [str(path) for path in run_folders(Path(DEFAULT_FOLDER))][:10]
    fix = f"one of: {', '.join(known)}" if known else "give the --output folder of a run"
    raise InputError(f"no run in {str(name)!r}", fix=fix)


STAMPED = (*MARKS, "memory.json", "eval/before.json", "eval/after.json")
"""Files whose change changes a summary."""
Stamp = tuple[tuple[int, int, int] | None, ...]


def _stamp(root: Path | str) -> Stamp:
    """Inode, size and time of the files that a summary reads."""
    found: list[tuple[int, int, int] | None] = []
    for name in STAMPED:
        try:
            stat = os.lstat(f"{root}/{name}")
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _holds_a_run(stamp: Stamp) -> bool:
    return any(stamp[: len(MARKS)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """A run in the index. `id` names it in an address: a hash, so that no path ever arrives from outside."""

    id: str
    root: Path
    name: str
    """Its path below the folder of the index."""
    stamp: Stamp
    running: bool
    summary: RunSummary


def run_id(name: str) -> str:
    """The id of the run at the path `name` below the folder of the index."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]


class RunIndex:
    """The runs below a folder. What has not changed since the last look is not read again."""

    def __init__(self, below: Path) -> None:
        self.below = below
        self._known: dict[str, Indexed] = {}
        """By folder."""
        self._lock = threading.Lock()

    def runs(self) -> list[Indexed]:
        """Every run that is there now, in the order of their paths."""
        with self._lock:
            held = locked_folders()
            found = [self._look(folder, stamp, held) for folder, stamp in _stamped_folders(self.below)]
            self._known = {str(one.root): one for one in found}
            return found

    def find(self, wanted: str) -> Indexed | None:
        """The run with that id, looked at anew; None where there is none."""
        with self._lock:
            known = next((one for one in self._known.values() if one.id == wanted), None)
            if known is not None and _holds_a_run(stamp := _stamp(known.root)):
                folder = str(known.root)
                self._known[folder] = fresh = self._look(folder, stamp, locked_folders())
                return fresh
        return next((one for one in self.runs() if one.id == wanted), None) if known is None else None

    def _look(self, folder: str, stamp: Stamp, held: frozenset[tuple[int, int]]) -> Indexed:
        running, known = bool(held) and _identity(folder) in held, self._known.get(folder)
        if known is not None and (known.stamp, known.running) == (stamp, running):
            return known
        root = Path(folder)
        name = root.relative_to(self.below).as_posix()
        summary = summary_of(RunRecord(root, quick=True), running=running)
        return Indexed(id=run_id(name), root=root, name=name, stamp=stamp, running=running, summary=summary)


def _identity(root: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(root)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino

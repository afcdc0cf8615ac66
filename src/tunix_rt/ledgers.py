"""What a run notes of itself for whoever checks it later: its rows, every checkpoint it committed, its processes.

Each file is replaced whole. A kill between a checkpoint and its entry is mended by the continuation, which finds the
checkpoint in the folder; what was noted of steps that are taken again is dropped.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tunix_rt.data.pack import RowFacts
from tunix_rt.errors import TunixError
from tunix_rt.rundir import (
    RunDir,
    checkpoint_problems,
    checkpoint_step,
    list_checkpoints,
    read_json,
    sha256_file,
    write_json,
    write_lines,
)

logger = logging.getLogger(__name__)

CHECKPOINTS_SCHEMA = "tunix-rt/checkpoints/1"
PROCESSES_SCHEMA = "tunix-rt/processes/1"


# --- rows -------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, facts: RowFacts) -> None:
    """`rows.jsonl`: one line per training row, in dataset order."""
    write_lines(path, facts.lines())


def has_rows(path: Path, facts: RowFacts) -> bool:
    """Whether `path` holds the lines of these rows, to the byte."""
    wanted = hashlib.sha256()
    for line in facts.lines():
        wanted.update(line.encode())
    return path.is_file() and sha256_file(path) == wanted.hexdigest()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def list_checkpoint(run: RunDir, checkpoint: Path) -> None:
    """Add a checkpoint that was just committed to `checkpoints.json`."""
    entry = _entry_of(checkpoint)
    known = read_json(run.checkpoint_list)["checkpoints"] if run.checkpoint_list.exists() else []
    _write_list(run, [one for one in known if one["step"] < entry["step"]] + [entry])


def mend_checkpoint_list(run: RunDir, heads: Sequence[str], *, sound: Path | None) -> None:
    """Make `checkpoints.json` tell of the steps that are kept and of no other, before training goes on after `sound`.

    `heads` are the hashes of the kept lines of the metrics by their step, at 0 that of the precommitment. Entries of other
    steps go. A checkpoint without an entry, committed just before a kill, gains it, unless it is damaged.
    """
    known = {entry["step"]: entry for entry in _listed(run, expected=sound is not None) if _belongs(entry, heads)}
    if sound is not None:  # verified just now: what it says of itself holds
        known[checkpoint_step(sound)] = _entry_of(sound)
    for checkpoint in list_checkpoints(run.checkpoints):
        step = checkpoint_step(checkpoint)
        if 0 < step < len(heads) and step not in known and not checkpoint_problems(checkpoint):
            entry = _entry_of(checkpoint)
            known |= {step: entry} if _belongs(entry, heads) else {}
    _write_list(run, [known[step] for step in sorted(known)])


def _entry_of(checkpoint: Path) -> dict[str, Any]:
    manifest = checkpoint / "MANIFEST.json"
    told = read_json(manifest)
    return {
        "step": told["step"],
        "manifest_sha256": sha256_file(manifest),
        "metrics_head": read_json(checkpoint / "state.json").get("metrics_head", ""),
        "files": told["files"],
    }


def _belongs(entry: Any, heads: Sequence[str]) -> bool:
    """Whether an entry is whole, and of a kept step as it was taken."""
    if not isinstance(entry, dict) or entry.keys() != {"step", "manifest_sha256", "metrics_head", "files"}:
        return False
    step = entry["step"]
    return type(step) is int and 0 < step < len(heads) and entry["metrics_head"] == heads[step]


def _listed(run: RunDir, *, expected: bool) -> list[Any]:
    return _read_list(
        run.checkpoint_list, "checkpoints", "tells only of the checkpoints that are still there", expected=expected
    )


def _read_list(path: Path, key: str, instead: str, *, expected: bool) -> list[Any]:
    """The list in `path`; empty where it cannot be had, which is said where it was `expected`."""
    if not expected and not path.exists():
        return []
    try:
        found = read_json(path)[key]
        if isinstance(found, list):
            return found
        problem = f"{path} is damaged: `{key}` is no list"
    except TunixError as error:
        problem = error.problem
    except (KeyError, TypeError):
        problem = f"{path} is damaged: it has no `{key}`"
    logger.warning("%s; from here on it %s", problem, instead)
    return []


def _write_list(run: RunDir, entries: list[dict[str, Any]]) -> None:
    write_json(run.checkpoint_list, {"schema": CHECKPOINTS_SCHEMA, "checkpoints": entries})


# --- processes --------------------------------------------------------------------------------------------------------


def note_process(run: RunDir, machine: dict[str, Any], *, first_step: int, started: datetime, first: bool) -> None:
    """Add this process to `processes.json`; the `first` of a run begins the file.

    The process that took a step is the last of those in the list that began at it or before.
    """
    before = [] if first else _read_list(run.processes, "processes", "tells only of later processes", expected=True)
    entry = {
        "pid": os.getpid(),
        "started": started.isoformat(timespec="seconds"),
        "first_step": first_step,
        "machine": machine,
    }
    write_json(run.processes, {"schema": PROCESSES_SCHEMA, "processes": [*before, entry]})

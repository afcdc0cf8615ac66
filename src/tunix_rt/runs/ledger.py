"""`metrics.jsonl`: one line per step, chained by hashes."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunix_rt.data.packing import RowFacts
from tunix_rt.engines.base import Step
from tunix_rt.errors import StorageError, TunixError
from tunix_rt.models.safetensors import parts_of, whole_name
from tunix_rt.runs.folder import RunDir, checkpoint_problems, checkpoint_step, list_checkpoints
from tunix_rt.runs.schemas import CheckpointEntry
from tunix_rt.storage import json_line, read_json, sha256_file, sha256_text, storage, sync_files, write_json


class MetricsLog:
    """`metrics.jsonl`: one flushed line per step, each carrying the hash of the line before it.

    `states` are the hashes of checkpoints that no line carries yet, by step. A line written where a checkpoint is saved
    carries them, so that the chain covers every state but the last, which `result.json` has.
    """

    def __init__(self, run: RunDir, head: str, size: int) -> None:
        self._run, self._path, self._size = run, run.metrics, size
        self.head = head
        self.states: dict[str, str] = {}
        self.columns: Callable[[int], Mapping[str, Any]] = lambda step: {}
        """What else the line of a step contains."""

    @classmethod
    def open(cls, run: RunDir, *, keep_steps: int) -> "MetricsLog":
        """Start after `keep_steps` lines that are already there; later lines belong to steps that will be taken again."""
        head = sha256_file(run.precommit)
        kept: list[bytes] = []
        if keep_steps:
            with storage(run.metrics):
                kept = run.metrics.read_bytes().splitlines(keepends=True)[:keep_steps]
        heads = chain_heads(head, kept)
        if len(heads) <= len(kept):
            raise TunixError(f"{run.metrics}:{len(heads)} breaks the hash chain", fix="start a new run")
        head = heads[-1]
        if len(kept) != keep_steps:
            raise TunixError(f"{run.metrics} ends before step {keep_steps}", fix="start a new run")
        if run.metrics.exists():  # cut in place: the kept lines are never unwritten
            with storage(run.metrics), run.metrics.open("ab") as file:
                file.truncate(sum(map(len, kept)))
        return cls(run, head, sum(map(len, kept)))

    def sync(self) -> None:
        """Make the lines durable, with all else that was measured up to here. A checkpoint that outlived them in a power cut
        could not be continued from."""
        run = self._run
        sync_files(self._path, run.heldout, run.samples_along, run.questions_along, run.log)

    def append(self, step: Step, *, saved: bool = False) -> None:
        """Write the line of `step`. Where a checkpoint of it is `saved` next, the line carries the states before it."""
        states = {"states": self.states} if saved and self.states else {}
        facts = {name: value for name, value in asdict(step).items() if value is not None}
        facts |= self.columns(step.step)
        line = json_line(states | facts | {"loss_hex": step.loss.hex(), "prev": self.head})
        with storage(self._path), self._path.open("ab") as file:
            if file.tell() != self._size:
                problem = f"{self._path}: another program deleted or changed it while the run wrote it"
                raise StorageError(problem, fix="restore it from a copy, then resume; or choose another --output")
            self._size += file.write(line.encode())
        self.head = hashlib.sha256(line.rstrip("\n").encode()).hexdigest()
        if states:
            self.states = {}


def step_and_prev(line: bytes) -> tuple[object, object]:
    try:
        record = json.loads(line)
        return record["step"], record["prev"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, None


def chain_heads(first: str, lines: list[bytes]) -> list[str]:
    """The hash each step's line must hold in `prev`: `first`, then that of every line up to the first that is wrong."""
    heads = [first]
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n") or step_and_prev(line) != (number, heads[-1]):
            break
        heads.append(hashlib.sha256(line.rstrip(b"\n")).hexdigest())
    return heads


logger = logging.getLogger(__name__)

CHECKPOINTS_SCHEMA = "tunix-rt/checkpoints/1"
PROCESSES_SCHEMA = "tunix-rt/processes/1"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
"""Of a checkpoint. The first two, of several ranks split into a file for each, are everything that the next step is computed
from, beside the data and the seed."""


# --- rows -------------------------------------------------------------------------------------------------------------


def has_rows(path: Path, facts: RowFacts) -> bool:
    """Whether `path`, the `rows.jsonl` of a run, holds the lines of these rows, to the byte: one per training row, in dataset
    order."""
    wanted = hashlib.sha256()
    for line in facts.lines():
        wanted.update(line.encode())
    return path.is_file() and sha256_file(path) == wanted.hexdigest()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def state_files(names: Collection[str]) -> list[str]:
    """Those of `names` that contain the weights and optimizer states of a checkpoint, sorted."""
    return sorted(part for whole in (MODEL, OPTIMIZER) for part in parts_of(whole, names))


def is_checkpoint_file(name: str) -> bool:
    return whole_name(name) in (MODEL, OPTIMIZER, STATE)


def is_checkpoint(names: Collection[str]) -> bool:
    """Whether `names` are the files of a checkpoint, no more and no fewer."""
    weights, states = (parts_of(whole, names) for whole in (MODEL, OPTIMIZER))
    return 0 < len(weights) == len(states) and set(names) == {*weights, *states, STATE}


def state_hash(files: Mapping[str, str]) -> str:
    """One hash over the weights and optimizer states of a checkpoint, given the SHA-256 of its files by name."""
    return sha256_text("".join(f"{files[name]}  {name}\n" for name in state_files(files)))


def list_checkpoint(run: RunDir, checkpoint: Path) -> dict[str, str]:
    """Add a checkpoint that was just committed to `checkpoints.json`; its state hash by its step."""
    entry = _entry_of(checkpoint)
    known = _listed(run, expected=False)
    _write_list(run, [one for one in known if one["step"] < entry["step"]] + [entry])
    return _states([entry])


def unchained_states(run: RunDir, chained: Collection[str]) -> dict[str, str]:
    """State hashes, by step, of the listed checkpoints whose steps are not among those that the metrics name."""
    states = _states(_listed(run, expected=False))
    return {step: state for step, state in states.items() if step not in chained}


def final_state(run: RunDir) -> dict[str, str]:
    """`final_state` of `result.json`: the state hash of the last checkpoint; empty without one."""
    states = list(_states(_listed(run, expected=False)).values())
    return {"final_state": states[-1]} if states else {}


def _states(entries: Sequence[dict[str, Any]]) -> dict[str, str]:
    """State hashes by step, in decimal digits as JSON has its keys."""
    return {
        str(entry["step"]): state_hash({name: facts["sha256"] for name, facts in entry["files"].items()})
        for entry in entries
    }


def repair_checkpoint_ledger(run: RunDir, heads: Sequence[str], *, verified: Path | None) -> None:
    """List the checkpoints of the steps that are kept and no others, before training continues from `verified`.

    `heads` are the hashes of the kept lines of the metrics by their step, at 0 that of `precommit.json`. Entries of other
    steps are dropped. A checkpoint without an entry, committed just before a kill, gains it, unless it is corrupt.
    """
    _write_list(run, _kept_entries(run, heads, verified))


def lost_states(run: RunDir, heads: Sequence[str], chained: Mapping[str, str], *, verified: Path) -> list[str]:
    """Steps whose state hash the metrics carry, and which `repair_checkpoint_ledger` cannot list with that hash."""
    states = _states(_kept_entries(run, heads, verified))
    return [step for step, digest in chained.items() if states.get(step) != digest]


def _kept_entries(run: RunDir, heads: Sequence[str], verified: Path | None) -> list[dict[str, Any]]:
    known = {entry["step"]: entry for entry in _listed(run, expected=verified is not None) if _belongs(entry, heads)}
    if verified is not None:
        known[checkpoint_step(verified)] = _entry_of(verified)
    for checkpoint in list_checkpoints(run.checkpoints):
        step = checkpoint_step(checkpoint)
        if not 0 < step < len(heads) or checkpoint == verified or (same := _entry_or_none(checkpoint)) is None:
            continue
        if known.get(step) != same and _belongs(same, heads) and not checkpoint_problems(checkpoint):
            known[step] = same
    return [known[step] for step in sorted(known)]


def _entry_of(checkpoint: Path) -> dict[str, Any]:
    manifest = checkpoint / "MANIFEST.json"
    contents = read_json(manifest)
    return {
        "step": contents["step"],
        "manifest_sha256": sha256_file(manifest),
        "metrics_head": read_json(checkpoint / "state.json").get("metrics_head", ""),
        "files": contents["files"],
    }


def _entry_or_none(checkpoint: Path) -> dict[str, Any] | None:
    """None where the checkpoint is too corrupt to have an entry."""
    if not all(os.path.isfile(checkpoint / name) for name in ("MANIFEST.json", "state.json")):
        return None
    try:
        return _entry_of(checkpoint)
    except StorageError:
        raise
    except (TunixError, KeyError, TypeError, AttributeError):
        return None


def _belongs(entry: dict[str, Any], heads: Sequence[str]) -> bool:
    """Whether an entry is of a kept step as it was taken."""
    step = entry["step"]
    return 0 < step < len(heads) and bool(entry["metrics_head"] == heads[step])


def _is_entry(found: Any) -> bool:
    try:
        return bool(CheckpointEntry.model_validate_json(json.dumps(found)))
    except ValidationError:
        return False


def _listed(run: RunDir, *, expected: bool) -> list[dict[str, Any]]:
    """The valid entries of `checkpoints.json`."""
    instead = "lists only the checkpoints that still exist"
    return [one for one in _read_list(run.checkpoint_list, "checkpoints", instead, expected=expected) if _is_entry(one)]


def _read_list(path: Path, key: str, instead: str, *, expected: bool) -> list[Any]:
    """The list in `path`; empty where it cannot be read, which is logged where it was `expected`."""
    if not expected and not path.exists():
        return []
    try:
        found = read_json(path)[key]
        if isinstance(found, list):
            return found
        problem = f"{path} is corrupt: `{key}` is not a list"
    except StorageError:
        raise
    except TunixError as error:
        problem = error.problem
    except (KeyError, TypeError):
        problem = f"{path} is corrupt: `{key}` is missing"
    logger.warning("%s; from here on it %s", problem, instead)
    return []


def _write_list(run: RunDir, entries: list[dict[str, Any]]) -> None:
    write_json(run.checkpoint_list, {"schema": CHECKPOINTS_SCHEMA, "checkpoints": entries})


# --- processes --------------------------------------------------------------------------------------------------------


def note_process(run: RunDir, machine: dict[str, Any], *, first_step: int, started: datetime, first: bool) -> None:
    """Add this process to `processes.json`; the `first` of a run begins the file.

    The process that took a step is the last of those in the list that began at it or before.
    """
    before = [] if first else _read_list(run.processes, "processes", "lists only later processes", expected=True)
    entry: dict[str, Any] = {"pid": os.getpid(), "started": started.isoformat(timespec="seconds")}
    entry |= {"first_step": first_step, "machine": machine}
    write_json(run.processes, {"schema": PROCESSES_SCHEMA, "processes": [*before, entry]})


def note_ranks(run: RunDir, ranks: Sequence[Mapping[str, Any]]) -> None:
    """The ranks of the process that was added last."""
    *before, last = _read_list(run.processes, "processes", "lists only this process", expected=True)
    known = [{name: value for name, value in one.items() if name != "versions"} for one in ranks]
    write_json(run.processes, {"schema": PROCESSES_SCHEMA, "processes": [*before, last | {"ranks": known}]})

"""Is a run folder still what the run left behind? `SHA256SUMS` over its files, the chain through its metrics, and what it
says of its answers.

No problems means that the folder is consistent with itself. It was not replayed: whoever rewrites all files, the chain
and the hashes together is found only by running the steps again.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tunix_rt.errors import EvidenceError, StorageError, TunixError
from tunix_rt.evidence.doubtful import nulls, parse_object, read_bytes, shown
from tunix_rt.evidence.ledger_checks import ledger_problems
from tunix_rt.evidence.rescore import answer_problems
from tunix_rt.evidence.told import is_evaluation
from tunix_rt.rundir import (
    RESULT_STATUS,
    RunDir,
    list_checkpoints,
    read_json,
    sha256_file,
    sha256_text,
    write_text,
)

MEANING = "consistent with itself; not replayed"
RESULT_SCHEMA = "tunix-rt/result/1"

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_REQUIRED_IN_METRICS = ("step", "loss", "loss_hex", "prev")


def write_hashes(run: RunDir, *, to_come: Mapping[Path, str] | None = None, sound: Collection[Path] = ()) -> Path:
    """Write `SHA256SUMS`, readable by `sha256sum -c`. A link, a special file or an odd name is an EvidenceError.

    `to_come` are files whose text is settled but which are written only after their hash is. `sound` are checkpoints that
    the caller has hashed itself, so that their manifests can be believed; all other files are read.
    """
    names, problems = _list_files(run.root)
    if problems:
        raise EvidenceError(
            f"{run.root} cannot be hashed\n" + "\n".join(f"  {problem}" for problem in problems),
            fix="a run folder holds plain files with plain names; remove what is listed",
        )
    coming = {path.relative_to(run.root).as_posix(): sha256_text(text) for path, text in (to_come or {}).items()}
    known = _hashes_at_commit(run, sound) | coming
    digests = {name: known.get(name) or sha256_file(run.root / name) for name in names} | coming
    write_text(run.hashes, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))
    return run.hashes


def _hashes_at_commit(run: RunDir, sound: Collection[Path]) -> dict[str, str]:
    """What the manifests of `sound` checkpoints say of their files: tens of gigabytes, hashed when they were committed.

    A process that was told to end has no time to read them again; whoever verifies does.
    """
    found: dict[str, str] = {}
    for checkpoint in (path for path in list_checkpoints(run.checkpoints) if path in sound):
        try:
            claimed = read_json(checkpoint / "MANIFEST.json")["files"]
            for name, facts in claimed.items():
                fits = (checkpoint / name).stat().st_size == facts["bytes"]
                if fits and re.fullmatch("[0-9a-f]{64}", facts["sha256"]):
                    found[(checkpoint / name).relative_to(run.root).as_posix()] = facts["sha256"]
        except (TunixError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # damaged: its files are read
    return found


def list_problems(folder: Path, *, may_lack_weights: bool = False) -> list[str]:
    """Every way the run in `folder` contradicts its hashes or itself; an empty list means it verifies. Never raises.

    The lists of rows and checkpoints are held against the rest, and the answers judged again, once the files are those that
    were hashed: else each changed file would be told of many times. The output of an evaluation, which took no step, is held
    to its hashes and its answers.

    A run brought home from another machine `may_lack_weights`, whose hashes it still has; one that is there must be right.
    """
    if not os.path.isdir(folder):
        return [f"{folder} is not a folder"]
    run = RunDir(folder)
    changed = hash_problems(run, may_lack=is_weights if may_lack_weights else lambda name: False)
    problems = changed + ([] if is_evaluation(run) else step_problems(run))
    return problems if changed else problems + ledger_problems(run) + answer_problems(run)


def step_problems(run: RunDir) -> list[str]:
    """Every way the metrics contradict themselves, and the result the metrics."""
    return _chain_problems(run) + _result_problems(run)


def is_weights(name: str) -> bool:
    """Whether the file of a run by that relative name holds weights or moments: too big to travel with its facts."""
    return name.startswith(("checkpoints/", "final_model/")) and name.endswith(".safetensors")


# --- the files against SHA256SUMS -------------------------------------------------------------------------------------


def _list_files(root: Path) -> tuple[list[str], list[str]]:
    """Relative POSIX names of all files that are covered, sorted; and what cannot be covered, as problems."""
    names: list[str] = []
    problems: list[str] = []
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            problems.append(f"cannot be listed: {shown(folder.relative_to(root).as_posix())}: {error.strerror}")
            continue
        for entry in entries:
            name = Path(entry.path).relative_to(root).as_posix()
            if _is_staged_or_own(name):
                continue
            if fault := _name_fault(name):
                problems.append(f"{fault}: {shown(name)}")
            elif entry.is_symlink():
                problems.append(f"a symbolic link: {name}")
            elif entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                names.append(name)
            else:
                problems.append(f"not a regular file: {name}")
    return sorted(names), sorted(problems)


def _is_staged_or_own(name: str) -> bool:
    """The lock, SHA256SUMS itself, and what a crash left half-staged (`.x.json.staged`, `.staged-step-000050/`)."""
    if name in (".lock", "SHA256SUMS"):
        return True
    return any(
        part.startswith(".staged-") or (part.startswith(".") and part.endswith(".staged")) for part in name.split("/")
    )


def list_uncovered(root: Path) -> list[str]:
    """What lies in `root` and no hash covers: the lock, and what a crash left half-staged. Only a run may have such."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        names = {name: (Path(folder) / name).relative_to(root).as_posix() for name in [*folders, *files]}
        found += [shown(name) for name in names.values() if name != "SHA256SUMS" and _is_staged_or_own(name)]
        folders[:] = [name for name in folders if not _is_staged_or_own(names[name])]
    return sorted(found)


def list_empty(root: Path) -> list[str]:
    """Folders in `root` that hold nothing, which no hash can cover and no clone brings along."""
    return sorted(
        shown(Path(folder).relative_to(root).as_posix())
        for folder, folders, files in os.walk(root)
        if not folders and not files
    )


def _name_fault(name: str) -> str | None:
    """Why `name` cannot stand in SHA256SUMS. `sha256sum` escapes backslashes and newlines; we refuse them."""
    if "\\" in name or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "a name with a backslash or control character"
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return "a name that is not UTF-8"
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name:
        return "not a plain relative path"
    return None


def hash_problems(run: RunDir, *, may_lack: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Every way the files differ from `SHA256SUMS`; nothing is read but bytes."""
    present, problems = _list_files(run.root)
    if run.hashes.is_symlink():
        return [*problems, "a symbolic link: SHA256SUMS"]
    data, unread = read_bytes(run.hashes)
    if data is None:
        return [*problems, unread]
    claimed, malformed = parse_hashes(data)
    problems += malformed
    problems += [f"missing: {name}" for name in sorted(claimed.keys() - set(present)) if not may_lack(name)]
    problems += [f"not in SHA256SUMS: {name}" for name in present if name not in claimed]
    for name in present:
        if name in claimed:
            try:
                if sha256_file(run.root / name) != claimed[name]:
                    problems.append(f"changed: {name}")
            except StorageError as error:
                problems.append(f"cannot be read: {name}: {error.problem}")
    return problems


def parse_hashes(data: bytes) -> tuple[dict[str, str], list[str]]:
    """Name -> hash of a SHA256SUMS, and every line of it that is not plain."""
    claimed: dict[str, str] = {}
    problems: list[str] = []
    *lines, rest = data.split(b"\n")
    if rest:
        problems.append("SHA256SUMS does not end with a newline")
        lines.append(rest)
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.decode("utf-8", "surrogateescape"))
        if match is None:
            problems.append(f"SHA256SUMS:{number}: malformed line")
        elif fault := _name_fault(match[2]):
            problems.append(f"SHA256SUMS:{number}: {fault}: {shown(match[2])}")
        elif _is_staged_or_own(match[2]):
            problems.append(f"SHA256SUMS:{number}: not a file of the run: {match[2]}")
        elif match[2] in claimed:
            problems.append(f"SHA256SUMS:{number}: listed twice: {match[2]}")
        else:
            claimed[match[2]] = match[1]
    return claimed, problems


# --- the metrics against themselves -----------------------------------------------------------------------------------


def _chain_problems(run: RunDir) -> list[str]:
    """Each line holds the SHA-256 of the line before it, the first that of `precommit.json`; steps count from 1."""
    if not os.path.exists(run.metrics):
        return []
    problems: list[str] = []
    lines, unread = _metrics_lines(run)
    if unread:
        problems.append(unread)
    precommit, unread = read_bytes(run.precommit)
    if precommit is None:
        problems.append(unread)
    prev = None if precommit is None else hashlib.sha256(precommit).hexdigest()
    for number, line in enumerate(lines, start=1):
        problems += [f"metrics.jsonl:{number}: {fault}" for fault in _line_faults(line, number, prev)]
        prev = hashlib.sha256(line).hexdigest()
    return problems


def _metrics_lines(run: RunDir) -> tuple[list[bytes], str]:
    """The lines without their newlines, and why they could not all be had. A torn last line is not among them."""
    data, unread = read_bytes(run.metrics)
    if data is None:
        return [], unread
    *lines, rest = data.split(b"\n")
    return lines, f"metrics.jsonl:{len(lines) + 1}: the last line is torn" if rest else ""


def _line_faults(line: bytes, step: int, prev: str | None) -> Iterator[str]:
    metrics = parse_object(line)
    if isinstance(metrics, str):
        yield metrics
        return
    absent = [key for key in _REQUIRED_IN_METRICS if key not in metrics]
    if absent:
        yield f"without {', '.join(absent)}"
    if "step" in metrics and not _is_count(metrics["step"], step):
        yield f"step is {shown(metrics['step'])}, not {step}"
    if "prev" in metrics and prev is not None and metrics["prev"] != prev:
        yield "the chain is broken: prev is not the hash of " + ("precommit.json" if step == 1 else "the line before")
    if "loss" in metrics and "loss_hex" in metrics and not _is_exact(metrics["loss"], metrics["loss_hex"]):
        yield f"loss {shown(metrics['loss'])} is not loss_hex {shown(metrics['loss_hex'])}"


# --- result.json against the metrics ----------------------------------------------------------------------


def _result_problems(run: RunDir) -> list[str]:
    data, unread = read_bytes(run.result)
    if data is None:
        return [f"{unread} (the run has not ended)" if not os.path.exists(run.result) else unread]
    result = parse_object(data)
    if isinstance(result, str):
        return [f"result.json: {result}"]
    return [f"result.json: {fault}" for fault in (*_result_faults(result), *_ending_faults(run, result))]


def _result_faults(result: Mapping[str, Any]) -> Iterator[str]:
    if result.get("schema") != RESULT_SCHEMA:
        yield f"schema is {shown(result.get('schema'))}, not {RESULT_SCHEMA!r}"
    status = result.get("status")
    if status not in RESULT_STATUS:
        yield f"status is {shown(status)}, none of {', '.join(RESULT_STATUS)}"
    elif "exit_code" in result and (status == "completed") != _is_count(result["exit_code"], 0):
        yield f"status is {status} with exit code {shown(result['exit_code'])}"
    planned, completed = result.get("steps_planned"), result.get("steps_completed")
    if status == "completed" and "steps_planned" in result and not _is_count(completed, planned):
        yield f"completed with {shown(completed)} of {shown(planned)} steps"
    for name in nulls(result):
        yield f"{shown(name)} is null; what is not known is left out"


def _ending_faults(run: RunDir, result: Mapping[str, Any]) -> Iterator[str]:
    """What the result says of the last step against the last line of the metrics.

    A completed run says it all. One that was stopped or failed may leave facts out, but those it states must be true.
    """
    lines, _ = _metrics_lines(run)  # none when the file is missing
    said = set(result) | ({"steps_completed"} if result.get("status") == "completed" else set())
    if "steps_completed" in said and not _is_count(result.get("steps_completed"), len(lines)):
        yield f"steps_completed is {shown(result.get('steps_completed'))}, metrics.jsonl has {len(lines)} lines"
    if not lines:
        for key in ("final_loss", "final_loss_hex", "metrics_head"):
            if key in said:
                yield f"{key} without a step in metrics.jsonl"
        return
    if result.get("status") == "completed":
        said |= {"final_loss", "final_loss_hex", "metrics_head"}
    last = parse_object(lines[-1])
    last_hex = last.get("loss_hex") if isinstance(last, dict) else None
    if "final_loss_hex" in said and (not isinstance(last_hex, str) or result.get("final_loss_hex") != last_hex):
        yield f"final_loss_hex is {shown(result.get('final_loss_hex'))}, the last line has {shown(last_hex)}"
    if "final_loss" in said and not _is_exact(result.get("final_loss"), last_hex):
        yield f"final_loss {shown(result.get('final_loss'))} is not the loss of the last line"
    if "metrics_head" in said and result.get("metrics_head") != hashlib.sha256(lines[-1]).hexdigest():
        yield "metrics_head is not the hash of the last line of metrics.jsonl"


# --- numbers that may be no numbers -----------------------------------------------------------------------------------


def _is_count(value: Any, wanted: Any) -> bool:
    return type(value) is int and value == wanted


def _is_exact(value: Any, written: Any) -> bool:
    """Whether `written` is the hexadecimal spelling of the float `value`."""
    return isinstance(value, float) and math.isfinite(value) and value.hex() == written

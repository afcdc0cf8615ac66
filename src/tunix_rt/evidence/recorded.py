"""What a bundle, or the run it was made of, says was computed: read once, for whoever computes it again.

The bundle was checked for consistency before, but nobody vouches for it: what has another shape than a run writes is an
EvidenceError that names the file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.evidence.claims import read_object
from tunix_rt.evidence.doubtful import parse_object, read_bytes
from tunix_rt.evidence.hashes import parse_hashes
from tunix_rt.rundir import RunDir, checkpoint_problems, checkpoint_step, list_checkpoints, sha256_file
from tunix_rt.strict_yaml import read_yaml

UNTOUCHED = "ask for an untouched copy of the bundle"
RUN_HASHES = "run-SHA256SUMS"
REPRODUCIBLE = ("model.safetensors", "optimizer.safetensors")
"""Files of a checkpoint that a replay gives to the byte; state.json tells seconds."""
STEP_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int, "loss": (float, int), "loss_hex": str, "lr": (float, int), "grad_norm": (float, int),
    "target_tokens": int, "tokens": int, "batch": str, "seconds": (float, int),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The claims of one run."""

    folder: Path
    root: str
    """Hash of its SHA256SUMS, which covers every other file."""
    precommit: Mapping[str, Any]
    result: Mapping[str, Any]
    training: Mapping[str, Any]
    """That part of config.yaml."""
    steps: Mapping[int, Mapping[str, Any]]
    checkpoints: Mapping[int, Mapping[str, str]]
    """By step: the hash of each file that a replay gives to the byte. Those that were deleted later included."""
    states: frozenset[int]
    """Steps whose checkpoint is in the folder, whole and with these hashes."""
    damaged: tuple[str, ...]
    """What is wrong with checkpoints in the folder that are not among `states`."""
    heldout: Mapping[int, Mapping[str, Any]]
    processes: tuple[tuple[int, Mapping[str, Any]], ...]
    """First step and machine of each process that trained; empty in older bundles."""
    final_model: Mapping[str, str]

    @property
    def total(self) -> int:
        return max(self.steps)

    @property
    def backend(self) -> str:
        return str(self.training.get("backend", "torch"))

    @property
    def compute(self) -> str:
        return str(self.training.get("dtype", "float32"))

    @property
    def source_sha256(self) -> str:
        return str(self.precommit.get("source_sha256"))

    @property
    def seconds(self) -> float:
        told = self.result.get("seconds")
        return float(told) if isinstance(told, int | float) else 0.0

    def step_seconds(self, after: int, up_to: int) -> float:
        return sum(float(line["seconds"]) for step, line in self.steps.items() if after < step <= up_to)

    def machines(self, after: int, up_to: int) -> list[Mapping[str, Any]]:
        """Of the processes that took the steps after `after` up to `up_to`; of an older run only what its result says."""
        if not self.processes:
            return [self._told_machine()]
        ends = [first for first, _ in self.processes[1:]] + [self.total + 1]
        return [
            machine
            for (first, machine), end in zip(self.processes, ends, strict=True)
            if first <= up_to and end > after + 1 and end > first
        ]

    def _told_machine(self) -> Mapping[str, Any]:
        told: dict[str, Any] = {"device": self.result.get("device"), "backend": self.backend}
        if told["device"] != "cpu":
            doctor = parse_object(read_bytes(RunDir(self.folder).doctor)[0] or b"")
            choice = doctor.get("choice") if isinstance(doctor, dict) else None
            told["gpu"] = {"name": choice.get("kind") if isinstance(choice, dict) else None}
        return told


def read_recorded(folder: Path) -> Recorded:
    """Everything that is computed again and held against what is found here."""
    run = RunDir(folder)
    hashes_file = folder / RUN_HASHES if os.path.lexists(folder / RUN_HASHES) else run.hashes
    hashes, wrong = parse_hashes(_bytes(hashes_file))
    if wrong:
        raise EvidenceError(f"{hashes_file.name}: {wrong[0]}", fix=UNTOUCHED)
    checkpoints = _checkpoints(run, hashes)
    states, damaged = _states(run, checkpoints)
    config = read_yaml(run.config)
    training = config.get("training")
    return Recorded(
        folder=folder,
        root=sha256_file(run.hashes),
        precommit=read_object(run.precommit),
        result=read_object(run.result),
        training=training if isinstance(training, dict) else {},
        steps=_lines(run.metrics, STEP_TYPES),
        checkpoints=checkpoints,
        states=frozenset(states),
        damaged=tuple(damaged),
        heldout=_lines(run.heldout, {"step": int, "loss": (float, int), "loss_hex": str, "target_tokens": int})
        if run.heldout.exists()
        else {},
        processes=_processes(run),
        final_model={
            name.removeprefix("final_model/"): digest
            for name, digest in hashes.items()
            if name.startswith("final_model/")
        },
    )


def _bytes(path: Path) -> bytes:
    data, unread = read_bytes(path)
    if data is None:
        raise EvidenceError(unread, fix=UNTOUCHED)
    return data


def _lines(path: Path, types: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The lines of a file by their step."""
    found: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        record = parse_object(line)
        if isinstance(record, str):
            raise EvidenceError(f"{path.name}:{number}: {record}", fix=UNTOUCHED)
        for name, kind in types.items():
            value = record.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise EvidenceError(f"{path.name}:{number} does not tell {name}", fix=UNTOUCHED)
        found[record["step"]] = record
    if not found:
        raise EvidenceError(f"{path.name} is empty", fix=UNTOUCHED)
    return found


def _checkpoints(run: RunDir, hashes: Mapping[str, str]) -> dict[int, Mapping[str, str]]:
    """From checkpoints.json, or in an older run those whose files were hashed when it ended."""
    if run.checkpoint_list.exists():
        try:
            listed = {
                int(one["step"]): {name: str(one["files"][name]["sha256"]) for name in REPRODUCIBLE}
                for one in read_object(run.checkpoint_list)["checkpoints"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"{run.checkpoint_list.name} is no list of checkpoints", fix=UNTOUCHED) from error
        return dict(sorted(listed.items()))
    found: dict[int, dict[str, str]] = {}
    for name, digest in hashes.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "checkpoints" and parts[2] in REPRODUCIBLE:
            number = parts[1].removeprefix("step-")
            if number.isdecimal():
                found.setdefault(int(number), {})[parts[2]] = digest
    return dict(sorted(found.items()))


def _states(run: RunDir, checkpoints: Mapping[int, Mapping[str, str]]) -> tuple[set[int], list[str]]:
    """Checkpoints that lie in the folder as recorded, and what is wrong with the others."""
    states: set[int] = set()
    damaged: list[str] = []
    for folder in list_checkpoints(run.checkpoints):
        step = checkpoint_step(folder)
        wanted = checkpoints.get(step)
        try:
            problems = checkpoint_problems(folder)
        except TunixError as error:
            problems = [error.problem]
        if wanted is None:
            problems.append("it is in no list")
        elif not problems:
            other = [name for name, digest in wanted.items() if sha256_file(folder / name) != digest]
            problems += [f"{name} is not the recorded one" for name in other]
        damaged += [f"{folder.name}: {problem}" for problem in problems]
        if not problems:
            states.add(step)
    return states, damaged


def _processes(run: RunDir) -> tuple[tuple[int, Mapping[str, Any]], ...]:
    if not run.processes.exists():
        return ()
    try:
        found = tuple((int(one["first_step"]), dict(one["machine"])) for one in read_object(run.processes)["processes"])
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{run.processes.name} is no list of processes", fix=UNTOUCHED) from error
    return found


def read_predictions_of(folder: Path, when: str) -> list[dict[str, Any]]:
    """The recorded answers, each with its id, prompt and output; none where there are none."""
    path = RunDir(folder).predictions(when)
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        record = parse_object(line)
        if isinstance(record, str) or any(not isinstance(record.get(name), str) for name in ("id", "prompt", "output")):
            raise EvidenceError(f"{path.name}:{number} is no answer", fix=UNTOUCHED)
        found.append(record)
    return found

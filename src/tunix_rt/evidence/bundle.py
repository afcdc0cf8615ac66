"""A bundle: the facts of a run without its weights, for a reviewer who trusts nothing. `collect` makes one folder of them
and never writes over another; `bundle_problems` computes everything again that the folder says of itself."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import ConfigError, EvidenceError, TunixError
from tunix_rt.evidence.claims import (
    KINDS,
    RunFiles,
    claims_of,
    read_object,
    read_run,
    refuse_another_setup,
    require,
    require_content,
)
from tunix_rt.evidence.hashes import list_problems, nulls, parse_hashes, read_bytes, shown, step_problems, write_hashes
from tunix_rt.evidence.readme import readme_text
from tunix_rt.evidence.source import find_commit
from tunix_rt.rundir import RunDir, settle_files, storage, sync_folder, write_json, write_text

SAYS = "bundle.json"
README = "README.md"
RUN_HASHES = "run-SHA256SUMS"
OF_CPU_RUN = (
    "config.yaml", "doctor.json", "precommit.json", "metrics.jsonl", "result.json", "env_info.txt", "training_log.txt",
)  # fmt: skip
LEFT_OUT = ("checkpoints/", "final_model/", "tensorboard/")
"""Folders of a run that a bundle does not carry; their hashes it does."""

_PLACE = re.compile(r"(?<![\w./:])(?:/(?:tmp|root|home|work|Users)/|[A-Z]:\\)[^\s\"',;:]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What `bundle.json` says, and each line of the copied files that names a place of the machine it was made on."""

    says: dict[str, Any]
    places: tuple[str, ...]


def collect(folder: Path, output: Path, *, cpu_folder: Path | None, repository: Path) -> Collected:
    """Make the bundle `output` of the run in `folder`. Refuses what is not whole, before anything is written."""
    _refuse_output(output, folder, cpu_folder)
    run = _sound_run(folder)
    require_content(run)
    cpu = _cpu_run(run, cpu_folder)
    says = claims_of(run, cpu)
    says["commit"] = _commit_of(says["source_sha256"], repository)
    hashes = _run_hashes(RunDir(folder).hashes)
    says["left_out"] = {name: digest for name, digest in hashes.items() if name.startswith(LEFT_OUT)}
    if clash := sorted(name for name in hashes if name in (SAYS, README, RUN_HASHES) or name.startswith("cpu/")):
        raise EvidenceError(
            f"{folder} holds {', '.join(clash)}, which a bundle has of its own", fix="give a run folder, not a bundle"
        )
    copies = {name: folder / name for name in hashes if name not in says["left_out"]}
    copies[RUN_HASHES] = RunDir(folder).hashes
    if cpu is not None:
        copies |= {f"cpu/{name}": cpu.folder / name for name in OF_CPU_RUN}
        copies[f"cpu/{RUN_HASHES}"] = RunDir(cpu.folder).hashes
    _write(output, copies, says)
    return Collected(says=says, places=tuple(_places(output, copies)))


def _refuse_output(output: Path, *runs: Path | None) -> None:
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; a bundle is never written over", fix="choose another --output")
    for run in runs:
        if run is not None and output.resolve().is_relative_to(run.resolve()):
            raise ConfigError(f"{output} is inside the run {run}, which must not change", fix="choose another --output")


def _sound_run(folder: Path) -> RunFiles:
    """The run in `folder`: it verifies, is complete and was made on a device that bundles are made of."""
    if problems := list_problems(folder, may_lack_weights=True):
        raise EvidenceError(
            f"{folder} does not verify: {len(problems)} problem(s)\n" + "\n".join(f"  {one}" for one in problems),
            fix="bring an untouched copy of the run (its weights may stay behind), or run it again",
        )
    run = read_run(folder)
    if run.result.get("status") != "completed":
        raise EvidenceError(
            f"{folder} is {run.result.get('status')}, not completed", fix="finish it with --resume, or run it again"
        )
    if run.result.get("device") not in KINDS:
        raise EvidenceError(
            f"{folder} ran on {shown(run.result.get('device'))}; bundles are made of runs on {' and '.join(KINDS)}",
            fix="collect a run on one of these",
        )
    return run


def _cpu_run(run: RunFiles, cpu_folder: Path | None) -> RunFiles | None:
    """The run to hold the speed against: required of a run on a GPU, senseless for one on the CPU."""
    if run.result["device"] == "cpu":
        if cpu_folder is not None:
            raise ConfigError(f"{run.folder} ran on the CPU itself", fix="leave --cpu-run out")
        return None
    if cpu_folder is None:
        raise EvidenceError(
            "a bundle of a run on a GPU holds its speed against the same configuration on the CPU",
            fix=f"tunix-rt train {run.folder / 'config.yaml'} --device cpu --output CPU_RUN, then add --cpu-run CPU_RUN",
        )
    cpu = _sound_run(cpu_folder)
    refuse_another_setup(run, cpu)
    require_content(cpu)
    return cpu


def _commit_of(source_sha256: str, repository: Path) -> str:
    commit = find_commit(source_sha256, repository)
    if commit is None:
        raise EvidenceError(
            f"no commit of {repository} has the source this run was made from (source_sha256 {source_sha256[:12]})",
            fix="commit that source, or point --repository at the clone that has it",
        )
    return commit


def _run_hashes(path: Path) -> dict[str, str]:
    data, unread = read_bytes(path)
    claimed, malformed = parse_hashes(data or b"")
    if data is None or malformed:
        raise EvidenceError(unread or f"{path.name}: {malformed[0]}", fix="ask for an untouched copy")
    return claimed


def _write(output: Path, copies: dict[str, Path], says: dict[str, Any]) -> None:
    """Fill a folder beside `output`, check it as a reader would, and make it `output` in one move."""
    output = Path(os.path.abspath(output))
    staged = output.with_name(f".staged-{output.name}")
    with storage(output):
        if staged.exists():  # of a collect that was killed
            shutil.rmtree(staged)
        staged.mkdir(parents=True)
        try:
            for name, source in copies.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, staged / name)
            write_json(staged / SAYS, says)
            write_text(staged / README, readme_text(says))
            write_hashes(RunDir(staged))
            settle_files(staged)
            if problems := bundle_problems(staged):
                raise EvidenceError(
                    "the bundle does not verify, and was not kept\n" + "\n".join(f"  {one}" for one in problems),
                    fix="did the run change meanwhile? Otherwise this is a defect; please report it with these lines",
                )
            staged.rename(output)
        finally:
            if staged.exists():
                shutil.rmtree(staged)
        sync_folder(output.parent)


def _places(output: Path, names: Iterable[str]) -> list[str]:
    """`name:line: place` for each line of the copied files with an absolute path of the machine."""
    home = str(Path.home())
    found = []
    for name in sorted(names):
        for number, line in enumerate((output / name).read_text("utf-8", "replace").splitlines(), start=1):
            place = _PLACE.search(line)
            if place or (len(home) > 1 and home in line):
                found.append(f"{name}:{number}: {place[0] if place else home}")
    return found


# --- a bundle against itself ------------------------------------------------------------------------------------------


def is_bundle(folder: Path) -> bool:
    return os.path.lexists(folder / SAYS)


def bundle_problems(folder: Path) -> list[str]:
    """Every way a bundle contradicts its hashes, its run or itself. Never raises.

    What it says is computed again from its files only once they are the files that were hashed.
    """
    if problems := list_problems(folder):
        return problems
    try:
        says = read_object(folder / SAYS)
        problems = [f"{SAYS}: {shown(name)} is null; what is not known is left out" for name in nulls(says)]
        run = read_run(folder)
        problems += _copy_problems(folder, says, with_cpu=run.result.get("device") == "cuda")
        if run.result.get("status") != "completed" or run.result.get("device") not in KINDS:
            return [*problems, "result.json: not of a completed run on cpu or cuda"]
        require_content(run)
        cpu = None
        if run.result["device"] != "cpu":
            cpu = read_run(folder / "cpu")
            problems += [f"cpu/{problem}" for problem in step_problems(RunDir(folder / "cpu"))]
            refuse_another_setup(run, cpu)
        return problems + _claim_problems(says, claims_of(run, cpu))
    except TunixError as error:
        return [*problems, *error.problem.splitlines()]


def _copy_problems(folder: Path, says: dict[str, Any], *, with_cpu: bool) -> list[str]:
    """The copied files against the hashes their runs ended with; what was left out against the same."""
    ours = _run_hashes(folder / RUN_HASHES)
    wanted = {name: digest for name, digest in ours.items() if not name.startswith(LEFT_OUT)}
    own = {SAYS, README, RUN_HASHES}
    if with_cpu:
        theirs = _run_hashes(folder / "cpu" / RUN_HASHES)
        wanted |= {f"cpu/{name}": theirs.get(name, "") for name in OF_CPU_RUN}
        own.add(f"cpu/{RUN_HASHES}")
    present = _run_hashes(folder / "SHA256SUMS")
    problems = [f"missing, though the run had it: {name}" for name in sorted(wanted.keys() - present.keys())]
    problems += [f"not of the run: {name}" for name in sorted(present.keys() - wanted.keys() - own)]
    problems += [
        f"not as the run left it: {name}"
        for name in sorted(wanted.keys() & present.keys())
        if wanted[name] != present[name]
    ]
    left_out = {name: digest for name, digest in ours.items() if name.startswith(LEFT_OUT)}
    if says.get("left_out") != left_out:
        problems.append(f"{SAYS}: left_out is not what {RUN_HASHES} has beyond the files here")
    return problems


def _claim_problems(says: dict[str, Any], computed: dict[str, Any]) -> list[str]:
    told = _flat({name: value for name, value in says.items() if name not in ("commit", "left_out")})
    given = _flat(computed)
    problems = [
        f"{SAYS}: {name} is {shown(told.get(name))}, the files give {shown(value)}"
        for name, value in given.items()
        if told.get(name) != value or type(told.get(name)) is not type(value)
    ]
    problems += [f"{SAYS}: {shown(name)} is said by no file" for name in sorted(told.keys() - given.keys())]
    commit = require(SAYS, says, "commit", str)
    return problems + ([] if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) else [f"{SAYS}: commit is no commit"])


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted name -> value. What is said is compared figure by figure, so that the one that differs is named."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and len(before) < 100  # deeper than anything we write
        flat |= _flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return flat

"""A bundle: the facts of a run without its weights, for a reviewer who trusts nothing. `collect` makes one folder of them
and never writes over another; `bundle_problems` computes everything again that the folder says of itself."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import ConfigError, EvidenceError, TunixError
from tunix_rt.evidence.claims import (
    OLDER_SCHEMA,
    SCHEMA,
    RunFiles,
    claims_of,
    engine_of,
    read_object,
    read_run,
    require,
    value_at,
)
from tunix_rt.evidence.doubtful import nulls, read_bytes, shown
from tunix_rt.evidence.hashes import list_problems, list_uncovered, parse_hashes, step_problems, write_hashes
from tunix_rt.evidence.manifest import MANIFEST, fault_of_name, manifest_of, require_name
from tunix_rt.evidence.readme import readme_text
from tunix_rt.evidence.source import NEWEST_COMMITS, find_commit
from tunix_rt.evidence.told import as_json, differences, flat
from tunix_rt.evidence.whole import require_whole
from tunix_rt.rundir import RunDir, settle_files, storage, sync_folder, write_json, write_text

SAYS = "bundle.json"
README = "README.md"
RUN_HASHES = "run-SHA256SUMS"
OWN = (SAYS, README, RUN_HASHES, MANIFEST)
OF_CPU_RUN = (
    "config.yaml", "doctor.json", "precommit.json", "metrics.jsonl", "result.json", "env_info.txt", "torch_version.txt",
    "training_log.txt",
)  # fmt: skip
LEFT_OUT = ("checkpoints/", "final_model/", "tensorboard/", "profile/trace.json.gz")
"""What of a run a bundle does not carry; its hashes it does. A trace is large, and names the computer and its folders."""

_PLACE = re.compile(r"(?<![\w./:])(?:/(?:tmp|root|home|work|Users)/|[A-Z]:\\)[^\s\"',;:]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What `bundle.json` says, and each line of the copied files that names a place of the machine it was made on."""

    says: dict[str, Any]
    places: tuple[str, ...]


def collect(
    folder: Path, output: Path, *, cpu_folder: Path | None, repository: Path, run_id: str | None = None
) -> Collected:
    """Make the bundle `output` of the run in `folder`, which it calls `run_id`, or by the name of `output`. Refuses what is
    not whole, before anything is written."""
    _refuse_output(output, folder, cpu_folder)
    name = require_name(Path(os.path.abspath(output)).name if run_id is None else run_id)
    run = _sound_run(folder)
    cpu = _cpu_run(run, cpu_folder)
    says = claims_of(run, cpu)
    says["commit"] = _commit_of(says["source_sha256"], repository)
    hashes = _run_hashes(RunDir(folder).hashes)
    says["left_out"] = {name: digest for name, digest in hashes.items() if name.startswith(LEFT_OUT)}
    if clash := sorted(name for name in hashes if name in OWN or name.startswith("cpu/")):
        raise EvidenceError(
            f"{folder} holds {', '.join(clash)}, which a bundle has of its own", fix="give a run folder, not a bundle"
        )
    copies = {name: folder / name for name in hashes if name not in says["left_out"]}
    copies[RUN_HASHES] = RunDir(folder).hashes
    if cpu is not None:
        copies |= {f"cpu/{name}": cpu.folder / name for name in OF_CPU_RUN}
        copies[f"cpu/{RUN_HASHES}"] = RunDir(cpu.folder).hashes
    _write(output, copies, says, manifest_of(run, says, name))
    return Collected(says=says, places=tuple(_places(output, [*copies, MANIFEST])))


def _refuse_output(output: Path, *runs: Path | None) -> None:
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; a bundle is never written over", fix="choose another --output")
    for run in runs:
        if run is not None and output.resolve().is_relative_to(run.resolve()):
            raise ConfigError(f"{output} is inside the run {run}, which must not change", fix="choose another --output")


def _sound_run(folder: Path) -> RunFiles:
    """The run in `folder`: it verifies, is complete, and holds what its device must leave."""
    if problems := list_problems(folder, may_lack_weights=True):
        raise EvidenceError(
            f"{folder} does not verify: {len(problems)} problem(s)\n" + "\n".join(f"  {one}" for one in problems),
            fix="bring an untouched copy of the run (its weights may stay behind), or run it again",
        )
    run = read_run(folder, f"{folder}/")
    require_whole(run)
    return run


def _cpu_run(run: RunFiles, cpu_folder: Path | None) -> RunFiles | None:
    """The run to hold the speed against: required of a run of PyTorch on a GPU, senseless for one on the CPU."""
    if run.result["device"] == "cpu":
        if cpu_folder is not None:
            raise ConfigError(f"{run.folder} ran on the CPU itself", fix="leave --cpu-run out")
        return None
    if cpu_folder is None:
        if not _needs_cpu_run(run):
            return None
        raise EvidenceError(
            "a bundle of a run on a GPU holds its speed against the same configuration on the CPU",
            fix=f"tunix-rt train {run.folder / 'config.yaml'} --device cpu --output CPU_RUN, then add --cpu-run CPU_RUN",
        )
    cpu = _sound_run(cpu_folder)
    refuse_another_setup(run, cpu)
    return cpu


def _needs_cpu_run(run: RunFiles) -> bool:
    """Of a run on a GPU. One of JAX may do without: the models it is meant for are too large for most CPUs."""
    return engine_of(run) != "jax"


def _commit_of(source_sha256: str, repository: Path) -> str:
    commit = find_commit(source_sha256, repository)
    if commit is None:
        raise EvidenceError(
            f"none of the newest {NEWEST_COMMITS} commits of {repository} has the source this run was made from "
            f"(source_sha256 {source_sha256[:12]})",
            fix="commit that source, or point --repository at the clone that has it",
        )
    return commit


def _run_hashes(path: Path, where: str = "") -> dict[str, str]:
    data, unread = read_bytes(path)
    claimed, malformed = parse_hashes(data or b"")
    if data is None or malformed:
        raise EvidenceError(where + (unread or f"{path.name}: {malformed[0]}"), fix="ask for an untouched copy")
    return claimed


def _write(output: Path, copies: dict[str, Path], says: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Fill a folder beside `output`, check it as a reader would, and make it `output` in one move."""
    output = Path(os.path.abspath(output))
    staged = output.with_name(f".staged-{output.name}")
    with storage(output), _taken_back_unless(output):
        if staged.exists():  # of a collect that was killed
            shutil.rmtree(staged)
        staged.mkdir(parents=True)
        try:
            for name, source in copies.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, staged / name)
            write_json(staged / SAYS, says)
            write_json(staged / MANIFEST, manifest)
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


@contextlib.contextmanager
def _taken_back_unless(made: Path) -> Iterator[None]:
    """Folders above `made` that come into being inside go again where it does not, whatever ended it."""
    missing = [folder for folder in made.parents if not folder.exists()]
    try:
        yield
    finally:
        if not made.exists():
            for folder in missing:
                with contextlib.suppress(OSError):  # never made, or somebody put something there meanwhile
                    folder.rmdir()


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


# --- two runs of one configuration ------------------------------------------------------------------------------------

SAME = (
    "source_sha256", "dataset.sha256", "dataset.merkle_root", "base_model.files", "base_model.weights",
    "tokenizer_sha256", "seeds",
)  # fmt: skip


def refuse_another_setup(run: RunFiles, cpu: RunFiles) -> None:
    """The run on the CPU must be this run on another device: same settings, source, data and model."""
    if cpu.result.get("device") != "cpu":
        raise EvidenceError(
            f"the run to compare with ran on {shown(cpu.result.get('device'))}, not on the CPU",
            fix="give a run on the CPU",
        )
    differ = [*different_settings(run.config, cpu.config), *_different_inputs(run.precommit, cpu.precommit)]
    if differ:
        raise EvidenceError(
            f"the run on the CPU is another run: {', '.join(differ)} differ(s)",
            fix="run the same configuration, of the same source, with --device cpu",
        )


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted names of the settings in which two configurations differ, but for the device."""
    ours, theirs = flat(one), flat(other)
    names = sorted((ours.keys() | theirs.keys()) - {"training.device"})
    return [name for name in names if name not in ours or name not in theirs or ours[name] != theirs[name]]


def _different_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in SAME:
        if value_at(one, name) is None or value_at(one, name) != value_at(other, name):
            yield f"precommit.json: {name}"


# --- a bundle against itself ------------------------------------------------------------------------------------------


def is_bundle(folder: Path) -> bool:
    return os.path.lexists(folder / SAYS)


def bundle_problems(folder: Path, repository: Path | None = None) -> list[str]:
    """Every way a bundle contradicts its hashes, its runs or itself; the commit is looked up in `repository` alone.
    Never raises.

    What it says is computed again from its files only once they are the files that were hashed.
    """
    problems = list_problems(folder) + [f"covered by no hash: {name}" for name in list_uncovered(folder)]
    if problems:
        return problems
    try:
        says = read_object(folder / SAYS)
        problems = [f"{SAYS}: {shown(name)} is null; what is not known is left out" for name in nulls(says)]
        run = read_run(folder)
        schema = OLDER_SCHEMA if says.get("schema") == OLDER_SCHEMA else SCHEMA
        on_gpu = run.result.get("device") == "cuda"
        with_cpu = on_gpu and (_needs_cpu_run(run) or os.path.lexists(folder / "cpu"))
        problems += _copy_problems(folder, with_cpu=with_cpu, with_manifest=schema == SCHEMA)
        require_whole(run)
        cpu = None
        if with_cpu:
            problems += [f"cpu/{problem}" for problem in step_problems(RunDir(folder / "cpu"))]
            cpu = read_run(folder / "cpu", "cpu/")
            require_whole(cpu)
            refuse_another_setup(run, cpu)
        return problems or _claim_problems(folder, says, run, claims_of(run, cpu, schema), repository)
    except TunixError as error:
        return [*problems, *(line.strip() for line in error.problem.splitlines())]


def _copy_problems(folder: Path, *, with_cpu: bool, with_manifest: bool) -> list[str]:
    """The copied files against the hashes their runs ended with; and whether the bundle's own are there."""
    wanted = {
        name: digest for name, digest in _run_hashes(folder / RUN_HASHES).items() if not name.startswith(LEFT_OUT)
    }
    own = set(OWN) if with_manifest else set(OWN) - {MANIFEST}
    if with_cpu:
        theirs = _run_hashes(folder / "cpu" / RUN_HASHES, "cpu/")
        wanted |= {f"cpu/{name}": theirs.get(name, "") for name in OF_CPU_RUN}
        own.add(f"cpu/{RUN_HASHES}")
    present = _run_hashes(folder / "SHA256SUMS")
    problems = [f"missing: {name}" for name in sorted(own - present.keys())]
    problems += [f"missing, though the run had it: {name}" for name in sorted(wanted.keys() - present.keys())]
    problems += [f"not of the run: {name}" for name in sorted(present.keys() - wanted.keys() - own)]
    problems += [
        f"not as the run left it: {name}"
        for name in sorted(wanted.keys() & present.keys())
        if wanted[name] != present[name]
    ]
    return problems


def _claim_problems(
    folder: Path, says: dict[str, Any], run: RunFiles, computed: dict[str, Any], repository: Path | None
) -> list[str]:
    """What the bundle says, figure by figure and then in words, against what its files give."""
    commit = require(SAYS, says, "commit", str)
    left_out = {name: digest for name, digest in _run_hashes(folder / RUN_HASHES).items() if name.startswith(LEFT_OUT)}
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit):
        return [f"{SAYS}: commit is no commit"]
    if repository is not None and (found := _commit_of(computed["source_sha256"], repository)) != commit:
        return [f"{SAYS}: commit is {commit}, the source of the run is that of {found}"]
    if says.get("left_out") != left_out:
        return [f"{SAYS}: left_out is not what {RUN_HASHES} has beyond the files here"]
    whole = computed | {"commit": commit, "left_out": left_out}
    problems = differences(SAYS, says, as_json(whole), "the files")
    if not problems and read_bytes(folder / README)[0] != readme_text(whole).encode("utf-8", "surrogatepass"):
        problems.append(f"{README} is not what this version of tunix-rt writes of {SAYS}")
    return problems or (_manifest_problems(folder, run, whole) if whole["schema"] == SCHEMA else [])


def _manifest_problems(folder: Path, run: RunFiles, says: dict[str, Any]) -> list[str]:
    """The manifest against what the files give; the name of the run is somebody's choice, and only has to be one."""
    told = read_object(folder / MANIFEST)
    if fault := fault_of_name(told.get("run_id")):
        return [f"{MANIFEST}: {fault}"]
    return differences(MANIFEST, told, as_json(manifest_of(run, says, told["run_id"])), "the files")

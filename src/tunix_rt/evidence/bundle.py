"""A bundle: the facts of a run without its weights, for a reviewer who trusts nothing. `collect` makes one folder of them
and never writes over another; what it says of itself is computed again by `verifying`."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import ConfigError, EvidenceError
from tunix_rt.evidence.agreeing import (
    OF_CPU_RUN,
    OWN,
    README,
    RUN_HASHES,
    SAYS,
    commit_of,
    may_stay_out,
    refuse_another_setup,
    run_hashes,
)
from tunix_rt.evidence.claims import AGAIN, RunFiles, claims_of, engine_of, read_run
from tunix_rt.evidence.hashes import is_weights, list_problems, write_hashes
from tunix_rt.evidence.manifest import MANIFEST, manifest_of, require_name
from tunix_rt.evidence.provenance import PROVENANCE, provenance_of
from tunix_rt.evidence.readme import readme_text
from tunix_rt.evidence.verifying import findings_of
from tunix_rt.evidence.whole import require_whole
from tunix_rt.models import redacted
from tunix_rt.rundir import RunDir, checkpoint_name, settle_files, storage, sync_folder, write_json, write_text

MIB = 2**20
CHECKPOINT_MIB = 64
"""Of checkpoints and weights that a bundle takes along unless told otherwise: it is meant for a repository."""
NOTED = ("rows.jsonl", "checkpoints.json", "processes.json")

_PLACE = re.compile(r"(?<![\w./:])(?:/(?:tmp|root|home|work|Users)/|[A-Z]:\\)[^\s\"',;:]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a bundle takes along beside the facts."""

    checkpoints: bool = False
    model: bool = False
    most_mib: int = CHECKPOINT_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What `bundle.json` says, and each line of the copied files that names a place of the machine it was made on."""

    says: dict[str, Any]
    places: tuple[str, ...]


def collect(
    folder: Path,
    output: Path,
    *,
    cpu_folder: Path | None,
    repository: Path,
    run_id: str | None = None,
    without_cpu: bool = False,
    extras: Extras | None = None,
) -> Collected:
    """Make the bundle `output` of the run in `folder`, which it calls `run_id`, or by the name of `output`. Refuses what is
    not whole, before anything is written. `without_cpu` there is nothing to hold a GPU's speed against."""
    _refuse_output(output, folder, cpu_folder)
    name = require_name(Path(os.path.abspath(output)).name if run_id is None else run_id)
    run = _sound_run(folder)
    cpu = _cpu_run(run, cpu_folder, without=without_cpu)
    says = claims_of(run, cpu)
    says["commit"] = commit_of(says["source_sha256"], repository)
    hashes = run_hashes(RunDir(folder).hashes)
    taken = _taken_along(folder, hashes, extras or Extras(), steps=says["steps_completed"])
    says["left_out"] = {name: digest for name, digest in hashes.items() if may_stay_out(name) and name not in taken}
    if clash := sorted(name for name in hashes if name in OWN or name.startswith("cpu/")):
        raise EvidenceError(
            f"{folder} holds {', '.join(clash)}, which a bundle has of its own", fix="give a run folder, not a bundle"
        )
    copies = {name: folder / name for name in hashes if name not in says["left_out"]}
    copies[RUN_HASHES] = RunDir(folder).hashes
    if cpu is not None:
        copies |= {f"cpu/{name}": cpu.folder / name for name in OF_CPU_RUN}
        copies[f"cpu/{RUN_HASHES}"] = RunDir(cpu.folder).hashes
    _refuse_secrets(copies)
    told = {SAYS: says, MANIFEST: manifest_of(run, says, name), PROVENANCE: provenance_of(run, says, hashes, name)}
    _write(output, copies, told)
    return Collected(says=says, places=tuple(_places(output, [*copies, MANIFEST])))


def _taken_along(folder: Path, hashes: Mapping[str, str], extras: Extras, *, steps: int) -> set[str]:
    """Names of the checkpoints and weights that go into the bundle, within the bytes that were allowed."""
    wanted = ("checkpoints/",) * extras.checkpoints + ("final_model/",) * extras.model
    # Nothing is replayed from the checkpoint of the last step, and it is as large as the others.
    last = f"checkpoints/{checkpoint_name(steps)}/"
    taken = {name for name in hashes if wanted and name.startswith(wanted) and not name.startswith(last)}
    if lacking := sorted(name for name in taken if not (folder / name).is_file()):
        raise EvidenceError(
            f"{folder} lacks {lacking[0]}, which was to be taken along", fix="bring it, or leave it out"
        )
    if extras.checkpoints and not any(name.startswith("checkpoints/") for name in taken):
        raise EvidenceError(
            f"{folder} has no checkpoint to replay from but that of its last step",
            fix="leave --with-checkpoints out; or run again with a smaller training.save_steps",
        )
    size = sum((folder / name).stat().st_size for name in taken)
    if size > extras.most_mib * MIB:
        raise EvidenceError(
            f"what is to be taken along has {size / MIB:,.1f} MiB, {extras.most_mib:,} are allowed",
            fix=f"--checkpoint-mib {-(-size // MIB)} allows it; or leave it out: its hashes are in the bundle",
        )
    return taken


def _refuse_secrets(copies: Mapping[str, Path]) -> None:
    """A last look: what a run writes is struck out when it is written, and this is what a stranger will read."""
    for name, source in copies.items():
        if is_weights(name) or name.startswith(("checkpoints/", "final_model/")):
            continue
        text = source.read_text("utf-8", "replace")
        for number, (line, struck) in enumerate(
            zip(text.split("\n"), redacted(text).split("\n"), strict=False), start=1
        ):
            if line != struck:
                raise EvidenceError(
                    f"{name}:{number} holds what looks like a token, a password or a signed address",
                    fix="revoke it, then run again without it: a bundle is for strangers",
                )


def _refuse_output(output: Path, *runs: Path | None) -> None:
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; a bundle is never written over", fix="choose another --to: NAME_v2, say")
    for run in runs:
        if run is not None and output.resolve().is_relative_to(run.resolve()):
            raise ConfigError(f"{output} is inside the run {run}, which must not change", fix="choose another --to")


def _sound_run(folder: Path) -> RunFiles:
    """The run in `folder`: it verifies, is complete, and holds what its device must leave."""
    if problems := list_problems(folder, may_lack_weights=True):
        raise EvidenceError(
            f"{folder} does not verify: {len(problems)} problem(s)\n" + "\n".join(f"  {one}" for one in problems),
            fix="bring an untouched copy of the run (its weights may stay behind), or run it again",
        )
    run = read_run(folder, f"{folder}/")
    require_whole(run)
    if lacking := [name for name in NOTED if not (folder / name).is_file()]:
        raise EvidenceError(f"{folder} has no {', '.join(lacking)}: an older version made it", fix=AGAIN)
    return run


def _cpu_run(run: RunFiles, cpu_folder: Path | None, *, without: bool) -> RunFiles | None:
    """The run to hold the speed against: of a run of PyTorch on a GPU either one is given, or it is said that there is none.
    One of JAX may do without: the models it is meant for are too large for most CPUs."""
    if run.result["device"] == "cpu" or (without and cpu_folder is not None):
        if cpu_folder is not None:
            why = "--without-cpu-run was given too" if without else f"{run.folder} ran on the CPU itself"
            raise ConfigError(why, fix="leave --cpu-run out")
        return None
    if cpu_folder is None:
        if without or engine_of(run) == "jax":
            return None
        raise EvidenceError(
            "a bundle of a run on a GPU holds its speed against the same configuration on the CPU",
            fix=f"tunix-rt train {run.folder / 'config.yaml'} --device cpu --output CPU_RUN, then add --cpu-run CPU_RUN; "
            "or say --without-cpu-run",
        )
    cpu = _sound_run(cpu_folder)
    refuse_another_setup(run, cpu)
    return cpu


def _write(output: Path, copies: Mapping[str, Path], told: Mapping[str, dict[str, Any]]) -> None:
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
            for name, value in told.items():
                write_json(staged / name, value)
            write_text(staged / README, readme_text(told[SAYS]))
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
        if is_weights(name):
            continue
        for number, line in enumerate((output / name).read_text("utf-8", "replace").splitlines(), start=1):
            place = _PLACE.search(line)
            if place or (len(home) > 1 and home in line):
                found.append(f"{name}:{number}: {place[0] if place else home}")
    return found


def bundle_problems(folder: Path, repository: Path | None = None) -> list[str]:
    """What the static checks find, in sentences."""
    return [finding.problem for finding in findings_of(folder, repository)]

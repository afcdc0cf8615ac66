"""Make a bundle: the facts of a completed run without its weights, in a folder of its own, verified as a reader would."""

import os
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt import assets
from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.evidence.checks import may_stay_out
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.facts import Inputs, Run
from tunix_rt.evidence.manifest import companion_problems, incomplete, manifest_of
from tunix_rt.evidence.readme import readme_text
from tunix_rt.models.secrets import redacted
from tunix_rt.runs.checksums import RUN_SUMS, SUMS, copy_regular, few, list_folder, read_file, write_sums
from tunix_rt.runs.folder import RunDir, checkpoint_name
from tunix_rt.runs.record import MANIFEST, README
from tunix_rt.runs.source import NEWEST_COMMITS, find_commit, package_hash, require_repository
from tunix_rt.storage import sha256_file, staged_folder, storage, write_json, write_text

MIB = 2**20
_PLACE = re.compile(r"(?<![\w./:])(?:/(?:tmp|root|home|work|Users)/|[A-Z]:\\)[^\s\"',;:]*")
_UNSCANNED = re.compile(
    r".*\.safetensors|(?:.*/)?(?:rows|metrics)\.jsonl|final_model/(?:tokenizer\.json|vocab\..*|merges\.txt|.*\.model)"
)
"""Weights, numbers and vocabularies."""
_OF_MACHINES = re.compile(r"(?:cpu/)?(?:[^/]*\.txt|doctor\.json|result\.json)")
"""Where `Basic` and `Bearer` start a header; in settings, questions and answers they are plain English: "a basic salary"."""
_TWO_WORDS = re.compile(r"(?i)\b(?:bearer|basic) +")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a bundle contains beside the facts."""

    checkpoints: bool = False
    model: bool = False
    most_mib: int = 64
    """Of both together: a bundle is meant for a repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The content of run_manifest.json, and each line of a copied file that contains a path of this machine."""

    manifest: dict[str, Any]
    places: tuple[str, ...]


def collect(
    folder: Path, output: Path, *, cpu_folder: Path | None, repository: Path | None, run_id: str | None = None,
    without_cpu: bool = False, extras: Extras | None = None, refs: Sequence[str] = (),
) -> Bundle:  # fmt: skip
    """Make the bundle `output` of the run in `folder`, named `run_id` or like `output`. Nothing is written before the run has
    passed every check of L1, its commit is found from `refs` and its CPU run fits. Without `repository`, the commit is that
    of the installed wheel if it has the source of the run, else it is looked up here."""
    output = Path(os.path.abspath(output))
    _refuse_output(output, folder, cpu_folder)
    run = _consistent_run(folder)
    cpu = _companion(run, cpu_folder, without=without_cpu)
    commit = _commit_of(run.commitment.source_sha256, repository, refs)
    hashes, taken = run.record.run_sums, _taken_along(run, extras or Extras())
    left_out = {name: digest for name, digest in hashes.items() if may_stay_out(name) and name not in taken}
    manifest = manifest_of(run, cpu, name=output.name if run_id is None else run_id, commit=commit)
    manifest["left_out"] = left_out
    _refuse_incomplete(manifest)
    copies = {name: (folder, name) for name in hashes if name not in left_out} | {RUN_SUMS: (folder, SUMS)}
    if cpu is not None and cpu_folder is not None:
        names = [SUMS, *(name for name in cpu.record.run_sums if not may_stay_out(name))]
        copies |= {f"cpu/{name}": (cpu_folder, name) for name in names}
    places = _write(output, copies, manifest, external_inputs(run))
    return Bundle(manifest=manifest, places=places)


def _refuse_output(output: Path, *runs: Path | None) -> None:
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; a bundle is never overwritten", fix="choose another --to: NAME_v2")
    for run in runs:
        if run is not None and output.resolve().is_relative_to(run.resolve()):
            raise ConfigError(f"{output} is inside the run {run}, which must not change", fix="choose another --to")


def _consistent_run(folder: Path) -> Run:
    """The completed run in `folder`, which passes every check that needs no model. Its weights may be missing."""
    examined = examine(folder, inputs=Inputs(), may_lack_weights=True)
    result = examined.record.result
    if examined.record.is_bundle:
        raise EvidenceError(f"{folder} is a bundle", fix="give the run folder that it was made of")
    if result is not None and result.status != "completed":
        problem = f"{folder}: the run is {result.status!r}, not completed"
        raise EvidenceError(problem, fix="finish it with --resume, or run it again")
    if examined.findings or examined.run is None:
        problems = [finding.problem for finding in examined.findings] or ["no completed run"]
        fix = "bring an untouched copy of the run (its weights may be missing), or run it again"
        raise EvidenceError(_listed(f"{folder} does not verify", problems), fix=fix)
    return examined.run


def _listed(title: str, problems: Iterable[str]) -> str:
    return "\n  ".join([title, *few(problems)])


def _companion(run: Run, cpu_folder: Path | None, *, without: bool) -> Run | None:
    """The CPU run that the speed of a GPU is compared with. A PyTorch run needs one, or `without`. A JAX run does not: the
    models it is for are too large for most CPUs."""
    if cpu_folder is not None and (without or run.device == "cpu"):
        problem = "--cpu-run and --without-cpu-run exclude each other" if without else "the run itself is on the CPU"
        raise ConfigError(problem, fix="leave --cpu-run out")
    if cpu_folder is None:
        if without or run.device == "cpu" or not CAPABILITIES[run.backend].cpu_baseline:
            return None
        train = f"tunix-rt train {run.record.root / 'config.yaml'} --device cpu --output CPU_RUN"
        raise EvidenceError(
            "the bundle of a GPU run compares its speed with the same configuration on the CPU",
            fix=f"{train}, then --cpu-run CPU_RUN; or --without-cpu-run",
        )
    cpu = _consistent_run(cpu_folder)
    if problems := list(companion_problems(run, cpu)):
        fix = "run the same configuration, of the same source, with --device cpu"
        raise EvidenceError(_listed(f"{cpu_folder} is another run", problems), fix=fix)
    return cpu


def _commit_of(source_sha256: str, repository: Path | None, refs: Sequence[str]) -> str:
    if repository is None:
        commit = assets.wheel_commit()
        if commit is not None and package_hash(Path(tunix_rt.__file__).parent)[0] == source_sha256:
            return commit
        repository = Path()
    require_repository(repository)
    found = find_commit(source_sha256, repository, refs)
    if found is None:
        raise EvidenceError(
            f"none of the newest {NEWEST_COMMITS} commits of {repository} has the source of this run "
            f"(source_sha256 {source_sha256[:12]})",
            fix="commit that source, or name the clone that has it with --repository",
        )
    return found.commit


def _taken_along(run: Run, extras: Extras) -> set[str]:
    """Names of the checkpoints and weights that go into the bundle, within `most_mib`. No replay starts at the last step."""
    files, folder, last = run.record.listing.files, run.record.root, f"checkpoints/{checkpoint_name(run.total)}/"
    earlier = {name for name in run.record.run_sums if name.startswith("checkpoints/") and not name.startswith(last)}
    model = {name for name in run.record.run_sums if name.startswith("final_model/")}
    taken = (earlier if extras.checkpoints else set()) | (model if extras.model else set())
    if lacking := min(taken - files.keys(), default=""):
        raise EvidenceError(f"{folder} lacks {lacking}", fix="bring it, or leave --with-checkpoints, --with-model out")
    if extras.checkpoints and not earlier:
        raise EvidenceError(
            f"{folder} has no checkpoint before that of its last step, so that nothing can be replayed from one",
            fix="leave --with-checkpoints out; or run again with a smaller training.save_steps",
        )
    size = sum(files[name] for name in taken)
    if size > extras.most_mib * MIB:
        raise EvidenceError(
            f"checkpoints and weights have {size / MIB:,.1f} MiB, the limit is {extras.most_mib:,} MiB",
            fix=f"--checkpoint-mib {-(-size // MIB)}; or leave them out: their hashes are in the bundle",
        )
    return taken


def _refuse_incomplete(manifest: Mapping[str, Any]) -> None:
    problems = list(incomplete(manifest))
    if named := [problem for problem in problems if problem.startswith("run_id:")]:
        raise ConfigError(f"--run-id: {named[0]}", fix="name the run in one short line: --run-id m39-local-cpu-proof")
    if problems:
        raise EvidenceError(_listed("the run lacks facts", problems), fix="run it again with this version of tunix-rt")


def external_inputs(run: Run) -> frozenset[str]:
    """Which inputs of the run do not ship with tunix-rt: keys of `inputs` in the manifest."""
    committed, shipped = run.commitment, Inputs()
    found = {
        "dataset": shipped.dataset(committed.dataset.sha256),
        "evalset": shipped.evalset(committed.evalset.sha256) if committed.evalset else "none",
        "base_model": shipped.base_model(committed.base_model.files, committed.base_model.weights),
    }
    named = run.config.model.tokenizer_name_or_path
    if named is not None and not (assets.shipped_folder("models") / os.path.basename(named)).is_dir():
        found["tokenizer_sha256"] = None
    return frozenset(name for name, place in found.items() if place is None)


# --- writing ----------------------------------------------------------------------------------------------------------

Copies = Mapping[str, tuple[Path, str]]
"""Name in the bundle -> run folder and name there."""


def _write(output: Path, copies: Copies, manifest: dict[str, Any], external: frozenset[str]) -> tuple[str, ...]:
    """Fill a folder beside `output`, verify it, and rename it. Returns the lines that contain paths of this machine."""
    with staged_folder(output) as staged:
        for name, source in copies.items():
            copy_regular(*source, staged / name)
        write_json(staged / MANIFEST, manifest)
        places = tuple(few(_places(staged, sorted([*copies, MANIFEST]))))
        write_text(staged / README, readme_text(manifest, external))
        write_sums(RunDir(staged))
        if problems := [finding.problem for finding in examine(staged, inputs=Inputs()).findings]:
            fix = "did the run change meanwhile? Otherwise this is a defect; please report it with these lines"
            raise EvidenceError(_listed("the bundle does not verify and was removed", problems), fix=fix)
    return places


def _places(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """`name:line: path` for each line with an absolute path of this machine. A secret is an EvidenceError."""
    home = str(Path.home())
    for name in names:
        if _UNSCANNED.fullmatch(name):
            continue
        text = (folder / name).read_bytes().decode("utf-8", "replace")
        _refuse_secrets(name, text if _OF_MACHINES.fullmatch(name) else _TWO_WORDS.sub("", text))
        for number, line in enumerate(text.split("\n"), start=1):
            place = _PLACE.search(line)
            if place or (len(home) > 1 and home in line):
                yield f"{name}:{number}: {place[0] if place else home}"


def _refuse_secrets(name: str, text: str) -> None:
    """What strangers will read is checked once more."""
    if (clean := redacted(text)) != text:
        pairs = zip(text.split("\n"), clean.split("\n"), strict=False)
        number = next((number for number, (line, shown) in enumerate(pairs, start=1) if line != shown), 1)
        raise EvidenceError(
            f"{name}:{number} contains what looks like a token, a password or a signed address",
            fix="revoke it, then run again without it: strangers read a bundle",
        )


BUNDLES = "submission_runs"
FOLDERS = ("training/configs", BUNDLES, "notebooks")
FILES = ("README.md", "LICENSE", "tunix-rt.md")
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints"}
MOST_BYTES = 256 * 2**20
"""Of one file."""
DATE = (1980, 1, 1, 0, 0, 0)
"""The first that a zip can contain."""
MODE = 0o100644


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The zip that was made."""

    path: Path
    sha256: str
    bytes: int
    files: int
    bundles: tuple[str, ...]


def package(repository: Path, output: Path) -> Package:
    """Make the zip `output` of the clone `repository`. Every bundle is verified before, and again from the zip."""
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists", fix="choose another --to, or remove it")
    names = _names(repository)
    inside = [name.split("/") for name in names if name.startswith(f"{BUNDLES}/")]
    bundles = tuple(sorted({parts[1] for parts in inside if len(parts) > 2}))
    if not bundles:
        raise InputError(f"{repository / BUNDLES} contains no bundle", fix="run this in a clone of the repository")
    _require_verified(repository, bundles)
    staged = output.with_name(f".{output.name}.staged")
    with storage(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_archive(repository, names, staged)
            _require_unpacked(staged, names, bundles)
            staged.replace(output)
        finally:
            staged.unlink(missing_ok=True)
        size = output.stat().st_size
    return Package(path=output, sha256=sha256_file(output), bytes=size, files=len(names), bundles=bundles)


def _names(repository: Path) -> list[str]:
    """The files to pack, by name. A link anywhere, even in place of a folder, is refused before anything is read."""
    links = [name for name in (*FILES, "training", *FOLDERS) if (repository / name).is_symlink()]
    problems = [f"{name} is a symbolic link" for name in links]
    names = [name for name in FILES if (repository / name).exists()]
    for folder in FOLDERS:
        if links or not (repository / folder).exists():  # a clone may lack one of the folders
            continue
        listing = list_folder(repository / folder)
        problems += [f"{folder}/{problem}" for problem in listing.problems]
        names += [f"{folder}/{name}" for name in listing.files if LEFT_OUT.isdisjoint(name.split("/"))]
    _refuse(problems, fix="only regular files are packed: replace or remove what is listed")
    return sorted(names)


def _refuse(problems: Sequence[str], *, fix: str) -> None:
    if problems:
        raise EvidenceError(_listed(f"not packed: {len(problems)} problem(s)", problems), fix=fix)


def _write_archive(repository: Path, names: Sequence[str], staged: Path) -> None:
    """Not compressed: another version of zlib would give other bytes."""
    with zipfile.ZipFile(staged, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            data, problem = read_file(repository, name, MOST_BYTES)
            if data is None:
                raise EvidenceError(f"not packed: {problem}", fix="repair it, or move it elsewhere")
            entry = zipfile.ZipInfo(name, date_time=DATE)
            entry.external_attr, entry.create_system = MODE << 16, 3
            archive.writestr(entry, data)


def _require_unpacked(staged: Path, names: Sequence[str], bundles: Sequence[str]) -> None:
    """The zip, unpacked elsewhere, contains what was packed, and its bundles verify."""
    with tempfile.TemporaryDirectory(prefix="tunix-rt-package-") as place, zipfile.ZipFile(staged) as archive:
        if archive.namelist() != names or archive.testzip() is not None:
            raise EvidenceError(f"{staged} does not contain what was packed", fix="free disk space, then try again")
        archive.extractall(place)
        _require_verified(Path(place), bundles)


def _require_verified(root: Path, bundles: Sequence[str]) -> None:
    problems: list[str] = []
    for name in bundles:
        examined = examine(root / BUNDLES / name, inputs=Inputs())
        if not examined.record.is_bundle:
            problems.append(f"{BUNDLES}/{name}: not a bundle")
        problems += [f"{BUNDLES}/{name}: {finding.problem}" for finding in examined.findings]
    _refuse(problems, fix="restore these bundles from the repository; only what verifies is packed")

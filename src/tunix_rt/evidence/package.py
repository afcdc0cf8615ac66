"""One zip with everything a reviewer needs: configurations, bundles, notebooks, README. The same files give the same bytes."""

import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.inputs import Inputs
from tunix_rt.runs.checksums import few, list_folder, read_file
from tunix_rt.storage import sha256_file, storage

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
            _write(repository, names, staged)
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
        listed = "\n".join(f"  {problem}" for problem in few(problems))
        raise EvidenceError(f"not packed: {len(problems)} problem(s)\n{listed}", fix=fix)


def _write(repository: Path, names: Sequence[str], staged: Path) -> None:
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

"""One zip with everything a reviewer needs: configurations, bundles, notebooks, README. The same files give the same bytes,
and it is unpacked and every bundle in it verified before it gets its name."""

import os
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.evidence.agreeing import is_bundle
from tunix_rt.evidence.findings import verdict_of
from tunix_rt.evidence.verifying import findings_of
from tunix_rt.rundir import sha256_file, storage

FOLDERS = ("training/configs", "submission_runs", "notebooks")
FILES = ("README.md", "LICENSE", "tunix-rt.md")
BUNDLES = "submission_runs"
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
DATE = (1980, 1, 1, 0, 0, 0)
"""The first that a zip can tell: when a file was copied says nothing."""
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
    """Make the zip `output` of the clone `repository`. A bundle that does not verify, before or after, is refused."""
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists", fix="choose another --to, or remove it")
    names = sorted(_names(repository))
    bundles = tuple(
        sorted({name.split("/")[1] for name in names if name.startswith(f"{BUNDLES}/") and name.count("/") > 1})
    )
    if not bundles:
        raise InputError(f"{repository / BUNDLES} holds no bundle", fix="run this in a clone of the repository")
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


def _names(repository: Path) -> Iterator[str]:
    """Files by their name in the clone. A link is refused: what it points at is somebody's own."""
    for name in FILES:
        if (repository / name).is_file():
            yield name
    for folder in FOLDERS:
        for path in (repository / folder).rglob("*"):
            name = path.relative_to(repository).as_posix()
            if path.is_symlink():
                raise EvidenceError(f"{name} is a symbolic link", fix="replace it by the file")
            if path.is_file() and not any(part in LEFT_OUT for part in PurePosixPath(name).parts):
                yield name


def _write(repository: Path, names: list[str], staged: Path) -> None:
    """Not compressed: another version of zlib would give other bytes."""
    with zipfile.ZipFile(staged, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, date_time=DATE)
            entry.external_attr, entry.create_system = MODE << 16, 3
            archive.writestr(entry, (repository / name).read_bytes())


def _require_unpacked(staged: Path, names: list[str], bundles: tuple[str, ...]) -> None:
    """What is in the zip, unpacked elsewhere, is what was put in, and verifies."""
    with tempfile.TemporaryDirectory(prefix="tunix-rt-package-") as place, zipfile.ZipFile(staged) as archive:
        if archive.namelist() != names or archive.testzip() is not None:
            raise EvidenceError(f"{staged} does not hold what was packed", fix="free disk space, then try again")
        archive.extractall(place)
        _require_verified(Path(place), bundles)


def _require_verified(root: Path, bundles: tuple[str, ...]) -> None:
    problems = []
    for name in bundles:
        folder = root / BUNDLES / name
        findings = findings_of(folder) if is_bundle(folder) else []
        if not is_bundle(folder):
            problems.append(f"{BUNDLES}/{name} is no bundle")
        elif verdict_of(findings) == "L0":
            problems += [f"{BUNDLES}/{name}: {finding.problem}" for finding in findings]
    if problems:
        raise EvidenceError(
            f"not packed: {len(problems)} problem(s)\n" + "\n".join(f"  {one}" for one in problems[:50]),
            fix="restore these bundles from the repository; nothing that does not verify is packed",
        )

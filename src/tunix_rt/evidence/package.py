"""One zip with everything a reviewer needs: configurations, bundles, notebooks, README. The same files give the same bytes."""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.inputs import Inputs
from tunix_rt.rundir import sha256_file, storage
from tunix_rt.runs.reading import few, open_regular, plain

BUNDLES = "submission_runs"
FOLDERS = ("training/configs", BUNDLES, "notebooks")
FILES = ("README.md", "LICENSE", "tunix-rt.md")
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
MIB = 2**20
MOST_MIB = 256
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
    names = sorted(_names(repository))
    bundles = tuple(
        sorted({name.split("/")[1] for name in names if name.startswith(f"{BUNDLES}/") and name.count("/") > 1})
    )
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


def _names(repository: Path) -> Iterator[str]:
    """The files to pack, by name. A link anywhere, even in place of a folder, is refused before anything is read."""
    for name in FILES:
        if os.path.lexists(repository / name):
            yield _packable(repository, name)
    for folder in FOLDERS:
        above = PurePosixPath(folder)
        for part in (*reversed(above.parents[:-1]), above):
            if (repository / part).is_symlink():
                raise _link(part.as_posix())
        for here, folders, files in os.walk(repository / folder, onerror=_unreadable):
            folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
            inside = Path(here).relative_to(repository).as_posix()
            if linked := [name for name in folders if os.path.islink(os.path.join(here, name))]:
                raise _link(f"{inside}/{linked[0]}")
            yield from (_packable(repository, f"{inside}/{name}") for name in files if name not in LEFT_OUT)


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a clone may lack one of the folders
        raise EvidenceError(f"{plain(str(error.filename))}: {error.strerror}", fix="make it readable") from error


def _link(name: str) -> EvidenceError:
    return EvidenceError(f"{plain(name)} is a symbolic link", fix="replace it by what it points to")


def _packable(repository: Path, name: str) -> str:
    """`name`, if it is a regular file of at most 256 MiB."""
    if (repository / name).is_symlink():
        raise _link(name)
    try:
        with open(open_regular(repository, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise EvidenceError(
            f"{plain(name)} cannot be packed: {error.strerror}", fix="remove it, or repair it"
        ) from error
    if size > MOST_MIB * MIB:
        raise EvidenceError(
            f"{plain(name)} has {size / MIB:,.0f} MiB, the limit is {MOST_MIB} MiB", fix="move it elsewhere"
        )
    return name


def _write(repository: Path, names: list[str], staged: Path) -> None:
    """Not compressed: another version of zlib would give other bytes."""
    with zipfile.ZipFile(staged, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, date_time=DATE)
            entry.external_attr, entry.create_system = MODE << 16, 3
            with open(open_regular(repository, name), "rb") as source:
                entry.file_size = os.fstat(source.fileno()).st_size
                with archive.open(entry, "w") as target:
                    shutil.copyfileobj(source, target, MIB)


def _require_unpacked(staged: Path, names: list[str], bundles: tuple[str, ...]) -> None:
    """The zip, unpacked elsewhere, contains what was packed, and its bundles verify."""
    with tempfile.TemporaryDirectory(prefix="tunix-rt-package-") as place, zipfile.ZipFile(staged) as archive:
        if archive.namelist() != names or archive.testzip() is not None:
            raise EvidenceError(f"{staged} does not contain what was packed", fix="free disk space, then try again")
        archive.extractall(place)
        _require_verified(Path(place), bundles)


def _require_verified(root: Path, bundles: tuple[str, ...]) -> None:
    problems: list[str] = []
    for name in bundles:
        examined = examine(root / BUNDLES / name, inputs=Inputs())
        if not examined.record.is_bundle:
            problems.append(f"{BUNDLES}/{name}: not a bundle")
        problems += [f"{BUNDLES}/{name}: {finding.problem}" for finding in examined.findings]
    if problems:
        raise EvidenceError(
            f"not packed: {len(problems)} problem(s)\n" + "\n".join(f"  {one}" for one in few(problems)),
            fix="restore these bundles from the repository; only what verifies is packed",
        )

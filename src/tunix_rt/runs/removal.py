"""Delete a run, or pack it into one file first. A live run is refused: its folder is locked while this works on it."""

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tunix_rt.errors import InputError, StorageError
from tunix_rt.runs.folder import RunDir
from tunix_rt.storage import bytes_below, discard, require_space, sha256_file, storage, sync_folder, unused

CHUNK = 2**20


@contextlib.contextmanager
def held(root: Path) -> Iterator[RunDir]:
    """The run in `root`, locked; InputError for a link or a folder without a run, StorageError for a live run."""
    run = RunDir(root)
    if root.is_symlink():
        raise InputError(f"{root} is a symbolic link", fix=f"name the folder itself: {os.path.realpath(root)}")
    if not root.is_dir() or not run.holds_a_run():
        raise InputError(f"no run in {str(root)!r}", fix="give the --output folder of a run")
    with run.locked():
        yield run


def remove(run: RunDir) -> None:
    """Delete the folder. It leaves its name in one rename, so no half of a run remains under it."""
    root = run.root.absolute()
    with storage(root):
        going = unused(root.with_name(f".{root.name}.staged"))
        root.rename(going)
        sync_folder(root.parent)
    discard(going)


def archive(run: RunDir, to: Path) -> int:
    """Write the run as the tar file `to`, read it back against the files, and delete the folder. Returns the bytes."""
    root = run.root.absolute()
    if to.exists() or to.is_symlink():
        raise StorageError(f"{to} exists", fix="give a new file: --to OTHER.tar")
    if to.absolute().is_relative_to(root):
        raise StorageError(f"{to} is inside the run", fix="give a file outside of it: --to OTHER.tar")
    require_space(to.absolute().parent, bytes_below(root), what="the archive")
    staged = unused(to.with_name(f".{to.name}.staged"))
    with storage(to):
        try:
            with staged.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(root, arcname=root.name, filter=lambda one: None if one.name.endswith("/.lock") else one)
                tar.close()
                file.flush()
                os.fsync(file.fileno())
            _require_equal(staged, root)
            staged.rename(to)
            sync_folder(to.absolute().parent)
        finally:
            staged.unlink(missing_ok=True)
    remove(run)
    return to.stat().st_size


def _require_equal(archive: Path, root: Path) -> None:
    """StorageError unless every file of the run is in the archive with its hash."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (stored := tar.extractfile(member)) is not None:
                digest = hashlib.sha256()
                while part := stored.read(CHUNK):
                    digest.update(part)
                found[member.name.removeprefix(f"{root.name}/")] = digest.hexdigest()
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not path.is_symlink() and name != ".lock" and found.get(name) != sha256_file(path):
            raise StorageError(
                f"{archive}: {name} differs from the file of the run", fix="repeat it; the run is unchanged"
            )

"""Which source made a run: one hash over the package's files, and the way back from that hash to a commit.

A run may happen on a machine without the repository's history, so it records the hash; the commit is found later. The
same hash by hand:

    cd src/tunix_rt && find . -name '*.py' -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum
"""

import hashlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tunix_rt.errors import ConfigError, EvidenceError
from tunix_rt.rundir import sha256_file, sha256_text

SOURCE_FOLDER = "src/tunix_rt"
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
NEWEST_COMMITS = 500


def source_hash(package_root: Path) -> tuple[str, dict[str, str]]:
    """One hash over all `*.py` below `package_root`, and the hash of each by its path relative to it."""
    files = {
        path.relative_to(package_root).as_posix(): sha256_file(path)
        for path in package_root.rglob("*.py")
        if path.is_file() and not path.is_symlink()
    }
    return combined_hash(files), dict(sorted(files.items()))


def combined_hash(files: Mapping[str, str]) -> str:
    """One hash over the hash of each file by its path."""
    return sha256_text("".join(f"{digest}  {path}\n" for path, digest in sorted(files.items())))


def require_repository(repo: Path) -> None:
    """A folder without a history is a slip of whoever named it, and says nothing about a run."""
    try:
        run_git(repo, "rev-parse", "--git-dir")
    except EvidenceError as error:
        raise ConfigError(f"--repository {error.problem}", fix=error.fix) from error


def source_of_commit(commit: str, repo: Path) -> str | None:
    """The hash of the package in that commit, however old it is; None where the clone has no such commit."""
    with _object_reader(repo) as objects:
        if objects.read(f"{commit}^{{commit}}") is None:
            return None
        tree = objects.read(f"{commit}:{SOURCE_FOLDER}")
        return combined_hash({}) if tree is None else _hash_of_tree(repo, tree.id, objects, {})


def is_shallow(repo: Path) -> bool:
    return run_git(repo, "rev-parse", "--is-shallow-repository").strip() == b"true"


def find_commit(source_sha256: str, repo: Path, named: str | None = None) -> str | None:
    """The commit `named`, where its package gives that hash; else the oldest of the newest 500 that do, or None.

    The oldest, because later commits that leave the source alone have the same hash and must not change the answer.
    """
    if named is not None and COMMIT.fullmatch(named) and source_of_commit(named, repo) == source_sha256:
        return named
    listed = (
        run_git(repo, "rev-list", "--exclude=refs/stash", "--all", f"--max-count={NEWEST_COMMITS}").decode().split()
    )
    found = None
    by_tree: dict[str, str] = {}
    by_blob: dict[str, str] = {}
    with _object_reader(repo) as objects:
        for commit in listed:
            tree = objects.read(f"{commit}:{SOURCE_FOLDER}")
            if tree is None:
                continue
            if tree.id not in by_tree:
                by_tree[tree.id] = _hash_of_tree(repo, tree.id, objects, by_blob)
            if by_tree[tree.id] == source_sha256:
                found = commit
    return found


def _hash_of_tree(repo: Path, tree: str, objects: "_Objects", by_blob: dict[str, str]) -> str:
    files: dict[str, str] = {}
    for entry in run_git(repo, "ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0"):
        facts, _, path = entry.partition(b"\t")
        if not path.endswith(b".py") or not facts.startswith(b"100"):  # regular files: no links, no submodules
            continue
        blob = facts.split()[2].decode()
        if blob not in by_blob:
            content = objects.read(blob)
            if content is None:
                raise EvidenceError(f"{repo}: object {blob} is missing", fix="fetch the whole history, then try again")
            by_blob[blob] = hashlib.sha256(content.data).hexdigest()
        files[path.decode("utf-8", "surrogateescape")] = by_blob[blob]
    return combined_hash(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GitObject:
    id: str
    data: bytes


class _Objects:
    """One `git cat-file --batch` for all reads: a process per object would take minutes over a long history."""

    def __init__(self, ask: IO[bytes], answer: IO[bytes]) -> None:
        self._ask = ask
        self._answer = answer

    def read(self, name: str) -> _GitObject | None:
        self._ask.write(name.encode() + b"\n")
        self._ask.flush()
        header = self._answer.readline().split()
        if len(header) != 3:  # "<name> missing"
            return None
        data = self._answer.read(int(header[2]))
        self._answer.read(1)  # the newline after the content
        return _GitObject(id=header[0].decode(), data=data)


@contextmanager
def _object_reader(repo: Path) -> Iterator[_Objects]:
    command = ["git", "-C", str(repo), "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        yield _Objects(process.stdin, process.stdout)


def run_git(repo: Path, *arguments: str) -> bytes:
    """What git prints; where it is missing or refuses, an EvidenceError says so."""
    try:
        return subprocess.run(["git", "-C", str(repo), *arguments], capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise EvidenceError("git is not installed", fix="install git, or look the commit up elsewhere") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        raise EvidenceError(f"{repo}: {said}", fix="point at a clone of the repository") from error

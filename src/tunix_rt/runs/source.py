"""Which source made a run: one hash over the package's files, and the way back from that hash to a commit.

A run may happen on a machine without the repository's history, so it records the hash; the commit is found later. The hash
covers every file below src/tunix_rt but hidden ones, `__pycache__` (written by Python) and `packaged` (what a wheel adds to a
clone). The same by hand:

    cd src/tunix_rt && find . -type f ! -path '*/.*' ! -path '*/__pycache__/*' ! -path './packaged/*' -printf '%P\\n' \\
        | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum

A commit has a hash only if all of its package is hashed: with a hidden, compiled or packaged file, a link or a submodule in
it, it matches no run. The objects of a clone are trusted, its configuration is not: git runs with none of the programs that
it may name, and without network.
"""

import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunix_rt.errors import ConfigError, InputError
from tunix_rt.storage import sha256_file, sha256_text, storage

SOURCE_FOLDER = "src/tunix_rt"
NEWEST_COMMITS = 500
GIT_SECONDS = 60.0
MAX_BYTES = 256 * 2**20
"""Of the output of one git command: bounds large files, and trees that name one file a million times."""
_SHIPPED = ("models", "presets", "datasets", "evalsets")
"""Folders of a commit that its package reads, besides itself."""
_NOT_SOURCE = re.compile(r"(?:.*/)?(?:__pycache__|packaged)/.*|.*\.(?:py[cod]|so|dll|dylib)", re.IGNORECASE)
_PLAIN_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*/)*[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_FULL_CLONE = "use a full clone of the project, without --depth and --filter"
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_TERMINAL_PROMPT": "0",
    "GIT_GRAFT_FILE": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMatch:
    """The oldest commit with the files of a run, and the branch or tag that contains it."""

    commit: str
    ref: str


def package_hash(package_root: Path) -> tuple[str, dict[str, str]]:
    """One hash over the files of the package, and the hash of each by its path relative to `package_root`."""
    files: dict[str, str] = {}
    for path in package_root.rglob("*"):
        name = path.relative_to(package_root)
        left_out = name.parts[0] == "packaged" or "__pycache__" in name.parts
        if not left_out and not any(part.startswith(".") for part in name.parts) and path.is_file():
            files[name.as_posix()] = sha256_file(path)
    return combined_hash(files), dict(sorted(files.items()))


def combined_hash(files: Mapping[str, str]) -> str:
    """One hash over the hash of each file by its path."""
    return sha256_text("".join(f"{digest}  {path}\n" for path, digest in sorted(files.items())))


def require_repository(repo: Path) -> None:
    """Refuse a folder without a history: a wrong setting, which means nothing for a run."""
    _full_name("HEAD", repo)


def find_commit(source_sha256: str, repo: Path, refs: Sequence[str] = ()) -> CommitMatch | None:
    """The oldest of the newest 500 commits with exactly these files that is reachable from `refs`: branches or tags that
    whoever verifies has named, else HEAD. The first ref with such a commit wins.

    The oldest, because later commits that leave the package alone have the same hash and must not change the answer.
    """
    for name in refs or ("HEAD",):
        ref = _full_name(name, repo)
        newest = ("--ignore-missing", f"--max-count={NEWEST_COMMITS}")
        commits = _git(repo, "rev-list", *newest, ref, "--").decode().split()
        named = "".join(f"{commit}:{SOURCE_FOLDER}\n" for commit in commits).encode()
        trees = [line.split()[0].decode() for line in _git(repo, "cat-file", "--batch-check", stdin=named).splitlines()]
        hashes = _package_hashes({tree for tree in trees if ":" not in tree}, repo)  # "<commit>:<path> missing"
        same = [commit for commit, tree in zip(commits, trees, strict=True) if hashes.get(tree) == source_sha256]
        if same:
            return CommitMatch(commit=same[-1], ref=ref.split("/", 2)[-1])
    if _git(repo, "rev-parse", "--is-shallow-repository").strip() == b"true":
        raise InputError(
            f"{repo}: no commit has the source {source_sha256[:12]}, but the history is incomplete (a shallow clone)",
            fix=f"fetch all of it: git -C {repo} fetch --unshallow",
        )
    return None


def write_source(commit: str, repo: Path, target: Path) -> str:
    """Write the package of a commit, and the folders it reads, into the empty folder `target`, as in a clone. Returns the
    hash of the package as written. Git checks nothing out: filters and attributes have no effect."""
    try:
        files = _plain_files(_git(repo, "ls-tree", "-r", "-z", "--full-tree", commit, SOURCE_FOLDER, *_SHIPPED))
    except ValueError as error:
        raise InputError(f"commit {commit}: {error}", fix="name a commit without it") from error
    if not any(path.startswith(SOURCE_FOLDER + "/") for path in files):
        raise InputError(f"commit {commit} has no {SOURCE_FOLDER}", fix="name a commit of tunix-rt")
    contents = _contents(files.values(), repo)
    with storage(target, fix="free space or permissions on that volume"):
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise ConfigError(f"{target} is not empty", fix="name a new folder")
        for path, blob in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            with (target / path).open("xb") as file:
                file.write(contents[blob])
        return package_hash(target / SOURCE_FOLDER)[0]


def _full_name(name: str, repo: Path) -> str:
    """The full name of a branch or tag. Other refs (pull requests, stashes), ids and revision expressions are refused: no
    branch needs to contain what they name. HEAD is its branch, or itself if it is detached."""
    kinds = ("refs/heads", "refs/tags", "refs/remotes")
    lines = _git(repo, "for-each-ref", "--format=%(HEAD)%(refname)", *kinds).decode("utf-8", "replace").split("\n")[:-1]
    if name == "HEAD":
        return next((line[1:] for line in lines if line.startswith("*")), name)
    found = [line[1:] for line in lines if name in (line[1:], line[1:].split("/", 2)[-1])]
    if not found:
        raise ConfigError(f"{repo} has no branch or tag {name!r}", fix="name one of `git branch -a` or `git tag`")
    if len(found) > 1:
        raise ConfigError(f"{name} is ambiguous in {repo}: {', '.join(found)}", fix="write the full name")
    return found[0]


def _package_hashes(trees: Iterable[str], repo: Path) -> dict[str, str]:
    """The hash of each tree of which all is hashed."""
    files: dict[str, dict[str, str]] = {}
    for tree in trees:
        listing = _git(repo, "ls-tree", "-r", "-z", "--full-tree", tree)
        try:
            files[tree] = _plain_files(listing)
        except ValueError:
            continue
    contents = _contents((blob for inside in files.values() for blob in inside.values()), repo)
    sha256 = {blob: hashlib.sha256(content).hexdigest() for blob, content in contents.items()}
    hashed = {tree: {path: sha256[blob] for path, blob in inside.items()} for tree, inside in files.items()}
    return {tree: combined_hash(inside) for tree, inside in hashed.items()}


def _plain_files(listing: bytes) -> dict[str, str]:
    """The id of each file by its path, from `git ls-tree`. ValueError for one that is not hashed, or that some file system
    would not keep under its name."""
    files: dict[str, str] = {}
    lower: set[str] = set()
    for entry in listing.decode("utf-8", "replace").split("\0")[:-1]:
        facts, _, path = entry.partition("\t")
        if not facts.startswith("100"):
            raise ValueError(f"{path!a} is a link or a submodule")
        if not _PLAIN_PATH.fullmatch(path) or path.lower() in lower:
            raise ValueError(f"{path!a} is not a plain file name, or occurs twice but for upper and lower case")
        if _NOT_SOURCE.fullmatch(path):
            raise ValueError(f"{path} is not source")
        lower.add(path.lower())
        files[path] = facts.split()[2]
    return files


def _contents(blobs: Iterable[str], repo: Path) -> dict[str, bytes]:
    wanted = sorted(set(blobs))
    output = _git(repo, "cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in wanted).encode())
    contents: dict[str, bytes] = {}
    at = 0
    for blob in wanted:
        start = output.index(b"\n", at) + 1
        header = output[at:start].split()  # "<id> blob <size>"
        if len(header) != 3:
            raise InputError(f"{repo}: object {blob} is missing", fix=_FULL_CLONE)
        at = start + int(header[2]) + 1  # a newline follows
        contents[blob] = output[start : at - 1]
    return contents


def _git(repo: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """The output of one git command. The one place that starts git."""
    settings = ("-c", "core.commitGraph=false", "-c", "advice.graftFileDeprecated=false")
    command = ["git", f"--git-dir={_git_folder(repo)}", "--no-pager", *settings, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _ENVIRONMENT
    with tempfile.TemporaryFile() as lines, tempfile.TemporaryFile() as stderr:
        lines.write(stdin)
        lines.seek(0)
        try:
            process = subprocess.Popen(command, stdin=lines, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        except FileNotFoundError as error:
            raise InputError("git is not installed", fix="install git, or leave --repository out") from error
        limit = threading.Timer(GIT_SECONDS, process.kill)
        limit.daemon = True
        limit.start()
        with process:
            assert process.stdout is not None
            output = process.stdout.read(MAX_BYTES + 1)
            if len(output) > MAX_BYTES:
                process.kill()
        limit.cancel()
        if len(output) > MAX_BYTES:
            raise InputError(f"{repo}: git {arguments[0]} prints more than {MAX_BYTES:,} bytes", fix=_FULL_CLONE)
        if process.returncode:
            stderr.seek(0)
            reason = " ".join(stderr.read(500).decode("utf-8", "replace").split())
            killed = f"ended after {GIT_SECONDS:.0f} s" if process.returncode < 0 else reason
            raise InputError(f"{repo}: git {arguments[0]} failed: {killed}", fix=_FULL_CLONE)
    return output


def _git_folder(repo: Path) -> Path:
    """CommitMatch here, not by git: git does not check the owner of a folder that is named to it, and needs no home folder."""
    start = Path(os.path.abspath(repo))
    for folder in (start, *start.parents):
        for place in (folder / ".git", folder):
            linked = place.name == ".git" and os.path.isfile(place)  # of a worktree: a file with the folder's path
            if linked or (os.path.isfile(place / "HEAD") and os.path.isdir(place / "objects")):
                return place
    raise ConfigError(
        f"--repository {repo}: not a git repository",
        fix="give the path of a git clone of tunix-rt, which has the commit of the run; the wheel of a release names its own",
    )

"""From the hash of a source to its commit, in clones whose configuration may be hostile. All are made by the real git."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tunix_rt
from tests.conftest import ROOT
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.runs import source
from tunix_rt.runs.source import CommitMatch, find_commit, package_hash, require_repository, write_source

PACKAGE = source.SOURCE_FOLDER
A = f"{PACKAGE}/a.py"
HONEST = {A: "A = 1\n", f"{PACKAGE}/cli/b.py": "B = 'ü'\r\n", f"{PACKAGE}/accelerators.csv": "H200\n"}


class Repository:
    """A repository with its work tree at `root`: an honest main, and a commit `evil` on the branch `fork` alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / ".git" / "info").mkdir(parents=True)
        self.git("init", "-q", "-b", "main", "--template=")
        self.honest = self.commit(HONEST)
        self.git("checkout", "-q", "-b", "fork")
        self.evil, self.evil_hash = self.commit({A: "import evil\n"}), self.hash
        self.git("checkout", "-q", "main")

    def git(self, *arguments: str, check: bool = True, stdin: str = "") -> str:
        """What plain git prints: with the configuration of the repository in force."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "-C", self.root, "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=check, input=stdin)
        return done.stdout.strip()

    def commit(self, files: dict[str, str]) -> str:
        for name, content in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(content.encode())
        self.git("add", "-A", "-f")
        self.git("commit", "-q", "-m", "change")
        return self.git("rev-parse", "HEAD")

    @property
    def hash(self) -> str:
        return package_hash(self.root / PACKAGE)[0]


@pytest.fixture
def repo(tmp_path):
    return Repository(tmp_path / "repo")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils is not here")
def test_every_file_but_those_of_wheels_and_python_counts_as_in_the_documented_command(tmp_path):
    package = shutil.copytree(Path(tunix_rt.__file__).parent, tmp_path / PACKAGE)
    command = re.search(r"^    (cd src/tunix_rt .*\n.*)$", source.__doc__, re.MULTILINE)[1]
    before, _ = package_hash(package)
    for name in ("packaged/x", ".h/x.py", "cli/.h", "cli/__pycache__/x", "x.so", "x.pyc", "x.csv", "cli/packaged/x.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(name)
        digest, files = package_hash(package)
        assert (digest != before) == (name in files) == name.endswith(("x.so", "x.pyc", "x.csv", "packaged/x.py")), name
        before = digest
    by_hand = subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert before == by_hand.split()[0]


def test_the_oldest_commit_with_the_source_is_found_from_its_hash_alone(repo, monkeypatch):
    first_hash = repo.hash
    repo.commit({"README.md": "the package stays"})
    second = repo.commit({A: "A = 2\n"})
    repo.git("merge", "-q", "-s", "ours", "fork", "-m", "merge")
    for digest, commit in {first_hash: repo.honest, repo.hash: second, repo.evil_hash: repo.evil}.items():
        assert find_commit(digest, repo.root) == CommitMatch(commit=commit, ref="main")
    monkeypatch.setattr(source, "NEWEST_COMMITS", 1)
    assert find_commit(first_hash, repo.root) is None and find_commit(repo.hash, repo.root) is not None


def test_the_source_of_a_commit_here_is_written_and_found(tmp_path):
    head = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "HEAD"], text=True).strip()
    found = find_commit(write_source(head, ROOT, tmp_path), ROOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["datasets", "evalsets", "models", "presets", "src"]
    assert subprocess.check_output(["git", "-C", ROOT, "diff", found.commit, head, "--", PACKAGE]) == b""


def test_a_commit_outside_the_named_branch_is_not_found_nor_put_in_the_place_of_another(repo, tmp_path):
    for ref in ("refs/pull/1/head", "refs/stash", "refs/heads/other"):
        repo.git("update-ref", ref, repo.evil)
    (repo.root / ".git" / "info" / "grafts").write_text(f"{repo.honest} {repo.evil}\n")
    assert repo.git("rev-list", "--count", "main") == "2"
    repo.git("replace", repo.honest, repo.evil)
    assert "evil" in repo.git("show", f"main:{A}")
    assert find_commit(repo.evil_hash, repo.root) is find_commit(repo.evil_hash, repo.root, ["main"]) is None
    assert write_source(repo.honest, repo.root, tmp_path / "written") == repo.hash


def test_another_branch_or_tag_can_be_named_and_nothing_else(repo):
    repo.git("tag", "-a", "-m", "release", "v1", "fork")
    for ref in ("refs/remotes/origin/fork", "refs/pull/1/head", "refs/remotes/origin/x\u2028xrefs/pull/1/head"):
        repo.git("update-ref", ref, repo.evil)
    for name in ("fork", "refs/heads/fork", "v1", "origin/fork"):
        found = CommitMatch(commit=repo.evil, ref=name.removeprefix("refs/heads/"))
        assert find_commit(repo.evil_hash, repo.root, ["main", name]) == found
    for name in ("refs/pull/1/head", "pull/1/head", repo.evil, "", "--all", "fork~0", "main..fork", ":/change"):
        with pytest.raises(ConfigError, match="has no branch or tag"):
            find_commit(repo.evil_hash, repo.root, [name])
    repo.git("tag", "fork", "main")
    with pytest.raises(ConfigError, match=r"ambiguous.*refs/heads/fork, refs/tags/fork"):
        find_commit(repo.evil_hash, repo.root, ["fork"])


@pytest.mark.parametrize("name", ["a.so", "b.PYC", "__pycache__/x", "packaged/x", ".x", "A.py", "link", "mod"])
def test_a_commit_with_what_is_not_plain_source_matches_no_run_and_is_not_written(repo, tmp_path, name):
    mode = {"link": "120000", "mod": "160000"}.get(name, "100644")
    entry = repo.honest if mode == "160000" else repo.git("rev-parse", f"main:{A}")
    repo.git("update-index", "--add", "--cacheinfo", f"{mode},{entry},{PACKAGE}/{name}")
    repo.git("commit", "-q", "--amend", "-m", "change")
    assert find_commit(repo.hash, repo.root) is None
    with pytest.raises(InputError, match=r"is not source|is not a plain file name|is a link or a submodule"):
        write_source(repo.git("rev-parse", "main"), repo.root, tmp_path / "written")


def test_a_path_that_leads_elsewhere_is_not_written(repo, tmp_path):
    tree = repo.git("rev-parse", f"main:{PACKAGE}/cli")
    for folder in ("..", "tunix_rt", "src"):
        tree = repo.git("mktree", stdin=f"040000 tree {tree}\t{folder}\n")
    with pytest.raises(InputError, match="is not a plain file name"):
        write_source(repo.git("commit-tree", "-m", "change", tree), repo.root, tmp_path / "written")
    assert not (tmp_path / "written").exists()


PROMISOR = ["core.repositoryFormatVersion=1", "extensions.partialClone=origin", "remote.origin.promisor=true"]
PLANTS = {
    "promisor ext": (["remote.origin.url=ext::{program}", "protocol.ext.allow=always"], "cat-file -p {missing}"),
    "promisor ssh": (["remote.origin.url=ssh://h/p", "core.sshCommand={program}"], "cat-file -p {missing}"),
    "promisor file": (["remote.origin.url=.", "remote.origin.uploadpack={program}"], "cat-file -p {missing}"),
    "filter": (["filter.evil.smudge={program}"], "archive HEAD"),
    "fsmonitor": (["core.fsmonitor={program}"], "status"),
}


@pytest.mark.parametrize(("settings", "trigger"), PLANTS.values(), ids=PLANTS)
def test_no_program_of_a_repository_is_run(repo, tmp_path, settings, trigger):
    digest, marker, program = repo.hash, tmp_path / "marker", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    program.chmod(0o755)
    (repo.root / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    missing = repo.git("rev-parse", f"HEAD:{PACKAGE}/cli/b.py")
    partial = "{missing}" in trigger
    for setting in PROMISOR * partial + settings:
        repo.git("config", *setting.format(program=program).split("=", 1))
    if partial:
        (repo.root / ".git" / "objects" / missing[:2] / missing[2:]).unlink()
    repo.git(*trigger.format(missing=missing).split(), check=False)
    assert marker.exists(), "plain git does not run it: nothing is tested"
    marker.unlink()
    with pytest.raises(InputError, match="full clone") if partial else contextlib.nullcontext():
        assert find_commit(digest, repo.root).commit == repo.honest
    with pytest.raises(InputError, match="full clone") if partial else contextlib.nullcontext():
        assert write_source(repo.honest, repo.root, tmp_path / "new") == digest
    assert not marker.exists()


def test_the_environment_does_not_point_git_elsewhere(repo, tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE", "GIT_TRACE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert find_commit(repo.hash, repo.root) == CommitMatch(commit=repo.honest, ref="main")
    assert not (tmp_path / "elsewhere").exists()


def test_a_git_that_does_not_end_or_prints_too_much_is_ended(repo, monkeypatch):
    monkeypatch.setattr(source, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="prints more than 100 bytes"):
        write_source(repo.honest, repo.root, repo.root / "new")
    monkeypatch.setattr(source, "GIT_SECONDS", 0.2)
    (repo.root / ".git" / "config").unlink()
    os.mkfifo(repo.root / ".git" / "config")
    with pytest.raises(InputError, match="ended after 0 s"):
        find_commit("0" * 64, repo.root)


def test_what_has_no_source_or_no_place_for_it_is_refused_with_the_way_out(repo, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is not empty"):
        write_source(repo.honest, repo.root, repo.root)
    repo.git("checkout", "-q", "--orphan", "empty")
    assert find_commit(repo.hash, repo.root) is None
    repo.git("rm", "-q", "-r", "-f", PACKAGE)
    commit = repo.commit({"README.md": "x"})
    assert find_commit(repo.evil_hash, repo.root) is None
    with pytest.raises(InputError, match="has no src/tunix_rt"):
        write_source(commit, repo.root, tmp_path / "new")
    with pytest.raises(ConfigError, match=r"--repository .*not a git repository"):
        require_repository(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="git is not installed"):
        require_repository(repo.root)


def test_worktrees_subfolders_and_clones_of_another_user_are_repositories(repo, tmp_path, monkeypatch):
    repo.git("worktree", "add", "-q", "-b", "more", str(tmp_path / "worktree"))
    repo.git("clone", "-q", "--bare", str(repo.root), str(tmp_path / "bare"))
    if os.geteuid() == 0:
        os.chown(tmp_path / "bare", 65534, 65534)
    monkeypatch.delenv("HOME", raising=False)
    for place, ref in {repo.root / PACKAGE: "main", tmp_path / "bare": "main", tmp_path / "worktree": "more"}.items():
        assert find_commit(repo.hash, place) == CommitMatch(commit=repo.honest, ref=ref)


def test_a_shallow_clone_without_the_commit_names_the_way_out(repo, tmp_path):
    repo.git("clone", "-q", "--depth=1", "--branch=fork", f"file://{repo.root}", str(tmp_path / "shallow"))
    assert find_commit(repo.evil_hash, tmp_path / "shallow").commit == repo.evil
    with pytest.raises(InputError, match=r"shallow clone[^$]*fetch --unshallow"):
        find_commit(repo.hash, tmp_path / "shallow")

"""The side that asks: which source computes, the process that does, and what it wrote down."""

import contextlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import tunix_rt
from tunix_rt import errors
from tunix_rt.backends import Progress
from tunix_rt.doctor.child import last_text, run_into
from tunix_rt.errors import TunixError
from tunix_rt.evidence.recorded import Recorded
from tunix_rt.evidence.source import SOURCE_FOLDER, find_commit, run_git, source_hash
from tunix_rt.recompute import SCHEMA
from tunix_rt.rundir import storage

CHILD = "tunix_rt.recompute.child"
SHIPPED = (SOURCE_FOLDER, "models", "presets", "datasets", "evalsets")
"""What of a commit a run of it reads."""
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The package that computes. `root` is where a recorded commit was unpacked; None: the package that runs here."""

    root: Path | None
    same: bool
    """Whether it is the source that made the run."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The lines of the child, and what kept it from finishing, empty where nothing did."""

    lines: Sequence[Mapping[str, Any]]
    failed: str
    seconds: float

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def machine(self) -> Mapping[str, Any]:
        return next((line["machine"] for line in self.of("machine")), {})


@contextlib.contextmanager
def source_of(recorded: Recorded, repository: Path | None) -> Iterator[Source]:
    """The source that made the run, where it can be had: the one that runs here, or that of a commit in `repository`."""
    ours, _ = source_hash(Path(tunix_rt.__file__).parent)
    if ours == recorded.source_sha256:
        yield Source(root=None, same=True, words="the source is the recorded one")
        return
    commit = None if repository is None else find_commit(recorded.source_sha256, repository)
    if repository is None or commit is None:
        where = "no --repository was named" if repository is None else f"{repository} has no commit of it"
        yield Source(root=None, same=False, words=f"the source here is not the recorded one, and {where}")
        return
    with tempfile.TemporaryDirectory(prefix="tunix-rt-source-") as scratch:
        root = Path(scratch)
        _unpack(repository, commit, root)
        if not (root / SOURCE_FOLDER / "recompute" / "child.py").is_file():
            words = f"commit {commit[:12]}, which made the run, cannot compute it again: the source here does"
            yield Source(root=None, same=False, words=words)
            return
        yield Source(root=root, same=True, words=f"the source is that of commit {commit[:12]}, unpacked for it")


def _unpack(repository: Path, commit: str, root: Path) -> None:
    listed = run_git(repository, "ls-tree", "--name-only", commit).decode().split("\n")
    folders = [name for name in SHIPPED if name.split("/")[0] in listed]
    with tempfile.TemporaryFile() as file:
        file.write(run_git(repository, "archive", "--format=tar", commit, *folders))
        file.seek(0)
        with storage(root), tarfile.open(fileobj=file) as archive:
            archive.extractall(root, filter="data")


def compute(
    what: str,
    request: Mapping[str, Any],
    *,
    source: Source,
    threads: object,
    jax: bool,
    progress: Progress,
    total: int,
) -> Answer:
    """Let a fresh process do it, with so many threads, which for `jax` is a number of cores. What it could not try for want
    of data or a model is raised."""
    with storage(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory(prefix="tunix-rt-recompute-") as folder:
        scratch = Path(folder)
        asked, answer = scratch / "request.json", scratch / "answer.jsonl"
        whole = {"schema": SCHEMA, "what": what, "parent": os.getpid(), "scratch": str(scratch), **request}
        whole["cores"] = threads if jax else None
        asked.write_text(json.dumps(whole), encoding="utf-8")
        answer.touch()

        def pulse(seconds: float) -> None:
            done = answer.read_bytes().count(b'"kind": "step"')
            progress("replay" if what == "steps" else "regenerate", done, max(total, 1), f"{seconds:.0f} s")

        with tempfile.TemporaryFile() as printed:
            ended = run_into(
                [sys.executable, "-P", "-m", CHILD, str(asked), str(answer)],
                printed, seconds=None, environment=_environment(source, threads), pulse=pulse,
            )  # fmt: skip
            said = _last_line(printed)
        lines = [json.loads(line) for line in answer.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    for line in lines:
        if line["kind"] == "error":
            raise _error(line)
    finished = any(line["kind"] in ("done", "finding") for line in lines)
    failed = "" if finished else f"the process that computes it {ended.words}{': ' if said else ''}{said}"
    return Answer(lines=lines, failed=failed, seconds=ended.seconds)


def _environment(source: Source, threads: object) -> dict[str, str]:
    """Ours, offline, with the recorded number of threads for whichever engine it is."""
    told = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if source.root is not None:
        # An empty entry would be the working folder, which may be the bundle itself: nothing in it may be imported.
        named = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        told["PYTHONPATH"] = os.pathsep.join([str(source.root / "src"), *named])
        told["PYTHONDONTWRITEBYTECODE"] = "1"
    if isinstance(threads, int) and 0 < threads <= MOST_THREADS:
        told |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return told


def _last_line(printed: IO[bytes]) -> str:
    return next(iter(last_text(printed).strip().splitlines()[-1:]), "").strip()[:300]


def _error(line: Mapping[str, Any]) -> TunixError:
    kind = getattr(errors, str(line["error"]), TunixError)
    made = kind if isinstance(kind, type) and issubclass(kind, TunixError) else TunixError
    return made(str(line["problem"]), fix=str(line["fix"]))

"""The side that asks: which source computes, the process that does, and what it wrote down."""

import contextlib
import glob
import json
import os
import signal
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
from tunix_rt.doctor.child import Ended, last_text, run_into
from tunix_rt.errors import DoesNotFitError, HardwareError, TunixError
from tunix_rt.evidence.claims import value_at
from tunix_rt.evidence.doubtful import parse_object, read_bytes
from tunix_rt.evidence.recorded import Recorded
from tunix_rt.evidence.source import SOURCE_FOLDER, find_commit, run_git, source_hash
from tunix_rt.recompute import SCHEMA
from tunix_rt.rundir import storage
from tunix_rt.strict_yaml import read_yaml

CHILD = "tunix_rt.recompute.child"
SHIPPED = (SOURCE_FOLDER, "models", "presets", "datasets", "evalsets")
"""What of a commit a run of it reads."""
MOST_THREADS = 1024
LOOKED_IN = ("models", "datasets", "evalsets")
"""Folders of the working folder in which models and data are looked for by name."""
NAMED = (
    ("model", "model_name_or_path"), ("model", "tokenizer_name_or_path"), ("data", "dataset"), ("evaluation", "evalset"),
)  # fmt: skip
"""Settings that may name a path."""
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "RESOURCE_EXHAUSTED")


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
    commit = None
    if repository is not None:
        commit = find_commit(recorded.source_sha256, repository, _named_commit(recorded.folder))
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


def _named_commit(folder: Path) -> str | None:
    """The commit that a bundle names, which may be older than those that are searched; a run names none."""
    told = parse_object(read_bytes(folder / "bundle.json")[0] or b"")
    named = told.get("commit") if isinstance(told, dict) else None
    return named if isinstance(named, str) else None


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
        working = scratch / "working"
        _make_working_folder(working, Path(str(request["folder"])))
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
                printed, seconds=None, environment=_environment(source, threads), folder=working, pulse=pulse,
            )  # fmt: skip
            said = _last_line(printed)
        lines = [json.loads(line) for line in answer.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    for line in lines:
        if line["kind"] == "error":
            raise _error(line)
    finished = any(line["kind"] in ("done", "finding") for line in lines)
    failed = "" if finished else f"the process that computes it {ended.words}{': ' if said else ''}{said}"
    if failed:
        _refuse_the_machine(ended, failed)
    return Answer(lines=lines, failed=failed, seconds=ended.seconds)


def _refuse_the_machine(ended: Ended, failed: str) -> None:
    """Raised is what says nothing about the run: a process that was killed, ran out of memory or did not start. What gave up
    by itself over what it was given did not compute what is recorded."""
    if ended.code == -signal.SIGKILL or any(words in failed for words in OUT_OF_MEMORY):
        raise DoesNotFitError(
            f"could not be tried here: {failed}",
            fix="the memory is likely too small: try it on a machine with more; that says nothing about the run",
        )
    if ended.pid == 0 or (ended.code is not None and ended.code < 0):
        raise HardwareError(
            f"could not be tried here: {failed}",
            fix="try it again, or on another machine; it says nothing about the run",
        )


def _make_working_folder(working: Path, folder: Path) -> None:
    """Where the process runs: a folder of its own, so that nothing that lies in the bundle or where we were called is taken for
    a part of the program. What the settings name, and the folders in which names are looked for, are linked into it."""
    working.mkdir()
    here, bundle = Path.cwd(), folder.resolve()
    if here.resolve().is_relative_to(bundle):
        return
    names = {*LOOKED_IN, *_first_parts(folder)}
    places = {place for name in names for place in (here.glob(name) if glob.has_magic(name) else [here / name])}
    for place in sorted(places):
        if place.exists() and place.resolve() != bundle:
            (working / place.name).symlink_to(place)


def _first_parts(folder: Path) -> Iterator[str]:
    """Of each relative path in the settings, as the run had them, the part that lies in the working folder."""
    settings = read_yaml(folder / "config.yaml")
    for part, name in NAMED:
        told = value_at(settings, f"{part}.{name}")
        parts = Path(told).parts if isinstance(told, str) and told and "\0" not in told else ()
        if parts and parts[0] not in ("/", "~", "..", ".", "**") and not Path(told).is_absolute():
            yield parts[0]


def _environment(source: Source, threads: object) -> dict[str, str]:
    """Ours, offline, with the recorded number of threads for whichever engine it is."""
    told = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    # An empty entry would be the working folder, which may be the bundle itself: nothing in it may be imported. The others
    # are made whole, for the process has another working folder than we have.
    named = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    if source.root is not None:
        named.insert(0, str(source.root / "src"))
        told["PYTHONDONTWRITEBYTECODE"] = "1"
    told["PYTHONPATH"] = os.pathsep.join(named)
    if isinstance(threads, int) and 0 < threads <= MOST_THREADS:
        told |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return told


def _last_line(printed: IO[bytes]) -> str:
    return next(iter(last_text(printed).strip().splitlines()[-1:]), "").strip()[:300]


def _error(line: Mapping[str, Any]) -> TunixError:
    kind = getattr(errors, str(line["error"]), TunixError)
    made = kind if isinstance(kind, type) and issubclass(kind, TunixError) else TunixError
    return made(str(line["problem"]), fix=str(line["fix"]))

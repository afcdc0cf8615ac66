"""A run is a folder. `RunDir` knows the name of every file in it, and locks it for one process."""

import contextlib
import errno
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tunix_rt.errors import InputError, StorageError
from tunix_rt.storage import (
    WrittenFile,
    discard,
    fresh_folder,
    json_text,
    publish_folder,
    settle_files,
    sha256_file,
    storage,
    sync_folder,
    unused,
    write_text,
)

FORMAT = 4
"""`format` in precommit.json. It rises only when the meaning of a file changes; a new optional key does not raise it."""
FOLDERS = ("checkpoints", "eval", "final_model", "profile", "rollouts", "tensorboard")
"""Of a run, in its folder."""
MARKS = ("precommit.json", "result.json", "metrics.jsonl")
"""A folder with one of these contains a run."""
TRACKER_FOLDERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlruns", "trackio": "trackio"}
"""Tracker of `training.report_to` -> its folder in a run."""
NOT_OURS = re.compile(
    rf"(?:{'|'.join(TRACKER_FOLDERS.values())}|aim|\.aim)(?:/.*)?|(?:.*/)?(?:\.DS_Store|Thumbs\.db|desktop\.ini|\._[^/]*)"
)
"""Folders of experiment trackers, and what file managers leave behind."""
EXTRA_FILE = "not in the manifest"


class _File:
    """An attribute of a `RunDir`: the path of that file or folder in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type) -> Path:
        return run.root / self.name


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run. Nothing else in tunix-rt spells these names."""

    root: Path

    config = _File("config.yaml")
    doctor = _File("doctor.json")
    plan = _File("plan.json")
    precommit = _File("precommit.json")
    log = _File("training_log.txt")
    metrics = _File("metrics.jsonl")
    env_info = _File("env_info.txt")
    torch_version = _File("torch_version.txt")
    cuda_check = _File("cuda_check.txt")
    """On a GPU: what torch reports about CUDA in the self-test."""
    nvidia_smi = _File("nvidia_smi.txt")
    """On a GPU: what nvidia-smi printed after the first step."""
    rows = _File("rows.jsonl")
    """What step trains on which row is a function of these and the seed."""
    extensions = _File("extensions.json")
    """Of a run that was extended after it was complete."""
    processes = _File("processes.json")
    checkpoints = _File("checkpoints")
    checkpoint_list = _File("checkpoints.json")
    """Of every checkpoint that was committed, those included that are deleted since."""
    final_model = _File("final_model")
    heldout = _File("eval/heldout.jsonl")
    rollouts = _File("rollouts")
    """Of a run that trains on them: a file for each step."""
    questions_along = _File("eval/along.jsonl")
    """Scores on held-out questions while such a run trains."""

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"step-{step:06d}.jsonl"

    def scores(self, when: str) -> Path:
        return self.root / "eval" / f"{when}.json"

    def predictions(self, when: str) -> Path:
        return self.root / "eval" / f"predictions-{when}.jsonl"

    samples = _File("samples.md")
    comparison = _File("comparison.md")
    """Of `tunix-rt evaluate --against`."""
    samples_along = _File("eval/samples.jsonl")
    """Answers given while training went on."""
    eval_summary = _File("eval_summary.json")
    memory = _File("memory.json")
    result = _File("result.json")
    profile = _File("profile/profile.json")
    """With `--profile`: where the time of a step went."""
    profile_page = _File("profile/profile.md")
    """The same for people."""
    profile_trace = _File("profile/trace.json.gz")
    """The same for Perfetto, kernel by kernel."""
    hashes = _File("SHA256SUMS")
    lock_file = _File(".lock")

    def holds_a_run(self) -> bool:
        return any(os.path.exists(f"{self.root}/{name}") for name in MARKS)

    def holds_work(self) -> bool:
        """Whether anything here took time to make; a run that was refused leaves only words."""
        return any(path.exists() for path in (self.metrics, self.checkpoints, self.predictions("before")))

    def refuse_links(self) -> None:
        """Refuse a folder with a symbolic link or a special file where a run writes: what is written or deleted through it
        lies elsewhere; and one with a folder in the place of a file, or a file in the place of a folder. The run folder itself
        may be reached through a link. Called before anything in it but the lock is opened."""
        with storage(self.root):
            for path in self._written():
                if found := _misfit(path.relative_to(self.root).as_posix(), path.lstat().st_mode):
                    raise StorageError(f"{path} is {found}", fix="move it away, or choose another --output")

    def _written(self) -> Iterator[Path]:
        """Everything at the top and below the folders of a run; links are not followed."""
        yield from self.root.iterdir() if self.root.is_dir() else ()
        for name in FOLDERS:
            yield from (self.root / name).rglob("*")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process. A lock left by a killed process does not hold."""
        with contextlib.ExitStack() as held:
            with storage(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                try:
                    held.enter_context(FileLock(self.lock_file, timeout=0))
                    held.enter_context(_locked_folder(self.root))
                except (Timeout, BlockingIOError) as error:
                    problem, fix = (
                        f"{self.root} is in use by another tunix-rt",
                        "wait for it, or choose another --output",
                    )
                    raise StorageError(problem, fix=fix) from error
            yield


def _misfit(name: str, mode: int) -> str:
    """What `name` in a run folder is, where a run has something else there; empty where it fits."""
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return f"{'a symbolic link' if stat.S_ISLNK(mode) else 'a special file'}, which a run does not write to"
    folder, _, file = name.rpartition("/")
    if (name in FOLDERS or (folder == "checkpoints" and file.startswith("step-"))) and not stat.S_ISDIR(mode):
        return "a file, where a run has a folder"
    written = f"{folder}/{file}".strip("/") if not file.endswith(".staged") else file[1:].removesuffix(".staged")
    is_file = folder in ("eval", "profile") or (written in _FILES and written not in FOLDERS)
    return "a folder, where a run writes a file" if is_file and stat.S_ISDIR(mode) else ""


_FILES = frozenset(one.name for one in vars(RunDir).values() if isinstance(one, _File))


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder itself, which nobody deletes in a live run as a lock file may be. A BlockingIOError where another process
    has it. Local disks lock folders; NFS does not, and there the lock file is all there is."""
    if sys.platform == "win32":  # has no such call; there an open file cannot be deleted
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BlockingIOError from error
        yield
    finally:
        os.close(descriptor)


def locked_folders() -> frozenset[tuple[int, int]]:
    """Device and inode of every folder or file that a process holds. A look at the system's own list: taking the lock, if only
    for a moment, could refuse a run that starts. Empty where there is no such list."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    found = set()
    for place in (line.split()[5] for line in lines if "FLOCK" in line and "->" not in line):
        major, minor, inode = place.split(":")
        found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return frozenset(found)


# --- checkpoints: stage, fsync, manifest, fsync, rename, fsync parent; a reader accepts only what verifies -----------


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def stage_checkpoint(folder: Path, step: int, write: Callable[[Path], Mapping[str, WrittenFile] | None]) -> Path:
    """Let `write` fill a staging folder, which is durable then, under a name that no reader looks at. Returns its path.

    Files that it returns were hashed while they were written, possibly by other ranks. A folder that fails is removed: it holds
    space.
    """
    staged = folder / f".staged-{checkpoint_name(step)}"
    with storage(folder):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)  # without its name there the first checkpoint would not outlive a power cut
        for leftover in (*folder.glob(".staged-*"), *folder.glob(".*.staged*")):
            discard(leftover)
        staged = unused(staged)
        with fresh_folder(staged):
            written = write(staged) or {}
            _refuse_absent(staged, written)
            settle_files(staged)
            hashes = {name: facts["sha256"] for name, facts in written.items()}
            hashes |= {path.name: sha256_file(path) for path in staged.iterdir() if path.name not in hashes}
            write_text(staged / "MANIFEST.json", _manifest_text(staged, step, hashes))
    return staged


def _refuse_absent(staged: Path, written: Mapping[str, WrittenFile]) -> None:
    """Refuse to commit a file that another host wrote and that is not here, or not all of it."""
    for name, facts in written.items():
        path = staged / name
        size = path.stat().st_size if path.is_file() else 0
        if size != facts["bytes"]:
            raise StorageError(
                f"{path} has {size:,} bytes, its rank wrote {facts['bytes']:,}",
                fix="choose an --output that all hosts share",
            )


def publish_checkpoint(staged: Path) -> Path:
    """Give a staged checkpoint its name. This is the commit."""
    final = staged.with_name(staged.name.removeprefix(".staged-").partition(".")[0])
    with storage(staged.parent):
        publish_folder(staged, final)  # replaces a corrupt one of the same step, which resume skipped
    return final


def _manifest_text(checkpoint: Path, step: int, hashes: Mapping[str, str]) -> str:
    """MANIFEST.json of a checkpoint with files of these hashes, to the byte."""
    files = {name: {"sha256": digest, "bytes": (checkpoint / name).stat().st_size} for name, digest in hashes.items()}
    return json_text({"schema": "tunix-rt/checkpoint/1", "step": step, "files": files})


def checkpoint_problems(checkpoint: Path) -> list[str]:
    """Every way a checkpoint differs from its manifest; an empty list means it verifies.

    A file that cannot be read is a StorageError: a failing disk or permissions do not make a checkpoint corrupt.
    """
    manifest = checkpoint / "MANIFEST.json"
    with storage(manifest):
        if not manifest.is_file():
            return ["MANIFEST.json is missing"]
        text, present = manifest.read_bytes(), {path.name for path in checkpoint.iterdir()} - {"MANIFEST.json"}
        present = {name for name in present if not NOT_OURS.fullmatch(name)}
    try:
        claimed = json.loads(text)
        step = int(claimed["step"])
        files = {str(name): str(facts["sha256"]) for name, facts in claimed["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return [f"MANIFEST.json cannot be read: {error!r}"]
    problems = [] if checkpoint.name == checkpoint_name(step) else [f"the manifest is of step {step}"]
    problems += [f"missing: {name}" for name in sorted(files.keys() - present)]
    problems += [f"{EXTRA_FILE}: {name}" for name in sorted(present - files.keys())]
    there = sorted(files.keys() & present)
    problems += [f"changed: {name}" for name in there if not _has(checkpoint / name, files[name])]
    if not problems and text != _manifest_text(checkpoint, step, files).encode():
        return ["MANIFEST.json is not as it was written"]
    return problems


def _has(path: Path, sha256: str) -> bool:
    """Whether `path` is a file of that content."""
    with storage(path):
        return path.is_file() and sha256_file(path) == sha256


def model_of_run(name: str) -> str:
    """The final model, if `name` is the folder of a run; any other name as it is. InputError for a run without one."""
    run = RunDir(Path(os.path.expanduser(name)))
    if not run.config.is_file() or os.path.exists(run.root / "config.json"):
        return name
    if not (run.final_model / "config.json").is_file():
        raise no_final_model(run)
    return str(run.final_model)


def no_final_model(run: RunDir) -> InputError:
    """Of an unfinished run, with the command that makes a model of its newest checkpoint."""
    fix = "finish it: run the same `tunix-rt train` command with --resume"
    if steps := [checkpoint_step(one) for one in list_checkpoints(run.checkpoints)]:
        to = f"{run.root}-step-{steps[0]}"
        fix += (
            f"; or write its newest checkpoint as a model: tunix-rt export {run.root} --step {steps[0]} --output {to}"
        )
    return InputError(f"the run in {run.root} is not complete: it has no final model", fix=fix)


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, newest step first. Ordered by the step in their name, never by time."""
    with storage(folder):
        if not folder.is_dir():
            return []
        steps = {path: path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()}
    return sorted((p for p, step in steps.items() if step.isdecimal()), key=lambda p: int(steps[p]), reverse=True)


def checkpoint_step(checkpoint: Path) -> int:
    """The step in the name of a checkpoint that `list_checkpoints` gave."""
    return int(checkpoint.name.removeprefix("step-"))


def prune_checkpoints(folder: Path, keep: int, *, newest: int, previous: int, best: int | None = None) -> None:
    """Delete all but `best` and the newest `keep` up to step `newest`, which was just made durable.

    Checkpoints after `previous`, the one before it, were skipped as corrupt or belong to steps that are repeated. They do not
    count: the highest number is not the newest then.
    """
    steps = {checkpoint: checkpoint_step(checkpoint) for checkpoint in list_checkpoints(folder)}
    ours = [checkpoint for checkpoint, step in steps.items() if step <= previous or step == newest]
    kept = {*ours[:keep], *(checkpoint for checkpoint in ours if steps[checkpoint] == best)}
    with storage(folder):
        for checkpoint in sorted(steps.keys() - kept):
            going = unused(folder / f".{checkpoint.name}.staged")  # gone in one move: half of it is nobody's checkpoint
            checkpoint.rename(going)
            discard(going)
        sync_folder(folder)

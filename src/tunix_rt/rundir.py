"""A run is a folder. This module knows the name of every file in it and how to write one so that a crash cannot halve it.

It may not know what the files mean: stages hand in plain values.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tunix_rt.errors import StorageError, TunixError

RESULT_STATUS = ("completed", "refused", "failed", "preempted")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run. Nothing else in tunix-rt spells these names."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def doctor(self) -> Path:
        return self.root / "doctor.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def precommit(self) -> Path:
        return self.root / "precommit.json"

    @property
    def log(self) -> Path:
        return self.root / "training_log.txt"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def env_info(self) -> Path:
        return self.root / "env_info.txt"

    @property
    def torch_version(self) -> Path:
        return self.root / "torch_version.txt"

    @property
    def cuda_check(self) -> Path:
        """On a GPU: what torch said of CUDA when it was proven."""
        return self.root / "cuda_check.txt"

    @property
    def nvidia_smi(self) -> Path:
        """On a GPU: what nvidia-smi printed after the first step."""
        return self.root / "nvidia_smi.txt"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def final_model(self) -> Path:
        return self.root / "final_model"

    @property
    def heldout(self) -> Path:
        return self.root / "eval" / "heldout.jsonl"

    def scores(self, when: str) -> Path:
        return self.root / "eval" / f"{when}.json"

    def predictions(self, when: str) -> Path:
        return self.root / "eval" / f"predictions-{when}.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.md"

    @property
    def memory(self) -> Path:
        return self.root / "memory.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def hashes(self) -> Path:
        return self.root / "SHA256SUMS"

    @property
    def lock_file(self) -> Path:
        return self.root / ".lock"

    def holds_a_run(self) -> bool:
        return self.precommit.exists() or self.result.exists() or self.metrics.exists()

    def holds_work(self) -> bool:
        """Whether anything here took time to make; a run that was refused leaves only words."""
        return any(path.exists() for path in (self.metrics, self.checkpoints, self.predictions("before")))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process. A lock left by a killed process does not hold."""
        with storage(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.lock_file, timeout=0)
            try:
                lock.acquire()
            except Timeout as error:
                raise StorageError(
                    f"{self.root} is in use by another tunix-rt", fix="wait for it, or choose another --output"
                ) from error
        try:
            yield
        finally:
            lock.release()


@contextlib.contextmanager
def storage(
    where: Path, *, fix: str = "free space or permissions on that volume, or another --output"
) -> Iterator[None]:
    """Turn what a disk can do to us into one clear error with its own exit code."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TunixError):
            raise
        named = error.filename or where
        raise StorageError(f"{named}: {error.strerror or error}", fix=fix) from error


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, paths as text; everything else as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def write_text(path: Path, text: str) -> None:
    """Replace `path` whole: a reader sees the old text or the new one, also after a power cut."""
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.staged")
        with staged.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
        sync_folder(path.parent)


def json_text(value: Any) -> str:
    """Canonical enough to hash: sorted keys, no NaN, a newline at the end."""
    return json.dumps(to_plain(value), indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def write_jsonl(path: Path, values: list[Any]) -> None:
    write_text(path, "".join(json_line(value) for value in values))


def json_line(value: Any) -> str:
    return json.dumps(to_plain(value), sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """The value in `path`; a missing or torn file is a TunixError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TunixError(f"{path} is missing", fix="is this the folder of a run?") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TunixError(f"{path} cannot be read: {error}", fix="the file is damaged; run again") from error


def sha256_file(path: Path) -> str:
    with storage(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable. Windows has no such call and needs none."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle_files(folder: Path) -> None:
    """Make all files below `folder` durable, readable by whom the umask lets read (safetensors writes them 0600)."""
    umask = os.umask(0o077)  # there is no way to ask that does not set
    os.umask(umask)
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        path.chmod(0o666 & ~umask)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


# --- checkpoints: stage, fsync, manifest, fsync, rename, fsync parent; a reader accepts only what verifies -----------


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def commit_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a staging folder, then make it `folder/step-NNNNNN` in one move. Returns that path."""
    final = folder / checkpoint_name(step)
    staged = folder / f".staged-{checkpoint_name(step)}"
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".staged-*"):
            shutil.rmtree(leftover)
        staged.mkdir()
        write(staged)
        settle_files(staged)
        files = {
            path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size} for path in sorted(staged.iterdir())
        }
        write_json(staged / "MANIFEST.json", {"schema": "tunix-rt/checkpoint/1", "step": step, "files": files})
        if final.exists():  # a damaged one of the same step, passed over at resume
            shutil.rmtree(final)
        staged.rename(final)
        sync_folder(folder)
    return final


def checkpoint_problems(checkpoint: Path) -> list[str]:
    """Every way a checkpoint differs from its manifest; an empty list means it verifies."""
    manifest = checkpoint / "MANIFEST.json"
    if not manifest.is_file():
        return ["MANIFEST.json is missing"]
    try:
        claimed = json.loads(manifest.read_text(encoding="utf-8"))
        step, files = (
            int(claimed["step"]),
            {str(name): str(facts["sha256"]) for name, facts in claimed["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return [f"MANIFEST.json cannot be read: {error!r}"]
    problems = [] if checkpoint.name == checkpoint_name(step) else [f"the manifest speaks of step {step}"]
    present = {path.name for path in checkpoint.iterdir()} - {"MANIFEST.json"}
    problems += [f"missing: {name}" for name in sorted(files.keys() - present)]
    problems += [f"not in the manifest: {name}" for name in sorted(present - files.keys())]
    return problems + [
        f"changed: {name}" for name in sorted(files.keys() & present) if not _has(checkpoint / name, files[name])
    ]


def _has(path: Path, sha256: str) -> bool:
    """Whether `path` is a file of that content; what cannot be read has none."""
    try:
        return sha256_file(path) == sha256
    except StorageError:
        return False


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, newest step first. Ordered by the step in their name, never by time."""
    if not folder.is_dir():
        return []
    steps = {path: path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()}
    return sorted((p for p, step in steps.items() if step.isdecimal()), key=lambda p: int(steps[p]), reverse=True)


def prune_checkpoints(folder: Path, keep: int, *, newest: int, previous: int) -> None:
    """Delete all but the newest `keep` up to step `newest`, which was just made durable.

    What lies after `previous`, the checkpoint before it, was passed over as damaged or belongs to steps that will be
    taken again. It must not count: the highest number is not the newest then.
    """
    steps = {checkpoint: int(checkpoint.name.removeprefix("step-")) for checkpoint in list_checkpoints(folder)}
    ours = [checkpoint for checkpoint, step in steps.items() if step <= previous or step == newest]
    with storage(folder):
        for checkpoint in steps.keys() - ours[:keep]:
            shutil.rmtree(checkpoint)
        sync_folder(folder)

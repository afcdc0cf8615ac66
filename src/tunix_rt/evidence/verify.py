"""`verify(folder, require="L3") -> Verdict`, by the installed code unless `--source` names a commit.

L0 readable: schemas and checksums. L1 consistent: what follows from recorded facts is recomputed. L2 regenerated: the final
weights give the recorded generations. L3 replayed: drawn segments of training give the recorded states. L4 reproduced: all
segments. L0 and L1 run in one worker process with tight limits (examine), L2 to L4 in another (compute).
"""

import contextlib
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunix_rt import errors
from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.errors import DoesNotFitError, EvidenceError, HardwareError, InputError, TunixError
from tunix_rt.evidence.facts import LEVELS, Claim, Finding, Inputs, Level, Verdict, level_of
from tunix_rt.evidence.replay.steps import fresh_nonce
from tunix_rt.evidence.sandbox import Exit, Limits, run_limited
from tunix_rt.evidence.sign import signer_of
from tunix_rt.progress import Progress, phase
from tunix_rt.runs.checksums import SUMS, copy_regular, is_weights, list_folder
from tunix_rt.runs.record import MANIFEST
from tunix_rt.runs.schemas import schema_of
from tunix_rt.runs.source import find_commit, write_source
from tunix_rt.storage import sha256_file, storage

GIB = 2**30
MAX_FACTS_BYTES = 2 * GIB
MAX_BUNDLE_BYTES = 8 * GIB
READING_SECONDS = 30
READING = Limits(wall_seconds=5 * READING_SECONDS, cpu_seconds=READING_SECONDS, address_bytes=GIB, file_bytes=2**26)
"""Limits of L0 and L1: reading takes a second."""
PREPARING = Limits(wall_seconds=50, resident_bytes=GIB, open_files=4096)
"""Limits of L2 to L4 until tokenizer, chat template and data are prepared; files that the reviewer supplies add to them."""
BYTES_PER_SECOND = 100e6
"""Lowest assumed hashing speed."""
RAM_PER_INPUT_BYTE = 100
"""Memory that a process on each core may take for a byte of tokenizer or data: a Gemma tokenizer of 33 MB takes 1.5 GB."""
MAX_COMPUTE_SECONDS = 24 * 3600.0
WORKER = "tunix_rt.evidence.worker"
"""Of every source since format 4, so that `--source` can start it. Requests and answers keep their keys."""
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "RESOURCE_EXHAUSTED", "std::bad_alloc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a reviewer passes beside the folder."""

    inputs: Inputs = field(default_factory=Inputs)
    weights: Path | None = None
    """The final model; None: that of the bundle, where it has one."""
    repository: Path | None = None
    refs: tuple[str, ...] = ()
    """Branches and tags in which the commit is looked for; none: what the repository has checked out."""
    source: str | None = None
    """A ref: compute with the recorded source, from a commit that is reachable from it."""
    segments: int | Literal["all"] | None = None
    nonce: str | None = None
    signed_by: Path | None = None
    time_limit: float = MAX_COMPUTE_SECONDS


def verify(
    folder: Path, require: Level = "L1", options: Options | None = None, progress: Progress = lambda *_: None
) -> Verdict:
    """Check the run or bundle in `folder` up to `require`. What cannot be tried here is raised: a missing input or a run of
    another format (exit code 3), too little memory (exit code 5). Everything else is in the verdict."""
    options = options or Options()
    options = replace(options, inputs=options.inputs.absolute())
    with _snapshot(folder) as snapshot:
        verdict = Verdict(folder=str(folder), level="none", required=require, findings=snapshot.findings)
        if snapshot.findings:
            return verdict
        examined = _run_examine(snapshot, options)
        findings = [Finding(**one) for one in examined["findings"]]
        passed, notes = list(examined["passed"]), list(examined["notes"])
        claims = {one["name"]: Claim(**one) for one in examined["claims"]}
        findings += _sign_claim(folder, claims, options, snapshot.sums_sha256)
        _commit_claim(claims, examined["about"], options)
        details: dict[str, Any] = {}
        if not findings and "L1" in passed and _needs_compute(require, options) and examined["about"]:
            computed = _run_compute(snapshot, examined["about"], require, options, progress)
            findings += [Finding(**one) for one in computed["findings"]]
            passed, notes, details = passed + computed["passed"], notes + computed["notes"], computed["details"]
            if not findings:
                for name, value_and_method in computed["recomputed"].items():
                    claims[name] = _as_recomputed(claims[name], *value_and_method)
        return replace(
            verdict, level=level_of(findings, passed), findings=tuple(findings), claims=tuple(claims.values()),
            notes=tuple(notes), details=details,
        )  # fmt: skip


def _needs_compute(require: Level, options: Options) -> bool:
    return LEVELS.index(require) >= LEVELS.index("L2") or options.weights is not None or options.segments is not None


def _as_recomputed(claim: Claim, value: str, how: str) -> Claim:
    """The value is the one computed here."""
    how += f"; recorded is {claim.value}" if value not in ("", claim.value) else ""
    return replace(claim, label="recomputed", value=value or claim.value, how=how)


# --- a private copy ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """The facts, copied once: what is verified cannot change meanwhile. The weights of a bundle are copied too; those of a run
    folder stay where they are and are hashed when they are used."""

    name: str
    root: Path
    weights: Path
    scratch: Path
    heavy_bytes: int = 0
    sums_sha256: str = ""
    findings: tuple[Finding, ...] = ()


@contextlib.contextmanager
def _snapshot(folder: Path) -> Iterator[_Snapshot]:
    with storage(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory(prefix="tunix-rt-verify-") as place:
        root, scratch = Path(place) / "facts", Path(place) / "scratch"
        root.mkdir()
        scratch.mkdir()
        yield _copy_folder(folder, root, scratch)


@phase("copy the folder")
def _copy_folder(folder: Path, root: Path, scratch: Path) -> _Snapshot:
    listing = list_folder(folder)
    bundle = MANIFEST in listing.files
    taken = [name for name in listing.files if bundle or not is_weights(name)]
    size, most = sum(listing.files[name] for name in taken), MAX_BUNDLE_BYTES if bundle else MAX_FACTS_BYTES
    problems = list(listing.problems[:50])
    if size > most:
        problems.append(f"{size / GIB:.1f} GiB, at most {most / GIB:.0f} GiB are read")
    for name in taken:
        schema = schema_of(name.removeprefix("cpu/"))
        if schema is not None and listing.files[name] > schema.most_bytes:
            problems.append(f"{name}: {listing.files[name]:,} bytes, at most {schema.most_bytes:,} are read")
    for name in taken if not problems else ():
        try:
            copy_regular(folder, name, root / name)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # of the volume here
                raise
            problems.append(f"{name}: cannot be read: {error.strerror or error}")
            break
    heavy = sum(os.lstat(folder / name).st_blocks * 512 for name in listing.files if is_weights(name))
    return _Snapshot(
        name=str(folder), root=root, weights=root if bundle else folder.absolute(), scratch=scratch, heavy_bytes=heavy,
        sums_sha256=sha256_file(root / SUMS) if (root / SUMS).is_file() else "",
        findings=tuple(Finding(level="L0", check="folder", problem=problem) for problem in problems),
    )  # fmt: skip


# --- the processes ----------------------------------------------------------------------------------------------------


@phase("check the files")
def _run_examine(snapshot: _Snapshot, options: Options) -> dict[str, Any]:
    supplied = sum(_bytes_of(path) for path in (*options.inputs.data, options.inputs.model) if path)
    seconds = READING_SECONDS + int((snapshot.heavy_bytes + supplied) / BYTES_PER_SECOND)
    limits = replace(READING, cpu_seconds=seconds, wall_seconds=5 * seconds)
    request = _request(snapshot, options) | {"mode": "examine"}
    environment = _environment(snapshot, None) | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    lines, ended, last_line = _run(snapshot, request, limits, environment)
    if found := _last(lines, "outcome"):
        return found
    what = f"takes more than {ended.breach}" if ended.breach else f"ended with code {ended.code}: {last_line}"
    return _failure("L0", f"reading it {what}")


@phase("recompute")
def _run_compute(
    snapshot: _Snapshot, about: Mapping[str, Any], require: Level, options: Options, progress: Progress
) -> dict[str, Any]:
    """L2 with the weights, L3 or L4 with the base model, in one process."""
    weights = _model_folder(options.weights) if options.weights else None
    if weights is None and any((snapshot.weights / "final_model").glob("*.safetensors")):
        weights = snapshot.weights / "final_model"
    replays = require in ("L3", "L4") or options.segments is not None
    if require == "L2" and weights is None:
        problem = "level L2 needs the weights of the final model, which this folder does not contain"
        raise InputError(problem, fix="add --weights PATH/final_model")
    request = _request(snapshot, options) | {
        "mode": "compute", "weights": str(weights.absolute()) if weights else None, "scratch": str(snapshot.scratch),
        "segments": (options.segments or "default") if replays else None, "whole": require == "L4", "root": snapshot.sums_sha256,
        "nonce": options.nonce or fresh_nonce(),
        "cores": about["threads"] if CAPABILITIES[about["backend"]].threads_by_affinity else None,
    }  # fmt: skip
    with _source(snapshot, about, options) as source:
        environment = _environment(snapshot, source) | _threads(about)
        supplied = sum(_bytes_of(path) for path in options.inputs.files())
        seconds = PREPARING.wall_seconds + supplied / 1e6
        preparing = replace(PREPARING, wall_seconds=seconds, resident_bytes=GIB + RAM_PER_INPUT_BYTE * supplied)
        watch = _Watch(progress, options.time_limit)
        lines, ended, last_line = _run(snapshot, request, preparing, environment, watch=watch, network=source is None)
    if found := _last(lines, "outcome"):
        return found
    return _not_finished(ended, last_line, prepared=watch.prepared, level="L3" if replays else "L2")


def _not_finished(ended: Exit, last_line: str, *, prepared: bool, level: Level) -> dict[str, Any]:
    """A breach is a finding; what this machine lacks is not about the run and is raised."""
    if not ended.breach and (ended.code == -9 or any(message in last_line for message in OUT_OF_MEMORY)):
        raise DoesNotFitError(f"could not be tried here: {last_line or 'killed'}", fix="try a machine with more memory")
    if not ended.breach and ended.code is not None and ended.code < 0 and prepared:
        raise HardwareError(f"could not be tried here: signal {-ended.code}: {last_line}", fix="try another machine")
    what = "computing" if prepared else "preparing tokenizer, chat template and data"
    failed = f"failed, which an honest bundle does not cause: {last_line}"
    how = f"takes more than {ended.breach}" if ended.breach else failed
    return _failure(level, f"{what} {how}")


def _failure(level: Level, problem: str) -> dict[str, Any]:
    """The outcome of a worker that wrote none."""
    found = {"level": level, "check": "limits", "problem": problem}
    return {"findings": [found], "claims": [], "notes": [], "passed": [], "about": {}, "recomputed": {}, "details": {}}


class _Watch:
    """Reads the lines of the worker: progress, and the end of the preparation."""

    def __init__(self, progress: Progress, seconds: float) -> None:
        self.progress, self.seconds, self.prepared = progress, seconds, False
        self.answer = Path()

    def __call__(self, elapsed: float) -> Limits | None:
        text = self.answer.read_text(encoding="utf-8", errors="replace") if self.answer.is_file() else ""
        lines = [line for line in text.splitlines() if line.endswith("}")]
        if lines and (last := json.loads(lines[-1]))["kind"] == "progress":
            self.progress("replay", last["done"], last["total"], "")
        if not self.prepared and any('"kind": "prepared"' in line for line in lines[:2]):
            self.prepared = True
            return replace(PREPARING, wall_seconds=self.seconds, resident_bytes=None)
        return None


def _run(
    snapshot: _Snapshot, request: Mapping[str, Any], limits: Limits, environment: Mapping[str, str], *,
    watch: _Watch | None = None, network: bool = True,
) -> tuple[list[dict[str, Any]], Exit, str]:  # fmt: skip
    """One worker. Errors that are not about the run are raised unchanged."""
    working = snapshot.scratch / "working"
    working.mkdir(exist_ok=True)
    request_file, answer = snapshot.scratch / "request.json", snapshot.scratch / "answer.jsonl"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    answer.unlink(missing_ok=True)
    if watch is not None:
        watch.answer = answer
    command = [sys.executable, "-P", "-m", WORKER, str(request_file), str(answer)]
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as failed:
        ended = run_limited(
            command, limits=limits, environment=environment, folder=working, stdin=b"", stdout=printed, stderr=failed,
            network=network, **({"pulse": watch} if watch else {}),
        )  # fmt: skip
        failed.seek(max(0, failed.seek(0, os.SEEK_END) - 4096))
        last_line = next(iter(failed.read().decode("utf-8", "replace").strip().splitlines()[-1:]), "")[:300]
    text = answer.read_text(encoding="utf-8") if answer.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    if error := _last(lines, "error"):
        kind = getattr(errors, str(error["error"]), TunixError)
        kind = kind if isinstance(kind, type) and issubclass(kind, TunixError) else TunixError
        raise kind(error["problem"].replace(str(snapshot.root), snapshot.name), fix=error["fix"])
    return lines, ended, last_line


def _last(lines: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return lines[-1] if lines and lines[-1]["kind"] == kind else {}


def _request(snapshot: _Snapshot, options: Options) -> dict[str, Any]:
    return {
        "folder": str(snapshot.root), "weights_root": str(snapshot.weights), "data": list(options.inputs.data),
        "model": options.inputs.model, "tokenizer": options.inputs.tokenizer,
        "preparing_bytes": 3 * GIB + RAM_PER_INPUT_BYTE * sum(_bytes_of(path) for path in options.inputs.files()),
    }  # fmt: skip


def _environment(snapshot: _Snapshot, source: Path | None) -> dict[str, str]:
    """Ours, offline, with a cache of its own: nothing that a bundle makes us prepare is kept."""
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "XDG_CACHE_HOME": str(snapshot.scratch / "cache")}
    found = os.environ | offline
    found.setdefault("HF_HOME", os.path.join(os.path.expanduser("~"), ".cache", "huggingface"))
    # An empty entry would be the working folder. The others are made absolute, for the process has another one.
    named = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    if source is not None:
        named.insert(0, str(source / "src"))
        found |= {"HOME": str(snapshot.scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    found["PYTHONPATH"] = os.pathsep.join(named)
    return found


def _threads(about: Mapping[str, Any]) -> dict[str, str]:
    """The recorded number of threads, which decides the order of sums; never more than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(min(int(about["threads"]), cores)))


@contextlib.contextmanager
def _source(snapshot: _Snapshot, about: Mapping[str, Any], options: Options) -> Iterator[Path | None]:
    """With `--source`, the recorded source, written out from a commit that is reachable from the named ref."""
    if options.source is None:
        yield None
        return
    repository = options.repository or Path()
    found = find_commit(about["source_sha256"], repository, [options.source])
    if found is None:
        raise InputError(
            f"no commit that is reachable from {options.source} has the recorded source {about['source_sha256'][:12]}",
            fix="name the ref that has it; or leave --source out: the code here computes, within tolerance",
        )
    target = snapshot.scratch / "source"
    if write_source(found.commit, repository, target) != about["source_sha256"]:
        raise EvidenceError(f"{found.commit}: other files than its hash", fix="use a full clone")
    yield target


def _model_folder(weights: Path) -> Path:
    """The folder of the model; that of a run stands for its final model."""
    for folder in (weights, weights / "final_model"):
        if (folder / "config.json").is_file():
            return folder
    raise InputError(f"{weights}: no model folder", fix="point --weights at the final_model of the run")


def _bytes_of(path: str) -> int:
    if os.path.isdir(path):
        return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    return os.path.getsize(path) if os.path.isfile(path) else 0


# --- commit and signer ------------------------------------------------------------------------------------------------


def _commit_claim(claims: dict[str, Claim], about: Mapping[str, Any], options: Options) -> None:
    """Consistent if a commit that is reachable from a ref the reviewer names has exactly the recorded source."""
    if options.repository is None or "commit" not in claims:
        return
    found = find_commit(about["source_sha256"], options.repository, options.refs)
    if found is None:
        how = f"no commit of {', '.join(options.refs) or 'the checked-out branch'} has this source"
        claims["commit"] = replace(claims["commit"], how=how)
    else:
        how = f"reachable from {found.ref}, exactly the recorded files"
        claims["commit"] = Claim(name="commit", value=found.commit, label="consistent", how=how)


def _sign_claim(folder: Path, claims: dict[str, Claim], options: Options, sums_sha256: str) -> list[Finding]:
    if options.signed_by is None:
        return []
    try:
        signature = signer_of(folder, options.signed_by)
        if signature.sums_sha256 != sums_sha256:
            raise EvidenceError("SHA256SUMS changed while it was verified", fix="")
    except EvidenceError as error:
        return [Finding(level="L0", check="signature", problem=error.problem)]
    how = f"signature over {SUMS}, key {signature.fingerprint}"
    claims["signer"] = Claim(name="signer", value=signature.signer, label="recomputed", how=how)
    return []

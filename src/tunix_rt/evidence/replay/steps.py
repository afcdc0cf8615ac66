"""Which steps of a run a verifier takes again: segments between recorded checkpoints, drawn after the bundle's root is fixed.

The draw is a function of the root and a nonce of the verifier, so whoever made the bundle cannot know it, and anybody who has
the nonce can repeat it. Pure functions.
"""

import contextlib
import hashlib
import math
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tunix_rt.engines.base import Step
from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.replay.session import Session, generate
from tunix_rt.export.export import save_final
from tunix_rt.models.safetensors import Stored, part_files, stored_tensors
from tunix_rt.progress import Progress
from tunix_rt.storage import sha256_file
from tunix_rt.train.loop import batches_of
from tunix_rt.train.resume import code_of
from tunix_rt.train.rollouts import RolloutSource

NONCE_BYTES = 16
LEAST_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """The steps after `start`, where a checkpoint or the base model is, up to `stop`."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start

    def describe(self) -> str:
        return f"steps {self.start + 1} to {self.stop}" if self.steps > 1 else f"step {self.stop}"


def fresh_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def all_segments(checkpoints: Iterable[int], total: int) -> list[Segment]:
    """The run of `total` steps, cut at each recorded checkpoint."""
    ends = sorted({step for step in checkpoints if 0 < step < total} | {total})
    return [Segment(start=start, stop=stop) for start, stop in zip([0, *ends], ends, strict=False)]


def draw_segments(segments: Sequence[Segment], count: int | None, *, root: str, nonce: str) -> tuple[Segment, ...]:
    """`count` of the segments without replacement, each with a chance in proportion to its steps; in order. Without a count,
    three, and more until they have a fifth of the steps: whoever made the run chose how short segments are."""

    def key(segment: Segment) -> float:
        digest = hashlib.sha256(f"{root}\n{nonce}\n{segment.stop}".encode()).digest()
        uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
        # The largest keys are a weighted sample (Efraimidis and Spirakis, 2006).
        return float(uniform ** (1 / segment.steps))

    drawn = sorted(segments, key=key, reverse=True)
    covered = accumulate(segment.steps for segment in drawn)
    enough = sum(steps < LEAST_SHARE * segments[-1].stop for steps in covered) + 1
    return tuple(sorted(drawn[: max(3, enough) if count is None else count]))


def chance_of_detection(segments: Sequence[Segment], count: int) -> float:
    """The least probability that a draw contains any one given segment: exact for segments of one length, else a lower bound."""
    if count >= len(segments) or len({segment.steps for segment in segments}) == 1:
        return min(1.0, count / len(segments))
    return 1 - (1 - min(segment.steps for segment in segments) / segments[-1].stop) ** count


def passes_over(segments: Sequence[Segment], states: Collection[int]) -> tuple[Segment, ...]:
    """What has to be computed to see all of `segments`, where the state after each step of `states` is at hand. One that
    begins where no state is begins earlier, at step 0 if need be; what overlaps then is one pass."""
    begun = sorted(
        Segment(start=max((state for state in states if state <= one.start), default=0), stop=one.stop)
        for one in segments
    )
    merged: list[Segment] = []
    for one in begun:
        if merged and one.start < merged[-1].stop:
            merged[-1] = Segment(start=merged[-1].start, stop=max(one.stop, merged[-1].stop))
        else:
            merged.append(one)
    return tuple(merged)


PIECE = 2**20
"""Numbers that are read at once."""
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def distance(first: Path, recorded: Path, here: Path) -> float:
    """Distance of `here` from `recorded`, over that of `here` from `first`; infinite where they contain other tensors.
    Each is a file, possibly split into one for each rank, or a folder of files."""
    sets = [_tensors(path) for path in (first, recorded, here)]
    shapes = [{name: tensor.shape for name, tensor in one.items()} for one in sets]
    if not shapes[0] == shapes[1] == shapes[2]:
        return math.inf
    moved = apart = 0.0
    for name in sorted(sets[0]):
        for a, b, c in zip(*(_pieces(one[name]) for one in sets), strict=True):
            moved += float(np.square(c - a).sum())
            apart += float(np.square(c - b).sum())
    if not moved:
        return 0.0 if not apart else math.inf
    return math.sqrt(apart / moved)


def _tensors(path: Path) -> dict[str, Stored]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else part_files(path.parent, path.name) or [path]
    try:
        found = stored_tensors(files)
    except ValueError as error:
        raise EvidenceError(f"{path}: {error}", fix="restore the file") from error
    for name, tensor in found.items():
        if tensor.dtype not in TYPES:
            problem = f"{path.name}: tensors of type {tensor.dtype}"
            raise EvidenceError(problem, fix="report it with the name of the model")
        if path.is_dir() and len(tensor.pieces) > 1:
            raise EvidenceError(f"{path.name}: {name!r} is in two files", fix="")
    return found


def _pieces(tensor: Stored) -> Iterator[npt.NDArray[np.float64]]:
    """The numbers of a tensor, as many at a time for each type and however it is split into files."""
    read, room = list[npt.NDArray[np.float64]](), PIECE
    for path, piece in tensor.pieces:
        left = (piece.end - piece.begin) // _width(tensor.dtype)
        with path.open("rb") as opened:
            opened.seek(piece.begin)
            while left:
                read.append(_numbers(opened, min(left, room) * _width(tensor.dtype), tensor.dtype))
                if not (count := len(read[-1])):
                    raise EvidenceError(f"{path.name} is incomplete", fix="restore the file")
                left, room = left - count, room - count
                if not room:
                    yield np.concatenate(read)
                    read, room = [], PIECE
    if read:
        yield np.concatenate(read)


def _width(kind: str) -> int:
    return np.dtype(TYPES[kind]).itemsize


def _numbers(file: IO[bytes], size: int, kind: str) -> npt.NDArray[np.float64]:
    found = np.frombuffer(file.read(size), dtype=TYPES[kind])
    if kind == "BF16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float64)


MODEL = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What is measured where the steps pass it."""

    checkpoints: Collection[int]
    """Steps whose state is hashed."""
    states: Mapping[int, Path]
    """Checkpoints whose files are at hand, with their recorded hashes: for a start, and for a distance."""
    heldout: Collection[int]
    before: bool
    """Whether the base model answers the questions."""
    after: bool
    final_weights: Path | None
    """The recorded final model, for a distance."""


@dataclass(slots=True, kw_only=True)
class PassResult:
    """Everything that one pass measured."""

    segment: Segment
    steps: list[Step] = field(default_factory=list)
    states: dict[int, dict[str, str]] = field(default_factory=dict)
    distances: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, tuple[float, int]] = field(default_factory=dict)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    gaps: dict[str, dict[int, float]] = field(default_factory=dict)
    final_model: dict[str, str] = field(default_factory=dict)
    final_config: dict[str, bytes] = field(default_factory=dict)
    final_distance: float | None = None


def take_steps(
    session: Session, segment: Segment, measured: Measurements, *, scratch: Path, progress: Progress
) -> PassResult:
    """Take the steps of `segment`. An engine that has trained begins at a checkpoint."""
    prepared, backend, engine, found = session.prepared, session.backend, session.engine, PassResult(segment=segment)
    training = prepared.config.training
    optimizer = backend.make_optimizer(engine, training)
    start = measured.states.get(segment.start)
    if segment.start and start is not None:
        backend.restore_state(engine, optimizer, start, step=segment.start)
    elif measured.before and not segment.start:
        found.answers["before"], found.gaps["before"] = generate(prepared, backend, engine, "before")
    if not segment.start and 0 in measured.heldout:
        found.heldout[0] = _heldout_loss(session)
    first = _first_weights(session, optimizer, segment, measured, scratch)
    batch_of = batches_of(prepared.config, session.data, prepared.tokenizer.pad_id, session.rows)
    backend.prepare_steps(
        engine, batch_of, training, total=session.ends[0], longest_row=session.data.longest_row,
        as_before=code_of(start).get("layers") if prepared.layers else None, planned=prepared.layers,
    )  # fmt: skip
    if training.samples:
        batch_of = RolloutSource(
            backend=backend, engine=engine, config=prepared.config, data=session.data, tokenizer=prepared.tokenizer,
            rows=session.rows, generation_rows=prepared.generation_rows,
        ).batch_of  # fmt: skip
    steps = backend.optimizer_steps(
        engine, optimizer, batch_of, training, first=segment.start + 1, total=session.total, ends=session.ends
    )
    with contextlib.closing(steps):
        for step in steps:
            found.steps.append(step)
            progress("replay", step.step, session.total, "")
            if step.step in measured.checkpoints:
                _measure_state(session, optimizer, step.step, measured, first, scratch, found)
            if step.step in measured.heldout:
                found.heldout[step.step] = _heldout_loss(session)
            if step.step == segment.stop:
                break
    if segment.stop == session.total:
        del optimizer  # the answers need its memory
        _measure_end(session, measured, first, scratch, found)
    return found


def _first_weights(
    session: Session, optimizer: Any, segment: Segment, measured: Measurements, scratch: Path
) -> Path | None:
    """The weights that the segment begins with, where a distance may be needed: as checkpoints and as a final model have them."""
    at_end = measured.final_weights is not None and segment.stop == session.total
    if not at_end and not any(segment.start < step <= segment.stop for step in measured.states):
        return None
    folder = scratch / "first"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    session.backend.write_direct(session.engine, optimizer, folder)
    if at_end:
        _save(session, folder / "final_model", dtype=None)
    return folder


def _measure_state(
    session: Session, optimizer: Any, step: int, measured: Measurements, first: Path | None, scratch: Path,
    found: PassResult,
) -> None:  # fmt: skip
    folder = scratch / "state"
    folder.mkdir()
    try:
        session.backend.write_direct(session.engine, optimizer, folder)
        found.states[step] = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
        if first is not None and step in measured.states:
            found.distances[step] = distance(first / MODEL, measured.states[step] / MODEL, folder / MODEL)
    finally:
        shutil.rmtree(folder)


def _heldout_loss(session: Session) -> tuple[float, int]:
    rows, pad_id = session.data.heldout_rows, session.prepared.tokenizer.pad_id
    found = session.backend.heldout_loss(session.engine, rows, batch_size=session.prepared.eval_rows, pad_id=pad_id)
    return found[0], found[1]


def _measure_end(
    session: Session, measured: Measurements, first: Path | None, scratch: Path, found: PassResult
) -> None:
    """The files of the final model, and its answers where they are measured."""
    folder = scratch / "final_model"
    _save(session, folder, dtype=session.prepared.config.training.save_dtype)
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    found.final_model = {path.name: sha256_file(path) for path in files}
    found.final_config = {path.name: path.read_bytes() for path in files if path.suffix != ".safetensors"}
    if first is not None and measured.final_weights is not None:
        found.final_distance = distance(first / "final_model", measured.final_weights, folder)
    if measured.after:
        made = generate(session.prepared, session.backend, session.engine, "after")
        found.answers["after"], found.gaps["after"] = made


def _save(session: Session, folder: Path, *, dtype: str | None) -> None:
    prepared = session.prepared
    save_final(session.backend, session.engine, folder, tokenizer=prepared.tokenizer, style=prepared.style, dtype=dtype)

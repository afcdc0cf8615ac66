"""Steps taken again from a recorded state, and everything that is measured on the way."""

import contextlib
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunix_rt.backends import Step
from tunix_rt.evidence.replay.distance import distance
from tunix_rt.evidence.replay.regenerate import generate
from tunix_rt.evidence.replay.segments import Segment
from tunix_rt.evidence.replay.session import Progress, Session
from tunix_rt.pipeline import save_final
from tunix_rt.rundir import sha256_file
from tunix_rt.train import batches_of, code_of

MODEL = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
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
class Passed:
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


def take_steps(session: Session, segment: Segment, wanted: Wanted, *, scratch: Path, progress: Progress) -> Passed:
    """Take the steps of `segment`. An engine that has trained begins at a checkpoint."""
    ready, backend, engine, found = session.ready, session.backend, session.engine, Passed(segment=segment)
    training = ready.config.training
    optimizer = backend.make_optimizer(engine, training)
    start = wanted.states.get(segment.start)
    if segment.start and start is not None:
        backend.restore_state(engine, optimizer, start, step=segment.start)
    elif wanted.before and not segment.start:
        found.answers["before"], found.gaps["before"] = generate(ready, backend, engine, "before")
    if not segment.start and 0 in wanted.heldout:
        found.heldout[0] = _heldout_loss(session)
    first = _first_weights(session, optimizer, segment, wanted, scratch)
    batch_of = batches_of(training, session.data, ready.tokenizer.pad_id, session.rows)
    backend.prepare_steps(
        engine, batch_of, training, total=session.total, longest_row=session.data.longest_row,
        as_before=code_of(start).get("layers") if ready.layers else None, planned=ready.layers,
    )  # fmt: skip
    steps = backend.optimizer_steps(engine, optimizer, batch_of, training, first=segment.start + 1, total=session.total)
    with contextlib.closing(steps):
        for step in steps:
            found.steps.append(step)
            progress("replay", step.step, session.total)
            if step.step in wanted.checkpoints:
                _measure_state(session, optimizer, step.step, wanted, first, scratch, found)
            if step.step in wanted.heldout:
                found.heldout[step.step] = _heldout_loss(session)
            if step.step == segment.stop:
                break
    if segment.stop == session.total:
        del optimizer  # the answers need its memory
        _measure_end(session, wanted, first, scratch, found)
    return found


def _first_weights(session: Session, optimizer: Any, segment: Segment, wanted: Wanted, scratch: Path) -> Path | None:
    """The weights that the segment begins with, where a distance may be needed: as checkpoints and as a final model have them."""
    at_end = wanted.final_weights is not None and segment.stop == session.total
    if not at_end and not any(segment.start < step <= segment.stop for step in wanted.states):
        return None
    folder = scratch / "first"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    session.backend.write_direct(session.engine, optimizer, folder)
    if at_end:
        _save(session, folder / "final_model", dtype=None)
    return folder


def _measure_state(
    session: Session, optimizer: Any, step: int, wanted: Wanted, first: Path | None, scratch: Path, found: Passed
) -> None:
    folder = scratch / "state"
    folder.mkdir()
    try:
        session.backend.write_direct(session.engine, optimizer, folder)
        found.states[step] = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
        if first is not None and step in wanted.states:
            found.distances[step] = distance(first / MODEL, wanted.states[step] / MODEL, folder / MODEL)
    finally:
        shutil.rmtree(folder)


def _heldout_loss(session: Session) -> tuple[float, int]:
    rows, pad_id = session.data.heldout_rows, session.ready.tokenizer.pad_id
    found = session.backend.heldout_loss(session.engine, rows, batch_size=session.ready.eval_rows, pad_id=pad_id)
    return found[0], found[1]


def _measure_end(session: Session, wanted: Wanted, first: Path | None, scratch: Path, found: Passed) -> None:
    """The files of the final model, and its answers where they are wanted."""
    folder = scratch / "final_model"
    _save(session, folder, dtype=session.ready.config.training.save_dtype)
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    found.final_model = {path.name: sha256_file(path) for path in files}
    found.final_config = {path.name: path.read_bytes() for path in files if path.suffix != ".safetensors"}
    if first is not None and wanted.final_weights is not None:
        found.final_distance = distance(first / "final_model", wanted.final_weights, folder)
    if wanted.after:
        found.answers["after"], found.gaps["after"] = generate(session.ready, session.backend, session.engine, "after")


def _save(session: Session, folder: Path, *, dtype: str | None) -> None:
    ready = session.ready
    save_final(session.backend, session.engine, folder, tokenizer=ready.tokenizer, style=ready.style, dtype=dtype)

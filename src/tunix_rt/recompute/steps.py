"""Steps of a recorded run taken again from a recorded state, and everything that is measured on the way."""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.backends import Step
from tunix_rt.evaluate.run import ask
from tunix_rt.evidence.segments import Segment
from tunix_rt.pipeline import save_final
from tunix_rt.recompute.distance import distance
from tunix_rt.recompute.session import Session
from tunix_rt.rundir import checkpoint_name, sha256_file, to_plain
from tunix_rt.train import batches_of, code_of

Tell = Callable[..., None]
MODEL = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is looked at where the steps pass it."""

    checkpoints: Collection[int]
    """Steps whose state is hashed."""
    states: Collection[int]
    """Steps whose recorded weights are at hand, for a distance where the hashes differ."""
    heldout: Collection[int]
    answers: Collection[str]
    """`before`, `after`: the questions of the evaluation are asked again."""


def take_steps(session: Session, segment: Segment, wanted: Wanted, *, scratch: Path, tell: Tell) -> None:
    """Tell every step of `segment` and what is wanted on its way. An engine that has trained begins at a checkpoint."""
    began = time.monotonic()
    backend, engine, training = session.backend, session.engine, session.config.training
    optimizer = backend.make_optimizer(engine, training)
    recorded = session.run.checkpoints / checkpoint_name(segment.start)
    if segment.start:
        backend.restore_state(engine, optimizer, recorded, step=segment.start)
    elif "before" in wanted.answers:
        _tell_answers(session, "before", tell)
    if not segment.start and 0 in wanted.heldout:
        _tell_heldout(session, 0, tell)
    first = _kept_weights(session, optimizer, segment, wanted, scratch)
    batch_of = batches_of(training, session.data, session.tokenizer.pad_id, session.rows)
    then = code_of(recorded if segment.start else None).get("layers")
    backend.prepare_steps(
        engine, batch_of, training, total=session.total, longest_row=session.data.longest_row,
        as_before=then if session.layers else None, planned=session.layers,
    )  # fmt: skip
    steps = backend.optimizer_steps(engine, optimizer, batch_of, training, first=segment.start + 1, total=session.total)
    with contextlib.closing(steps):
        for step in steps:
            tell("step", **_told(step))
            if step.step in wanted.checkpoints:
                tell("checkpoint", step=step.step, **_state(session, optimizer, step.step, wanted, first, scratch))
            if step.step in wanted.heldout:
                _tell_heldout(session, step.step, tell)
            if step.step == segment.stop:
                break
    if segment.stop == session.total:
        del optimizer  # the answers need its memory
        _tell_end(session, wanted, scratch, tell)
    tell("pass", start=segment.start, stop=segment.stop, seconds=round(time.monotonic() - began, 3))


def _told(step: Step) -> dict[str, Any]:
    return to_plain(step) | {"loss_hex": step.loss.hex()}  # type: ignore[no-any-return]


def _kept_weights(session: Session, optimizer: Any, segment: Segment, wanted: Wanted, scratch: Path) -> Path | None:
    """The weights that the segment begins with, where a distance may be asked for."""
    if not any(segment.start < step <= segment.stop for step in wanted.states):
        return None
    folder = scratch / "first"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    session.backend.write_direct(session.engine, optimizer, folder)
    return folder / MODEL


def _state(
    session: Session, optimizer: Any, step: int, wanted: Wanted, first: Path | None, scratch: Path
) -> Mapping[str, Any]:
    """Hashes of what a checkpoint would hold now; and how far its weights are from recorded ones that are at hand."""
    folder = scratch / "state"
    folder.mkdir()
    try:
        session.backend.write_direct(session.engine, optimizer, folder)
        told: dict[str, Any] = {"files": {path.name: sha256_file(path) for path in sorted(folder.iterdir())}}
        if first is not None and step in wanted.states:
            told["apart"] = distance(first, session.run.checkpoints / checkpoint_name(step) / MODEL, folder / MODEL)
        return told
    finally:
        shutil.rmtree(folder)


def _tell_heldout(session: Session, step: int, tell: Tell) -> None:
    loss, targets = session.backend.heldout_loss(
        session.engine, session.data.heldout_rows, batch_size=session.eval_rows, pad_id=session.tokenizer.pad_id
    )
    tell("heldout", step=step, loss=loss, loss_hex=loss.hex(), target_tokens=targets)


def _tell_end(session: Session, wanted: Wanted, scratch: Path, tell: Tell) -> None:
    """The files of the final model, and its answers where they are wanted."""
    folder = scratch / "final_model"
    save_final(session.backend, session.engine, folder, tokenizer=session.tokenizer, style=session.data.style)
    tell("final_model", files={path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()})
    if "after" in wanted.answers:
        _tell_answers(session, "after", tell)


def _tell_answers(session: Session, when: str, tell: Tell) -> None:
    answers = ask(
        session.backend, session.engine, session.questions(), what=f"answers {when}",
        rows_at=lambda length: session.eval_rows, progress=lambda *_: None, stop=lambda: None,
    )  # fmt: skip
    tell("answers", when=when, answers=[to_plain(answer) for answer in answers])

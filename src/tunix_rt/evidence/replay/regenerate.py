"""Level L2: the given weights answer the recorded questions again, and have the recorded held-out loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.config.load import with_settings
from tunix_rt.data.render import prompt_ids
from tunix_rt.engines.base import load_backend
from tunix_rt.errors import DoesNotFitError
from tunix_rt.evaluate.generate import Questions, ask, stop_ids
from tunix_rt.evidence.replay.compare import other_answers
from tunix_rt.evidence.replay.session import Ready
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.shape import shape_of
from tunix_rt.runs.schemas import PredictionLine
from tunix_rt.scoring.score import CONTEXT, LENGTH, STOP, TAG
from tunix_rt.storage import to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    """What the given weights compute."""

    machine: Mapping[str, Any]
    adapted: bool
    """Adapters stood beside the weights in the run and are merged into these."""
    answers: list[dict[str, Any]]
    gaps: dict[int, float]
    """Place of an answer that came out differently -> how far its least likely token lies below the likeliest."""
    heldout: tuple[float, int] | None


def regenerate(ready: Ready, weights: Path, *, with_answers: bool) -> Regenerated:
    """Load the model in `weights` and answer all questions; those that come out differently are followed token by token."""
    alone = {"model.model_name_or_path": str(weights), "model.weights": "pretrained", "training.lora_rank": None}
    config = with_settings(ready.config, alone)
    source = resolve_model(str(weights))
    shape = shape_of(source.config)
    if (size := 4 * shape.parameters) > ready.choice.free_bytes:
        raise DoesNotFitError(
            f"{shape.parameters:,} weights take {size / 2**30:.2f} GiB, {ready.choice.device} has "
            f"{ready.choice.free_bytes / 2**30:.2f} GiB free",
            fix="verify on a machine with more memory",
        )
    backend = load_backend(config.training.backend)
    engine = backend.load(source, device=ready.choice.device, training=config.training)
    rows, pad_id = ready.data.heldout_rows if ready.data else (), ready.tokenizer.pad_id
    heldout = backend.heldout_loss(engine, rows, batch_size=ready.eval_rows, pad_id=pad_id) if rows else None
    answers, gaps = generate(ready, backend, engine, "after") if with_answers else ([], {})
    adapted = ready.config.training.lora_rank is not None
    machine = backend.machine_facts(engine)
    return Regenerated(machine=machine, adapted=adapted, answers=answers, gaps=gaps, heldout=heldout)


def generate(ready: Ready, backend: Any, engine: Any, when: str) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """The answers of the engine; those that differ from the recorded ones are followed token by token."""
    questions = ready.questions()
    given = ask(
        backend, engine, questions, what="answers", rows_at=lambda length: ready.eval_rows, progress=lambda *_: None,
        stop=lambda: None,
    )  # fmt: skip
    answers = [to_plain(answer) for answer in given]
    other = other_answers(ready.run.record.predictions(when), answers)
    return answers, largest_gaps(backend, engine, questions, other, ready.shape.max_positions)


def largest_gaps(
    backend: Any, engine: Any, questions: Questions, recorded: Mapping[int, PredictionLine], positions: int
) -> dict[int, float]:
    """For each recorded answer, the most that the logit of one of its tokens, or of its end, lies below the largest there; 0
    where every token is the likeliest. Infinite where it cannot have ended as recorded.

    The text is tokenized again, which need not give the tokens it was made of; that is rare, and counts against the answer."""
    tokenizer, decoding = questions.tokenizer, questions.decoding
    found = dict.fromkeys(recorded, math.inf)
    prompts = {place: prompt_ids(questions.items[place].prompt, tokenizer, questions.style) for place in recorded}
    tokens = {place: tokenizer.encode_conversation(one.output) for place, one in recorded.items()}
    room = {place: min(decoding.max_new_tokens, positions - len(prompt)) for place, prompt in prompts.items()}
    fits = [place for place in recorded if len(tokens[place]) <= room[place]]
    if not fits:
        return found
    gaps = backend.token_gaps(
        engine,
        [prompts[place] for place in fits],
        [tokens[place] for place in fits],
        stop_ids(tokenizer, questions.style),
    )
    for place, (*inside, end) in zip(fits, gaps, strict=True):
        one, full = recorded[place], len(tokens[place]) == room[place]
        may_end = {STOP: True, TAG: str(decoding.closing) in one.output, LENGTH: full, CONTEXT: full}.get(
            one.ended, False
        )
        if may_end:
            found[place] = max([*inside, *([end] if one.ended == STOP else [])], default=0.0)
    return found

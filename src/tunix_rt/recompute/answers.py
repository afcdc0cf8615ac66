"""Recorded questions asked again of the weights that are said to have answered them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.backends import load_backend
from tunix_rt.backends.decoding import CONTEXT, LENGTH, STOP, TAG, Decoding
from tunix_rt.config import with_settings
from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import EvalItem
from tunix_rt.doctor.choose import DeviceChoice
from tunix_rt.errors import DoesNotFitError
from tunix_rt.evaluate.run import Questions, ask, decoding_of, stop_ids
from tunix_rt.evidence.comparing import same_answer
from tunix_rt.evidence.precommit import began_on, read_precommit
from tunix_rt.evidence.recorded import read_predictions_of
from tunix_rt.pipeline import find_model, tokenizer_of
from tunix_rt.plan.shape import ModelShape
from tunix_rt.recompute.session import planned_in, settings_here
from tunix_rt.rundir import RunDir, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The model of the run, ready to answer, and what it answered then."""

    backend: Any
    engine: Any
    recorded: Sequence[dict[str, Any]]
    tokenizer: Tokenizer
    style: Style
    decoding: Decoding
    rows: int
    positions: int

    def questions(self, places: Sequence[int]) -> Questions:
        items = [_item(self.recorded[place]) for place in places]
        return Questions(items=items, tokenizer=self.tokenizer, style=self.style, decoding=self.decoding)


def answer_again(request: dict[str, Any], tell: Callable[..., None]) -> None:
    """Tell the machine, then the answers at the places that were asked for.

    How many questions are asked at once can turn a near tie. So where an answer comes out otherwise, all are asked once more
    just as they were asked then, and what comes out of that counts.
    """
    asked = _opened(request, tell)

    def answers_to(places: Sequence[int]) -> list[dict[str, Any]]:
        given = ask(
            asked.backend, asked.engine, asked.questions(places), what="regenerate", rows_at=lambda length: asked.rows,
            progress=lambda *_: None, stop=lambda: None,
        )  # fmt: skip
        return [to_plain(answer) for answer in given]

    places, recorded = request["places"], asked.recorded
    answers = answers_to(places)
    again = not all(same_answer(recorded[place], one) for place, one in zip(places, answers, strict=True))
    if again and len(places) < len(recorded):
        everything = answers_to(range(len(recorded)))
        answers = [everything[place] for place in places]
    tell("answers", answers=answers, whole=again)


def follow_answers(request: dict[str, Any], tell: Callable[..., None]) -> None:
    """Tell the machine, then for each answer that was asked for how unlikely its unlikeliest token is."""
    asked = _opened(request, tell)
    recorded = [asked.recorded[place] for place in request["places"]]
    gaps = largest_gaps(
        asked.backend, asked.engine, asked.questions(request["places"]), recorded, positions=asked.positions
    )
    tell("gaps", gaps=gaps)


def largest_gaps(
    backend: Any, engine: Any, questions: Questions, recorded: Sequence[Mapping[str, Any]], *, positions: int
) -> list[float]:
    """For each recorded answer, the most that the logit of one of its tokens, or of its end, lies below the largest there; 0
    where every token is the likeliest. Infinite where it cannot have ended as it says.

    The text is made tokens again, which need not be those it was made of; that is rare, and counts against the answer."""
    tokenizer, decoding = questions.tokenizer, questions.decoding
    prompts = [prompt_ids(item.prompt, tokenizer, questions.style) for item in questions.items]
    answers = [tokenizer.encode_conversation(one["output"]) for one in recorded]
    room = [min(decoding.max_new_tokens, positions - len(prompt)) for prompt in prompts]
    found = [math.inf] * len(recorded)
    fits = [place for place, answer in enumerate(answers) if len(answer) <= room[place]]
    told = backend.token_gaps(
        engine, [prompts[place] for place in fits], [answers[place] for place in fits],
        stop_ids(tokenizer, questions.style),
    )  # fmt: skip
    for place, (*tokens, end) in zip(fits, told, strict=True):
        full, closed = len(answers[place]) == room[place], str(decoding.closing) in recorded[place]["output"]
        may_end = {STOP: True, TAG: closed, LENGTH: full, CONTEXT: full}.get(recorded[place]["ended"], False)
        if may_end:
            found[place] = max([*tokens, *([end] if recorded[place]["ended"] == STOP else [])], default=0.0)
    return found


def _opened(request: dict[str, Any], tell: Callable[..., None]) -> Asked:
    """The model in the folder that the request names, loaded on a device that is here; its machine is told."""
    run = RunDir(Path(request["folder"]))
    committed = read_precommit(run)
    config, choice = settings_here(run, committed, model=request["weights"])
    # The folder has everything: weights that were random at first, adapters that were added to them, the tokenizer.
    alone = {"model.weights": "pretrained", "model.tokenizer_name_or_path": None, "training.lora_rank": None}
    adapted = config.training.lora_rank is not None
    config = with_settings(config, alone)
    source, shape = find_model(config)
    _refuse_too_big(shape, choice)
    tokenizer, _ = tokenizer_of(config, source, shape)
    style = style_of(config.data, tokenizer, today=began_on(committed))
    backend = load_backend(config.training.backend)
    engine = backend.load(source, device=choice.device, training=config.training)
    tell("machine", machine=backend.machine_facts(engine), adapted=adapted)
    rows, _ = planned_in(run, config, choice.device)
    return Asked(
        backend=backend, engine=engine, recorded=read_predictions_of(run.root, "after"), tokenizer=tokenizer, style=style,
        decoding=decoding_of(style, max_new_tokens=config.evaluation.max_new_tokens), rows=rows,
        positions=shape.max_positions,
    )  # fmt: skip


def _refuse_too_big(shape: ModelShape, choice: DeviceChoice) -> None:
    """In float32, the widest that weights are read in; answers take what is left."""
    needed = 4 * shape.parameters
    if needed > choice.free_bytes:
        raise DoesNotFitError(
            f"{shape.parameters:,} weights take {needed / 2**30:.2f} GiB; {choice.device} has {choice.free_bytes / 2**30:.2f} "
            "GiB free",
            fix="verify on a machine with more memory",
        )


def _item(recorded: dict[str, Any]) -> EvalItem:
    """The question as the eval set has it; what is judged of its answer is not looked at here."""
    return EvalItem(
        id=recorded["id"], prompt=recorded["prompt"], answer=recorded["expected"], section=recorded["section"]
    )

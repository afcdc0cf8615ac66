"""Recorded questions asked again of the weights that are said to have answered them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunix_rt.backends import load_backend
from tunix_rt.config import with_settings
from tunix_rt.data.render import style_of
from tunix_rt.data.trace import EvalItem
from tunix_rt.doctor.choose import DeviceChoice
from tunix_rt.errors import DoesNotFitError
from tunix_rt.evaluate.run import Questions, ask, decoding_of
from tunix_rt.evidence.comparing import same_answer
from tunix_rt.evidence.precommit import began_on, read_precommit
from tunix_rt.evidence.recorded import read_predictions_of
from tunix_rt.pipeline import find_model, tokenizer_of
from tunix_rt.plan.shape import ModelShape
from tunix_rt.recompute.session import planned_in, settings_here
from tunix_rt.rundir import RunDir, to_plain


def answer_again(request: dict[str, Any], tell: Callable[..., None]) -> None:
    """Tell the machine, then the answers at the places that were asked for.

    How many questions are asked at once can turn a near tie. So where an answer comes out otherwise, all are asked once more
    just as they were asked then, and what comes out of that counts.
    """
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
    recorded = read_predictions_of(run.root, "after")
    eval_rows, _ = planned_in(run, config, choice.device)
    decoding = decoding_of(style, max_new_tokens=config.evaluation.max_new_tokens)

    def answers_to(places: Sequence[int]) -> list[dict[str, Any]]:
        questions = Questions(
            items=[_item(recorded[place]) for place in places], tokenizer=tokenizer, style=style, decoding=decoding
        )
        given = ask(
            backend, engine, questions, what="regenerate", rows_at=lambda length: eval_rows,
            progress=lambda *_: None, stop=lambda: None,
        )  # fmt: skip
        return [to_plain(answer) for answer in given]

    places: list[int] = request["places"]
    answers = answers_to(places)
    again = not all(same_answer(recorded[place], one) for place, one in zip(places, answers, strict=True))
    if again and len(places) < len(recorded):
        everything = answers_to(range(len(recorded)))
        answers = [everything[place] for place in places]
    tell("answers", answers=answers, whole=again)


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

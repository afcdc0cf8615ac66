"""Ask the model every question of an eval set and write down what it said and how it scored."""

from collections.abc import Callable, Sequence
from typing import Any

from tunix_rt.backends import Progress
from tunix_rt.config import RunConfig
from tunix_rt.data.render import Style, prompt_ids
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import EvalItem
from tunix_rt.evaluate.score import Prediction, Scores, Tags, judge, score_predictions
from tunix_rt.rundir import RunDir, write_json, write_jsonl


def evaluate_model(
    backend: Any,
    engine: Any,
    *,
    when: str,
    items: Sequence[EvalItem],
    tokenizer: Tokenizer,
    style: Style,
    config: RunConfig,
    run: RunDir,
    progress: Progress,
    stop: Callable[[], None],
) -> tuple[list[Prediction], Scores]:
    """Greedy answers to `items`, in their order, scored; `eval/<when>.json` and the predictions are written.

    `stop` is called as answers come, so that it may raise: a long evaluation can be interrupted, and then leaves no file.
    """
    prompts = [prompt_ids(item.prompt, tokenizer, style) for item in items]
    tags = Tags(reasoning=style.reasoning_tag, answer=style.answer_tag)
    outputs: dict[int, str] = {}
    for index, ids in backend.generate(
        engine,
        prompts,
        max_new_tokens=config.evaluation.max_new_tokens,
        batch_size=config.evaluation.per_device_eval_batch_size,
        stop_ids=stop_ids(tokenizer, style),
        pad_id=tokenizer.pad_id,
    ):
        outputs[index] = tokenizer.decode(ids)
        progress(f"evaluate {when}", len(outputs), len(items), "")
        stop()
    predictions = [
        judge(
            id=item.id,
            prompt=item.prompt,
            expected=item.answer,
            output=outputs[index],
            section=item.section,
            category=item.category,
            tags=tags,
        )
        for index, item in enumerate(items)
    ]
    scores = score_predictions(predictions, when=when)
    write_jsonl(run.predictions(when), list(predictions))
    write_json(run.scores(when), scores)
    return predictions, scores


def stop_ids(tokenizer: Tokenizer, style: Style) -> list[int]:
    """Tokens that end an answer: end-of-sequence, and the end of a turn where the template has one of its own."""
    return sorted({tokenizer.eos_id, style.template.end_id} - {-1})

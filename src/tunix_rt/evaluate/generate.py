"""Ask the model every question of an eval set and write down what it said and how it scored."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tunix_rt.data.render import Style, prompt_ids
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import EvalItem
from tunix_rt.engines.base import Progress
from tunix_rt.engines.decoding import Decoding
from tunix_rt.runs.folder import RunDir
from tunix_rt.scoring.score import Prediction, Scores, Tags, judge, score_predictions
from tunix_rt.storage import append_jsonl, to_plain, write_json, write_jsonl

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked and how: the same for base and tuned, or their answers cannot be compared."""

    items: Sequence[EvalItem]
    tokenizer: Tokenizer
    style: Style
    decoding: Decoding

    @property
    def tags(self) -> Tags:
        return Tags(reasoning=self.style.reasoning_tag, answer=self.style.answer_tag)

    def settings(self) -> dict[str, Any]:
        """What decides the tokens that are given and how the next are chosen."""
        said = (self.style.template.sha256, self.style.system_instruction, *self.tags)
        style = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        tags = {"reasoning_tag": self.tags.reasoning, "answer_tag": self.tags.answer}
        return self.decoding.settings() | tags | {"style": style, "tokenizer": self.tokenizer.sha256}


def decoding_of(style: Style, *, max_new_tokens: int, **more: Any) -> Decoding:
    """Greedy unless said otherwise, and over at the closing tag of the answer."""
    return Decoding(max_new_tokens=max_new_tokens, closing=f"</{style.answer_tag}>", **more)


def ask(
    backend: Any,
    engine: Any,
    questions: Questions,
    *,
    what: str,
    rows_at: Callable[[int], int],
    progress: Progress,
    stop: Callable[[], None],
) -> list[Prediction]:
    """An answer to every item, judged, in the order of the items.

    `stop` is called as answers come, so that it may raise: a long evaluation can be interrupted.
    """
    tokenizer, items, began = questions.tokenizer, questions.items, time.monotonic()
    prompts = [prompt_ids(item.prompt, tokenizer, questions.style) for item in items]
    answers = {}
    for index, answer in backend.generate(
        engine,
        prompts,
        decoding=questions.decoding,
        stop_ids=stop_ids(tokenizer, questions.style),
        pad_id=tokenizer.pad_id,
        decode=tokenizer.decode,
        rows_at=rows_at,
    ):
        answers[index] = answer
        progress(what, len(answers), len(items), _pace(len(answers), len(items), time.monotonic() - began))
        stop()
    return [
        judge(
            id=item.id,
            prompt=item.prompt,
            expected=item.answer,
            output=tokenizer.decode(answers[index].ids),
            section=item.section,
            category=item.category,
            difficulty=item.difficulty,
            ended=answers[index].ended,
            tags=questions.tags,
        )
        for index, item in enumerate(items)
    ]


def _pace(done: int, total: int, seconds: float) -> str:
    """Questions per second and the time that is left at this pace. The longest prompts come first: seldom too short."""
    left = seconds / done * (total - done)
    return (
        f"{done / max(seconds, 1e-9):,.1f}/s, {left:,.0f} s left"
        if total > done
        else f"{done / max(seconds, 1e-9):,.1f}/s"
    )


def evaluate_model(
    backend: Any, engine: Any, questions: Questions, *, when: str, run: RunDir, **asking: Any
) -> tuple[list[Prediction], Scores]:
    """`ask`, scored; `eval/<when>.json` and the predictions are written. Interrupted, it leaves no file."""
    predictions = ask(backend, engine, questions, what=f"evaluate {when}", **asking)
    scores = score_predictions(predictions, when=when)
    write_jsonl(run.predictions(when), list(predictions))
    write_json(run.scores(when), scores)
    return predictions, scores


def read_along(backend: Any, engine: Any, questions: Questions, run: RunDir, rows: int, step: int) -> None:
    """Answers to a few questions while training goes on: appended to `eval/samples.jsonl`, the first one said."""
    silent: dict[str, Any] = {"progress": lambda *_: None, "stop": lambda: None}
    answers = ask(backend, engine, questions, what="samples", rows_at=lambda length: rows, **silent)
    append_jsonl(run.samples_along, [{"step": step, **to_plain(answer)} for answer in answers])
    right = sum(answer.lenient for answer in answers)
    said = " / ".join(part for part in answers[0].output.splitlines() if part.strip())
    logger.info("step %d  samples: %d of %d right; %r", step, right, len(answers), said[:120])


def stop_ids(tokenizer: Tokenizer, style: Style) -> list[int]:
    """Tokens that end an answer: end-of-sequence, and the end of a turn where the template has one of its own."""
    return sorted({tokenizer.eos_id, style.template.end_id} - {-1})

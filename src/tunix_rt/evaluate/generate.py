"""Generations for an eval set: prompted, scored, written into a run folder, and read back from one."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tunix_rt.data.records import EvalItem, first_problem
from tunix_rt.data.render import Style, prompt_ids
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.engines.base import Backend, Engine
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.errors import InputError, TunixError, did_you_mean
from tunix_rt.evaluate.comparison import NAMES, Side
from tunix_rt.progress import Progress, phase
from tunix_rt.runs.folder import RunDir
from tunix_rt.scoring.score import Prediction, Scores, Tags, judge, score_predictions
from tunix_rt.storage import CHECK_VOLUME, append_jsonl, read_json, storage, to_plain, write_json, write_jsonl

logger = logging.getLogger(__name__)

TOKENS_BETWEEN_REPORTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The prompts and how generations are decoded: the same for both sides of a comparison."""

    items: Sequence[EvalItem]
    tokenizer: Tokenizer
    style: Style
    decoding: Decoding

    @property
    def tags(self) -> Tags:
        return Tags(reasoning=self.style.reasoning_tag, answer=self.style.answer_tag)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the prompt tokens and the choice of the next ones."""
        parts = (self.style.template.sha256, self.style.system_instruction, *self.tags)
        style = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        tags = {"reasoning_tag": self.tags.reasoning, "answer_tag": self.tags.answer}
        return self.decoding.settings() | tags | {"style": style, "tokenizer": self.tokenizer.sha256}


def decoding_of(style: Style, *, max_new_tokens: int, **more: Any) -> Decoding:
    """Greedy by default, and stopped by the closing tag of the answer."""
    return Decoding(max_new_tokens=max_new_tokens, closing=f"</{style.answer_tag}>", **more)


def generate_predictions(
    backend: Backend,
    engine: Engine,
    questions: Questions,
    *,
    what: str,
    batch_size_at: Callable[[int], int],
    progress: Progress,
    stop: Callable[[], None],
) -> list[Prediction]:
    """A scored generation for every item, in the order of the items.

    `stop` is called after each one and every few tokens, and may raise: a long evaluation can be interrupted.
    """
    tokenizer, items = questions.tokenizer, questions.items
    prompts = [prompt_ids(item.prompt, tokenizer, questions.style) for item in items]
    answers: dict[int, Answer] = {}
    tokens = 0
    with phase(what, len(items)) as report:

        def decode(ids: list[int]) -> str:
            """Called for every new token, to find the closing tag, which all `Questions` have: reports the tokens of a batch of
            which nothing has ended."""
            nonlocal tokens
            tokens += 1
            if tokens % TOKENS_BETWEEN_REPORTS == 0:
                report(len(answers), f"{tokens:,} tokens")
                stop()
            return tokenizer.decode(ids)

        for index, answer in backend.generate(
            engine,
            prompts,
            decoding=questions.decoding,
            stop_ids=stop_ids(tokenizer, questions.style),
            pad_id=tokenizer.pad_id,
            decode=decode,
            batch_size_at=batch_size_at,
        ):
            answers[index] = answer
            progress(what, len(answers), len(items), f"{tokens:,} tokens")
            stop()
    return [
        _judged(questions, item, tokenizer.decode(answers[index].ids), answers[index].ended)
        for index, item in enumerate(items)
    ]


def _judged(questions: Questions, item: EvalItem, output: str, ended: str) -> Prediction:
    question = item.model_dump(include={"id", "prompt", "section", "category", "difficulty"})
    return judge(expected=item.answer, output=output, ended=ended, tags=questions.tags, **question)


def is_scored(questions: Questions, predictions: Sequence[Prediction], scores: Scores) -> bool:
    """Whether `predictions` are judged outputs for these questions, and `scores` are theirs."""
    pairs = zip(questions.items, predictions, strict=False)
    again = [_judged(questions, item, found.output, found.ended) for item, found in pairs]
    return (
        again == [*predictions]
        and len(again) == len(questions.items)
        and score_predictions(again, scores.when) == scores
    )


def evaluate_model(
    backend: Backend, engine: Engine, questions: Questions, *, when: str, run: RunDir | None, **generation: Any
) -> tuple[list[Prediction], Scores]:
    """`generate_predictions`, scored; with a `run`, `eval/<when>.json` and the predictions are written when all are complete."""
    predictions = generate_predictions(backend, engine, questions, what=f"evaluate {when}", **generation)
    scores = score_predictions(predictions, when=when)
    if run is not None:
        write_jsonl(run.predictions(when), list(predictions))
        write_json(run.scores(when), scores)
    return predictions, scores


def sample_during_training(
    backend: Backend, engine: Engine, questions: Questions, run: RunDir, rows: int, step: int
) -> None:
    """Generations for a few prompts, appended to `eval/samples.jsonl`; the first one is logged."""
    silent: dict[str, Any] = {"progress": lambda *_: None, "stop": lambda: None}
    samples = generate_predictions(
        backend, engine, questions, what="samples", batch_size_at=lambda length: rows, **silent
    )
    append_jsonl(run.samples_along, [{"step": step, **to_plain(sample)} for sample in samples])
    right = sum(sample.lenient for sample in samples)
    text = " / ".join(part for part in samples[0].output.splitlines() if part.strip())
    logger.info("step %d  samples: %d of %d correct (lenient); first output: %r", step, right, len(samples), text[:120])


def stop_ids(tokenizer: Tokenizer, style: Style) -> list[int]:
    """Tokens that end a generation: end-of-sequence, and the end of a turn where the template has one of its own."""
    return sorted({tokenizer.eos_id, style.template.end_id} - {-1})


# --- read back --------------------------------------------------------------------------------------------------------


def read_predictions(path: Path) -> list[Prediction]:
    """The lines of an `eval/predictions-*.jsonl`; an invalid line is an InputError that names it."""
    adapter = TypeAdapter(Prediction)
    predictions = []
    try:
        # Not `splitlines`: an output may contain U+2028, which JSON leaves as it is.
        with storage(path, fix=CHECK_VOLUME):
            lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read: {error}", fix="evaluate again") from error
    for number, line in enumerate(lines, start=1):
        try:
            predictions.append(adapter.validate_json(line, strict=True))
        except ValidationError as error:
            raise InputError(f"{path}:{number}: {': '.join(first_problem(error))}", fix="evaluate again") from error
    return predictions


def read_scores(path: Path) -> Scores:
    """The scores in an `eval/before.json` or `eval/after.json`; anything else is an InputError."""
    try:
        return TypeAdapter(Scores).validate_python(read_json(path, InputError, fix="evaluate again"))
    except ValidationError as error:
        raise InputError(f"{path}: {': '.join(first_problem(error))}", fix="evaluate again") from error


def read_side(folder: Path) -> Side:
    """The generations in the folder of a run (those after training) or of `tunix-rt evaluate`, under the folder's name."""
    return _side(folder, folder.name or str(folder), "after", "answers")


def read_both(folder: Path) -> tuple[Side, Side]:
    """The two sides in one folder: before and after training, or the two models of `tunix-rt evaluate --against`."""
    if not RunDir(folder).predictions("base").is_file():
        before, after = NAMES
        return _side(folder, before, "before", is_moment=True), _side(folder, after, "after", is_moment=True)
    names = _summary(RunDir(folder)).get("models")
    first, second = "base", folder.name or str(folder)
    match names:
        case [str(one), str(other)] if one != other:
            first, second = one, other
    return _side(folder, first, "base"), _side(folder, second, "answers")


def _side(folder: Path, name: str, *whens: str, is_moment: bool = False) -> Side:
    run = RunDir(folder)
    path = next((path for when in whens if (path := run.predictions(when)).is_file()), None)
    if path is None and not folder.exists():
        beside = [str(one) for one in folder.parent.glob("*/")]
        raise InputError(f"{folder}: no such folder", fix=did_you_mean(str(folder), beside, otherwise="check the path"))
    if path is None:
        raise InputError(
            f"{folder} has no predictions to compare (no {' or '.join(run.predictions(when).name for when in whens)})",
            fix="name the folder of a finished `tunix-rt train`, or the --output of `tunix-rt evaluate`",
        )
    summary = _summary(run)
    model = ""
    match summary.get("models"):
        case [str(only)]:
            model = only
        case [str(base), str(tuned)]:
            model = base if whens[0] == "base" else tuned
    return Side(
        name=name,
        predictions=read_predictions(path),
        decoding=_decoding(run, summary),
        is_moment=is_moment,
        model=model,
        computed={key: value for key in ("dtype", "device") if isinstance(value := summary.get(key), str)},
    )


def _summary(run: RunDir) -> dict[str, Any]:
    content = read_json(run.eval_summary) if run.eval_summary.is_file() else {}
    return content if isinstance(content, dict) else {}


def _decoding(run: RunDir, summary: Mapping[str, Any]) -> dict[str, Any]:
    """How the generations were decoded; empty for a folder without eval_summary.json."""
    if not run.eval_summary.is_file():
        return {}
    try:
        return dict(summary["decoding"])
    except (KeyError, TypeError, ValueError) as error:
        raise TunixError(f"{run.eval_summary}: decoding is missing", fix="evaluate again") from error

"""Generations before and after training, scored and compared; resumed runs read back the first."""

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tunix_rt.engines.base import Engine
from tunix_rt.errors import InputError
from tunix_rt.evaluate.comparison import Comparison, compare
from tunix_rt.evaluate.generate import (
    Questions,
    decoding_of,
    evaluate_model,
    generate_predictions,
    is_scored,
    read_predictions,
    read_scores,
    sample_during_training,
)
from tunix_rt.evaluate.report import samples_markdown, summary_of
from tunix_rt.progress import duration
from tunix_rt.runs.journal import RunResult
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.schemas_rollouts import AlongLine
from tunix_rt.scoring.score import CUT_OFF, Prediction, Scores, score_predictions
from tunix_rt.storage import append_jsonl, write_json, write_text
from tunix_rt.train.alarms import alarms_of, mean_reward
from tunix_rt.train.context import RunContext

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """The evaluation of one run: what is generated from, and the scores so far."""

    questions: Questions
    scores: dict[str, Scores] = field(default_factory=dict)
    before: list[Prediction] = field(default_factory=list)
    comparison: Comparison | None = None


def open_evaluation(context: RunContext) -> Evaluation:
    data = context.data
    decoding = decoding_of(data.style, max_new_tokens=context.config.evaluation.max_new_tokens)
    questions = Questions(items=data.items, tokenizer=context.tokenizer, style=data.style, decoding=decoding)
    return Evaluation(questions=questions)


def evaluate_before(context: RunContext, engine: Engine, evaluation: Evaluation) -> None:
    """Generations of the untrained model: those on disk where a resumed run has them.

    Their time is recorded. Evaluation after training generates from the same prompts, so it is expected to take as long,
    also in a resumed process that does not generate before training.
    """
    if not context.data.items or (context.journal.continued and _read_before(context, evaluation)):
        return
    stop, saved, began = context.stop, context.start.saved_state, time.monotonic()
    check = partial(stop.check, saved, starting=True)
    evaluation.before = _evaluate(context, engine, evaluation, "before", check)
    seconds = round(time.monotonic() - began, 3)
    context.journal.result.answering_seconds = seconds
    if stop.has_budget:
        logger.info(
            "Evaluation after training will take about %s. If less of the time budget is left, the run stops first; "
            "resuming it evaluates",
            duration(seconds),
        )
    stop.check(saved)  # the generations are saved: a resumed process gets further


def evaluate_after(context: RunContext, engine: Engine, evaluation: Evaluation) -> None:
    """Generations of the trained model, compared with those before: `samples.md`, `eval_summary.json`."""
    if not context.data.items:
        return
    saved = context.all_saved
    seconds = context.journal.result.answering_seconds or 0.0
    in_vain = context.start.step == context.journal.result.steps_completed
    context.stop.check_time(seconds, "evaluation after training", saved, in_vain=in_vain)
    after = _evaluate(context, engine, evaluation, "after", partial(context.stop.check, saved))
    evaluation.comparison = compare(evaluation.before, after)
    write_text(context.run.samples, samples_markdown(evaluation.before, after, evaluation.comparison))
    _write_summary(context, evaluation)


def samples_during_training(context: RunContext, engine: Engine, questions: Questions) -> Any:
    """A function of the step that generates from the first few prompts, or None where none are requested."""
    few = replace(questions, items=context.data.items[: context.config.evaluation.samples_during_training])
    if not few.items:
        return None
    return partial(sample_during_training, context.backend, engine, few, context.run, context.plan.generation_rows)


def evaluate_along(context: RunContext, engine: Engine, step: int) -> None:
    """Answer the held-out questions after `step`, and append the line with its alarms."""
    rollouts, record = context.config.training.rollouts, RunRecord(context.run.root)
    if rollouts is None or not context.data.alarm_items:
        return
    style, before = context.data.style, record.along
    if any(line.step == step for line in before):
        return
    decoding = decoding_of(style, max_new_tokens=rollouts.max_new_tokens)
    questions = Questions(items=context.data.alarm_items, tokenizer=context.tokenizer, style=style, decoding=decoding)
    predictions = generate_predictions(
        context.backend, engine, questions, what="held-out questions", progress=lambda *_: None, stop=lambda: None,
        batch_size_at=lambda length: context.plan.generation_rows,
    )  # fmt: skip
    scores, since = score_predictions(predictions, when="along"), before[-1].step if before else 0
    steps = record.metrics[since:step]
    reward = mean_reward([one.reward for one in steps])
    line = AlongLine(
        step=step, items=scores.items, correct=scores.correct, well_formed=scores.well_formed,
        unfinished=sum(one.ended in CUT_OFF for one in predictions), equations=scores.equations,
        equations_right=scores.equations_right, mean_output_chars=scores.mean_output_chars, alarms=(),
        **({} if reward is None else {"reward": reward}),
    )  # fmt: skip
    found = alarms_of(before, line, no_signal=bool(steps) and not any(one.trained_rollouts for one in steps))
    facts = line.model_dump(exclude_none=True) | {"alarms": found}
    append_jsonl(context.run.questions_along, [facts])
    context.phases.end(engine, "held-out questions")
    logger.info(
        "step %d  held-out questions: %d of %d correct, %d well-formed%s",
        step, line.correct, line.items, line.well_formed, "" if line.reward is None else f"; reward {line.reward:.3f}",
    )  # fmt: skip
    for alarm in found:
        context.journal.warn(f"Alarm at step {step}: {alarm}")


def _evaluate(context: RunContext, engine: Engine, evaluation: Evaluation, when: str, check: Any) -> list[Prediction]:
    rows = context.plan.generation_rows
    predictions, scores = evaluate_model(
        context.backend, engine, evaluation.questions, when=when, run=context.run,
        batch_size_at=lambda length: rows, progress=context.options.progress, stop=check,
    )  # fmt: skip
    record_scores(context.journal.result, evaluation, when, scores)
    context.phases.end(engine, "generation")
    return predictions


def record_scores(result: RunResult, evaluation: Evaluation, when: str, scores: Scores) -> None:
    evaluation.scores[when] = scores
    result.scores = (result.scores or {}) | {
        when: {
            "accuracy": scores.accuracy, "accuracy_lenient": scores.accuracy_lenient, "format_rate": scores.format_rate,
        }
    }  # fmt: skip
    logger.info(
        "Evaluation %s: %d of %d correct (strict), %d (lenient), %.0f %% well-formed",
        when, scores.correct, scores.items, scores.correct_lenient, 100 * scores.format_rate,
    )  # fmt: skip


def _read_before(context: RunContext, evaluation: Evaluation) -> bool:
    """Whether the folder has the generations from before training; a corrupt file means generating again."""
    run = context.run
    if not (run.scores("before").exists() and run.predictions("before").exists()):
        return False
    try:
        predictions, scores = read_predictions(run.predictions("before")), read_scores(run.scores("before"))
        if not is_scored(evaluation.questions, predictions, scores):
            raise InputError(f"{run.scores('before')}: not the scores of these outputs", fix="generate again")
    except InputError as error:
        logger.warning("Generating again before training: %s", error.problem)
        return False
    evaluation.before = predictions
    record_scores(context.journal.result, evaluation, "before", scores)
    return True


def _write_summary(context: RunContext, evaluation: Evaluation) -> None:
    config, data = context.config, context.data
    evalset: dict[str, Any] = {"evalset": "held out"}
    if data.evalset:
        evalset = {"evalset": data.evalset.key, "evalset_sha256": data.evalset.sha256}
    facts = {
        "models": [config.model.model_name_or_path], "weights": config.model.weights, **evalset,
        "questions": len(data.items), "device": context.device.device, "dtype": config.training.dtype,
        "decoding": evaluation.questions.settings(),
    }  # fmt: skip
    before, after = evaluation.scores["before"], evaluation.scores["after"]
    write_json(context.run.eval_summary, summary_of(before, after, evaluation.comparison, **facts))

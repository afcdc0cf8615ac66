"""A trained or published model, opened to be asked: by `evaluate`, `generate` and `chat`."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tunix_rt.backends import Progress, load_backend
from tunix_rt.backends.decoding import Answer, Decoding
from tunix_rt.config import Data, load_config
from tunix_rt.data.render import Style, conversation_ids, prompt_ids, style_of
from tunix_rt.data.sample import Turn
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.doctor.choose import DeviceChoice, choose_device, set_environment
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.verdict import Ask
from tunix_rt.doctor.words import device_lines
from tunix_rt.errors import ConfigError, DoesNotFitError, InputError
from tunix_rt.evaluate.evalsets import EvalSet
from tunix_rt.evaluate.report import Comparison, Side, compare_runs, comparison_markdown, samples_markdown, table
from tunix_rt.evaluate.run import Questions, ask, decoding_of, stop_ids
from tunix_rt.evaluate.score import Prediction, Scores, score_predictions
from tunix_rt.evaluate.summary import summary_of
from tunix_rt.models import ModelSource, refuse_address, resolve_model, resolve_tokenizer
from tunix_rt.plan.answering import rows_that_fit
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.rundir import RunDir, write_json, write_jsonl, write_text

logger = logging.getLogger(__name__)

GIB = 2**30
OTHER_TOKENIZER = "name the tokenizer that belongs to it: --set model.tokenizer_name_or_path=..."
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a person calls a model: a run, which has settings of its own, or a model as `resolve_model` takes it."""

    name: str
    model: str
    data: Data
    """How the run it came from wrote its prompts; the defaults for any other model."""
    tokenizer: str | None = None


def name_model(name: str, changes: Sequence[str] = ()) -> Named:
    """A run folder stands for the model it trained; everything else for itself. `changes` are settings of `data`."""
    refuse_address("the model", name)
    for change in changes:
        if not change.startswith(("data.", "model.tokenizer")):
            raise ConfigError(
                f"--set {change}: only how prompts are written can be set here",
                fix="set data.chat_template, data.system_instruction, data.reasoning_tag, data.answer_tag or "
                "model.tokenizer_name_or_path",
            )
    run = RunDir(Path(name).expanduser())
    if not run.config.is_file():
        config = load_config(None, overrides=changes)
        return Named(name=name, model=name, data=config.data, tokenizer=config.model.tokenizer_name_or_path)
    if not (run.final_model / "config.json").is_file():
        raise InputError(
            f"the run in {name} has no final model",
            fix="finish it with --resume, or name one of its checkpoints' models",
        )
    config = load_config(run.config, overrides=changes)
    # The final model has its tokenizer beside it; another one is taken only when it is named here.
    renamed = any(change.startswith("model.tokenizer") for change in changes)
    tokenizer = config.model.tokenizer_name_or_path if renamed else None
    return Named(name=name, model=str(run.final_model), data=config.data, tokenizer=tokenizer)


def settle_device(device: str, dtype: str | None) -> tuple[DeviceChoice, str]:
    """The device that was asked for, never another; and the type to compute in, which is what it does best unless named."""
    device = {"gpu": "cuda"}.get(device, device)
    facts = gather_facts(backend="torch", device=device)
    choice = choose_device(Ask(device=device, backend="torch", dtype=dtype or "float32"), facts)
    set_environment(choice.device, "torch")
    for line in device_lines(choice, facts):
        logger.info("%s", line)
    modern = choice.capability is None or choice.capability >= (8, 0)
    return choice, dtype or ("float32" if choice.device == "cpu" else "bfloat16" if modern else "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model on its device, and how it is spoken to."""

    name: str
    source: ModelSource
    shape: ModelShape
    choice: DeviceChoice
    dtype: str
    backend: Any
    engine: Any
    tokenizer: Tokenizer
    style: Style

    def rows_at(self, max_new_tokens: int, asked: int | None = None) -> Callable[[int], int]:
        """How many prompts of a length are answered at once: `asked`, or what the memory at hand allows."""
        if asked is not None:
            return lambda length: asked
        free = self.backend.free_bytes(self.engine)

        @cache
        def rows(length: int) -> int:
            return rows_that_fit(
                self.shape,
                dtype=self.dtype,
                device=self.choice.device,
                length=length,
                max_new_tokens=max_new_tokens,
                free_bytes=free,
                modern=self.choice.capability is None or self.choice.capability >= (8, 0),
            )

        return rows

    def prompt(self, turns: tuple[Turn, ...], decoding: Decoding) -> list[int]:
        """Tokens of a conversation whose next turn is the model's. InputError when they leave no room for an answer."""
        try:
            turns[-1].text.encode()
        except UnicodeEncodeError as error:  # bytes of the command line or the keyboard that are no UTF-8
            raise InputError("the question is no UTF-8 text", fix="ask it in UTF-8") from error
        ids = conversation_ids(turns, self.tokenizer, self.style)
        if len(ids) >= self.shape.max_positions:
            what, anew = ("question", "") if len(turns) == 1 else ("conversation", ", or begin anew with /new")
            raise InputError(
                f"{self.name}: the {what} takes {len(ids):,} tokens, and the model has {self.shape.max_positions:,} positions",
                fix=f"ask something shorter{anew}",
            )
        self.refuse_unknown(ids)
        return ids

    def refuse_unknown(self, ids: Sequence[int]) -> None:
        """InputError for a prompt with a token that the model has no embedding for."""
        if (highest := max(ids, default=0)) >= self.shape.vocab:
            raise InputError(
                f"{self.name}: its vocabulary has {self.shape.vocab:,} words, and a prompt has the token {highest:,}",
                fix=OTHER_TOKENIZER,
            )

    def answer(
        self, prompt: Sequence[int], decoding: Decoding, heard: Callable[[str], None] | None = None
    ) -> tuple[str, Answer]:
        """Text and tokens of one answer; `heard` is told the text so far as it grows."""

        def hear(_: int, ids: list[int]) -> None:
            if heard is not None:
                heard(self.tokenizer.decode(ids))

        found: Iterator[tuple[int, Answer]] = self.backend.generate(
            self.engine,
            [prompt],
            decoding=decoding,
            stop_ids=stop_ids(self.tokenizer, self.style),
            pad_id=self.tokenizer.pad_id,
            decode=self.tokenizer.decode,
            rows_at=lambda length: 1,
            heard=hear if heard is not None else None,
        )
        [(_, answer)] = found
        return self.tokenizer.decode(answer.ids), answer


def open_model(
    named: Named, choice: DeviceChoice, dtype: str, *, weights: str = "pretrained", like: OpenModel | None = None
) -> OpenModel:
    """Load the model. With `like` it is given the prompts of that one, token for token."""
    source = resolve_model(named.model, weights=weights)
    shape = shape_of(source.config)
    _refuse_too_big(named, shape, choice, dtype)
    if like is None:
        folder = resolve_tokenizer(named.tokenizer) if named.tokenizer else source.folder
        tokenizer = load_tokenizer(folder, str(source.config["model_type"]))
        style = style_of(named.data, tokenizer)
    else:
        tokenizer, style = like.tokenizer, like.style
    # Not every control token counts: Gemma 3's tokenizer has one for images, beyond the table of its models of text.
    if (end := min(stop_ids(tokenizer, style))) >= shape.vocab:
        raise InputError(
            f"{named.name}: its vocabulary has {shape.vocab:,} words, and an answer ends with the token {end:,}",
            fix=OTHER_TOKENIZER,
        )
    logger.info(
        "Model: %s revision=%s parameters=%s device=%s dtype=%s weights=%s",
        source.name, source.revision, f"{shape.parameters:,}", choice.device, dtype, source.weights,
    )  # fmt: skip
    if weights == "random":
        logger.warning("The weights are random: what this model answers says nothing about the pretrained one")
    backend = load_backend("torch")
    return OpenModel(
        name=named.name,
        source=source,
        shape=shape,
        choice=choice,
        dtype=dtype,
        backend=backend,
        engine=backend.load_to_ask(source, device=choice.device, dtype=dtype),
        tokenizer=tokenizer,
        style=style,
    )


def _refuse_too_big(named: Named, shape: ModelShape, choice: DeviceChoice, dtype: str) -> None:
    """Before a weight is loaded. Answers take what is left, one at a time if need be."""
    needed = shape.parameters * BYTES[dtype]
    if needed > choice.free_bytes:
        smaller = "use --dtype bfloat16, or " if dtype == "float32" else ""
        raise DoesNotFitError(
            f"{named.name}: its weights take {needed / GIB:.2f} GiB in {dtype}; {choice.device} has "
            f"{choice.free_bytes / GIB:.2f} GiB free",
            fix=f"{smaller}free memory there, or ask on another device",
        )


# --- an eval set -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one model answered, or two of them: the one that is compared against comes first."""

    evalset: EvalSet
    names: tuple[str, ...]
    predictions: tuple[list[Prediction], ...]
    scores: tuple[Scores, ...]
    comparison: Comparison | None
    summary: dict[str, Any]

    def write(self, output: Path) -> None:
        """Into a folder that `tunix-rt compare` reads."""
        run = RunDir(output)
        for predictions, scores in zip(self.predictions, self.scores, strict=True):
            write_jsonl(run.predictions(scores.when), list(predictions))
            write_json(run.scores(scores.when), scores)
        if self.comparison is not None:
            before, after = self.predictions
            write_text(run.samples, samples_markdown(before, after, self.comparison))
            write_text(output / "comparison.md", comparison_markdown(self.comparison, table(*self.scores)))
        write_json(run.eval_summary, self.summary)


def evaluate_models(
    model: Named,
    against: Named | None,
    evalset: EvalSet,
    *,
    device: str,
    dtype: str | None,
    weights: str,
    batch_size: int | None,
    progress: Progress,
    **decoding: Any,
) -> Evaluation:
    """Ask one model, or two of them the same prompts in the same way, every question of `evalset`."""
    choice, kind = settle_device(device, dtype)
    opened = open_model(model, choice, kind, weights=weights)
    questions = Questions(
        items=evalset.items,
        tokenizer=opened.tokenizer,
        style=opened.style,
        decoding=decoding_of(opened.style, **decoding),
    )

    def answers(asked: OpenModel, when: str) -> tuple[str, list[Prediction], Scores]:
        if asked.tokenizer.vocab_size > asked.shape.vocab:
            for item in evalset.items:
                asked.refuse_unknown(prompt_ids(item.prompt, asked.tokenizer, asked.style))
        rows_at = asked.rows_at(questions.decoding.max_new_tokens, batch_size)
        found = ask(
            asked.backend, asked.engine, questions, what=f"evaluate {when}", rows_at=rows_at, progress=progress,
            stop=lambda: None,
        )  # fmt: skip
        return asked.name, found, score_predictions(found, when=when)

    sides = [answers(opened, "answers")]
    if against is not None:
        like = replace(opened, engine=None)
        del opened  # one model at a time in memory
        sides.insert(0, answers(open_model(against, choice, kind, like=like), "base"))
    names, predictions, scores = zip(*sides, strict=True)
    comparison = None
    if against is not None:
        comparison = compare_runs(*(Side(name=name, predictions=found) for name, found, _ in sides))
    facts = {
        "models": list(names), "evalset": evalset.key, "evalset_sha256": evalset.sha256, "questions": len(evalset.items),
        "device": choice.device, "dtype": kind, "weights": weights, "decoding": questions.settings(),
    }  # fmt: skip
    summary = summary_of(scores[0], scores[1] if comparison else None, comparison, **facts)
    return Evaluation(
        evalset=evalset, names=names, predictions=predictions, scores=scores, comparison=comparison, summary=summary
    )

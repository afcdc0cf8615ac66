"""A trained or published model, opened to be asked: by `evaluate`, `generate` and `chat`."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Data
from tunix_rt.data.render import Style, conversation_ids, prompt_ids, style_of
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.data.trace import Turn
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Progress, load_backend
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.errors import ConfigError, DoesNotFitError, InputError
from tunix_rt.evaluate.evalsets import EvalSet
from tunix_rt.evaluate.generate import Questions, ask, decoding_of, stop_ids
from tunix_rt.evaluate.report import Comparison, Side, compare_runs, comparison_markdown, samples_markdown, table
from tunix_rt.evaluate.summary import summary_of
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.models.secrets import refuse_address
from tunix_rt.plan.memory import rows_that_fit
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.runs.checksums import write_sums
from tunix_rt.runs.folder import RunDir
from tunix_rt.scoring.score import Prediction, Scores, score_predictions
from tunix_rt.storage import storage, write_json, write_jsonl, write_text
from tunix_rt.train.device import find_device

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
    choice = find_device(device, dtype or "float32")
    modern = choice.capability is None or choice.capability >= (8, 0)
    return choice, dtype or ("float32" if choice.device == "cpu" else "bfloat16" if modern else "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model that exists and would fit, before a weight of it is read."""

    name: str
    source: ModelSource
    shape: ModelShape
    choice: DeviceChoice
    dtype: str
    tokenizer: Tokenizer
    style: Style

    def refuse_unknown(self, ids: Sequence[int]) -> None:
        """InputError for a prompt with a token that the model has no embedding for."""
        if (highest := max(ids, default=0)) >= self.shape.vocab:
            raise InputError(
                f"{self.name}: its vocabulary has {self.shape.vocab:,} words, and a prompt has the token {highest:,}",
                fix=OTHER_TOKENIZER,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel(Found):
    """The same with its weights, on its device."""

    backend: Any
    engine: Any

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


def find_model(
    named: Named,
    choice: DeviceChoice,
    dtype: str,
    *,
    weights: str = "pretrained",
    like: Found | None = None,
    beside: bool = False,
) -> Found:
    """Everything about the model but its weights. With `like` it will be given the prompts of that one, token for token,
    and `beside` it in memory, or after it."""
    source = resolve_model(named.model, weights=weights)
    shape = shape_of(source.config)
    _refuse_too_big(named, shape.parameters + (like.shape.parameters if like and beside else 0), choice, dtype)
    tokenizer = _tokenizer_of(named, source, like)
    style = style_of(named.data, tokenizer) if like is None else like.style
    # Not every control token counts: Gemma 3's tokenizer has one for images, beyond the table of its models of text.
    if (end := min(stop_ids(tokenizer, style))) >= shape.vocab:
        raise InputError(
            f"{named.name}: its vocabulary has {shape.vocab:,} words, and an answer ends with the token {end:,}",
            fix=OTHER_TOKENIZER,
        )
    return Found(
        name=named.name, source=source, shape=shape, choice=choice, dtype=dtype, tokenizer=tokenizer, style=style
    )


def _tokenizer_of(named: Named, source: ModelSource, like: Found | None) -> Tokenizer:
    """The model's own, or that of `like`, which must know the same words by the same numbers."""
    if like is not None and not (source.folder / "tokenizer.json").is_file():
        return like.tokenizer
    folder = resolve_tokenizer(named.tokenizer) if named.tokenizer else source.folder
    own = load_tokenizer(folder, str(source.config["model_type"]))
    if like is None:
        return own
    words, others = (one.inner.get_vocab(with_added_tokens=True) for one in (own, like.tokenizer))
    if other := next((word for word in sorted({*words, *others}) if words.get(word) != others.get(word)), None):
        raise InputError(
            f"{named.name} and {like.name} have different tokenizers ({other!r} is not the same token in both): neither can "
            "be given the other's prompts",
            fix="compare models of one family: a base model and what was trained from it",
        )
    return like.tokenizer


def load_found(found: Found) -> OpenModel:
    """Read the weights."""
    source = found.source
    logger.info(
        "Model: %s revision=%s parameters=%s device=%s dtype=%s weights=%s",
        source.name, source.revision, f"{found.shape.parameters:,}", found.choice.device, found.dtype, source.weights,
    )  # fmt: skip
    if source.weights == "random":
        logger.warning("The weights are random: what this model answers says nothing about the pretrained one")
    backend = load_backend("torch")
    engine = backend.load_to_ask(source, device=found.choice.device, dtype=found.dtype)
    return OpenModel(
        **{field.name: getattr(found, field.name) for field in fields(Found)}, backend=backend, engine=engine
    )


def _refuse_too_big(named: Named, parameters: int, choice: DeviceChoice, dtype: str) -> None:
    """Before a weight is loaded. Answers take what is left, one at a time if need be."""
    needed = parameters * BYTES[dtype]
    if needed > choice.free_bytes:
        smaller = "use --dtype bfloat16, or " if dtype == "float32" else ""
        raise DoesNotFitError(
            f"{named.name}: {parameters:,} weights take {needed / GIB:.2f} GiB in {dtype}; {choice.device} has "
            f"{choice.free_bytes / GIB:.2f} GiB free",
            fix=f"{smaller}free memory there, or ask on another device",
        )


# --- an eval set -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one model answered to every question."""

    name: str
    rows: int
    """Questions that were asked at once."""
    predictions: list[Prediction]
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model, or two of them: the one that is compared against comes first."""

    sides: tuple[Answered, ...]
    comparison: Comparison | None
    summary: dict[str, Any]

    @property
    def scores(self) -> list[Scores]:
        return [side.scores for side in self.sides]


def evaluate_models(
    model: Named,
    against: Named | None,
    evalset: EvalSet,
    *,
    output: Path | None,
    device: str,
    dtype: str | None,
    weights: str,
    batch_size: int | None,
    progress: Progress,
    **decoding: Any,
) -> Evaluation:
    """Ask one model, or two of them the same prompts in the same way, every question of `evalset`.

    Answers are written to `output` as soon as a model has given all of its own; what can be refused is, before that."""
    choice, kind = settle_device(device, dtype)
    found = find_model(model, choice, kind, weights=weights)
    models = [(found, "answers")]
    if against is not None:
        models.append((find_model(against, choice, kind, like=found), "base"))
    questions = Questions(
        items=evalset.items, tokenizer=found.tokenizer, style=found.style, decoding=decoding_of(found.style, **decoding)
    )
    run = None if output is None else RunDir(output)
    if run is not None:
        with storage(run.root):
            run.root.mkdir(parents=True, exist_ok=True)
    sides: list[Answered] = []
    for one, when in models:
        sides.insert(0, _answered(one, questions, when, batch_size, run, progress))
        batch_size = sides[0].rows  # in 16 bits a near tie may fall differently with the batch: the same for both
    comparison = None
    if len(sides) == 2:
        comparison = compare_runs(*(Side(name=side.name, predictions=side.predictions) for side in sides))
    facts = {
        "models": [side.name for side in sides], "weights": weights, "evalset": evalset.key,
        "evalset_sha256": evalset.sha256, "questions": len(evalset.items), "device": choice.device, "dtype": kind,
        "rows": sides[-1].rows, "decoding": questions.settings(),
    }  # fmt: skip
    scores = [side.scores for side in sides]
    summary = summary_of(scores[0], scores[1] if comparison else None, comparison, **facts)
    if run is not None:
        _write_summary(run, sides, comparison, summary)
    return Evaluation(sides=tuple(sides), comparison=comparison, summary=summary)


def _answered(
    found: Found, questions: Questions, when: str, batch_size: int | None, run: RunDir | None, progress: Progress
) -> Answered:
    """One model at a time in memory: this one is gone when its answers are there."""
    if found.tokenizer.vocab_size > found.shape.vocab:
        for item in questions.items:
            found.refuse_unknown(prompt_ids(item.prompt, found.tokenizer, found.style))
    opened = load_found(found)
    longest = max(len(prompt_ids(item.prompt, found.tokenizer, found.style)) for item in questions.items)
    rows = opened.rows_at(questions.decoding.max_new_tokens, batch_size)(longest)
    note = "" if found.dtype == "float32" else f"; in {found.dtype} another number may turn a near tie"
    logger.info("Asking %d at once%s", min(rows, len(questions.items)), note)
    asked: dict[str, Any] = {
        "what": f"evaluate {when}",
        "rows_at": lambda length: rows,
        "progress": progress,
        "stop": lambda: None,
    }
    predictions = ask(opened.backend, opened.engine, questions, **asked)
    scores = score_predictions(predictions, when=when)
    if run is not None:
        write_jsonl(run.predictions(when), list(predictions))
        write_json(run.scores(when), scores)
    return Answered(name=found.name, rows=rows, predictions=predictions, scores=scores)


def _write_summary(
    run: RunDir, sides: Sequence[Answered], comparison: Comparison | None, summary: dict[str, Any]
) -> None:
    """The rest of a folder that `tunix-rt compare` reads, with the hashes of all of it."""
    if comparison is not None:
        before, after = (side.predictions for side in sides)
        write_text(run.samples, samples_markdown(before, after, comparison))
        write_text(run.comparison, comparison_markdown(comparison, table(*(side.scores for side in sides))))
    write_json(run.eval_summary, summary)
    write_sums(run)

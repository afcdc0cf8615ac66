"""Open a trained or published model for generation: `evaluate`, `generate` and `chat`."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Data
from tunix_rt.data.records import Turn
from tunix_rt.data.render import Style, conversation_ids, prompt_ids, style_of
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Backend, Engine, load_backend
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.errors import ConfigError, DoesNotFitError, InputError, PromptTooLong
from tunix_rt.evaluate.comparison import Comparison, Side, compare_runs
from tunix_rt.evaluate.evalsets import EvalSet
from tunix_rt.evaluate.generate import Questions, decoding_of, evaluate_model, stop_ids
from tunix_rt.evaluate.report import comparison_markdown, samples_markdown, summary_of, table
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.models.secrets import refuse_address
from tunix_rt.plan.generation import rows_that_fit
from tunix_rt.plan.shape import Outline, outline_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.progress import Progress, phase
from tunix_rt.runs.checksums import write_sums
from tunix_rt.runs.folder import RunDir, model_of_run
from tunix_rt.scoring.score import Prediction, Scores
from tunix_rt.storage import storage, write_json, write_text
from tunix_rt.train.device import find_device

logger = logging.getLogger(__name__)

GIB = 2**30
OTHER_TOKENIZER = "name the tokenizer that belongs to it: --set model.tokenizer_name_or_path=..."
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SETTABLE = ("data.", "model.tokenizer")
MAX_NEW_TOKENS = 256
"""Of a generation, where neither an option nor a run says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the user names it: a run, which has settings of its own, or anything that `resolve_model` takes."""

    name: str
    model: str
    data: Data
    """How prompts are rendered: the settings of the run, the defaults for any other model."""
    tokenizer: str | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    """Of an evaluation: those of the run."""


def model_spec(name: str, changes: Sequence[str] = ()) -> ModelSpec:
    """A run folder stands for the model it trained; everything else for itself. `changes` are settings of `data`."""
    refuse_address("the model", name)
    for change in changes:
        if not change.startswith(SETTABLE):
            raise ConfigError(
                f"--set {change}: only the rendering of prompts can be set here",
                fix="set data.chat_template, data.system_instruction, data.reasoning_tag, data.answer_tag or "
                "model.tokenizer_name_or_path",
            )
    run, model = RunDir(Path(name).expanduser()), model_of_run(name)
    if model == name:
        config = load_config(None, overrides=changes)
        return ModelSpec(name=name, model=name, data=config.data, tokenizer=config.model.tokenizer_name_or_path)
    config = load_config(run.config, overrides=changes)
    # The final model has its tokenizer beside it; only one that is named here replaces it.
    renamed = any(change.startswith("model.tokenizer") for change in changes)
    tokenizer = config.model.tokenizer_name_or_path if renamed else None
    return ModelSpec(
        name=name, model=model, data=config.data, tokenizer=tokenizer, max_new_tokens=config.evaluation.max_new_tokens
    )


def inference_device(device: str, dtype: str | None) -> tuple[DeviceChoice, str]:
    """The requested device, never another; and the compute dtype, by default the fastest that the device supports."""
    choice = find_device(device, dtype or "float32")
    half = "bfloat16" if choice.capability is None or choice.capability >= (8, 0) else "float16"
    return choice, dtype or ("float32" if choice.device == "cpu" else half)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that exists and fits, before a weight is read."""

    name: str
    source: ModelSource
    shape: ModelShape | Outline
    choice: DeviceChoice
    dtype: str
    tokenizer: Tokenizer
    style: Style

    def refuse_unknown(self, ids: Sequence[int]) -> None:
        """InputError for a prompt with a token that the embedding does not have."""
        if (highest := max(ids, default=0)) >= self.shape.vocab:
            raise InputError(
                f"{self.name}: the vocabulary has {self.shape.vocab:,} tokens, and a prompt has token {highest:,}",
                fix=OTHER_TOKENIZER,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ResolvedModel):
    """The same with its weights, on its device."""

    backend: Backend
    engine: Engine

    def batch_size_at(self, max_new_tokens: int, requested: int | None = None) -> Callable[[int], int]:
        """The batch size for prompts of a length: `requested`, or as much as fits into free memory."""
        if requested is not None:
            return lambda length: requested
        if isinstance(self.shape, Outline):
            return lambda length: 1
        free = self.backend.free_bytes(self.engine)
        fitting = partial(
            rows_that_fit, self.shape, dtype=self.dtype, device=self.choice.device, max_new_tokens=max_new_tokens,
            free_bytes=free, capability=self.choice.capability,
        )  # fmt: skip
        return cache(lambda length: fitting(length=length))

    def prompt(self, turns: tuple[Turn, ...]) -> list[int]:
        """Tokens of a conversation whose next turn is the model's. InputError when they leave no position free."""
        try:
            turns[-1].text.encode()
        except UnicodeEncodeError as error:  # bytes of the command line or the keyboard
            raise InputError("the question is not valid UTF-8", fix="write it in UTF-8") from error
        ids = conversation_ids(turns, self.tokenizer, self.style)
        return self._admitted(
            ids, *(("question",) if len(turns) == 1 else ("conversation", ", or begin anew with /reset"))
        )

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text without a template, which the model continues."""
        return self._admitted([*self.tokenizer.prefix, *self.tokenizer.encode(text)], "prompt")

    def _admitted(self, ids: list[int], what: str, anew: str = "") -> list[int]:
        if len(ids) >= self.shape.max_positions:
            raise PromptTooLong(
                f"{self.name}: the {what} takes {len(ids):,} tokens, and the model has {self.shape.max_positions:,} positions",
                fix=f"shorten it{anew}",
            )
        self.refuse_unknown(ids)
        return ids

    def generate(
        self, prompt: Sequence[int], decoding: Decoding, on_text: Callable[[str], None] | None = None
    ) -> tuple[str, Answer]:
        """Text and tokens of one generation; `on_text` is called with the text so far as it grows."""

        def show(_: int, ids: list[int]) -> bool:
            if on_text is not None:
                on_text(self.tokenizer.decode(ids))
            return False

        [(_, answer)] = self.generations([prompt], decoding, show if on_text else None)
        return self.tokenizer.decode(answer.ids), answer

    def generations(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, on_tokens: Callable[[int, list[int]], bool] | None
    ) -> Iterator[tuple[int, Answer]]:
        """(index of the prompt, generation) as each ends; `on_tokens` as in `engines.base`."""
        batch_size_at = self.batch_size_at(decoding.max_new_tokens, 1 if len(prompts) == 1 else None)
        return self.backend.generate(
            self.engine, prompts, decoding=decoding, stop_ids=stop_ids(self.tokenizer, self.style),
            pad_id=self.tokenizer.pad_id, decode=self.tokenizer.decode, batch_size_at=batch_size_at, on_tokens=on_tokens,
        )  # fmt: skip


def resolve_spec(
    spec: ModelSpec,
    choice: DeviceChoice,
    dtype: str,
    *,
    weights: str = "pretrained",
    like: ResolvedModel | None = None,
    beside: bool = False,
) -> ResolvedModel:
    """Everything about the model but its weights. With `like` it gets the prompts of that model, token for token; it is in
    memory `beside` it, or after it."""
    source = resolve_model(spec.model, weights=weights)
    shape = outline_of(source.config, source.weight_files() if weights == "pretrained" else ())
    _refuse_too_big(spec, shape.parameters + (like.shape.parameters if like and beside else 0), choice, dtype)
    tokenizer = _tokenizer_of(spec, source, like)
    style = style_of(spec.data, tokenizer) if like is None else like.style
    # Not every special token counts: Gemma 3's tokenizer has one for images, beyond the embedding of its text models.
    if (end := min(stop_ids(tokenizer, style))) >= shape.vocab:
        raise InputError(
            f"{spec.name}: the vocabulary has {shape.vocab:,} tokens, and generations end with token {end:,}",
            fix=OTHER_TOKENIZER,
        )
    return ResolvedModel(
        name=spec.name, source=source, shape=shape, choice=choice, dtype=dtype, tokenizer=tokenizer, style=style
    )


def _tokenizer_of(spec: ModelSpec, source: ModelSource, like: ResolvedModel | None) -> Tokenizer:
    """The model's own, or that of `like`, which must have the same vocabulary."""
    if like is not None and not (source.folder / "tokenizer.json").is_file():
        return like.tokenizer
    folder = resolve_tokenizer(spec.tokenizer) if spec.tokenizer else source.folder
    own = load_tokenizer(folder, str(source.config["model_type"]))
    if like is None:
        return own
    ids, others = (one.inner.get_vocab(with_added_tokens=True) for one in (own, like.tokenizer))
    if other := next((token for token in sorted({*ids, *others}) if ids.get(token) != others.get(token)), None):
        raise InputError(
            f"{spec.name} and {like.name} have different tokenizers (the ids of {other!r} differ), so they cannot share "
            "prompts",
            fix="compare models of one family: a base model and what was trained from it",
        )
    return like.tokenizer


@phase("load the weights")
def load_resolved(model: ResolvedModel) -> LoadedModel:
    """Read the weights."""
    source = model.source
    logger.info(
        "Model: %s revision=%s parameters=%s device=%s dtype=%s weights=%s",
        source.name, source.revision, f"{model.shape.parameters:,}", model.choice.device, model.dtype, source.weights,
    )  # fmt: skip
    if source.weights == "random":
        logger.warning("The weights are random: these generations do not describe the pretrained model")
    backend = load_backend("torch")
    engine = backend.load_for_inference(source, device=model.choice.device, dtype=model.dtype)
    known = {field.name: getattr(model, field.name) for field in fields(ResolvedModel)}
    return LoadedModel(**known, backend=backend, engine=engine)


def _refuse_too_big(spec: ModelSpec, parameters: int, choice: DeviceChoice, dtype: str) -> None:
    """Before a weight is loaded. Generation takes what is left, with batch size 1 if need be."""
    needed = parameters * BYTES[dtype]
    if needed > choice.free_bytes:
        smaller = "use --dtype bfloat16, or " if dtype == "float32" else ""
        raise DoesNotFitError(
            f"{spec.name}: {parameters:,} weights take {needed / GIB:.2f} GiB in {dtype}; {choice.device} has "
            f"{choice.free_bytes / GIB:.2f} GiB free",
            fix=f"{smaller}free memory there, or use another device",
        )


# --- an eval set -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScores:
    """The generations of one model for every question, scored."""

    name: str
    batch_size: int
    predictions: list[Prediction]
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model, or two of them: the one compared against comes first."""

    sides: tuple[ModelScores, ...]
    comparison: Comparison | None
    summary: dict[str, Any]

    @property
    def scores(self) -> list[Scores]:
        return [side.scores for side in self.sides]


def evaluate_models(
    model: ModelSpec,
    against: ModelSpec | None,
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
    """Generate for every question of `evalset` with one model, or with two from the same prompts.

    Predictions are written to `output` as soon as a model has finished; everything that can be refused is, before that."""
    choice, kind = inference_device(device, dtype)
    resolved = resolve_spec(model, choice, kind, weights=weights)
    models = [(resolved, "answers")]
    if against is not None:
        models.append((resolve_spec(against, choice, kind, like=resolved), "base"))
    tokenizer, style = resolved.tokenizer, resolved.style
    questions = Questions(
        items=evalset.items, tokenizer=tokenizer, style=style, decoding=decoding_of(style, **decoding)
    )
    run = None if output is None else RunDir(output)
    if run is not None:
        with storage(run.root):
            run.root.mkdir(parents=True, exist_ok=True)
    sides: list[ModelScores] = []
    for one, when in models:
        sides.insert(0, _evaluated(one, questions, when, batch_size, run, progress))
        batch_size = sides[0].batch_size  # in 16 bits the batch size may decide a near tie: the same for both
    comparison = None
    if len(sides) == 2:
        comparison = compare_runs(*(Side(name=side.name, predictions=side.predictions) for side in sides))
    facts = {
        "models": [side.name for side in sides], "weights": weights, "evalset": evalset.key,
        "evalset_sha256": evalset.sha256, "questions": len(evalset.items), "device": choice.device, "dtype": kind,
        "rows": sides[-1].batch_size, "decoding": questions.settings(),
    }  # fmt: skip
    scores = [side.scores for side in sides]
    summary = summary_of(scores[0], scores[1] if comparison else None, comparison, **facts)
    if run is not None:
        _write_summary(run, sides, comparison, summary)
    return Evaluation(sides=tuple(sides), comparison=comparison, summary=summary)


def _evaluated(
    model: ResolvedModel,
    questions: Questions,
    when: str,
    batch_size: int | None,
    run: RunDir | None,
    progress: Progress,
) -> ModelScores:
    """One model at a time is in memory: this one is released when its generations are complete."""
    prompts = [prompt_ids(item.prompt, model.tokenizer, model.style) for item in questions.items]
    for prompt in prompts:
        model.refuse_unknown(prompt)
    loaded = load_resolved(model)
    rows = loaded.batch_size_at(questions.decoding.max_new_tokens, batch_size)(max(map(len, prompts)))
    note = "" if model.dtype == "float32" else f"; in {model.dtype} the batch size may decide a near tie"
    logger.info("Generating with batch size %d%s", min(rows, len(prompts)), note)
    predictions, scores = evaluate_model(
        loaded.backend, loaded.engine, questions, when=when, run=run, batch_size_at=lambda length: rows, progress=progress,
        stop=lambda: None,
    )  # fmt: skip
    return ModelScores(name=model.name, batch_size=rows, predictions=predictions, scores=scores)


def _write_summary(
    run: RunDir, sides: Sequence[ModelScores], comparison: Comparison | None, summary: dict[str, Any]
) -> None:
    """The rest of a folder that `tunix-rt compare` reads, with the hashes of all of it."""
    if comparison is not None:
        before, after = (side.predictions for side in sides)
        write_text(run.samples, samples_markdown(before, after, comparison))
        write_text(run.comparison, comparison_markdown(comparison, table(*(side.scores for side in sides))))
    write_json(run.eval_summary, summary)
    write_sums(run)

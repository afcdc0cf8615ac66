"""A recorded run, prepared from the verifier's own inputs: settings, tokenizer, data, questions, engine. And what its model, or
the given weights, generate."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tunix_rt.config.capabilities import LORA_SETTINGS
from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.data.prepare import ModelFacts, Prepared, prepare
from tunix_rt.data.records import EvalItem
from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.sources import find_evalset, read_items
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.doctor.facts import Ask
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.selection import DeviceChoice, choose_device, set_environment, with_virtual_devices
from tunix_rt.engines.base import Backend, Engine, load_backend
from tunix_rt.errors import DoesNotFitError, EvidenceError, HardwareError, InputError
from tunix_rt.evaluate.generate import Questions, decoding_of, generate_predictions, stop_ids
from tunix_rt.evidence.facts import Inputs, Run, needed
from tunix_rt.evidence.replay.compare import other_answers
from tunix_rt.models.multimodal import text_config
from tunix_rt.models.resolve import ModelSource, resolve_model
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.report import refuse_if_too_big
from tunix_rt.plan.shape import Outline, outline_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.target import devices_of
from tunix_rt.plan.trace import shape_of_any
from tunix_rt.runs.checksums import parse_object
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.ledger import has_rows
from tunix_rt.runs.schemas import Batch, PredictionLine
from tunix_rt.scoring.score import CONTEXT, LENGTH, STOP, TAG
from tunix_rt.storage import to_plain
from tunix_rt.train.context import load_engine, step_shape
from tunix_rt.train.preflight import adjust_data_replicas, steps_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Everything but the engine. `data` is None where the dataset is not at hand, `items` where the questions are not."""

    run: Run
    config: RunConfig
    choice: DeviceChoice
    model: ModelSource | None
    shape: ModelShape | Outline
    tokenizer: Tokenizer
    style: Style
    data: Prepared | None
    items: tuple[EvalItem, ...] | None

    @property
    def eval_rows(self) -> int:
        """Held-out rows that go through the model at once, as in the run."""
        plan = self.run.record.plan
        return plan.memory.eval_rows if plan else self.config.evaluation.per_device_eval_batch_size or 1

    @property
    def generation_rows(self) -> int:
        """Questions that are answered at once, as in the run."""
        plan = self.run.record.plan
        return (plan.memory.generation_rows if plan else 0) or self.eval_rows

    @property
    def layers(self) -> str | None:
        """What computes the layers; None on another device than the recorded one."""
        plan = self.run.record.plan
        return plan.memory.layers if plan and plan.memory.device == self.choice.device else None

    def questions(self) -> Questions:
        decoding = decoding_of(self.style, max_new_tokens=self.config.evaluation.max_new_tokens)
        return Questions(items=self.items or (), tokenizer=self.tokenizer, style=self.style, decoding=decoding)


def prepare_run(run: Run, inputs: Inputs, *, to_train: bool) -> PreparedRun:
    """Find the inputs by hash and prepare them. What is missing is an InputError that lists it; what is there and does not give
    what the run committed to is an EvidenceError. `to_train` needs the base model and the dataset too."""
    committed, evalset = run.commitment, None
    base = inputs.base_model(committed.base_model.files, committed.base_model.weights)
    model = resolve_model(base, weights=committed.base_model.weights) if base else None
    described = model.config if model else parse_object(run.record.data("final_model/config.json") or b"")
    if not isinstance(described, Mapping):
        raise EvidenceError(f"final_model/config.json: {described}", fix="")
    described = text_config(described)
    shape = shape_of_any(model, run.config.training) if model else outline_of(described)
    model_type = str(described.get("model_type"))
    folder = inputs.tokenizer_folder(committed.tokenizer_sha256, model_type)
    dataset = inputs.dataset(committed.dataset.sha256)
    found: dict[str, Any] = {"tokenizer": folder, "base model": base, "dataset": dataset}
    if (heldout := committed.dataset.validation) is not None:
        found["validation"] = inputs.dataset(heldout.sha256)
    lacking = [name for name, place in found.items() if place is None]
    if folder is None or (to_train and lacking):
        raise missing_inputs(run, lacking if to_train else ["tokenizer"])
    changes: dict[str, Any] = {"model.tokenizer_name_or_path": folder, "model.revision": "main"}
    changes |= {"model.model_name_or_path": base} if base else {}
    if heldout is not None:
        changes["data.validation"] = (found["validation"] or (None,))[0]
        dataset = dataset if found["validation"] else None  # the rows need both
    if dataset:
        weights = run.config.data.weights
        changes["data.dataset"] = dict(zip(dataset, weights, strict=True)) if weights else dataset
    if committed.evalset is not None:
        evalset = inputs.evalset(committed.evalset.sha256)
        enabled = run.config.evaluation.enabled and evalset is not None
        changes |= {"evaluation.evalset": evalset, "evaluation.enabled": enabled}
    choice = _device(run.config, committed.device)
    config = with_settings(run.config, changes | {"training.device": choice.device})
    config = adjust_data_replicas(config, devices_of(config.training, choice), continued=True)
    today = date.fromisoformat(committed.dataset.today) if committed.dataset.today else None
    tokenizer = load_tokenizer(Path(folder), model_type)
    style = style_of(config.data, tokenizer, today=today)
    if style.sha256 != committed.dataset.style_sha256:
        raise EvidenceError("tokenizer and settings give another chat template than the recorded one", fix="")
    facts = ModelFacts(vocabulary=shape.vocab, positions=shape.max_positions, model_type=model_type)
    data = prepare(config, tokenizer, facts, lambda *_: None, today=today) if dataset else None
    if data is not None:
        _require_committed(run, data)
    items = data.items if data is not None and committed.evalset is None else None
    return PreparedRun(
        run=run, config=config, choice=choice, model=model, shape=shape, tokenizer=tokenizer, style=style, data=data,
        items=tuple(read_items(find_evalset(evalset))) if evalset else items,
    )  # fmt: skip


def missing_inputs(run: Run, lacking: list[str]) -> InputError:
    listed = [f"{what} {name}: {hashes}" for what, name, hashes in needed(run.commitment) if what in lacking]
    return InputError(
        f"missing inputs, by hash: {', '.join(lacking)}",
        fix="supply it: --model DIR, --tokenizer DIR, --data FILE\n    " + "\n    ".join(listed),
    )


def _require_committed(run: Run, data: Prepared) -> None:
    facts = run.commitment.dataset
    here = (data.merkle_root, data.traces, data.heldout_traces, data.skipped, [part.rows for part in data.mixture])
    rows = [part.rows for part in run.mixture]
    if here != (facts.merkle_root, facts.traces, facts.heldout_traces, facts.skipped or 0, rows):
        problem = "the dataset gives other rows, or other numbers of traces, than the run committed to"
        raise EvidenceError(problem, fix="")
    if not has_rows(RunDir(run.record.root).rows, data.row_facts):
        raise EvidenceError("rows.jsonl is not what the dataset gives", fix="")


def _device(config: RunConfig, recorded: str) -> DeviceChoice:
    """The recorded device, else the CPU."""
    training = config.training
    for device in dict.fromkeys((recorded, "cpu")):
        facts = gather_facts(backend=training.backend, device=device)
        ask = Ask(device=device, backend=training.backend, dtype=training.dtype)
        try:
            choice = with_virtual_devices(choose_device(ask, facts), training.backend)
            set_environment(choice.device, training.backend)
            return choice
        except HardwareError as error:
            if device == "cpu":
                raise
            logger.warning("%s is not available, using the CPU: %s", device, error.problem)
    raise AssertionError("unreachable: the CPU is usable or refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A prepared run with its engine at the base model."""

    prepared: PreparedRun
    data: Prepared
    backend: Backend
    engine: Engine
    total: int
    """Steps that the run took."""
    ends: tuple[int, ...]
    """Steps that it was planned for in turn."""
    rows: int
    """Of a micro-batch."""


def open_session(prepared: PreparedRun) -> Session:
    """Load the base model. Refuses what does not fit here: the verifier's machine is not the one that ran."""
    config, data, recorded = prepared.config, prepared.data, prepared.run.commitment.batch
    if data is None or prepared.model is None or isinstance(prepared.shape, Outline):
        raise missing_inputs(prepared.run, ["base model", "dataset"])
    batch = recorded or Batch(rows=config.training.per_device_train_batch_size, devices=1)
    choice = prepared.choice
    devices = devices_of(config.training, choice)
    plan = predict_run(
        prepared.shape, config, device=choice.device, devices=devices, rows=batch.rows, row_tokens=data.longest_row,
        target_share=data.trained_tokens / data.tokens, capability=choice.capability, device_name=choice.kind,
        layers=prepared.layers,
    )  # fmt: skip
    refuse_if_too_big(plan, prepared.choice, prepared.shape, config)
    backend, step = load_backend(config.training.backend), step_shape(config, data, batch)
    engine = load_engine(backend, prepared.model, prepared.shape, config, prepared.choice, step, attempt=False)
    ends = (steps_of(config, data, batch.rows), *prepared.run.ends[1:])
    return Session(
        prepared=prepared, data=data, backend=backend, engine=engine, total=prepared.run.total, ends=ends, rows=batch.rows,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Regeneration:
    """What the given weights compute."""

    machine: Mapping[str, Any]
    adapted: bool
    """Adapters stood beside the weights in the run and are merged into these."""
    answers: list[dict[str, Any]]
    gaps: dict[int, float]
    """Place of an answer that came out differently -> how far its least likely token is below the likeliest."""
    heldout: tuple[float, int] | None


def regenerate(prepared: PreparedRun, weights: Path, *, with_answers: bool) -> Regeneration:
    """Load the model in `weights` and answer all questions; those that come out differently are followed token by token."""
    alone: dict[str, Any] = {"model.model_name_or_path": str(weights), "model.weights": "pretrained"}
    alone |= {f"training.{name}": Training.model_fields[name].default for name in LORA_SETTINGS}
    config = with_settings(prepared.config, alone)
    source = resolve_model(str(weights))
    shape = outline_of(source.config, source.weight_files())
    if (size := 4 * shape.parameters) > prepared.choice.free_bytes:
        raise DoesNotFitError(
            f"{shape.parameters:,} weights take {size / 2**30:.2f} GiB, {prepared.choice.device} has "
            f"{prepared.choice.free_bytes / 2**30:.2f} GiB free",
            fix="verify on a machine with more memory",
        )
    backend = load_backend(config.training.backend)
    engine = backend.load(source, device=prepared.choice.device, training=config.training)
    rows, pad_id = prepared.data.heldout_rows if prepared.data else (), prepared.tokenizer.pad_id
    heldout = backend.heldout_loss(engine, rows, batch_size=prepared.eval_rows, pad_id=pad_id) if rows else None
    answers, gaps = generate(prepared, backend, engine, "after") if with_answers else ([], {})
    adapted = prepared.config.training.lora_rank is not None
    machine = backend.machine_facts(engine)
    return Regeneration(machine=machine, adapted=adapted, answers=answers, gaps=gaps, heldout=heldout)


def generate(
    prepared: PreparedRun, backend: Backend, engine: Engine, when: str
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """The answers of the engine; those that differ from the recorded ones are followed token by token."""
    questions = prepared.questions()
    given = generate_predictions(
        backend, engine, questions, what="answers", batch_size_at=lambda length: prepared.generation_rows,
        progress=lambda *_: None, stop=lambda: None,
    )  # fmt: skip
    answers = [to_plain(answer) for answer in given]
    other = other_answers(prepared.run.record.predictions(when), answers)
    return answers, largest_gaps(backend, engine, questions, other, prepared.shape.max_positions)


def largest_gaps(
    backend: Backend, engine: Engine, questions: Questions, recorded: Mapping[int, PredictionLine], positions: int
) -> dict[int, float]:
    """For each recorded answer, the most that the logit of one of its tokens, or of its end, is below the largest there; 0
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
    begun, ended = ([of[place] for place in fits] for of in (prompts, tokens))
    gaps = backend.token_gaps(engine, begun, ended, stop_ids(tokenizer, questions.style))
    for place, (*inside, end) in zip(fits, gaps, strict=True):
        one, full = recorded[place], len(tokens[place]) == room[place]
        may_end = {STOP: True, TAG: str(decoding.closing) in one.output, LENGTH: full, CONTEXT: full}
        if may_end.get(one.ended, False):
            found[place] = max([*inside, *([end] if one.ended == STOP else [])], default=0.0)
    return found

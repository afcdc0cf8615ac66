"""A recorded run made ready to be computed again from the verifier's own inputs: settings, tokenizer, data, questions, engine."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.length_checks import ModelFacts
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.render import Style, style_of
from tunix_rt.data.sources import find_evalset, read_items
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.data.trace import EvalItem
from tunix_rt.doctor.facts import Ask
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.selection import DeviceChoice, choose_device, set_environment, with_virtual_devices
from tunix_rt.engines.base import load_backend
from tunix_rt.errors import EvidenceError, HardwareError, InputError
from tunix_rt.evaluate.generate import Questions, decoding_of
from tunix_rt.evidence.facts import Run
from tunix_rt.evidence.inputs import Inputs, needed
from tunix_rt.models.resolve import ModelSource, resolve_model
from tunix_rt.pipeline import load_engine
from tunix_rt.plan.fit import refuse_if_too_big
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.runs.checksums import parse_object
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.ledger import has_rows
from tunix_rt.train.commitment import Batch
from tunix_rt.train.preflight import plan_with_data, step_shape, steps_of, with_copies_that_fit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Everything but the engine. `data` is None where the dataset is not at hand, `items` where the questions are not."""

    run: Run
    config: RunConfig
    choice: DeviceChoice
    model: ModelSource | None
    shape: ModelShape
    tokenizer: Tokenizer
    style: Style
    data: Prepared | None
    items: tuple[EvalItem, ...] | None

    @property
    def eval_rows(self) -> int:
        """Questions or held-out rows that go through the model at once, as in the run."""
        plan = self.run.record.plan
        return plan.memory.eval_rows if plan else self.config.evaluation.per_device_eval_batch_size or 1

    @property
    def layers(self) -> str | None:
        """What computes the layers; None on another device than the recorded one."""
        plan = self.run.record.plan
        return plan.memory.layers if plan and plan.memory.device == self.choice.device else None

    def questions(self) -> Questions:
        decoding = decoding_of(self.style, max_new_tokens=self.config.evaluation.max_new_tokens)
        return Questions(items=self.items or (), tokenizer=self.tokenizer, style=self.style, decoding=decoding)


def prepare_run(run: Run, inputs: Inputs, *, to_train: bool) -> Ready:
    """Find the inputs by hash and prepare them. What is missing is an InputError that lists it; what is there and does not give
    what the run committed to is an EvidenceError. `to_train` needs the base model and the dataset too."""
    committed, evalset = run.commitment, None
    base = inputs.base_model(committed.base_model.files, committed.base_model.weights)
    model = resolve_model(base, weights=committed.base_model.weights) if base else None
    described = model.config if model else parse_object(run.record.data("final_model/config.json") or b"")
    if not isinstance(described, Mapping):
        raise EvidenceError(f"final_model/config.json: {described}", fix="")
    shape, model_type = shape_of(described), str(described.get("model_type"))
    folder = inputs.tokenizer_folder(committed.tokenizer_sha256, model_type)
    dataset = inputs.dataset(committed.dataset.sha256)
    found = {"tokenizer": folder, "base model": base, "dataset": dataset}
    lacking = [name for name, place in found.items() if place is None]
    if folder is None or (to_train and lacking):
        raise missing_inputs(run, lacking if to_train else ["tokenizer"])
    changes: dict[str, Any] = {"model.tokenizer_name_or_path": folder, "model.revision": "main"}
    changes |= {"model.model_name_or_path": base} if base else {}
    changes |= {"data.dataset": dataset} if dataset else {}
    if committed.evalset is not None:
        evalset = inputs.evalset(committed.evalset.sha256)
        enabled = run.config.evaluation.enabled and evalset is not None
        changes |= {"evaluation.evalset": evalset, "evaluation.enabled": enabled}
    choice = _device(run.config, committed.device)
    config = with_settings(run.config, changes | {"training.device": choice.device})
    config = with_copies_that_fit(config, choice.count, continued=True)
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
    return Ready(
        run=run, config=config, choice=choice, model=model, shape=shape, tokenizer=tokenizer, style=style, data=data,
        items=tuple(read_items(find_evalset(evalset))) if evalset else items,
    )  # fmt: skip


def missing_inputs(run: Run, lacking: list[str]) -> InputError:
    listed = [f"{what} {name}: {hashes}" for what, name, hashes in needed(run.commitment) if what in lacking]
    return InputError(
        f"not at hand by hash: {', '.join(lacking)}",
        fix="supply it: --model DIR, --tokenizer DIR, --data FILE\n    " + "\n    ".join(listed),
    )


def _require_committed(run: Run, data: Prepared) -> None:
    facts = run.commitment.dataset
    here = (data.merkle_root, data.traces, data.heldout_traces)
    if here != (facts.merkle_root, facts.traces, facts.heldout_traces):
        raise EvidenceError(
            "the dataset gives other rows, or other numbers of traces, than the run committed to", fix=""
        )
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
            logger.warning("No %s here, the CPU computes: %s", device, error.problem)
    raise AssertionError("a CPU is there or refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A prepared run with its engine at the base model."""

    ready: Ready
    data: Prepared
    backend: Any
    engine: Any
    total: int
    rows: int
    """Of a micro-batch."""


def open_session(ready: Ready) -> Session:
    """Load the base model. Refuses what does not fit here: the verifier's machine is not the one that ran."""
    config, data, recorded = ready.config, ready.data, ready.run.commitment.batch
    if data is None or ready.model is None:
        raise missing_inputs(ready.run, ["base model", "dataset"])
    alone = Batch(rows=config.training.per_device_train_batch_size, devices=1)
    batch = Batch(rows=recorded.rows, devices=recorded.devices) if recorded else alone
    plan = plan_with_data(config, ready.shape, ready.choice, data, batch.rows, ready.layers)
    refuse_if_too_big(plan, ready.choice, ready.shape, config)
    backend, step = load_backend(config.training.backend), step_shape(config, data, batch)
    engine = load_engine(backend, ready.model, ready.shape, config, ready.choice, step, attempt=False)
    total = steps_of(config, data, batch.rows)
    return Session(ready=ready, data=data, backend=backend, engine=engine, total=total, rows=batch.rows)


Progress = Callable[[str, int, int], None]

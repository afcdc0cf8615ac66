"""A recorded run made ready to be computed again from the verifier's own inputs: settings, tokenizer, data, questions, engine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tunix_rt.admission import plan_with_data, step_shape, steps_of, with_copies_that_fit
from tunix_rt.backends import load_backend
from tunix_rt.commitment import Batch
from tunix_rt.config import RunConfig, with_settings
from tunix_rt.data.limits import ModelFacts
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.registry import find_evalset, read_items
from tunix_rt.data.render import Style, style_of
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.data.trace import EvalItem
from tunix_rt.doctor.checks import Ask
from tunix_rt.doctor.choose import DeviceChoice, choose_device, set_environment, with_virtual_devices
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.errors import EvidenceError, HardwareError, InputError
from tunix_rt.evaluate.run import Questions, decoding_of
from tunix_rt.evidence.facts import Run
from tunix_rt.evidence.inputs import Inputs, needed
from tunix_rt.ledgers import has_rows
from tunix_rt.models import ModelSource, resolve_model
from tunix_rt.pipeline import load_engine
from tunix_rt.plan.fit import refuse_if_too_big
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.rundir import RunDir

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
    committed, config = run.commitment, run.config
    model_name = inputs.base_model(committed.base_model.files, committed.base_model.weights)
    dataset = inputs.dataset(committed.dataset.sha256)
    evalset = inputs.evalset(committed.evalset.sha256) if committed.evalset else None
    model = resolve_model(model_name, weights=committed.base_model.weights) if model_name else None
    final_model = ModelSource(
        name="final_model", folder=run.record.root / "final_model", revision="local", weights="random",
        config=_model_config(run),
    )  # fmt: skip
    shape = shape_of((model or final_model).config)
    model_type = str((model or final_model).config.get("model_type"))
    folder = inputs.tokenizer_folder(committed.tokenizer_sha256, model_type)
    lacking = [
        name for name, found in (("tokenizer", folder), ("base model", model), ("dataset", dataset)) if found is None
    ]
    if folder is None or (to_train and lacking):
        raise missing_inputs(run, lacking if to_train else ["tokenizer"])
    tokenizer = load_tokenizer(Path(folder), model_type)
    changes: dict[str, Any] = {"model.tokenizer_name_or_path": folder, "evaluation.evalset": evalset}
    changes |= {"model.model_name_or_path": model_name, "model.revision": "main"} if model_name else {}
    changes |= {"data.dataset": dataset} if dataset else {}
    if committed.evalset is not None and evalset is None:
        changes["evaluation.enabled"] = False
    choice = _device(config, committed.device)
    config = with_settings(config, changes | {"training.device": choice.device})
    config = with_copies_that_fit(config, choice.count, continued=True)
    today = date.fromisoformat(committed.dataset.today) if committed.dataset.today else None
    style = style_of(config.data, tokenizer, today=today)
    if style.sha256 != committed.dataset.style_sha256:
        raise EvidenceError("tokenizer and settings give another chat template than the recorded one", fix="")
    facts = ModelFacts(vocabulary=shape.vocab, positions=shape.max_positions, model_type=model_type)
    data = prepare(config, tokenizer, facts, lambda *_: None, today=today) if dataset else None
    if data is not None:
        _require_committed(run, data)
    items = tuple(read_items(find_evalset(evalset))) if evalset else None
    if committed.evalset is None and data is not None:
        items = data.items
    return Ready(
        run=run,
        config=config,
        choice=choice,
        model=model,
        shape=shape,
        tokenizer=tokenizer,
        style=style,
        data=data,
        items=items,
    )


def _model_config(run: Run) -> dict[str, Any]:
    from tunix_rt.runs.reading import parse_object

    found = parse_object(run.record.data("final_model/config.json", 2**20) or b"")
    return found if isinstance(found, dict) else {}


def missing_inputs(run: Run, lacking: list[str]) -> InputError:
    listed = [f"{what} {name}: {hashes}" for what, name, hashes in needed(run.commitment) if what in lacking]
    return InputError(
        f"not at hand by hash: {', '.join(lacking)}",
        fix="supply it: --model DIR, --tokenizer DIR, --data FILE\n    " + "\n    ".join(listed),
    )


def _require_committed(run: Run, data: Prepared) -> None:
    if data.merkle_root != run.commitment.dataset.merkle_root:
        raise EvidenceError(
            f"the dataset gives {len(data.rows):,} rows of Merkle root {data.merkle_root[:12]}, recorded is "
            f"{run.commitment.dataset.merkle_root[:12]}",
            fix="",
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
    config, data, batch = ready.config, ready.data, ready.run.commitment.batch
    if data is None or ready.model is None:
        raise missing_inputs(ready.run, ["base model", "dataset"])
    rows = (
        Batch(rows=batch.rows, devices=batch.devices)
        if batch
        else Batch(rows=config.training.per_device_train_batch_size, devices=1)
    )
    refuse_if_too_big(
        plan_with_data(config, ready.shape, ready.choice, data, rows.rows, ready.layers),
        ready.choice,
        ready.shape,
        config,
    )
    backend = load_backend(config.training.backend)
    step = step_shape(config, data, rows)
    engine = load_engine(backend, ready.model, ready.shape, config, ready.choice, step, attempt=False)
    return Session(
        ready=ready, data=data, backend=backend, engine=engine, total=steps_of(config, data, rows.rows), rows=rows.rows
    )


Progress = Callable[[str, int, int], None]

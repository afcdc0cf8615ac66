"""A recorded run made ready to be computed again: its settings, data, base model and engine on a device that is here."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.admission import plan_with_data, step_shape, steps_of, with_copies_that_fit
from tunix_rt.backends import Progress, load_backend
from tunix_rt.config import RunConfig, load_config, with_settings
from tunix_rt.data.limits import ModelFacts
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.doctor.checks import Ask
from tunix_rt.doctor.choose import DeviceChoice, choose_device, set_environment, with_virtual_devices
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.errors import HardwareError
from tunix_rt.evaluate.run import Questions, decoding_of
from tunix_rt.evidence.precommit import Batch, batch_of_run, began_on, model_hashes, read_precommit
from tunix_rt.ledgers import has_rows
from tunix_rt.models import ModelSource
from tunix_rt.pipeline import find_model, load_engine, tokenizer_of
from tunix_rt.plan.fit import refuse_if_too_big
from tunix_rt.plan.shape import ModelShape
from tunix_rt.rundir import RunDir, read_json

logger = logging.getLogger(__name__)


class Differs(Exception):
    """What the run committed to is not what is here: there is no sense in computing it again. `check` names the finding."""

    def __init__(self, check: str, problem: str) -> None:
        super().__init__(problem)
        self.check, self.problem = check, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A recorded run with its engine loaded: at step 0, unless its weights are those of a folder."""

    run: RunDir
    config: RunConfig
    model: ModelSource
    tokenizer: Tokenizer
    data: Prepared
    backend: Any
    engine: Any
    total: int
    rows: int
    """Of a micro-batch."""
    eval_rows: int
    layers: str | None
    """What computed them, as planned; None where that is not recorded or this is another device."""

    def questions(self) -> Questions:
        decoding = decoding_of(self.data.style, max_new_tokens=self.config.evaluation.max_new_tokens)
        return Questions(items=self.data.items, tokenizer=self.tokenizer, style=self.data.style, decoding=decoding)


def open_session(folder: Path, *, model: str | None, progress: Progress) -> Session:
    """The run recorded in `folder`. `model` is where its base model lies here, if not where its name says.

    A `Differs` says that data, tokenizer or base model are not those that the run committed to."""
    run = RunDir(folder)
    committed = read_precommit(run)
    config, choice = settings_here(run, committed, model=model)
    source, shape = find_model(config)
    refuse_another_model(source, committed)
    tokenizer, facts = tokenizer_of(config, source, shape)
    refuse_another_tokenizer(tokenizer, committed)
    data = _data(run, config, committed, tokenizer, facts, progress)
    batch = batch_of_run(committed) or Batch(rows=config.training.per_device_train_batch_size, devices=1)
    eval_rows, layers = planned_in(run, config, choice.device)
    backend, engine = _engine(config, source, shape, choice, data, batch, layers)
    return Session(
        run=run, config=config, model=source, tokenizer=tokenizer, data=data, backend=backend, engine=engine,
        total=steps_of(config, data, batch.rows), rows=batch.rows, eval_rows=eval_rows, layers=layers,
    )  # fmt: skip


def settings_here(run: RunDir, committed: Mapping[str, Any], *, model: str | None) -> tuple[RunConfig, DeviceChoice]:
    """The settings of the run on a device that is here: the recorded one, else the CPU, which is said."""
    config = load_config(run.config)
    if model is not None:
        config = with_settings(config, {"model.model_name_or_path": model, "model.revision": "main"})
        if (Path(model) / "tokenizer.json").is_file():  # whichever it is, its hash is looked at
            config = with_settings(config, {"model.tokenizer_name_or_path": None})
    choice = _device(config, str(committed.get("device")))
    set_environment(choice.device, config.training.backend)
    config = with_settings(config, {"training.device": choice.device})
    return with_copies_that_fit(config, choice.count, continued=True), choice


def _device(config: RunConfig, recorded: str) -> DeviceChoice:
    training = config.training
    for device in dict.fromkeys((recorded, "cpu")):
        facts = gather_facts(backend=training.backend, device=device)
        ask = Ask(device=device, backend=training.backend, dtype=training.dtype)
        try:
            return with_virtual_devices(choose_device(ask, facts), training.backend)
        except HardwareError as error:
            if device == "cpu":
                raise
            logger.warning("No %s here, so the CPU computes it: %s", device, error.problem)
    raise AssertionError("a CPU is there or refused")


def refuse_another_model(source: ModelSource, committed: Mapping[str, Any]) -> None:
    """By the hashes of its files. Random weights are a function of the seed and the architecture."""
    told = committed.get("base_model")
    wanted = told.get("files") if isinstance(told, Mapping) else None
    here = model_hashes(source)
    if wanted == here:
        return
    known = wanted if isinstance(wanted, Mapping) else {}
    other = sorted(name for name in known.keys() | here.keys() if known.get(name) != here.get(name))
    raise Differs(
        "base-model",
        f"{source.folder} is not the model that was trained: {', '.join(other[:4])} differ(s); --model names another folder",
    )


def refuse_another_tokenizer(tokenizer: Tokenizer, committed: Mapping[str, Any]) -> None:
    if committed.get("tokenizer_sha256") != tokenizer.sha256:
        raise Differs(
            "tokenizer", f"the tokenizer in {tokenizer.folder} is not the recorded one; --model names a folder with it"
        )


def _data(
    run: RunDir,
    config: RunConfig,
    committed: Mapping[str, Any],
    tokenizer: Tokenizer,
    facts: ModelFacts,
    progress: Progress,
) -> Prepared:
    data = prepare(config, tokenizer, facts, progress, today=began_on(dict(committed)))
    told = committed.get("dataset")
    wanted = told.get("merkle_root") if isinstance(told, Mapping) else None
    if data.merkle_root != wanted:
        raise Differs(
            "dataset",
            f"{data.dataset.key} gives {len(data.rows):,} rows of root {data.merkle_root[:12]} here, recorded is "
            f"{str(wanted)[:12]}: other data, or prepared otherwise",
        )
    if run.rows.exists() and not has_rows(run.rows, data.row_facts):
        raise Differs("rows", "rows.jsonl is not what the data give: hashes, tokens or targets of some rows differ")
    return data


def _engine(
    config: RunConfig,
    source: ModelSource,
    shape: ModelShape,
    choice: DeviceChoice,
    data: Prepared,
    batch: Batch,
    layers: str | None,
) -> tuple[Any, Any]:
    """Refuses what is not expected to fit here: the verifier's machine is not the one that ran."""
    refuse_if_too_big(plan_with_data(config, shape, choice, data, batch.rows, layers), choice, shape, config)
    backend = load_backend(config.training.backend)
    return backend, load_engine(backend, source, shape, config, choice, step_shape(config, data, batch), attempt=False)


def planned_in(run: RunDir, config: RunConfig, device: str) -> tuple[int, str | None]:
    """How many questions or held-out rows were given at once, and what computes the layers on the same kind of device."""
    memory = read_json(run.plan).get("memory", {}) if run.plan.exists() else {}
    rows, layers = memory.get("eval_rows"), memory.get("layers")
    if not isinstance(rows, int) or rows < 1:
        rows = config.evaluation.per_device_eval_batch_size or 1
    return rows, layers if layers in ("plain", "compiled", "recorded") and memory.get("device") == device else None

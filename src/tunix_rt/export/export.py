"""`final_model`: the trained model with its tokenizer, as other tools load it, and the check that a fresh process loads it."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Data, RunConfig, Training
from tunix_rt.data.render import Style, style_of
from tunix_rt.data.template import BUILT_IN
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.engines.base import Backend, Engine, load_backend
from tunix_rt.errors import ConfigError, DoesNotFitError, EvidenceError, InputError
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.export.adapter import adapter_step, write_adapter
from tunix_rt.export.roundtrip import RoundTrip, check_folder, check_round_trip, reference_of
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.models.safetensors import join_files, parts_of
from tunix_rt.models.secrets import refuse_address
from tunix_rt.plan.precision import recipe_of
from tunix_rt.progress import phase
from tunix_rt.runs import folder as run_folder
from tunix_rt.runs.folder import RunDir, checkpoint_name, checkpoint_problems, checkpoint_step, list_checkpoints
from tunix_rt.storage import read_json, require_space, sha256_file, staged_folder, storage, to_plain, write_json
from tunix_rt.train.checkpointer import best_checkpoint
from tunix_rt.train.commitment import began_on, read_precommit
from tunix_rt.train.context import RunContext
from tunix_rt.train.device import find_device

logger = logging.getLogger(__name__)

ROUNDTRIP_SECONDS = 20.0
"""Time that the round-trip check of a small model takes, with a margin; it is skipped where a time budget has less left."""


@phase("save the model")
def save_final(
    backend: Backend, engine: Engine, folder: Path, *, tokenizer: Tokenizer, style: Style, dtype: str | None = None,
    ends: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Save the model and its tokenizer. With `dtype`, the weights of `engine` are rounded to it first: what it generates
    afterwards is what the saved model generates. `ends` are the tokens that end a generation, where they are known."""
    if dtype is not None:
        backend.round_weights(engine, dtype)
        logger.info("Final model: weights rounded to %s", dtype)
    backend.save(
        engine, folder, tokenizer_folder=tokenizer.folder, stop_ids=ends or stop_ids(tokenizer, style),
        chat_template=built_in_template(style),
    )  # fmt: skip


def built_in_template(style: Style) -> str | None:
    """The template that replaces that of the tokenizer: the model was trained with it."""
    return style.template.jinja if style.template.name in BUILT_IN else None


def export_final(context: RunContext, engine: Engine) -> None:
    save_final(
        context.backend, engine, context.run.final_model, tokenizer=context.tokenizer, style=context.data.style,
        dtype=context.config.training.save_dtype,
    )  # fmt: skip
    context.phases.end(engine, "export")


def check_final_model(context: RunContext, engine: Engine) -> None:
    """Load `final_model` in a fresh process and compare. A model that differs there is moved aside, and the run fails."""
    context.stop.check(context.all_saved)
    result, final = context.journal.result, context.run.final_model
    if context.stop.why(needed_seconds=ROUNDTRIP_SECONDS):
        logger.warning("The final model was not reloaded: no time is left; `tunix-rt export` on this run checks it")
        result.final_model = {"proven": False}
        return
    tokenizer, style = context.tokenizer, context.data.style
    refused = final.with_name("final_model-refused")
    try:
        with phase("reload check"):
            proof = check_round_trip(
                context.backend, engine, final, tokenizer=tokenizer, style=style, stop_ids=stop_ids(tokenizer, style)
            )
    except EvidenceError:
        with contextlib.suppress(OSError):  # the finding is raised, whatever the disk does
            shutil.rmtree(refused, ignore_errors=True)
            final.rename(refused)
        raise
    shutil.rmtree(refused, ignore_errors=True)
    if proof is None:
        result.final_model = {"proven": False}
        return
    compared = {name: value for name, value in to_plain(proof).items() if value is not None}
    result.final_model = {"proven": True, **compared}
    logger.info("Final model: %s", proof.describe())


SCHEMA = "tunix-rt/export-proof/1"
PROOF = "export_proof.json"
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BESIDE_BYTES = 64 * 2**20
"""Disk space for tokenizer, configuration and `export_proof.json`."""
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An exported folder and its round-trip check."""

    folder: Path
    model: str
    dtype: str
    proof: RoundTrip
    loader: str = "transformers"

    def describe(self) -> str:
        return f"{self.model} is in {self.folder} ({self.dtype}), {self.proof.describe(self.loader)}"

    @property
    def commands(self) -> tuple[str, ...]:
        """What serves it elsewhere; adapters need their base model too."""
        return (f"vllm serve {self.folder}",) if self.loader == "transformers" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is exported: a model folder, its tokenizer, and the settings of the run that trained it."""

    source: ModelSource
    tokenizer: Path
    dtype: str
    """Of the stored weights."""
    data: Data
    today: date | None = None
    adapted: Training | None = None
    """Settings of a LoRA run, whose checkpoints contain the adapters alone."""
    checkpoint: Path | None = None
    adapter: bool = False
    """The adapters alone are exported."""
    more_stops: tuple[int, ...] = ()
    """Tokens that end a generation beside those of tokenizer and template."""


def export_model(
    name: str,
    output: Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
) -> Export:
    """Write the model `name`, or of a LoRA run the `adapter` alone, into the folder `output`, in Hugging Face layout, with
    `export_proof.json` beside it.

    The folder gets its name after the round-trip check: a difference is an EvidenceError, and nothing is left behind."""
    refuse_address("the model", name)
    refuse_occupied(output)
    with find_origin(name, step=step, best=best, adapter=adapter) as origin:
        kind = _dtype_of(origin, dtype)
        size = sum(path.stat().st_size for path in origin.source.weight_files())
        loaded = written = size * ITEM_BYTES[kind] // ITEM_BYTES[origin.dtype]
        if adapter and origin.checkpoint is not None:
            written = (origin.checkpoint / WEIGHTS).stat().st_size
        require_space(output, written + BESIDE_BYTES, what="the exported model")
        chosen = device_for(device, kind, loaded)
        place = Path(os.path.abspath(output))
        with staged_folder(place) as staged:
            return _write_and_check(origin, staged, output, device=chosen, dtype=kind)


def refuse_occupied(output: Path) -> None:
    with storage(output):
        if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
            raise ConfigError(f"--output: {output} is not empty", fix="name a folder that does not exist yet")


def device_for(requested: str, dtype: str, weights: int) -> str:
    choice = find_device(requested, dtype)
    device = choice.device
    if weights > choice.free_bytes:
        raise DoesNotFitError(
            f"the weights take {weights / 2**30:.2f} GiB in {dtype}; {device} has {choice.free_bytes / 2**30:.2f} GiB free",
            fix="free memory there, or export on another device",
        )
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: export needs cpu or cuda", fix="--device cpu")
    return device


# --- what is exported ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def find_origin(name: str, *, step: int | None, best: bool, adapter: bool) -> Iterator[Origin]:
    """The model of that name. A checkpoint gets a temporary model folder."""
    run = RunDir(Path(os.path.expanduser(name)))
    is_run = os.path.isdir(run.root) and run.holds_a_run()
    if (step is not None or best or adapter) and not is_run:
        raise ConfigError(f"{name} is not a run: it has no checkpoints", fix="remove --step, --best and --adapter")
    if step is not None and best:
        raise ConfigError("--step and --best name two checkpoints", fix="remove one of them")
    if not is_run:
        yield of_model(name)
    elif step is None and not best and not adapter:
        yield _of_final_model(run)
    else:
        step = adapter_step(run, step, best=best) if adapter else step
        with tempfile.TemporaryDirectory(prefix="tunix-rt-export-") as scratch:
            yield replace(_of_checkpoint(run, _checkpoint(run, step), Path(scratch)), adapter=adapter)


def of_model(name: str) -> Origin:
    source = resolve_model(name, or_random=False)
    return Origin(
        source=source,
        tokenizer=source.folder,
        dtype=_kept_in(source),
        data=Data(),
        more_stops=_eos_ids(source.folder),
    )


def _kept_in(source: ModelSource) -> str:
    """The dtype of the stored weights; of a multimodal model, config.json has it beside the text model's."""
    outer = read_json(source.folder / "config.json")
    for config in (outer if isinstance(outer, dict) else {}, source.config):
        for key in ("dtype", "torch_dtype"):
            if config.get(key) in ITEM_BYTES:
                return str(config[key])
    return "float32"


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """The eos_token_id of generation_config.json: some models have more than one."""
    path = folder / "generation_config.json"
    content = read_json(path) if path.is_file() else {}
    named = content.get("eos_token_id") if isinstance(content, dict) else None
    listed = named if isinstance(named, list) else [named]
    return tuple(number for number in listed if type(number) is int and number >= 0)


def _of_final_model(run: RunDir) -> Origin:
    if not run.final_model.is_dir():
        raise run_folder.no_final_model(run)
    data, today = load_config(run.config).data, began_on(read_precommit(run))
    return replace(of_model(str(run.final_model)), data=data, today=today, more_stops=())


def _checkpoint(run: RunDir, step: int | None) -> Path:
    """The checkpoint of `step`, or the best without one; its hashes are verified."""
    if step is None:
        step = best_checkpoint(run).get("best_step")
        if step is None:
            raise InputError(f"{run.root}: no checkpoint has a held-out loss", fix="name one with --step")
    checkpoint = run.checkpoints / checkpoint_name(step)
    if not (steps := _steps(run)):
        raise InputError(
            f"{run.root} has no checkpoint", fix="finish it: run the same `tunix-rt train` command with --resume"
        )
    if not checkpoint.is_dir():
        raise InputError(f"{run.root} has no checkpoint of step {step}", fix=f"give --step one of: {steps}")
    if problems := checkpoint_problems(checkpoint):
        raise EvidenceError(f"{checkpoint} is corrupt: {'; '.join(problems[:3])}", fix="export another step")
    return checkpoint


def _steps(run: RunDir) -> str:
    return ", ".join(str(checkpoint_step(one)) for one in reversed(list_checkpoints(run.checkpoints)))


def _of_checkpoint(run: RunDir, checkpoint: Path, scratch: Path) -> Origin:
    """The weights of a checkpoint as a model folder; of adapters, their base model with them."""
    config = load_config(run.config)
    training, today = config.training, began_on(read_precommit(run))
    base, tokenizer = _base_model(run, config, adapted=training.lora_rank is not None)
    origin = Origin(
        source=base, tokenizer=tokenizer, dtype=_kept_in(base), data=config.data, today=today, checkpoint=checkpoint
    )
    if training.lora_rank is not None:
        _refuse_another_base(run, base)
        return replace(origin, adapted=training)
    write_json(scratch / "config.json", base.config)
    _whole_weights(checkpoint, scratch / WEIGHTS)
    name = f"{run.root} step {checkpoint_step(checkpoint)}"
    source = ModelSource(name=name, folder=scratch, revision="local", weights="pretrained", config=base.config)
    return replace(origin, source=source, dtype=recipe_of(training).weights)


def _whole_weights(checkpoint: Path, to: Path) -> None:
    """The weights of a checkpoint as one file: a link, or where several ranks wrote them, a copy."""
    with storage(checkpoint):
        files = [checkpoint / name for name in parts_of(WEIGHTS, [one.name for one in checkpoint.iterdir()])]
        if len(files) == 1:
            to.symlink_to(files[0].resolve())
            return
        require_space(to.parent, sum(path.stat().st_size for path in files), what="a copy of the weights")
        join_files(files, to)


def _refuse_another_base(run: RunDir, base: ModelSource) -> None:
    """Adapters belong to the base weights they were trained with."""
    committed = read_precommit(run).get("base_model", {}).get("files", {})
    changed = sorted(path.name for path in base.weight_files() if committed.get(path.name) != sha256_file(path))
    if changed:
        raise EvidenceError(
            f"{base.name}: {', '.join(changed)} differs from the base model of the run in {run.root}",
            fix="restore the base model, or export the final model of the run: remove --step, --best and --adapter",
        )


def _base_model(run: RunDir, config: RunConfig, *, adapted: bool) -> tuple[ModelSource, Path]:
    """The base model of a run and the folder of its tokenizer; without adapters its architecture is enough."""
    if not adapted and (run.final_model / "config.json").is_file():
        return resolve_model(str(run.final_model), weights="random"), run.final_model
    named = config.model
    if adapted and named.weights == "random":
        raise InputError(
            f"{run.root}: the checkpoints contain adapters alone, and the base weights are random",
            fix="export its final model: remove --step, --best and --adapter",
        )
    weights = named.weights if adapted else "random"
    base = resolve_model(named.model_name_or_path or "", revision=named.revision, weights=weights)
    return base, resolve_tokenizer(named.tokenizer_name_or_path) if named.tokenizer_name_or_path else base.folder


def _dtype_of(origin: Origin, requested: str | None) -> str:
    kind = requested or ("float32" if origin.adapted is not None or origin.dtype == "float64" else origin.dtype)
    if origin.adapted is not None and kind != "float32":
        merge = "export in float32 first, then export that folder with --dtype"
        raise ConfigError(
            f"--dtype {kind}: adapters are {'saved' if origin.adapter else 'merged'} in float32",
            fix="remove --dtype" if origin.adapter else merge,
        )
    return kind


# --- writing and checking --------------------------------------------------------------------------------------------


def _write_and_check(origin: Origin, folder: Path, output: Path, *, device: str, dtype: str) -> Export:
    backend = load_backend("torch")
    tokenizer = load_tokenizer(origin.tokenizer, str(origin.source.config["model_type"]))
    style = style_of(origin.data, tokenizer, today=origin.today)
    ends = sorted({*stop_ids(tokenizer, style), *origin.more_stops})
    engine = _load(backend, origin, device=device, dtype=dtype)
    written = None
    if origin.adapter and origin.adapted is not None and origin.checkpoint is not None:
        written = write_adapter(
            folder, checkpoint=origin.checkpoint, base=origin.source, training=origin.adapted,
            tokenizer_folder=tokenizer.folder, chat_template=built_in_template(style),
        )  # fmt: skip
    else:
        save_final(backend, engine, folder, tokenizer=tokenizer, style=style, ends=ends)
    checked = _check(backend, engine, folder, tokenizer=tokenizer, style=style, ends=ends, adapter=written)
    with storage(folder):
        files = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    source = origin.source
    model = source.name if origin.adapted is None else f"{source.name} with the adapters of {origin.checkpoint}"
    facts: dict[str, Any] = {"model": model, "revision": source.revision, "dtype": dtype, "files": files}
    if source.converted_from is not None:
        facts["converted_from"] = source.converted_from
    write_json(folder / PROOF, {"schema": SCHEMA, **facts, "proof": asdict(checked)})
    return Export(
        folder=output, model=model, dtype=dtype, proof=checked, loader="peft" if origin.adapter else "transformers"
    )


@phase("load the weights")
def _load(backend: Backend, origin: Origin, *, device: str, dtype: str) -> Engine:
    if origin.adapted is None or origin.checkpoint is None:
        return backend.load_for_inference(origin.source, device=device, dtype=dtype)
    training = origin.adapted
    if origin.adapter:  # plain `peft` adds it to whole weights, and is compared with that
        training = training.model_copy(update={"load_in_4bit": False})
    engine = backend.load(origin.source, device=device, training=training)
    optimizer = backend.make_optimizer(engine, training)  # of the adapters alone: it is small
    backend.restore_state(engine, optimizer, origin.checkpoint, step=checkpoint_step(origin.checkpoint))
    return engine


@phase("reload check")
def _check(
    backend: Backend, engine: Engine, folder: Path, *, tokenizer: Tokenizer, style: Style, ends: list[int],
    adapter: Mapping[str, list[Any]] | None,
) -> RoundTrip:  # fmt: skip
    """Compute the reference, release the model, then compare: only one model is in memory."""
    try:
        reference = reference_of(backend, engine, tokenizer=tokenizer, style=style, stop_ids=ends, adapter=adapter)
    except InputError as error:
        if engine.recipe.compute != "float16":
            raise
        raise InputError(
            error.problem, fix="float16 overflows at 65,504, which is too low for some models: --dtype bfloat16"
        ) from error
    backend.release(engine)
    checked = check_folder(reference, folder)
    if checked is None:
        raise DoesNotFitError(
            "the exported model could not be reloaded for the round-trip check (the log has the reason), and was removed",
            fix="free memory, export it with --device cpu, or on a larger computer",
        )
    return checked

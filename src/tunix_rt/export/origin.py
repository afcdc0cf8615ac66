"""What is exported: the model of a name, of a run, or of a checkpoint, with its tokenizer and settings."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Data, RunConfig, Training
from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.export.adapter import adapter_step
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.models.safetensors import join_files, part_files
from tunix_rt.plan.precision import recipe_of
from tunix_rt.progress import phase
from tunix_rt.runs import folder as run_folder
from tunix_rt.runs.folder import RunDir, checkpoint_name, checkpoint_problems, checkpoint_step, list_checkpoints
from tunix_rt.storage import read_json, require_space, sha256_file, storage, write_json
from tunix_rt.train.checkpointer import best_checkpoint
from tunix_rt.train.commitment import began_on, read_precommit

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
WEIGHTS = "model.safetensors"
PROOF = "export_proof.json"


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
        files = part_files(checkpoint, WEIGHTS)
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


def source_weights(origin: Origin) -> list[str]:
    """SHA-256 of the weights that are exported; of a folder of `tunix-rt export`, of those that it was exported from."""
    folder, files = origin.source.folder, origin.source.weight_files()
    with storage(folder), phase("hash the weights"):
        if origin.checkpoint is not None:
            files = part_files(origin.checkpoint, WEIGHTS)
        hashes = sorted(map(sha256_file, files))
        proof = read_json(folder / PROOF) if origin.checkpoint is None and (folder / PROOF).is_file() else {}
    return list(proof["weights"]) if "weights" in proof and {*hashes} <= {*proof["files"].values()} else hashes

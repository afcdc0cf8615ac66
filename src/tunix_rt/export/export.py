"""`final_model`: the trained model with its tokenizer, as other tools load it, and the check that a fresh process loads it."""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunix_rt.data.render import Style, style_of
from tunix_rt.data.template import BUILT_IN
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.engines.base import Backend, Engine, load_backend
from tunix_rt.errors import ConfigError, DoesNotFitError, EvidenceError, InputError
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.export.adapter import write_adapter
from tunix_rt.export.origin import ITEM_BYTES, PROOF, WEIGHTS, Origin, find_origin, source_weights
from tunix_rt.export.roundtrip import RoundTrip, check_folder, check_round_trip, reference_of
from tunix_rt.models.safetensors import part_files
from tunix_rt.models.secrets import refuse_address
from tunix_rt.progress import phase
from tunix_rt.runs.folder import checkpoint_step
from tunix_rt.storage import require_space, sha256_file, staged_folder, storage, to_plain, write_json
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
BESIDE_BYTES = 64 * 2**20
"""Disk space for tokenizer, configuration and `export_proof.json`."""


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
            written = sum(path.stat().st_size for path in part_files(origin.checkpoint, WEIGHTS))
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
    facts["weights"] = source_weights(origin)
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

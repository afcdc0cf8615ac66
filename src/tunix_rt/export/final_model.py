"""`final_model`: the trained model with its tokenizer, as other tools load it, and the check that a fresh process loads it."""

import contextlib
import logging
import shutil
from pathlib import Path

from tunix_rt.data.render import Style
from tunix_rt.data.template import BUILT_IN
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.engines.base import Backend, Engine
from tunix_rt.errors import EvidenceError
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.export.roundtrip import check_round_trip
from tunix_rt.storage import to_plain
from tunix_rt.train.context import RunContext

logger = logging.getLogger(__name__)

ROUNDTRIP_SECONDS = 20.0
"""Time that the round-trip check of a small model takes, with a margin; it is skipped where a time budget has less left."""


def save_final(
    backend: Backend, engine: Engine, folder: Path, *, tokenizer: Tokenizer, style: Style, dtype: str | None
) -> None:
    """Save the model and its tokenizer. With `dtype`, the weights of `engine` are rounded to it first: what it generates
    afterwards is what the saved model generates."""
    if dtype is not None:
        backend.round_weights(engine, dtype)
        logger.info("Final model: weights rounded to %s", dtype)
    template = style.template
    backend.save(
        engine, folder, tokenizer_folder=tokenizer.folder, stop_ids=stop_ids(tokenizer, style),
        chat_template=template.jinja if template.name in BUILT_IN else None,  # it was trained with it
    )  # fmt: skip


def export_final(context: RunContext, engine: Engine) -> None:
    save_final(
        context.backend, engine, context.run.final_model, tokenizer=context.tokenizer, style=context.data.style,
        dtype=context.config.training.save_dtype,
    )  # fmt: skip
    context.phases.end(engine, "export")


def check_final_model(context: RunContext, engine: Engine) -> None:
    """Load `final_model` in a fresh process and compare. A model that differs there is moved aside, and the run fails."""
    context.stop.check(f"all {context.total} steps are saved")
    result, final = context.journal.result, context.run.final_model
    if context.stop.why(needed_seconds=ROUNDTRIP_SECONDS):
        logger.warning("The final model was not reloaded: no time is left; `tunix-rt export` on this run checks it")
        result.final_model = {"proven": False}
        return
    tokenizer, style = context.tokenizer, context.data.style
    refused = final.with_name("final_model-refused")
    try:
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

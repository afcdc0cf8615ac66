"""`tunix-rt init`: five questions, or flags, and a commented configuration that fits the device."""

import sys
from pathlib import Path
from typing import Any

import click

METHODS = ("auto", "full", "lora", "qlora")


@click.command()
@click.argument("file", default="config.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="Hub id, local folder, GGUF file, or a shipped model.")
@click.option("--data", help="Dataset key, file or folder.")
@click.option("--method", type=click.Choice(METHODS), help="What is trained; auto, the default: the first that fits.")
@click.option("--max-length", type=click.IntRange(8), help="Tokens of a row [1024, or the positions of the model].")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), help="Passes over the data [3].")
@click.option("--on", metavar="NAME", help="Another device: t4, rtx4090, h200, 8gb, or a facts.json of the doctor.")
def init(file: Path, **given: Any) -> None:
    """Write FILE, a commented configuration that fits this computer by the planner, or the device of --on.

    On a terminal, what no flag gives is asked. The file is never overwritten.
    """
    from tunix_rt.cli.plan_targets import resolve_target
    from tunix_rt.cli.views import text
    from tunix_rt.config.load import build_config
    from tunix_rt.errors import ConfigError, InputError
    from tunix_rt.models.resolve import PRESET_OF, refuse_unavailable
    from tunix_rt.models.secrets import refuse_addresses, refuse_secrets
    from tunix_rt.plan.starter import starter
    from tunix_rt.runs.folder import model_of_run
    from tunix_rt.storage import storage, write_text
    from tunix_rt.train.plan_inputs import find_architecture

    if file.exists() or file.is_symlink():
        raise ConfigError(f"{file} exists", fix="give a new file: tunix-rt init OTHER.yaml")
    asking = sys.stdin.isatty()
    model = model_of_run(_answer("Model", given["model"], "--model", None, asking))
    engine = "jax" if (given["on"] or "").startswith("tpu") else "torch"
    config = build_config({"model": {"model_name_or_path": model}, "training": {"backend": engine}}, "init")
    refuse_addresses(config.model_dump())
    target = resolve_target(given["on"], config).target
    source, shape = find_architecture(config)
    positions = min(1024, shape.max_positions)
    data = _answer("Data (a file, a folder or a dataset key)", given["data"], "--data", None, asking)
    method = _answer(f"Train on {target.name}: {', '.join(METHODS)}", given["method"], "--method", "auto", asking)
    length = _answer("Tokens of a row", given["max_length"], "--max-length", positions, asking)
    epochs = _answer("Passes over the data", given["epochs"], "--epochs", 3.0, asking)
    settings = {
        "model.model_name_or_path": model, "data.dataset": data, "data.max_length": length, "training.num_train_epochs": epochs,
    }  # fmt: skip
    refuse_secrets({"data": {"dataset": data}})
    if method not in METHODS:
        raise ConfigError(f"no method {method!r}", fix=f"use one of: {', '.join(METHODS)}")
    found = starter(settings, method, shape, target)
    with storage(file):
        write_text(file, found.yaml(target.name))
    for sentence in found.misfits:
        text.show_note(f"not {sentence}")
    if source.revision == "preset" and source.name not in PRESET_OF:
        try:
            refuse_unavailable(source.name)
        except InputError as error:
            text.show_note(f"before it trains: {error.problem}; {error.fix}")
    on = f" --on {given['on']}" if given["on"] else ""
    text.show_note(f"written: {file} ({source.name}, {found.plan.verdict} on {target.name}); next:")
    text.show_note(f"  {text.program()} train {file} --dry-run{on}")


def _answer(question: str, given: Any, flag: str, default: Any, asking: bool) -> Any:
    """The flag, what a person types, or the default."""
    from tunix_rt.errors import ConfigError

    if given is not None:
        return given
    if asking:
        return click.prompt(question, default=default, err=True)
    if default is None:
        raise ConfigError(f"{flag} is missing, and there is no terminal to ask", fix=f"add {flag} NAME")
    return default

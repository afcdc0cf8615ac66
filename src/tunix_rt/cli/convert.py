"""`tunix-rt convert`: a configuration of another trainer as one of ours, with what became of every key."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tunix_rt.config.dialects.conversion import Conversion

NAMES = ("axolotl", "llama-factory", "trl", "torchtune")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "dialect", type=click.Choice(NAMES), help="Whose configuration it is; detected unless given.")
@click.option("--to", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the YAML to this new file.")
@click.option("--json", "as_json", is_flag=True, help="Print settings and keys as JSON.")
def convert(file: Path, dialect: str | None, out: Path | None, as_json: bool) -> None:
    """Convert FILE: Axolotl, LLaMA-Factory or torchtune YAML, or the arguments of `trl sft` (YAML, JSON, command line).

    Every key is mapped, reported as without effect here, or refused with the nearest way. With a refused key nothing is
    written, and the exit code is 2.
    """
    from tunix_rt.cli.views import text
    from tunix_rt.config.dialects.conversion import convert as convert_text
    from tunix_rt.config.load import build_config
    from tunix_rt.config.strict_yaml import read_text
    from tunix_rt.errors import ConfigError
    from tunix_rt.models.secrets import refuse_secrets
    from tunix_rt.storage import storage, write_text

    found = with_known_model(convert_text(read_text(file), str(file), dialect=dialect, folder=Path()))
    if as_json:
        parts = asdict(found)
        text.show_json({key: parts[key] for key in parts if key != "origins"})
    else:
        show_keys(found, file)
    found.require_accepted(str(file))
    refuse_secrets(build_config(found.nested(), str(file)).model_dump())
    if out is None:
        if not as_json:
            click.echo(found.yaml(file.name), nl=False)
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists", fix="give a new file: --to OTHER.yaml")
    with storage(out):
        write_text(out, found.yaml(file.name))
    click.echo(f"written: {out}; next: tunix-rt plan {out}", err=True)


def with_known_model(found: "Conversion") -> "Conversion":
    """The same, with `trust_remote_code` without effect where the type of the model is known."""
    if not found.asks_for_remote_code:
        return found
    from tunix_rt.models.resolve import type_is_known

    model, revision = (found.settings.get(f"model.{key}") for key in ("model_name_or_path", "revision"))
    return found.without_remote_code() if type_is_known(str(model), str(revision or "main")) else found


def show_conversion(found: "Conversion", path: Path) -> "Conversion":
    """The `report` of `load_config`."""
    found = with_known_model(found)
    show_keys(found, path)
    return found


def show_keys(found: "Conversion", path: Path) -> None:
    """What became of every key, on stderr."""
    click.echo(f"{path}: a configuration of {found.title}", err=True)
    for title, lines in (
        ("mapped", found.mapped),
        (f"defaults of {found.title}", found.defaults),
        ("without effect here", found.without_effect),
    ):
        if lines:
            click.echo("\n".join([f"  {title}:", *(f"    {line.describe()}" for line in lines)]), err=True)

"""`tunix-rt export`: a model in Hugging Face layout, with a round-trip check."""

from dataclasses import asdict
from pathlib import Path

import click


@click.command()
@click.argument("model")
@click.option(
    "--to", "layout", type=click.Choice(["hf"]), default="hf", show_default=True, help="Layout of the folder."
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder that does not exist yet.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device to load it on.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights. Unset: unchanged.",
)
@click.option(
    "--step", type=click.IntRange(min=1), help="Of a run: the checkpoint of this step instead of the final model."
)
@click.option("--best", is_flag=True, help="Of a run: the checkpoint with the lowest held-out loss.")
@click.option("--json", "as_json", is_flag=True, help="Print the round-trip check as JSON.")
def export(
    model: str,
    layout: str,
    output: Path,
    device: str,
    dtype: str | None,
    step: int | None,
    best: bool,
    as_json: bool,
) -> None:
    """Write MODEL (a run folder, model folder, GGUF file, shipped model or hub id) for transformers, with a round-trip check.

    A fresh process reloads the folder with plain transformers and compares weights, logits, greedy generations, tokens and chat
    template with the model in memory. A difference is exit 6, and the folder is removed.
    """
    from tunix_rt.cli.views import text
    from tunix_rt.export.export import export_model
    from tunix_rt.storage import to_plain

    done = export_model(model, output, device=device, dtype=dtype, step=step, best=best)
    if as_json:
        text.show_json(to_plain(asdict(done)) | {"layout": layout})
    else:
        text.show_lines([done.describe()])

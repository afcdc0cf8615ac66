"""`tunix-rt push`: a model on the hub, with a model card."""

from pathlib import Path

import click


@click.command()
@click.argument("run")
@click.argument("repository")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), help="A folder of `tunix-rt export` [final_model]."
)
@click.option("--private", is_flag=True, help="A private repository.")
@click.option("--yes", is_flag=True, help="Upload. Without it, nothing is sent.")
@click.option("--json", "as_json", is_flag=True, help="Print files, card and the address of the commit as JSON.")
def push(run: str, repository: str, folder: Path | None, private: bool, yes: bool, as_json: bool) -> None:
    """Upload the final model of RUN to REPOSITORY (OWNER/NAME) on the hub, with a model card made from the run.

    Without --yes, the files and the card are printed, and nothing is sent. The token is that of `hf auth login` or HF_TOKEN."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.export.push import plan_push, push

    with watching():
        planned = plan_push(run, repository, folder=folder, private=private)
        address = push(planned) if yes else None
    if as_json:
        text.show_json(planned.facts() | {"commit": address})
    else:
        text.show_lines(
            [f"uploaded: {address}"] if address else [*planned.describe(), "Nothing was sent; --yes uploads it"]
        )

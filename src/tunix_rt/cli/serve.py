"""`tunix-rt serve`: an OpenAI-compatible endpoint on this computer."""

from functools import partial
from pathlib import Path

import click

from tunix_rt.cli.main import Dtype

PORT = 8000


@click.command()
@click.argument("model", metavar="RUN")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: a free one.")
@click.option("--max-new-tokens", type=click.IntRange(1, 65_536), help="Of a request that sets no limit [256].")
@click.option("--device", default="auto", help="auto, cpu or cuda (gpu).")
@click.option("--dtype", type=Dtype(), help="Unset: the best for the device.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Rendering of prompts (data.*).")
def serve(
    model: str, port: int, max_new_tokens: int | None, device: str, dtype: str | None, overrides: tuple[str, ...]
) -> None:
    """Serve RUN (a run folder, or any model that `generate` takes) to OpenAI clients on this computer. Ctrl-C stops it."""
    from tunix_rt import loopback
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.errors import InputError
    from tunix_rt.inference import MAX_NEW_TOKENS, inference_device, load_resolved, model_spec, resolve_spec
    from tunix_rt.runs.folder import RunDir
    from tunix_rt.runs.index import DEFAULT_FOLDER, is_training_in
    from tunix_rt.serve.app import Served, make_app

    place = Path(model).expanduser()
    runs = place.absolute().parent if RunDir(place).holds_a_run() else Path(DEFAULT_FOLDER)
    spec = model_spec(model, overrides)
    with loopback.listen("127.0.0.1", port) as bound:
        if is_training_in(runs):
            raise InputError(f"a run is training in {runs}, and needs the device", fix="serve when it has ended")
        with watching():
            loaded = load_resolved(resolve_spec(spec, *inference_device(device, dtype)))
            name = place.absolute().name if place.exists() else model
            served = Served(loaded, name, max_new_tokens or MAX_NEW_TOKENS, partial(is_training_in, runs))

        def ready() -> None:
            click.echo(f"Serving {model} as model {name}: http://127.0.0.1:{bound.getsockname()[1]}/v1")
            click.echo("Ctrl-C stops it.", err=True)

        loopback.serve(make_app(served), bound, ready, served.batcher.close)

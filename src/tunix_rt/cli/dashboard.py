"""`tunix-rt dashboard`: pages over the runs of a folder, in a browser on this computer."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tunix_rt.dashboard.site import Site

LOCAL = ("127.0.0.1", "::1", "localhost")
WIDE_OPEN = ("0.0.0.0", "::")


@click.command()
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: a free one.")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Where to listen; default: this computer alone.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Another name under which a browser may ask; may be repeated.",
)
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
@click.option("--no-key", is_flag=True, help="Whoever reaches the port may read; other users of this computer too.")
@click.option("--chat", "chat_run", metavar="RUN", help="Also try RUN's model beside its base model, at /try.")
@click.option(
    "--export",
    "target",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the pages as files into DIR, and stop.",
)
def dashboard(
    folder: Path | None, port: int, host: str, hosts: tuple[str, ...], no_open: bool, no_key: bool, chat_run: str | None,
    target: Path | None,
) -> None:  # fmt: skip
    """Look at the runs below FOLDER (default: runs), or at the run FOLDER, in a browser. Ctrl-C stops it.

    It never writes into a run folder."""
    from tunix_rt.dashboard.site import Site
    from tunix_rt.errors import ConfigError, InputError
    from tunix_rt.runs.folder import RunDir
    from tunix_rt.runs.index import DEFAULT_FOLDER, run_id

    below = folder or Path(DEFAULT_FOLDER)
    if folder is not None and not below.is_dir():
        fix = "give the parent of the run folders; `tunix-rt train demo --output runs/demo` makes a run"
        raise InputError(f"{below}: no such folder", fix=fix)
    if no_key and host not in LOCAL:
        raise ConfigError("--no-key is for this computer alone", fix="leave out --no-key or --host")
    for name in hosts:
        if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]", name):
            fix = "give the name alone, as gpu-host or [::1]: it is allowed at every port"
            raise ConfigError(f"--allow-host {name}: not a host name", fix=fix)
    is_run = RunDir(below).holds_a_run()
    site = Site.of(below.absolute().parent if is_run else below, chat_run=chat_run)
    start = f"/runs/{run_id(below.absolute().name)}" if is_run else "/"
    if target is not None:
        from tunix_rt.dashboard.export import Export

        count = Export(site=site, start=start).write(target, lambda name: click.echo(f"verifying {name}", err=True))
        click.echo(f"{count} pages in {target}; open {target / 'index.html'}")
        return
    _serve(site, start, host=host, port=port, hosts=hosts, has_key=not no_key, opens=not no_open)


def _serve(
    site: "Site", start: str, *, host: str, port: int, hosts: tuple[str, ...], has_key: bool, opens: bool
) -> None:
    """`start` is the page that the printed address leads to."""
    from tunix_rt.dashboard.app import make_app
    from tunix_rt.dashboard.guard import Guard, new_key
    from tunix_rt.loopback import LOOPBACK, listen, serve

    bound = listen(host, port)
    port = bound.getsockname()[1]
    more = () if host in WIDE_OPEN else (f"[{host}]" if ":" in host else host,)
    names = tuple(name.lower() for name in (*LOOPBACK, *more, *hosts))
    guard = Guard(hosts=names, port=port, key=new_key() if has_key else None, once=[new_key()])
    shown = "127.0.0.1" if host in WIDE_OPEN else f"[{host}]" if ":" in host else host
    page = f"http://{shown}:{port}{start}"
    address = page + (f"?key={guard.key}" if guard.key else "")

    def ready() -> None:
        click.echo(f"Dashboard of {site.folder}: {address}")
        if host not in LOCAL:
            click.echo("warning: the network can reach it; whoever has this address can read the runs", err=True)
        click.echo("Ctrl-C stops it.", err=True)
        if opens:
            # Other users can read the words of the program that opens a browser.
            click.launch(f"{page}?key={guard.once[0]}" if guard.key else page)

    serve(make_app(site, guard), bound, ready, site.chat.close if site.chat else lambda: None)

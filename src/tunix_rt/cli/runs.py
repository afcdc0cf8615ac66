"""`tunix-rt runs`: lists and shows run folders, finished or not; `rm` and `archive` delete them.

A run may be live, so a missing file is an unknown fact and a torn last line is skipped; a corrupt file is named.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunix_rt.cli.main import Group
from tunix_rt.cli.views import text

if TYPE_CHECKING:
    from tunix_rt.evaluate.report import Row
    from tunix_rt.runs.index import RunSummary
    from tunix_rt.runs.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """What `tunix-rt runs show` prints. Curves are (step, loss)."""

    summary: "RunSummary"
    reason: str | None
    model: str | None
    dataset: str | None
    parameters: int | None
    seconds: float | None
    losses: list[tuple[int, float]]
    heldout: list[tuple[int, float]]
    predicted_bytes: int | None
    measured_bytes: int | None
    best_step: int | None = None
    best_heldout_loss: float | None = None
    resumed_from: int | None = None
    """The step after which the run resumed; None for a run without interruption."""
    extended: tuple[tuple[int, int], ...] = ()
    """(from, to) steps of each extension."""
    skipped_checkpoints: tuple[str, ...] = ()
    """Corrupt checkpoints that were skipped at the resume, each with its problem."""
    table: "list[Row]" = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _ListByDefault(Group):
    """`runs`, `runs DIR` and `runs --json` are short for `runs list ...`; write a folder named `show` as `./show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def runs() -> None:
    """List runs, show one, delete or archive them. `tunix-rt runs [DIR]` is short for `tunix-rt runs list [DIR]`."""


@runs.command("list")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_(folder: Path | None, as_json: bool) -> None:
    """List the runs below DIR (default: runs), newest first."""
    from tunix_rt.runs.index import DEFAULT_FOLDER, list_runs

    found = list_runs(folder)
    if as_json:
        text.show_json([asdict(run) for run in found])
    elif found:
        text.show_runs(found, str(folder or DEFAULT_FOLDER))
    else:
        click.echo(f"no runs below {folder or DEFAULT_FOLDER}", err=True)


@runs.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the run as JSON.")
def show(run: Path, as_json: bool) -> None:
    """Show one RUN: loss curve, scores before and after, memory, files."""
    from tunix_rt.runs.index import find_run

    detail = read_run(find_run(run))
    if as_json:
        text.show_json(asdict(detail))
    else:
        text.show_run(detail)


YES = click.option("--yes", is_flag=True, help="Do not ask.")
RUNS = click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))


@runs.command("rm")
@RUNS
@YES
def remove(folders: tuple[Path, ...], yes: bool) -> None:
    """Delete every RUN with its checkpoints and its model. Asks first; a live run is refused."""
    from tunix_rt.runs.index import find_run
    from tunix_rt.runs.removal import held, remove

    for root in [find_run(folder) for folder in folders]:
        with held(root) as run:
            if _agreed(run.root, "delete", yes):
                remove(run)
                click.echo(f"deleted: {root}", err=True)


@runs.command()
@RUNS
@click.option("--to", "out", type=click.Path(path_type=Path), help="The tar file, for one RUN [RUN.tar].")
@YES
def archive(folders: tuple[Path, ...], out: Path | None, yes: bool) -> None:
    """Pack every RUN into a tar file, read it back, then delete the folder. Asks first; a live run is refused."""
    from tunix_rt.runs.index import find_run
    from tunix_rt.runs.removal import archive, held

    if out is not None and len(folders) > 1:
        raise click.UsageError("--to names the file of one run")
    for root in [find_run(folder) for folder in folders]:
        to = out or root.with_name(f"{root.name}.tar")
        with held(root) as run:
            if _agreed(run.root, f"pack into {to} and delete", yes):
                click.echo(f"packed: {to}, {text.gib(archive(run, to))}; unpack it with: tar -xf {to}", err=True)


def _agreed(root: Path, what: str, yes: bool) -> bool:
    """Whether a person agrees; ConfigError where nobody can be asked."""
    from tunix_rt.errors import ConfigError
    from tunix_rt.storage import bytes_below

    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked whether to {what} {root}", fix="add --yes")
    return click.confirm(f"{what} {root} ({text.gib(bytes_below(root))})?", err=True)


def read_run(root: Path) -> RunDetail:
    """Everything that `show` prints about the run in `root`."""
    from tunix_rt.runs.index import known, summary_of
    from tunix_rt.runs.record import RunRecord

    record = RunRecord(root)
    result, memory, config = record.result, record.memory, record.config
    losses, heldout = ([(line.step, line.loss) for line in lines] for lines in (record.metrics, record.heldout))
    skipped = (result.skipped_checkpoints or ()) if result else ()
    detail = RunDetail(
        summary=summary_of(record),
        **known(result, "reason", "parameters", "seconds", "best_step", "best_heldout_loss"),
        **known(memory, "predicted_bytes", "measured_bytes"),
        model=config.model.model_name_or_path if config else None,
        dataset=config.data.key if config else None,
        losses=losses,
        heldout=heldout,
        resumed_from=(result.resumed_from or None) if result else None,
        extended=tuple((one.after_step, one.max_steps) for one in record.extensions),
        skipped_checkpoints=tuple(f"{one.name}: {', '.join(one.problems)}" for one in skipped),
        table=_table(record),
        paths=_paths(root),
    )
    half = [f"the last line of {name} is torn" for name in record.torn]
    return replace(detail, notes=(*record.listing.problems, *(one[0] for one in record.problems.values()), *half))


def _table(record: "RunRecord") -> "list[Row]":
    from tunix_rt.evaluate.report import table

    before = record.scores("before")
    return table(before, record.scores("after")) if before else []


def _paths(root: Path) -> dict[str, str]:
    from tunix_rt.runs.folder import RunDir, list_checkpoints

    run = RunDir(root)
    places = {"model": run.final_model, "samples": run.samples, "log": run.log, "hashes": run.hashes}
    if checkpoints := list_checkpoints(run.checkpoints):
        places["newest checkpoint"] = checkpoints[0]
    return {name: str(path) for name, path in places.items() if path.exists()}

"""`tunix-rt runs`: what is in the run folders, finished or not. Reads, never writes.

A run may be under way while it is looked at, so a missing file is a fact that is not known yet and a half-written last
line is passed over; a damaged file is named.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunix_rt.cli import text
from tunix_rt.errors import InputError, TunixError

if TYPE_CHECKING:
    from tunix_rt.evaluate.report import Row
    from tunix_rt.rundir import RunDir

UNFINISHED = "running or interrupted"
DEFAULT_FOLDER = "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of `tunix-rt runs`. What is not known is None."""

    folder: str
    status: str
    steps_completed: int | None = None
    steps_planned: int | None = None
    final_loss: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    lenient_before: float | None = None
    lenient_after: float | None = None
    device: str | None = None
    when: str | None = None
    """When the run finished; of an unfinished one, when it last wrote."""
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """What `tunix-rt runs show` tells. Curves are (step, loss)."""

    summary: RunSummary
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
    """The step this run went on after; None for one that was never interrupted."""
    skipped_checkpoints: tuple[str, ...] = ()
    """Damaged ones that were passed over when it went on, each with what was wrong."""
    table: "list[Row]" = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _ListByDefault(click.Group):
    """`runs`, `runs DIR` and `runs --json` mean `runs list ...`; a folder named `show` is written `./show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def runs() -> None:
    """List runs, or show one. `tunix-rt runs [DIR]` is short for `tunix-rt runs list [DIR]`."""


@runs.command("list")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_(folder: Path | None, as_json: bool) -> None:
    """List the runs below DIR (default: runs), newest first."""
    found = list_runs(folder)
    if as_json:
        text.show_json([asdict(run) for run in found])
    elif found:
        text.show_runs(found)
    else:
        click.echo(f"no runs below {folder or DEFAULT_FOLDER}", err=True)


@runs.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the run as JSON.")
def show(run: Path, as_json: bool) -> None:
    """Show one RUN: loss curve, answers before and after, memory, where its files lie."""
    detail = read_run(find_run(run))
    if as_json:
        text.show_json(asdict(detail))
    else:
        text.show_run(detail)


def list_runs(folder: Path | None) -> list[RunSummary]:
    """The runs below `folder`, newest first. A folder that was named and is not there is an InputError."""
    below = folder if folder is not None else Path(DEFAULT_FOLDER)
    if not below.is_dir():
        if folder is None:
            return []
        raise InputError(f"there is no folder {str(below)!r}", fix="give the folder that holds the run folders")
    found = [_Reader(root).summary() for root in _run_folders(below)]
    return sorted(found, key=lambda run: (run.when or "", run.folder), reverse=True)


def find_run(name: Path) -> Path:
    """The run folder `name`, or the one of that name below `runs`."""
    from tunix_rt.rundir import RunDir

    for candidate in (name, Path(DEFAULT_FOLDER) / name):
        if candidate.is_dir() and RunDir(candidate).holds_a_run():
            return candidate
    known = [str(path) for path in _run_folders(Path(DEFAULT_FOLDER))][:10]
    raise InputError(
        f"no run in {str(name)!r}", fix=f"one of: {', '.join(known)}" if known else "give the --output folder of a run"
    )


def read_run(root: Path) -> RunDetail:
    """Everything `show` tells about the run in `root`."""
    reader = _Reader(root)
    result, memory, config = reader.object(reader.run.result), reader.object(reader.run.memory), reader.config()
    losses, heldout = reader.curve(reader.run.metrics), reader.curve(reader.run.heldout)
    model, data = _mapping(config.get("model")), _mapping(config.get("data"))
    rows = reader.table()
    return RunDetail(
        summary=reader.summary(),
        reason=_words(result.get("reason")),
        model=_words(model.get("model_name_or_path")),
        dataset=_words(data.get("dataset")),
        parameters=_count(result.get("parameters")),
        seconds=_finite(result.get("seconds")),
        losses=losses,
        heldout=heldout,
        predicted_bytes=_count(memory.get("predicted_bytes")),
        measured_bytes=_count(memory.get("measured_bytes")),
        best_step=_count(result.get("best_step")),
        best_heldout_loss=_finite(result.get("best_heldout_loss")),
        resumed_from=_count(result.get("resumed_from")) or None,
        skipped_checkpoints=tuple(_skipped(result.get("skipped_checkpoints"))),
        table=rows,
        paths=_paths(reader.run),
        notes=(*reader.notes.values(), *dict.fromkeys(reader.half_written)),
    )


def _run_folders(below: Path) -> Iterator[Path]:
    """Folders that hold a run, without descending into one. Links are not followed."""
    from tunix_rt.rundir import RunDir

    for folder, inner, _ in os.walk(below):
        if RunDir(Path(folder)).holds_a_run():
            inner.clear()
            yield Path(folder)
        inner[:] = sorted(name for name in inner if not name.startswith("."))


def _paths(run: "RunDir") -> dict[str, str]:
    from tunix_rt.rundir import list_checkpoints

    places = {"model": run.final_model, "samples": run.samples, "log": run.log, "hashes": run.hashes}
    if checkpoints := list_checkpoints(run.checkpoints):
        places["newest checkpoint"] = checkpoints[0]
    return {name: str(path) for name, path in places.items() if path.exists()}


class _Reader:
    """Reads the files of one run. What is damaged is remembered by file name in `notes`, and read as not known."""

    def __init__(self, root: Path) -> None:
        from tunix_rt.rundir import RunDir

        self.run = RunDir(root)
        self.notes: dict[str, str] = {}
        self.half_written: list[str] = []

    def summary(self) -> RunSummary:
        result = self.object(self.run.result)
        losses = [] if self.run.result.exists() else self.curve(self.run.metrics)
        before, after = self.object(self.run.scores("before")), self.object(self.run.scores("after"))
        status = _words(result.get("status")) or ("unknown" if self.run.result.exists() else UNFINISHED)
        return RunSummary(
            folder=str(self.run.root),
            status=status,
            steps_completed=losses[-1][0] if losses else _count(result.get("steps_completed")),
            steps_planned=_count(result.get("steps_planned")),
            final_loss=_finite(result.get("final_loss")),
            accuracy_before=_finite(before.get("accuracy")),
            accuracy_after=_finite(after.get("accuracy")),
            lenient_before=_finite(before.get("accuracy_lenient")),
            lenient_after=_finite(after.get("accuracy_lenient")),
            device=_words(result.get("device")),
            when=_words(result.get("finished")) or self._last_write(),
            damaged=tuple(sorted(self.notes)),
        )

    def object(self, path: Path) -> Mapping[str, Any]:
        """The JSON object in `path`, empty when the file is missing or damaged."""
        from tunix_rt.rundir import read_json

        if not path.exists():
            return {}
        try:
            value = read_json(path)
        except (TunixError, ValueError) as error:
            return self._damaged(path, error.problem if isinstance(error, TunixError) else str(error))
        return value if isinstance(value, dict) else self._damaged(path, f"{path} is not a JSON object")

    def config(self) -> Mapping[str, Any]:
        from tunix_rt.strict_yaml import read_yaml

        if not self.run.config.exists():
            return {}
        try:
            return read_yaml(self.run.config)
        except TunixError as error:
            return self._damaged(self.run.config, error.problem)

    def curve(self, path: Path) -> list[tuple[int, float]]:
        """(step, loss) of every line. A last line without newline is still being written."""
        if not path.exists():
            return []
        try:
            *lines, rest = path.read_bytes().split(b"\n")
        except OSError as error:
            self._damaged(path, f"{path} cannot be read: {error.strerror}")
            return []
        points = []
        for number, line in enumerate(lines, start=1):
            if (point := _point(line)) is None:
                self._damaged(path, f"{path.name}:{number} is not a step with a finite loss")
            else:
                points.append(point)
        if rest:
            self.half_written.append(f"the last line of {path.name} is half-written")
        return points

    def table(self) -> "list[Row]":
        from tunix_rt.evaluate.reading import read_scores
        from tunix_rt.evaluate.report import table

        before, after = self.run.scores("before"), self.run.scores("after")
        if not before.exists():
            return []
        try:
            return table(read_scores(before), read_scores(after) if after.exists() else None)
        except TunixError as error:
            self._damaged(before, error.problem)
            return []

    def _damaged(self, path: Path, problem: str) -> dict[str, Any]:
        self.notes.setdefault(path.name, problem)
        return {}

    def _last_write(self) -> str | None:
        times = [path.stat().st_mtime for path in (self.run.metrics, self.run.precommit) if path.exists()]
        return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None


def _point(line: bytes) -> tuple[int, float] | None:
    try:
        value = _mapping(json.loads(line))
    except (ValueError, RecursionError):
        return None
    step, loss = _count(value.get("step")), _finite(value.get("loss"))
    return None if step is None or loss is None else (step, loss)


def _skipped(value: object) -> Iterator[str]:
    """`step-000050: changed: model.safetensors` of every entry that names a checkpoint."""
    for entry in value if isinstance(value, list) else ():
        if name := _words(_mapping(entry).get("name")):
            problems = _mapping(entry).get("problems")
            said = [word for word in problems if isinstance(word, str)] if isinstance(problems, list) else []
            yield f"{name}: {', '.join(said)}" if said else name


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _words(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _finite(value: object) -> float | None:
    """A number that can be shown; a huge integer cannot."""
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None

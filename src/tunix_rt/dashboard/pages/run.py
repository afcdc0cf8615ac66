"""`/runs/ID`: one run: what it is, how it goes, its curves, scores, memory, checkpoints, log and settings."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunix_rt.config.settings import RunConfig
from tunix_rt.dashboard import formats
from tunix_rt.dashboard.charts import LARGEST, Bar, Chart, Series
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.errors import EvidenceError
from tunix_rt.evaluate.report import table
from tunix_rt.models.secrets import redacted
from tunix_rt.plan.calibration import describe_error
from tunix_rt.plan.memory import LEFT_OUT
from tunix_rt.runs.curves import FILE as METRICS
from tunix_rt.runs.curves import TOTALS, Column, Curves, CurveStore, bucketed
from tunix_rt.runs.folder import checkpoint_name
from tunix_rt.runs.index import RUNNING, UNFINISHED, Indexed
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.tail import last_text

AXES = {"step": ("step", "count"), "tokens": ("total_tokens", ""), "time": ("total_seconds", "seconds")}
"""Choice -> column and unit."""
SCALES, SMOOTHINGS = {"0": "linear", "1": "log"}, {one: one for one in ("0", "0.6", "0.9", "0.99")}
TITLES = {
    "loss": "Loss", "lr": "Learning rate", "grad_norm": "Gradient norm", "tokens_per_second": "Tokens per second",
    "peak_bytes": "Memory, peak of each step",
}  # fmt: skip
"""The first charts of a page. Other columns follow under their own names."""
HELDOUT, HELDOUT_FILE, MOST_HELDOUT = "held-out loss", "eval/heldout.jsonl", 4 * 2**20
BUCKETS = 200
LOG, LOG_BYTES = "training_log.txt", 8 * 1024
MOST_CHECKPOINTS = 100
MOST_KEPT = 64
LIVE_MS = 500
EVERY_MS = {RUNNING: LIVE_MS, UNFINISHED: 5000, "preempted": 10_000, "failed": 10_000}
"""Status -> how often a page is looked at again. Those that ended early may be resumed; others stay as they are."""
READ = (
    "config.yaml", "precommit.json", "result.json", "plan.json", "memory.json", "checkpoints.json", "extensions.json",
    "processes.json", HELDOUT_FILE, "eval/before.json", "eval/after.json",
)  # fmt: skip
"""Files of the page that do not change with every step."""


# --- curves, for this page and for comparisons ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The curves of one run. `heldout` are steps and losses."""

    name: str
    curves: Curves
    heldout: tuple[Column, Column]
    predicted_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView:
    controls: list[tuple[str, str, str, list[tuple[str, str]]]]
    """Label, name in the address, chosen value, and the choices with their texts."""
    charts: list[Chart] = field(default_factory=list)
    zooms: list[tuple[str, str]] = field(default_factory=list)
    """Name, and the address after `?`."""
    notes: list[str]
    reading: bool


def columns_of(sources: Sequence[Source]) -> list[str]:
    """Columns with a value in any of these runs, the known ones first."""
    there = {name for one in sources for name, column in one.curves.columns.items() if np.isfinite(column).any()}
    return [name for name in TITLES if name in there] + sorted(there - {*TITLES, *TOTALS, "step"})


def title_of(column: str) -> str:
    return TITLES.get(column) or column.replace("_", " ").capitalize()


def view_curves(query: Query, sources: Sequence[Source], columns: Sequence[str]) -> CurveView:
    """A chart for each column, as the address says: along which x, from where to where, how smooth."""
    sampled, reading = any(one.curves.is_sample for one in sources), any(one.curves.reading for one in sources)
    x = "step" if sampled else query.choice("x", tuple(AXES))
    log, smooth = query.choice("log", SCALES), query.choice("smooth", SMOOTHINGS)
    notes = [f"{one.name}: {one.curves.problem}" for one in sources if one.curves.problem]
    if sampled:
        more = "The whole file is being read; look again." if reading else "The whole file is not read."
        notes.append(f"These curves are a sample, some hundred steps spread evenly over the run. {more}")
    along = {one: one for one in AXES}
    offered = (("x-axis", "x", x, along), ("y-axis", "log", log, SCALES), ("Smoothing", "smooth", smooth, SMOOTHINGS))
    controls = [(label, name, chosen, list(choices.items())) for label, name, chosen, choices in offered]
    (column, x_unit), drawn = AXES[x], [one for one in sources if one.curves.steps]
    if not drawn:
        return CurveView(controls=controls, notes=[*notes, "No step was taken."], reading=reading)
    ends = min(_first(one, column) for one in drawn), max(float(one.curves.columns[column][-1]) for one in drawn)
    first, last = np.nan_to_num(np.clip(ends, -LARGEST, LARGEST)).tolist()
    low, high = _bounds(query, first, last)
    charts = [
        Chart(
            name=name.replace("-", "_").replace(" ", "_"), title=title_of(name), low=low, high=high, x_name=x, x_unit=x_unit,
            unit="bytes" if name.endswith("_bytes") else "seconds" if name.endswith("seconds") else "", log=log == "1",
            smoothing=float(smooth), series=_series(drawn, name, column, low, high), level=_level(drawn, name),
        )
        for name in columns
    ]  # fmt: skip
    zooms = _zooms(query, low, high, (first, last))
    return CurveView(controls=controls, charts=charts, zooms=zooms, notes=notes, reading=reading)


def _first(source: Source, column: str) -> float:
    """Where the curves of a run begin: a held-out loss before the first step is at 0."""
    return 0.0 if 0 in source.heldout[0][:1] else float(source.curves.columns[column][0])


def _series(sources: Sequence[Source], name: str, column: str, low: float, high: float) -> tuple[Series, ...]:
    found = []
    for one in sources:
        columns, alone = one.curves.columns, len(sources) == 1
        if name in columns:
            buckets = bucketed(columns[column], columns[name], low, high, BUCKETS)
            found.append(Series(name=title_of(name) if alone else one.name, buckets=buckets))
        if len(one.heldout[0]) and (name == HELDOUT or (name == "loss" and alone)):
            buckets = bucketed(*_heldout(one, columns[column]), low, high, BUCKETS)
            found.append(Series(name=HELDOUT if alone else one.name, buckets=buckets, marks=True))
    return tuple(found)


def _heldout(source: Source, x: Column) -> tuple[Column, Column]:
    """Held-out losses at the x of their steps, that before training at 0; without those of steps that are not read yet."""
    steps, (at, losses) = source.curves.columns["step"], source.heldout
    place = np.searchsorted(steps, at, "right") - 1
    known = at <= steps[-1]
    return np.where(place < 0, 0.0, x[place])[known], losses[known]


def _level(sources: Sequence[Source], name: str) -> tuple[str, float] | None:
    predicted = sources[0].predicted_bytes if len(sources) == 1 and name == "peak_bytes" else None
    return ("predicted", float(predicted)) if predicted else None


def _bounds(query: Query, low: float, high: float) -> tuple[float, float]:
    """`from` and `to` of the address, within what there is."""
    given = []
    for name, default in (("from", low), ("to", high)):
        try:
            value = float(query.get(name) or default)
        except ValueError:
            value = default
        given.append(min(max(value, low), high) if np.isfinite(value) else default)
    return (given[0], given[1]) if given[0] < given[1] else (low, high)


def _zooms(query: Query, low: float, high: float, whole: tuple[float, float]) -> list[tuple[str, str]]:
    """Links for those without a pointer."""
    half, left, right = (high - low) / 2, min((high - low) / 2, low - whole[0]), min((high - low) / 2, whole[1] - high)
    ranges = {"zoom in": (low + half / 2, high - half / 2)}
    if (low, high) != whole:
        ranges["zoom out"] = (low - half, high + half)
        ranges |= {"left": (low - left, high - left), "right": (low + right, high + right)}
    digits = 0 if half > 100 else 3
    links = [
        (name, query.with_(**{"from": f"{a:.{digits}f}", "to": f"{b:.{digits}f}"})) for name, (a, b) in ranges.items()
    ]
    return [*links, ("reset zoom", query.with_(**{"from": None, "to": None}))]


Phase = tuple[str, float | None, float | None, str]
"""Name, predicted and measured bytes, and by which share the prediction is too high."""


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What the files of a run contain that do not change with every step."""

    reason: str
    facts: list[tuple[str, str]]
    settings: list[tuple[str, str, str]]
    """Name, value, default."""
    memory: list[Phase]
    bars: list[Bar]
    measured_as: str
    predicted_bytes: int | None
    checkpoints: list[tuple[int, int, str]]
    """Step, bytes, what is known about it."""
    scores: list[tuple[str, ...]]
    """Measure, out of, before, after, gain."""
    heldout: tuple[Column, Column]
    """Steps and losses."""
    problems: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    run: Indexed
    details: Details
    curves: CurveView
    log: str
    log_is_cut: bool
    every: int
    """Milliseconds until the page is looked at again; 0: it does not change any more."""


def page(site: Site, query: Query, run_id: str) -> Page:
    run = site.run(run_id)
    read = [run.root / name for name in (*READ, METRICS)]
    curves: CurveView = kept(site, f"curves {run_id} {query.with_()}", read, lambda: _curves(site, query, run))
    log, log_is_cut = kept(site, f"log {run_id}", [run.root / LOG], lambda: read_log(run.root))
    every = how_often([run], curves)
    values = RunPage(run=run, details=details_of(site, run), curves=curves, log=log, log_is_cut=log_is_cut, every=every)
    return Page(template="run.html", title=run.name, values=values, live=every > 0)


def _curves(site: Site, query: Query, run: Indexed) -> CurveView:
    source = source_of(site, run)
    return view_curves(query, [source], columns_of([source]))


def source_of(site: Site, run: Indexed) -> Source:
    store: CurveStore = site.cache.setdefault("curves", CurveStore())
    details = details_of(site, run)
    predicted = details.predicted_bytes
    return Source(name=run.name, curves=store.get(run.root), heldout=details.heldout, predicted_bytes=predicted)


def details_of(site: Site, run: Indexed) -> Details:
    paths = [run.root / name for name in READ]
    found: Details = kept(site, f"details {run.id}", paths, lambda: read_details(RunRecord(run.root)))
    return found


def how_often(runs: Sequence[Indexed], curves: CurveView) -> int:
    known = [EVERY_MS[run.summary.status] for run in runs if run.summary.status in EVERY_MS]
    return LIVE_MS if curves.reading else min(known, default=0)


_KEPT_LOCK = threading.Lock()


def kept(site: Site, key: str, paths: Sequence[Path], make: Callable[[], Any]) -> Any:
    """What `make` returns, until one of the files changes; not kept while a file is still being read."""
    stamp = []
    for path in paths:
        try:
            found = os.lstat(path)
            stamp.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            stamp.append((0, 0, 0))
    store: dict[str, Any] = site.cache.setdefault("kept", {})
    known = store.get(key)
    if known is not None and known[0] == stamp:
        return known[1]
    made = make()
    with _KEPT_LOCK:
        store.pop(key, None)
        if not getattr(made, "reading", False):
            store[key] = (stamp, made)
        if len(store) > MOST_KEPT:
            del store[next(iter(store))]
    return made


def read_details(record: RunRecord) -> Details:
    result, memory, plan, before = record.result, record.memory, record.plan, record.scores("before")
    phases, bars = _memory(record)
    try:
        scores: list[tuple[str, ...]] = [row.cells for row in table(before, record.scores("after"))] if before else []
    except EvidenceError as error:
        scores = [(error.problem, "", "", "", "")]
    too_long = record.listing.files.get(HELDOUT_FILE, 0) > MOST_HELDOUT
    lines = () if too_long else record.heldout or ()
    heldout = np.array([line.step for line in lines], np.float64), np.array([line.loss for line in lines], np.float64)
    facts, settings, checkpoints = _facts(record), settings_of(record.config), _checkpoints(record)
    return Details(
        reason=redacted(result.reason) if result else "", facts=facts, settings=settings, memory=phases, bars=bars,
        measured_as=memory.measured_as if memory else "", checkpoints=checkpoints, scores=scores, heldout=heldout,
        predicted_bytes=memory.predicted_bytes if memory else plan.peak_bytes if plan else None,
        problems=[*record.listing.problems, *(one for found in record.problems.values() for one in found),
                  *([f"{HELDOUT_FILE}: more than {MOST_HELDOUT:,} bytes, not shown"] if too_long else [])],
    )  # fmt: skip


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    result, commitment, config = record.result, record.commitment, record.config
    machine = record.processes[-1].machine if record.processes else None
    random = commitment is not None and commitment.base_model.weights == "random"
    found: list[tuple[str, str | None]] = [
        ("model", commitment.base_model.name if commitment else config.model.model_name_or_path if config else None),
        ("weights", "random: not evidence of learning" if random else None),
        ("data", config.data.key if config else None),
        ("device", machine.gpu.name if machine and machine.gpu else machine.cpu if machine else None),
        ("engine", f"{machine.backend} on {machine.device}" if machine else None),
    ]
    if result is not None:
        best = f"step {result.best_step or 0:,}, {HELDOUT} {formats.figure(result.best_heldout_loss)}"
        found += [
            ("parameters", formats.count(result.parameters)),
            ("time", formats.seconds(result.seconds)),
            ("best step", best if result.best_step else None),
            ("resumed", f"after step {result.resumed_from:,}" if result.resumed_from else None),
            ("skipped checkpoints", "; ".join(one.name for one in result.skipped_checkpoints or ())),
            ("warnings", "; ".join(result.warnings or ())),
        ]
    found += [("extended", f"from {one.after_step:,} to {one.max_steps:,} steps") for one in record.extensions]
    return [(name, redacted(value)) for name, value in found if value]


def settings_of(config: RunConfig | None) -> list[tuple[str, str, str]]:
    """Every setting beside its default, without secrets."""
    found, defaults = [], RunConfig().model_dump()
    for section, settings in config.model_dump().items() if config else ():
        for name, value in settings.items():
            default = defaults[section][name]
            default = value if value == default else default  # 0.0 is 0
            found.append((f"{section}.{name}", _shown(value), _shown(default)))
    return found


def _shown(value: object) -> str:
    return "not set" if value is None else redacted(str(value))


def _memory(record: RunRecord) -> tuple[list[Phase], list[Bar]]:
    """Phases with their prediction and what was measured, the largest first; before that is known, those of the plan."""
    memory, plan = record.memory, record.plan
    if memory is None:
        planned = [one for one in plan.memory.phases if one.name not in LEFT_OUT] if plan else []
        bars = [Bar(name=one.name, parts=worded(one.parts)) for one in planned]
        return [(one.name, one.total_bytes, None, formats.MISSING) for one in planned], bars
    parts = {one.total_bytes: worded(one.parts) for one in memory.predicted_parts.phases}
    phases: list[Phase] = [
        (name, one.get("predicted_bytes"), one.get("measured_bytes"), _error_text(one))
        for name, one in memory.phases.items()
    ]
    phases.sort(key=lambda phase: -(phase[2] or 0))
    bars = [
        Bar(name=name, parts=parts.get(int(predicted or 0), {"predicted": int(predicted or 0)}), measured=measured)
        for name, predicted, measured, _ in phases
    ]
    return phases, bars


def _error_text(phase: Mapping[str, float]) -> str:
    """A lower bound has no error."""
    if "error" not in phase:
        return formats.MISSING
    return describe_error(int(phase["predicted_bytes"]), int(phase["measured_bytes"]))


def worded(parts: Mapping[str, int]) -> dict[str, int]:
    return {name.replace("_", " "): size for name, size in parts.items()}


def _checkpoints(record: RunRecord) -> list[tuple[int, int, str]]:
    best, found = record.result.best_step if record.result else None, []
    for one in record.checkpoints[-MOST_CHECKPOINTS:]:
        there = f"checkpoints/{checkpoint_name(one.step)}/MANIFEST.json" in record
        state = ("on disk" if there else "not in this folder") + (f"; lowest {HELDOUT}" if one.step == best else "")
        found.append((one.step, sum(file.bytes for file in one.files.values()), state))
    return found


def read_log(root: Path) -> tuple[str, bool]:
    """The last lines of the log, without secrets, and whether there are more."""
    text, is_cut = last_text(root, LOG, LOG_BYTES)
    return redacted(text.rstrip()), is_cut

"""`/compare?run=ID&run=ID`: the curves of two to eight runs over each other, settings that differ, scores, paired verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunix_rt.dashboard.formats import MISSING
from tunix_rt.dashboard.pages import run as single
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.errors import EvidenceError, InputError, TunixError
from tunix_rt.evaluate.comparison import Side, compare_runs
from tunix_rt.evaluate.report import computing_remarks, paragraph
from tunix_rt.evidence.data_checks import tags_in, verdict_problems
from tunix_rt.runs.index import Indexed
from tunix_rt.runs.record import RunRecord

FEWEST, MOST = 2, 8
PREDICTIONS, SUMMARY = "eval/predictions-after.jsonl", "eval_summary.json"
MOST_BYTES = 16 * 2**20
"""Of the predictions of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first run against `name`: what the paired comparison gives; or why there is none, and the way out."""

    name: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage:
    runs: list[Indexed]
    curves: single.CurveView
    scores: list[tuple[str, list[str]]]
    """Of the generations after training: measure, then the value of each run."""
    settings: list[tuple[str, list[str]]]
    """Those that differ."""
    verdicts: list[Verdict]
    every: int


def page(site: Site, query: Query, run_id: str = "") -> Page:
    ids = list(dict.fromkeys(query.all("run")))
    if not FEWEST <= len(ids) <= MOST:
        problem = f"{len(ids)} run(s) to compare; {FEWEST} to {MOST} can be shown together"
        raise InputError(problem, fix="choose them by the boxes in the list of runs")
    runs = [site.run(one) for one in ids]
    details, sources = [single.details_of(site, run) for run in runs], [single.source_of(site, run) for run in runs]
    columns = single.columns_of(sources) + [single.HELDOUT] * any(len(one.heldout[0]) for one in sources)
    column = query.choice("column", tuple(columns) or ("loss",))
    curves = single.view_curves(query, sources, [column])
    curves.controls.insert(0, ("Curve", "column", column, [(name, single.title_of(name)) for name in columns]))
    every = single.how_often(runs, curves)
    settings = beside([{name: value for name, value, _ in one.settings} for one in details])
    read = [run.root / name for run in runs for name in (PREDICTIONS, SUMMARY)]
    values = ComparePage(
        runs=runs, curves=curves, every=every, settings=[row for row in settings if len(set(row[1])) > 1],
        scores=beside([{row[0]: row[3] for row in one.scores if row[3]} for one in details]),
        verdicts=single.kept(site, f"verdicts {ids}", read, lambda: verdicts(runs)),
    )  # fmt: skip
    return Page(template="compare.html", title="Compare", values=values, live=every > 0)


def beside(tables: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Every name with its value in each of the tables."""
    return [
        (name, [one.get(name, MISSING) for one in tables]) for name in dict.fromkeys(n for one in tables for n in one)
    ]


def verdicts(runs: Sequence[Indexed]) -> list[Verdict]:
    """The first run against each of the others, question by question."""
    found, sides = [], dict[str, Side]()
    for other in runs[1:]:
        try:
            for run in (runs[0], other):
                sides[run.id] = sides.get(run.id) or _side(run)
            pair = sides[runs[0].id], sides[other.id]
            text = " ".join([paragraph(compare_runs(*pair)), *computing_remarks(*pair)])
            found.append(Verdict(name=other.name, text=text))
        except TunixError as error:
            found.append(Verdict(name=other.name, text=error.problem, fix=error.fix))
    return found


def _side(run: Indexed) -> Side:
    """The generations of a run after training. An error unless their verdicts follow from their outputs."""
    record = RunRecord(run.root)
    if not 0 < (size := record.listing.files.get(PREDICTIONS, 0)) <= MOST_BYTES:
        problem = f"{size:,} bytes, at most {MOST_BYTES:,} are read" if size else "missing"
        raise InputError(f"{run.name}: {PREDICTIONS}: {problem}", fix="compare runs that were evaluated after training")
    predictions, summary = record.predictions("after"), record.summary
    decoding = summary.decoding if summary else {}
    problems = [*record.problems.get(PREDICTIONS, ()), *record.problems.get(SUMMARY, ())]
    for one in predictions:
        problems += [f"question {one.id!r}: {problem}" for problem in verdict_problems(one, tags_in(decoding))]
    if problems:
        raise EvidenceError(f"{run.name}: {problems[0]}", fix="evaluate again; verdicts follow from the outputs alone")
    computed = {"dtype": summary.dtype, "device": summary.device} if summary else {}
    model = summary.models[-1] if summary else ""
    return Side(name=run.name, predictions=predictions, decoding=decoding, model=model, computed=computed)

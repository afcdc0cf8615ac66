"""`/data`: a dataset as a run tokenizes it, token by token: what is trained, what is masked and why, what validation finds."""

import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from tunix_rt.dashboard import datasets, models
from tunix_rt.dashboard.datasets import Opened
from tunix_rt.dashboard.formats import percent, visible
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.data.packing import Row
from tunix_rt.data.preview import RowView, Span, TokenView, as_in_a_run, read_record, view_of
from tunix_rt.data.readers import describe_line
from tunix_rt.data.sources import named
from tunix_rt.data.validation import RULES, Finding
from tunix_rt.errors import InputError, TunixError

MOST_TOKENS = 2_000
"""On one page; the next ones have an address of their own."""
MOST_PLACES = 12
MARKS = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥"})
Options = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanView:
    trained: bool
    title: str
    tokens: tuple[tuple[TokenView, str], ...]
    """Each with its text: spaces and line breaks as marks, what is invisible by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleView:
    """An example of a row, or the one of a record."""

    title: str
    record: int
    spans: tuple[SpanView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """`places` are (line, record). A finding of one record has none."""

    rule: str
    refuses: bool
    text: str
    fix: str
    places: tuple[tuple[str, int], ...] = ()
    more: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One record or one packed row: number `number` of `total`."""

    kind: str
    number: int
    total: int
    title: str
    counts: str
    examples: tuple[ExampleView, ...]
    broken: tuple[FindingView, ...]
    before: int | None
    after: int | None
    next_token: int | None
    """Where a longer row goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPage:
    data: str
    model: str
    datasets: Options
    models: Options
    ids: bool
    problem: str = ""
    fix: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    findings: tuple[FindingView, ...] = ()
    has_rows: bool = False
    shown: Shown | None = None


def page(site: Site, query: Query, run_id: str = "") -> Page:
    form: dict[str, Any] = {"data": "", "model": "", "datasets": (), "models": (), "ids": query.get("ids") == "1"}
    values, status = None, 200
    try:
        with datasets.reading(site) as shelf:
            form |= _form(site, shelf, query)
            if form["data"]:
                values = DataPage(**form, **datasets.read(site, shelf, query, form["data"], form["model"], _answer))
    except TunixError as error:
        values, status = DataPage(**form, problem=error.problem, fix=error.fix), 400
    return Page(template="data.html", title="Data", values=values or DataPage(**form), status=status)


def _form(site: Site, shelf: datasets.Shelf, query: Query) -> dict[str, Any]:
    data, shipped = query.get("data").strip(), datasets.tokenizer_names()
    own = data if models.RUN_ID.fullmatch(data) else ""
    runs = tuple((run.id, f"{run.name}: {key}") for run, key in datasets.runs_of_datasets(site, shelf))
    known = tuple((run.id, run.name) for run in models.runs_with(site, "tokenizer.json"))
    return {
        "data": data,
        "model": query.get("model").strip() or own or shipped[0],
        "datasets": (("Datasets", tuple((key, key) for key in named("datasets"))), ("As a run trained on it", runs)),
        "models": (("Shipped models", tuple((name, name) for name in shipped)), ("Final models of runs", known)),
    }


def _answer(opened: Opened, query: Query) -> dict[str, Any]:
    packed = bool(query.get("row"))
    start = query.whole("token", 0)
    shown = _row(opened, query, start) if packed else _record(opened, query, start)
    return {
        "facts": tuple(_facts(opened)),
        "findings": tuple(_findings(opened)),
        "has_rows": opened.rows is not None,
        "shown": shown,
    }


def _facts(opened: Opened) -> Iterator[tuple[str, str]]:
    seen, store, made = opened.seen, opened.seen.store, opened.prepared
    only = f", the first of a longer dataset: {datasets.CHECK}" if opened.shortened else ""
    yield "dataset", f"{seen.dataset.key} ({seen.format}), sha256 {seen.dataset.sha256[:12]}"
    yield "records", f"{opened.records:,}{only}"
    share = percent(store.trained_tokens / store.tokens if store.tokens else None)
    yield "tokens", f"{store.tokens:,}, of which {store.trained_tokens:,} are trained ({share})"
    yield "template", seen.style.template.name
    lost = [f"{count:,} {what}" for what, count in (("dropped", seen.dropped), ("truncated", seen.truncated)) if count]
    yield "max_length", "; ".join([f"{opened.config.data.max_length:,}", *lost])
    if seen.skipped:
        yield "skipped", f"{seen.skipped:,} bad records"
    if made is not None:
        held = f"{made.traces:,} training examples, {made.heldout_traces:,} held out"
        yield "rows", f"{len(made.rows):,}, {percent(made.fill)} full without the last; {held}"
    broken = [finding for finding in seen.findings if finding.refuses]
    verdict = f"refused: {', '.join(one.rule for one in broken)}" if broken else "ready to train on"
    yield "validation", f"{verdict}; {len(seen.findings)} of {len(RULES)} rules broken; eval sets are not compared here"


# --- findings ---------------------------------------------------------------------------------------------------------


def _findings(opened: Opened) -> Iterator[FindingView]:
    """Each broken rule, with links to the first records that break it."""
    records = _records_at({place for one in opened.seen.findings for place in one.places[:MOST_PLACES]}, opened)
    for one in opened.seen.findings:
        places = tuple(records[place] for place in one.places[:MOST_PLACES] if place in records)
        yield FindingView(
            rule=one.rule, refuses=one.refuses, text=f"{one.count:,} x {RULES[one.rule].finds}; first: {one.seen}",
            fix=one.way_out, places=places, more=one.count - len(places),
        )  # fmt: skip


def _records_at(places: set[str], opened: Opened) -> dict[str, tuple[str, int]]:
    """The line and the record number of each place."""
    dataset, entries = opened.seen.dataset, opened.seen.store.examples.entries
    pairs = zip(entries["file"].tolist(), entries["line"].tolist(), strict=True) if places else ()
    return {
        place: (f"line {describe_line(line)}", number)
        for number, (file, line) in enumerate(pairs, start=1)
        if (place := dataset.place(file, line)) in places
    }


def _broken(broken: Sequence[tuple[str, str]], place: str, findings: Sequence[Finding]) -> Iterator[FindingView]:
    """What is wrong with one record: by itself, and beside others."""
    rules = {rule for rule, _ in broken}
    beside = [(one.rule, one.seen) for one in findings if place in one.places and one.rule not in rules]
    for rule, seen in (*broken, *beside):
        yield FindingView(
            rule=rule, refuses=RULES[rule].refuses, text=f"{RULES[rule].finds}: {seen}", fix=RULES[rule].fix
        )


# --- one record, one row ----------------------------------------------------------------------------------------------


def _record(opened: Opened, query: Query, start: int) -> Shown:
    """A record, tokenized as in a run."""
    number = query.whole("record", 1, least=1, most=opened.records)
    found = read_record(opened.recipe, number)
    row, too_long = as_in_a_run(found, opened.config.data)
    title = "; ".join(filter(None, [_line(opened, number), too_long]))
    broken = tuple(_broken(found.broken, found.place, opened.seen.findings))
    return _shown(opened, row, "record", number, opened.records, title, [number], broken, start)


def _row(opened: Opened, query: Query, start: int) -> Shown:
    """A training row. There are rows only where no rule refuses the data."""
    rows = opened.rows
    if rows is None:
        raise InputError("a run refuses this data, so it has no rows", fix="look at its records and their findings")
    number = query.whole("row", 1, least=1, most=len(rows))
    inside = [at + 1 for at in rows.examples_of(number - 1)]
    title = f"{len(inside):,} examples" if len(inside) > 1 else "1 example"
    return _shown(opened, rows[number - 1], "row", number, len(rows), title, inside, (), start)


def _line(opened: Opened, number: int) -> str:
    entry = opened.seen.store.examples.entries[number - 1]
    files = opened.seen.dataset.files
    of = f" of file {int(entry['file']) + 1}" if len(files) > 1 else ""
    return f"line {describe_line(int(entry['line']))}{of}"


def _shown(
    opened: Opened, row: Row, kind: str, number: int, total: int, title: str, records: list[int],
    broken: tuple[FindingView, ...], start: int,
) -> Shown:  # fmt: skip
    view = view_of(row, opened.recipe.tokenizer)
    count = len(view.tokens)
    start = start if start < count else 0
    share = percent(view.trained / count)
    return Shown(
        kind=kind, number=number, total=total, title=title,
        counts=f"{count:,} tokens: {view.trained:,} trained ({share}), {count - view.trained:,} masked",
        examples=tuple(_examples(view, opened, records, start)), broken=broken,
        before=number - 1 if number > 1 else None, after=number + 1 if number < total else None,
        next_token=start + MOST_TOKENS if start + MOST_TOKENS < count else None,
    )  # fmt: skip


def _examples(view: RowView, opened: Opened, records: list[int], start: int) -> Iterator[ExampleView]:
    """The examples of the tokens from `start` on, span by span."""
    firsts: dict[int, int] = {}
    for token in view.tokens:
        if token.trained:
            firsts.setdefault(token.example, token.position)
    lengths = view.lengths
    part = RowView(tokens=view.tokens[start : start + MOST_TOKENS])
    for example, spans in groupby(part.spans, key=lambda span: span.example):
        record = records[example - 1]
        yield ExampleView(
            title=f"example {example}: {_line(opened, record)}, {lengths[example - 1]:,} tokens",
            record=record,
            spans=tuple(_span(span, _reason(span, firsts.get(example), opened)) for span in spans),
        )


def _reason(span: Span, first: int | None, opened: Opened) -> str:
    """Why the tokens of a span are targets, or why they are not. `first` is the first trained token of the example."""
    if span.trained:
        return "targets of the loss"
    if first is None:
        return "no token of this example is trained"
    if span.tokens[0].position > first:
        return "behind a completion: the next turn of the prompt, or text of the template"
    if opened.seen.format == "text" or not opened.recipe.style.completion_only_loss:
        return "the first token: nothing before it could predict it"
    return "the prompt: only completions are trained (data.completion_only_loss)"


def _span(span: Span, reason: str) -> SpanView:
    count, what = len(span.tokens), "trained" if span.trained else "masked"
    return SpanView(
        trained=span.trained,
        title=f"{what}, {count:,} {'token' if count == 1 else 'tokens'}: {reason}",
        tokens=tuple((token, visible(token.text).translate(MARKS) or '""') for token in span.tokens),
    )


# --- the process that reads with the tokenizer of a run ----------------------------------------------------------------


def main() -> None:
    """Values of the page, or the error, for a request of `datasets.read`."""
    query, config, source, today = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the dashboard)
    try:
        values = _answer(datasets.open_dataset(config, *datasets.loaded(source), today), query)
    except TunixError as error:
        values = {"problem": error.problem, "fix": error.fix}
    json.dump(values, sys.stdout, default=lambda one: str(one) if isinstance(one, bytes) else asdict(one))


if __name__ == "__main__":
    main()

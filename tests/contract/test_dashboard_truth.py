"""Every number on every page of the five recorded runs is, at its place, what a named function gives from the run's files."""

import html
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.contract.test_dashboard_plan import KEY, RUNS, of_a_run, say
from tests.tables import parametrize, tables
from tunix_rt.config.settings import RunConfig
from tunix_rt.dashboard import charts
from tunix_rt.dashboard.app import find_page, render
from tunix_rt.dashboard.formats import count, figure, gib, moment, percent, rate, seconds, visible
from tunix_rt.dashboard.pages import answers, data, evidence, run
from tunix_rt.dashboard.pages.plan_view import WORDS, size
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.data.prepare import prepare
from tunix_rt.data.preview import view_of
from tunix_rt.data.validation import RULES
from tunix_rt.evaluate import comparison, generate, report
from tunix_rt.evidence.facts import LABELS
from tunix_rt.evidence.readme import LEVEL_FLAGS
from tunix_rt.evidence.verify import verify
from tunix_rt.models.secrets import redacted
from tunix_rt.plan.answer import rounded
from tunix_rt.plan.calibration import describe_error
from tunix_rt.plan.memory import LEFT_OUT, SPARE
from tunix_rt.progress import duration
from tunix_rt.runs.curves import FIELDS, bucketed
from tunix_rt.runs.index import run_id
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.tail import last_objects, last_text
from tunix_rt.scoring import equations, score

NAMES = sorted(path.name for path in RUNS.iterdir() if path.is_dir())
MARK = {True: "✓ right", False: "✗ wrong"}
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
Pieces = Iterator[str]
"""Texts of a page in their order, each with its name and its numbers."""


verdict_of = cache(lambda name: verify(RUNS / name))


@cache
def site() -> Site:
    """Of the recorded runs, all of them verified."""
    found = Site.of(RUNS)
    for one in found.index.runs():
        evidence.background(found).start(one.id, evidence.stamp_of(one), partial(verdict_of, one.name)).join()
    return found


def opened(site: Site, address: str) -> str:
    path, _, rest = address.partition("?")
    handler, one = find_page(path)
    query = Query.parse(rest)
    return render(handler(site, query, one), path, query)


def text_of(page: str) -> str:
    """What a reader sees, without forms and axes: the values of a chart are in the table behind it."""
    page = re.sub(r"<(svg|header|footer|head)\b.*?</\1>|<form [^>]*class=.*?</form>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def explain(page: str, pieces: Iterable[str]) -> None:
    """Each piece follows the one before, and no number of the page is in none of them."""
    text, rest, place = text_of(page), "", 0
    for piece in (" ".join(one.split()) for one in pieces):
        found = text.find(piece, place)
        assert found >= 0, (piece, text[place : place + 300])
        rest, place = rest + text[place:found] + "|", found + len(piece)
    assert re.findall(rf"[^|]*?{NUMBER}[^|]*", rest + text[place:]) == []


# --- runs -------------------------------------------------------------------------------------------------------------


def rate_of(name: str) -> str:
    recent = last_objects(RUNS / name, "metrics.jsonl", 8 * 1024)
    return rate(sum(line["tokens"] for line in recent) / sum(line["seconds"] for line in recent))


def of_list() -> Pieces:
    yield f"{len(NAMES)} of {len(NAMES)} runs below {RUNS}"
    for name in sorted(NAMES, key=lambda one: RunRecord(RUNS / one).result.finished, reverse=True):
        record = RunRecord(RUNS / name)
        result, base, exam = record.result, record.commitment.base_model, record.commitment.evalset
        yield f"{name} {result.status} {base.name} {result.device}{', random weights' * (base.weights == 'random')}"
        yield f"{count(result.steps_completed)} of {count(result.steps_planned)} {figure(result.final_loss)}"
        yield " → ".join(percent(record.scores(when).accuracy) for when in ("before", "after"))
        yield f"{exam.key}, {count(exam.items)} questions" if exam else "eval set not recorded"
        yield f"{rate_of(name)} {gib(record.memory.measured_bytes)} predicted {gib(record.memory.predicted_bytes)}"
        yield f"{verdict_of(name).level} bundle {moment(result.finished)}"


def of_curves(title: str, unit: str, curves: dict[str, tuple[Any, Any]]) -> Pieces:
    """The caption of a chart, and the table behind it. `curves` are x and y by name."""
    made = {name: bucketed(*map(np.array, pair), -np.inf, np.inf, run.BUCKETS) for name, pair in curves.items()}
    most = max(one.points.max() for one in made.values())
    yield f"{title} by step" + (f", mean and range of up to {most:,} steps" if most > 1 else "")
    for name, few in ((name, one.coarser(charts.TABLE_ROWS)) for name, one in made.items()):
        for first, last, *cells in zip(few.first, few.last, few.lowest, few.mean, few.highest, strict=True):
            values = " ".join(charts.label(one, unit) for one in cells)
            inside = sum(first <= x <= last for x in curves[name][0])
            yield f"{name} {first:,.0f}{f' to {last:,.0f}' if last > first else ''} {inside:,} {values}"


def of_run(name: str) -> Pieces:
    record = RunRecord(RUNS / name)
    result, memory, lines = record.result, record.memory, record.metrics
    yield f"{name} Answers Evidence"
    yield f"{result.status} : {result.reason}"
    yield f"steps {result.steps_completed:,} of {result.steps_planned:,} last loss {figure(lines[-1].loss)}"
    yield f"last steps {rate_of(name)}"
    machine = record.processes[-1].machine
    yield f"model {record.commitment.base_model.name}"
    yield f"data {record.config.data.key}"
    yield f"device {machine.gpu.name if machine.gpu else machine.cpu}"
    yield f"parameters {result.parameters:,} time {seconds(result.seconds)}"
    yield f"best step step {result.best_step:,}, held-out loss {figure(result.best_heldout_loss)}"
    yield f"finished {moment(result.finished)}"
    steps = [line.step for line in lines]
    values = {column: [getattr(line, column) for line in lines] for column in FIELDS}
    values["tokens_per_second"] = [line.tokens / line.seconds for line in lines]
    there = [one for one in values if one not in run.TITLES and one != "step" and None not in values[one]]
    for column in (*run.TITLES, *sorted(there)):
        title = run.title_of(column)
        curves = {title: (steps, values[column])}
        if column == "loss":
            curves["held-out loss"] = [one.step for one in record.heldout], [one.loss for one in record.heldout]
        unit = "bytes" if column == "peak_bytes" else "seconds" if column == "seconds" else ""
        caption, *rows = of_curves(title, unit, curves)
        yield caption
        yield f"predicted, {charts.label(memory.predicted_bytes, 'bytes')}" if column == "peak_bytes" else ""
        yield from rows
    yield from (" ".join(row.cells) for row in report.table(record.scores("before"), record.scores("after"))[:6])
    yield f"measured: {memory.measured_as}"
    for phase, found in sorted(memory.phases.items(), key=lambda one: -(one[1].get("measured_bytes") or 0)):
        figures = found.get("predicted_bytes"), found.get("measured_bytes")
        yield f"{phase} {' '.join(map(gib, figures))} {describe_error(*map(int, figures)) if 'error' in found else '–'}"
    yield from (f"{one.step:,} {gib(sum(file.bytes for file in one.files.values()))}" for one in record.checkpoints)
    yield redacted(last_text(RUNS / name, "training_log.txt", run.LOG_BYTES)[0])
    config, defaults = record.config.model_dump(), RunConfig().model_dump()
    rows = [(section, key, value) for section, values in config.items() for key, value in values.items()]
    for section, key, value in sorted(rows, key=lambda row: row[2] == defaults[row[0]][row[1]]):
        shown = ["not set" if one is None else str(one) for one in (value, defaults[section][key])]
        yield f"{section}.{key} {shown[0]} {shown[0] if value == defaults[section][key] else shown[1]}"


def of_evidence(name: str) -> Pieces:
    verdict, outcome = verdict_of(name), evidence.background(site()).outcome(run_id(name))
    yield f"{name} · Answers"
    yield "Verification at L1"
    yield f"tunix-rt evidence verify {RUNS / name} Verify"
    yield f"Checked {moment(outcome.finished)} UTC in {seconds(outcome.seconds)}"
    yield f"Verdict: {verdict.describe()}"
    yield from (f"{one.name} {one.value} {one.label} {one.how}" for one in verdict.claims)
    yield from verdict.notes
    yield from (f"{label} {meaning}" for label, meaning in LABELS.items())
    for flag, does in LEVEL_FLAGS.items():
        yield f"{does} tunix-rt evidence verify {RUNS / name}{flag}" if flag else ""


KINDS: dict[str, Callable[[score.Prediction, score.Prediction], bool]] = {
    "all": lambda b, a: True, "gained": lambda b, a: a.strict > b.strict, "lost": lambda b, a: a.strict < b.strict,
    "both": lambda b, a: b.strict and a.strict, "neither": lambda b, a: not (b.strict or a.strict),
    "malformed": lambda b, a: not a.well_formed,
}  # fmt: skip


def of_answers(name: str, kind: str, first: int) -> Pieces:
    before, after = sides = generate.read_both(RUNS / name)
    pairs = list(zip(before.predictions, after.predictions, strict=True))
    yield f"{name} · Evidence Answers {report.paragraph(comparison.compare_runs(*sides))}"
    scores = [score.score_predictions(side.predictions, side.name) for side in sides]
    yield from report.remarks(*scores, tokens_setting="evaluation.max_new_tokens")
    yield from (" ".join(row.cells) for row in report.table(*scores))
    counts = {answers.SHOWS[key].format("after"): sum(one(*pair) for pair in pairs) for key, one in KINDS.items()}
    yield " ".join(f"{shown} ({number})" for shown, number in counts.items())
    matching = [(number, pair) for number, pair in enumerate(pairs, start=1) if KINDS[kind](*pair)]
    yield f"{first + 1} to {min(first + 50, len(matching))} of " if matching else ""
    yield f"{len(matching)} matching questions, {len(pairs)} in all"
    for number, pair in matching[first : first + 50]:
        yield f"{number}. {pair[0].id}"
        yield f"{pair[0].prompt} Expected: {pair[0].expected}"
        for side, one in zip(sides, pair, strict=True):
            tagged, reasoning = score.read_answer(one.output), score.reasoning_of(one.output)
            yield f"{side.name} strict {MARK[one.strict]} · lenient {MARK[one.lenient]} · {answers.ENDINGS[one.ended]}"
            yield f"Answer: {tagged.answer}" if tagged else "Malformed"
            yield f"{one.reasoning_words} words before the answer, {one.equations_right} of {one.equations} equations right"
            yield visible(reasoning if tagged else one.output)
            yield from (f"{MARK[found.right]} : {found.text}" for found in equations.equations_in(reasoning))


def of_comparison(*names: str) -> Pieces:
    records = [RunRecord(RUNS / name) for name in names]
    yield f"{len(names)} runs compared {' '.join(f'{one} , completed' for one in names)}"
    metrics = [([line.step for line in one.metrics], [line.loss for line in one.metrics]) for one in records]
    caption, *rows = of_curves("Loss", "", dict(zip(names, metrics, strict=True)))
    yield from (caption, " ".join(names), *rows)
    first, *others = (generate.read_side(RUNS / name) for name in names)
    yield f"against {names[0]}"
    for side in others:
        verdict = report.paragraph(comparison.compare_runs(first, side))
        yield " ".join([side.name, verdict, *report.computing_remarks(first, side)])
    yield f"setting {' '.join(names)}"
    configs = [one.config.model_dump() for one in records]
    for section, key in ((section, key) for section, settings in configs[0].items() for key in settings):
        values = [one[section][key] for one in configs]
        if len(set(map(str, values))) > 1:
            yield f"{section}.{key} {' '.join('not set' if one is None else str(one) for one in values)}"
    tables = [report.table(one.scores("before"), one.scores("after")) for one in records]
    after = [{row.cells[0]: row.cells[3] for row in rows} for rows in tables]
    yield f"measure {' '.join(names)}"
    for measure in (one for one in after[0] if after[0][one]):
        yield " ".join([measure, *(one[measure] for one in after)])


# --- data and plans ---------------------------------------------------------------------------------------------------


def of_data(number: int) -> Pieces:
    """A packed row, as a run trains on it."""
    config, tokenizer, facts = of_a_run()
    found = prepare(config, tokenizer, facts, lambda *_: None)
    store, view = found.store, view_of(found.rows[number - 1], tokenizer)
    share, masked = percent(store.trained_tokens / store.tokens), len(view.tokens) - view.trained
    yield f"dataset {KEY} ({found.format}), sha256 {found.dataset.sha256[:12]} records {len(store.examples)}"
    yield f"tokens {store.tokens:,}, of which {store.trained_tokens:,} are trained ({share})"
    yield f"max_length {config.data.max_length:,} rows {len(found.rows):,}, {percent(found.fill)} full without the last; "
    yield f"{found.traces:,} training examples, {found.heldout_traces:,} held out"
    yield f"{len(found.findings)} of {len(RULES)} rules broken"
    yield f"Packed row {number} of {len(found.rows)}: {len(view.lengths)} examples {len(view.tokens):,} tokens: "
    yield f"{view.trained:,} trained ({percent(view.trained / len(view.tokens))}), {masked:,} masked"
    yield "<0xE2>"
    inside = [store.examples.entries[place] for place in found.rows.examples_of(number - 1)]
    for example, spans in groupby(view.spans, key=lambda span: span.example):
        yield f"example {example}: line {inside[example - 1]['line']}, {view.lengths[example - 1]} tokens"
        for span in spans:
            yield f"{'trained' if span.trained else 'masked'}, {len(span.tokens)} tokens: "
            yield from (token.text.translate(data.MARKS) for token in span.tokens)


def speed_of(time: Any) -> str:
    low, high = (rounded(time["tokens"] / time[name]) for name in ("seconds_high", "seconds_low"))
    return f"{rounded(time['tokens_per_second'])} tokens/s ({low} to {high})"


def of_plan(model: str, on: str, settings: dict[str, str]) -> Pieces:
    """From what `tunix-rt plan --json` prints."""
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    value = json.loads(say("--model", model, "--on", on, *sets).stdout)
    memory, fit, time, run = (value[name] for name in ("memory", "fit", "time", "run"))
    judged = [one for one in memory["phases"] if one["name"] not in LEFT_OUT]
    margin, safety, least = fit["margin_bytes"], fit["safety_bytes"], "at least " * value["compiler_decides"]
    beside = {"safety margin": safety, "CUDA context": memory["context_bytes"], "CUDA graph pool": memory["pool_bytes"]}
    yield f"{value['device']['name']} {value['unable'] or ('as written' if margin < 0 else '')}".removesuffix(" ")
    yield "" if value["unable"] else f"{size(-margin)} too much" if margin < 0 else f"{size(margin)} to spare"
    yield " ".join([f"{least}{size(fit['predicted_bytes'])} predicted",
                    *(f"+ {size(one)} {name}" for name, one in beside.items() if one)])  # fmt: skip
    yield f", {size(fit['available_bytes'])} free"
    yield f"on each of {memory['devices']} devices" if memory["devices"] > 1 else ""
    yield f"model {model}: {memory['parameters']:,} parameters"
    yield f"micro-batch {memory['rows']} row"
    yield f"of {memory['row_tokens']:,} tokens, {memory['dtype']}; evaluation batch size {memory['eval_rows']}"
    yield f", generation {memory['generation_rows']}"
    yield f"speed {speed_of(time)}, {duration(time['seconds'])} a step of {time['tokens']:,} tokens"
    if run:
        hours = " to ".join(duration(3600 * run[name]) for name in ("hours_low", "hours_high"))
        yield f"{hours} of training: {'' if value['steps_exact'] else 'at most '}{run['steps']:,} steps, {run['tokens']:,}"
    yield f"disk up to {size(value['disk_bytes'])} needed"
    yield from (f"reload check {size(one['total_bytes'])}" for one in memory["phases"] if one not in judged)
    if value["compiler_decides"]:
        yield f"compiler {least}{size(fit['predicted_bytes'])} of {size(fit['available_bytes'])} free"
    yield shlex.join(["tunix-rt", "plan", "--model", model, "--on", on, *sets])
    for kind in ("proposals", "faster"):
        for one in value[kind]:
            yield one["line"].removeprefix("--set ").replace(" --set ", ", ")
            yield f"{least}{size(one['predicted_bytes'])}, {rounded(one['tokens_per_second'])} tokens/s"
            yield from one["costs"]
    yield from value["last_resorts"]
    yield f"limit, {charts.label(fit['available_bytes'], 'bytes')}"
    largest = {part: max(one["parts"].get(part, 0) for one in judged) for one in judged for part in one["parts"]}
    spare = [sum(one["parts"].get(part, 0) for part in SPARE) for one in judged]
    totals = [one["total_bytes"] for one in judged]
    peak = [fit["predicted_bytes"] in (all_, all_ - some) for all_, some in zip(totals, spare, strict=True)].index(True)
    for part in sorted((part for part in largest if largest[part]), key=lambda part: -largest[part]):
        cells = [one["parts"].get(part, 0) for one in judged]
        yield " ".join([WORDS.get(part, part.replace("_", " ")), *(size(one) for one in cells if one)])
    for name in ("CUDA context", "CUDA graph pool"):
        yield f"{name} {' '.join([size(beside[name])] * len(judged))}" if beside[name] else ""
    yield f"safety margin {size(safety)}" if safety else ""
    more = memory["context_bytes"] + memory["pool_bytes"]
    yield " ".join(["total", *(size(one + more + safety * (place == peak)) for place, one in enumerate(totals))])
    devices = json.loads(say("--model", model, "--on", "all", *sets).stdout)["devices"]
    changed = sum(bool(one["proposals"]) and not one["runs"] for one in devices)
    yield f"{sum(one['runs'] for one in devices)} of {len(devices)} devices run it as written, {changed} with changes"
    for one in devices:
        yield f"{one['device']['name']} {size(one['device']['memory_bytes'])}"
        yield "no bfloat16" if one["unable"] and not one["proposals"] else ""
        yield f"{size(one['fit']['predicted_bytes'])} {size(one['fit']['margin_bytes'])} {speed_of(one['time'])}"


PAGES: list[tuple[str, Callable[[], Pieces]]] = [
    ("/", of_list),
    *((f"/runs/{run_id(name)}", partial(of_run, name)) for name in NAMES),
    *((f"/runs/{run_id(name)}/evidence", partial(of_evidence, name)) for name in NAMES),
    *((f"/runs/{run_id(name)}/answers?show={kind}", partial(of_answers, name, kind, 0)) for name in NAMES[:2] for kind in KINDS),
    *((f"/runs/{run_id(name)}/answers?first={first}", partial(of_answers, name, "all", first))
      for name in NAMES for first in range(0, RunRecord(RUNS / name).scores("after").items, 50)),
    (f"/compare?run={run_id('m39_cpu_v1')}&run={run_id('m40_v1')}", partial(of_comparison, "m39_cpu_v1", "m40_v1")),
    (f"/data?data={KEY}&model=tiny-gemma3&row=2", partial(of_data, 2)),
    *((f"/plan?{urlencode({'model': model, 'on': on, 'devices': 'all', **settings})}", partial(of_plan, model, on, settings))
      for model, on, settings in tables(__file__)["plans"]),
]  # fmt: skip


@pytest.mark.parametrize(("address", "pieces"), PAGES, ids=lambda one: one if isinstance(one, str) else "")
def test_every_number_of_a_page_is_at_its_place_what_a_named_function_gives_from_the_files(address, pieces):
    explain(opened(site(), address), pieces())


@parametrize("name", "keys", "new", "page", "shown", "without")
def test_a_changed_file_changes_the_page(tmp_path, name, keys, new, page, shown, without):
    """`keys` lead to the changed value, in the first line of a file of lines. `without`: files that take its place."""
    run = shutil.copytree(RUNS / "m39_cpu_v1", tmp_path / "runs" / "one")
    for gone in without:
        (run / gone).unlink()
    site = Site.of(tmp_path / "runs")
    address = page.replace("ID", run_id("one"))
    before = opened(site, address)
    head, *rest = (run / name).read_text().splitlines() if name.endswith(".jsonl") else [(run / name).read_text()]
    inner = value = json.loads(head)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = new
    (run / name).write_text("\n".join([json.dumps(value), *rest]) + "\n")
    assert shown not in text_of(before) and shown in text_of(opened(site, address))

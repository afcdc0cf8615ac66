"""Every number on every page of the five recorded runs comes from the value of its page, and that from the files of the run."""

import dataclasses
import html
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from tests.conftest import ROOT
from tests.pages import Read
from tests.tables import parametrize
from tunix_rt.dashboard import charts, formats
from tunix_rt.dashboard.app import environment, find_page, render
from tunix_rt.dashboard.pages import evidence
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.evidence.verify import verify
from tunix_rt.plan.calibration import describe_error
from tunix_rt.runs.index import run_id
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.tail import last_objects

RUNS, KEY = ROOT / "submission_runs", "dev-reasoning-v2"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
TEMPLATES = ROOT / "src" / "tunix_rt" / "dashboard" / "templates"


def leaves(value: object, depth: int = 0) -> Iterator[object]:
    """Everything inside a value that a template could show: fields, items, and what its properties give."""
    if depth > 12 or isinstance(value, Path | bytes):
        yield str(value)
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int | float | str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(key, depth + 1)
            yield from leaves(inner, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        yield len(value)
        for inner in value:
            yield from leaves(inner, depth + 1)
    elif isinstance(value, np.ndarray):
        yield from leaves(value.tolist(), depth + 1)
    elif isinstance(value, BaseModel):
        yield from leaves(dict(value), depth + 1)
    elif dataclasses.is_dataclass(value):
        if isinstance(value, charts.Series):  # the table behind a chart
            yield from leaves(value.buckets.coarser(charts.TABLE_ROWS), depth + 1)
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, one in vars(type(value)).items() if isinstance(one, property)]
        for name in names:
            yield from leaves(getattr(value, name), depth + 1)


def shown_numbers(value: object) -> set[str]:
    """The numbers in every form in which `formats` writes the leaves of a value."""
    found: set[str] = set()
    for leaf in leaves(value):
        texts = [str(leaf), formats.visible(leaf)]
        if not isinstance(leaf, str):
            texts += [form(leaf) for name, form in formats.FILTERS.items() if name not in ("moment", "visible")]
            texts += [charts.label(leaf, unit) for unit in charts.UNITS]
        elif re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.+]+", leaf):
            texts.append(formats.moment(leaf))
        for text in texts:
            found.update(NUMBER.findall(text))
    return found


@cache
def template_numbers() -> set[str]:
    """Numbers that stand in the templates themselves, as in `L1`."""
    environment()
    return {number for path in TEMPLATES.glob("*.html") for number in NUMBER.findall(path.read_text())}


def text_of(page: str) -> str:
    """What a reader sees, without axes: the values of a chart are in the table behind it."""
    page = re.sub(r"<svg.*?</svg>|<footer>.*?</footer>|<head>.*?</head>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def opened(site: Site, address: str) -> tuple[str, object]:
    path, _, rest = address.partition("?")
    handler, run_id = find_page(path)
    query = Query.parse(rest)
    page = handler(site, query, run_id)
    return render(page, path, query), page.values


def addresses(site: Site) -> list[str]:
    ids = [one.id for one in site.index.runs()]
    pages = [
        f"/runs/{one}{end}" for one in ids for end in ("", "?x=tokens", "/answers", "/answers?show=lost", "/evidence")
    ]
    data = [f"/data?data={KEY}&model=tiny-gemma3&{one}" for one in ("record=7", "row=2", "record=3&ids=1")]
    planned = [f"/plan?model=gemma-3-1b&on=rtx4090{more}" for more in ("", "&devices=all")]
    return ["/", *pages, f"/compare?run={ids[3]}&run={ids[4]}", *data, *planned]


def test_every_number_on_a_page_is_in_its_value():
    site = Site.of(RUNS)
    for run in site.index.runs():
        evidence.start(site, run).join()
    for address in addresses(site):
        page, value = opened(site, address)
        known = shown_numbers(value) | template_numbers()
        stray = [number for number in NUMBER.findall(text_of(page)) if number not in known]
        assert stray == [], address


def cells(site: Site, address: str) -> list[list[str]]:
    return [[" ".join(cell.split()) for cell in row] for row in Read(opened(site, address)[0]).rows]


def test_every_cell_of_the_list_is_what_a_named_function_gives_from_the_files_of_its_run():
    site = Site.of(RUNS)
    rows = {row[1]: row[2:] for row in cells(site, "/") if len(row) > 2}
    for path in (path for path in RUNS.iterdir() if path.is_dir()):
        record, verdict = RunRecord(path), verify(path)
        evidence.start(site, one := site.index.find(run_id(path.name))).join()
        assert evidence.verified_level(site, one) == verdict.level
        result, base, exam = record.result, record.commitment.base_model, record.commitment.evalset
        recent = last_objects(path, "metrics.jsonl", 8 * 1024)
        speed = sum(line["tokens"] for line in recent) / sum(line["seconds"] for line in recent)
        before, after = (formats.percent(record.scores(when).accuracy) for when in ("before", "after"))
        examined = f"{exam.key}, {formats.count(exam.items)} questions" if exam else "eval set not recorded"
        weights = ", random weights" if base.weights == "random" else ""
        assert rows[path.name] == [
            result.status, f"{base.name} {result.device}{weights}",
            f"{formats.count(result.steps_completed)} of {formats.count(result.steps_planned)}", "",
            formats.figure(result.final_loss), f"{before} → {after} {examined}", formats.rate(speed),
            f"{formats.gib(record.memory.measured_bytes)} predicted {formats.gib(record.memory.predicted_bytes)}",
            "not verified bundle", formats.moment(result.finished),
        ]  # fmt: skip
        phases = {row[0]: row[1:] for row in cells(site, f"/runs/{one.id}") if row}
        for name, found in record.memory.phases.items():
            figures = (found.get("predicted_bytes"), found.get("measured_bytes"))
            error = describe_error(*map(int, figures)) if "error" in found else formats.MISSING
            assert phases[name] == [*map(formats.gib, figures), error], (path, name)


@parametrize("name", "keys", "new", "page", "shown", "without")
def test_a_changed_file_changes_the_page(tmp_path, name, keys, new, page, shown, without):
    """`keys` lead to the changed value, in the first line of a file of lines. `without`: files that take its place."""
    run = shutil.copytree(RUNS / "m39_cpu_v1", tmp_path / "runs" / "one")
    for gone in without:
        (run / gone).unlink()
    site = Site.of(tmp_path / "runs")
    address = page.replace("ID", run_id("one"))
    before, _ = opened(site, address)
    head, *rest = (run / name).read_text().splitlines() if name.endswith(".jsonl") else [(run / name).read_text()]
    inner = value = json.loads(head)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = new
    (run / name).write_text("\n".join([json.dumps(value), *rest]) + "\n")
    after, _ = opened(site, address)
    assert shown not in text_of(before) and shown in text_of(after)

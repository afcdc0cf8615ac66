"""The pages of one run and of several: every figure is one of the run's files, and any address is answered."""

import gzip
import json
import random
import re
import shutil
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages import Read
from tests.tables import parametrize
from tunix_rt.dashboard import app
from tunix_rt.dashboard.pages import compare, run, runs
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.errors import InputError
from tunix_rt.runs.index import RUNNING, UNFINISHED, Indexed, RunSummary

RUNS = ROOT / "submission_runs"


def render(page, query=None, part=""):
    return app.render(page, "/runs/x", query or Query(), part)


@pytest.fixture(scope="module")
def site():
    return Site.of(RUNS)


def id_of(site, name):
    return next(one.id for one in site.index.runs() if one.name == name)


# --- the list ---------------------------------------------------------------------------------------------------------


def listed(count: int) -> list[Indexed]:
    """Runs with few different values, some unknown."""
    rng, found = random.Random(24), []
    for number in range(count):
        loss, accuracy, speed = (rng.choice([None, 0.5, 1.5, 2.5]) for _ in range(3))
        summary = RunSummary(
            folder=f"/runs/{number:03}", status=rng.choice([RUNNING, UNFINISHED, "completed", "failed"]),
            model=rng.choice([None, "gpt2", "gemma-3-1b"]), final_loss=loss, accuracy_after=accuracy,
            tokens_per_second=speed, measured_bytes=rng.choice([None, 2**30, 2**33]), device=rng.choice(["cpu", "cuda"]),
            when=rng.choice([None, "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"]),
        )  # fmt: skip
        known = {"id": f"{number:012x}", "root": Path(summary.folder), "name": f"{number:03}", "stamp": ()}
        found.append(Indexed(**known, running=False, summary=summary))
    return found


@pytest.mark.parametrize("group", runs.GROUPS)
@pytest.mark.parametrize("sort", runs.SORTS)
def test_the_list_has_every_run_once_in_its_order_over_its_pages(sort, group):
    known = listed(2 * runs.PAGE_RUNS + 30)
    for turned in (False, True):
        pages, first = [], 0
        while first is not None:
            query = Query.parse(f"sort={sort}&group={group}&turned={int(turned)}&first={first}")
            pages.append(runs.choose(known, query, folder="/runs", levels={}))
            assert pages[-1].before == (max(0, first - runs.PAGE_RUNS) if first else None)
            first = pages[-1].after
        rows = [(name, one) for page in pages for name, members in page.groups for one in members]
        assert sorted(one.id for _, one in rows) == [one.id for one in known] and len(pages) == 3
        assert group == "none" or all(name == (getattr(one.summary, group) or "unknown") for name, one in rows)
        assert len(list(groupby(name for name, _ in rows))) == len({name for name, _ in rows})
        rank = {RUNNING: 0, UNFINISHED: 1}
        for _, together in groupby(rows, key=lambda row: (row[0], rank.get(row[1].summary.status, 2))):
            values = [runs.SORTS[sort](one.summary) for _, one in together]
            there = [value for value in values if value is not None]
            assert there == sorted(there, reverse=(sort in runs.DOWNWARDS) != turned) == values[: len(there)]
        ranks = [(name, rank.get(one.summary.status, 2)) for name, one in rows]
        assert all(left <= right for (a, left), (b, right) in pairwise(ranks) if a == b)


def test_the_list_is_filtered_by_words_and_status():
    known = listed(90)
    page = runs.choose(known, Query.parse("q=gpt2+cuda&status=failed"), folder="/runs", levels={})
    wanted = [one.id for one in known if (one.summary.model, one.summary.device) == ("gpt2", "cuda")]
    wanted = [one.id for one in known if one.id in wanted and one.summary.status == "failed"]
    assert sorted(one.id for one in page.groups[0][1]) == wanted and (page.shown, page.total) == (len(wanted), 90)


# --- one run ----------------------------------------------------------------------------------------------------------


@parametrize("address")
def test_any_address_is_answered_and_its_links_lead_on(site, address):
    query = Query.parse(address)
    page = run.page(site, query, id_of(site, "m39_v1"))
    links = [link for link in Read(render(page, query)).links if "from=" in link]
    assert len(links) in (1, 4)
    for link in links:
        again = run.page(site, Query.parse(link.removeprefix("?")), id_of(site, "m39_v1")).values.curves
        assert again.controls == page.values.curves.controls
        assert again.charts[0].low < again.charts[0].high


def test_a_run_that_goes_on_is_looked_at_again_and_its_page_grows(tmp_path):
    shutil.copytree(RUNS / "demo_v1", tmp_path / "live")
    ended = json.loads((result := tmp_path / "live" / "result.json").read_text())
    for gone in ("result.json", "memory.json", "run_manifest.json"):
        (tmp_path / "live" / gone).unlink()
    metrics = tmp_path / "live" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:50]))
    site = Site.of(tmp_path)
    before = run.page(site, Query(), id_of(site, "live"))
    assert before.live and before.values.every == 5000 and 'data-every="5000"' in render(before)
    assert "Predicted by part" in render(before) and ">proof<" not in render(before)  # from plan.json
    metrics.write_bytes(b"".join(lines[:90]))
    after = run.page(site, Query(), id_of(site, "live")).values
    assert after.curves.charts[0].series[0].buckets.last[-1] == 90 and after.details is before.values.details
    for status, every in (("preempted", 10_000), ("failed", 10_000), ("completed", 0)):
        result.write_text(json.dumps(ended | {"status": status}))
        page = run.page(site, Query(), id_of(site, "live"))
        assert (page.values.run.summary.status, page.values.every, page.live) == (status, every, every > 0)


def test_corrupt_files_are_named_and_secrets_in_the_log_are_not_shown(tmp_path):
    root = tmp_path / "run"
    shutil.copytree(RUNS / "demo_v1", root)
    (root / "result.json").write_text('{"status": "completed"}')
    (root / "checkpoints.json").unlink()
    (root / "checkpoints.json").symlink_to("/etc/passwd")
    with (root / "metrics.jsonl").open("a") as metrics, (root / "training_log.txt").open("a") as log:
        metrics.write('{"step": NaN}\n')
        log.write("token hf_" + "a" * 30 + " \x1b[31m\n")
    text = Read(render(run.page(site := Site.of(tmp_path), Query(), id_of(site, "run")))).text
    named = ("result.json: reason: missing", "checkpoints.json: a symbolic link", "metrics.jsonl:201: not an object")
    assert all(shown in text for shown in (*named, "hf_***"))
    assert "a" * 30 not in text and "\x1b" not in text


@pytest.mark.parametrize("x", run.AXES)
def test_a_page_has_at_most_60_kb_with_as_much_noise_as_it_shows(tmp_path, x):
    rng, root = random.Random(24), Path(shutil.copytree(RUNS / "m39_v1", tmp_path / "run"))
    first = json.loads((root / "metrics.jsonl").read_text().splitlines()[0])
    numbers = {name: value for name, value in first.items() if type(value) in (int, float) and name != "step"}

    def line(step: int) -> str:
        noise = {name: type(value)(value * rng.lognormvariate(0, 1)) for name, value in numbers.items()}
        return json.dumps({**first, **noise, "step": step}) + "\n"

    (root / "metrics.jsonl").write_text("".join(map(line, range(1, 64 * run.BUCKETS + 1))))
    log = (bytes(rng.choices(range(32, 256), k=90)) + b"\n" for _ in range(2900))
    (root / "training_log.txt").write_bytes(b"".join(log))
    site, query = Site.of(tmp_path), Query((("x", x),))
    curves = run.page(site, query, id_of(site, "run")).values.curves
    assert len(curves.charts[0].series[0].buckets) == run.BUCKETS and not curves.reading
    page = render(run.page(site, query, id_of(site, "run")), query).encode()
    assert len(gzip.compress(page)) <= 60_000


@parametrize("values")
def test_any_finite_numbers_are_drawn_along_any_axis(tmp_path, values):
    names = ("loss", "lr", "grad_norm", "target_tokens", "tokens", "seconds", "peak_bytes")
    lines = [json.dumps({"step": step, **dict.fromkeys(names, one)}) + "\n" for step, one in enumerate(values, start=1)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    site = Site.of(tmp_path)
    for address in ("", "x=tokens&log=1", "x=time&smooth=0.99&from=0&to=1"):
        html = render(run.page(site, Query.parse(address), id_of(site, "run")))
        Read(html)
        assert not re.search(r'="[^"]*\b(nan|inf)\b', html)


def test_runs_that_cannot_be_compared_say_why_and_every_curve_can_be_chosen(site):
    ids = [id_of(site, name) for name in ("m39_cpu_v1", "demo_v1", "m39_cpu_v1")]
    query = Query(tuple(("run", one) for one in ids))
    view = compare.page(site, query).values
    assert "were decoded differently: max_new_tokens is 64" in view.verdicts[0].text and view.verdicts[0].fix
    for column, title in view.curves.controls[0][3]:
        chosen = compare.page(site, Query((*query.pairs, ("column", column)))).values.curves.charts[0]
        assert chosen.title == title and [one.name for one in chosen.series] == ["m39_cpu_v1", "demo_v1"]
    for count in (0, 1, 9):
        with pytest.raises(InputError, match=rf"{count} run\(s\) to compare; 2 to 8") as refused:
            compare.page(site, Query(tuple(("run", f"{number:012x}") for number in range(count))))
        assert "list of runs" in refused.value.fix

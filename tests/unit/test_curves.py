"""Metrics as columns: they equal the file, grow with it, follow it when a resumed run truncates it, and survive any content."""

import json
import os
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import create_model

from tunix_rt.dashboard import charts
from tunix_rt.dashboard.app import render
from tunix_rt.dashboard.pages import run
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.runs import curves
from tunix_rt.runs.curves import CurveStore, MetricsFile, bucketed
from tunix_rt.runs.fields import Amount, Maybe
from tunix_rt.runs.schemas import StepLine


def line(step, **changed):
    numbers = {"lr": 2e-5, "grad_norm": 1.5, "target_tokens": 8, "tokens": 16, "seconds": 0.5, "peak_bytes": 2**30}
    texts = {"loss_hex": "0x1.0000000000000p+0", "batch": "b" * 64, "prev": "c" * 64}
    return json.dumps({"step": step, "loss": 1 / step, **numbers, **texts, **changed}).encode() + b"\n"


def write(root, *lines):
    (root / "metrics.jsonl").write_bytes(b"".join(lines))


def read(file):
    found = file.curves()
    assert not found.is_sample
    return found


# --- buckets ----------------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


values = st.lists(st.one_of(finite, st.just(float("nan"))), max_size=300)


@given(y=values, count=st.integers(1, 40), cut=st.tuples(st.integers(-5, 310), st.integers(-5, 310)))
def test_buckets_equal_brute_force_and_keep_every_extreme(y, count, cut):
    low, high = sorted(cut)
    found = bucketed(np.arange(len(y), dtype=float), np.array(y), low, high, count)
    points = [(x, value) for x, value in enumerate(y) if low <= x <= high and np.isfinite(value)]
    assert len(found) <= count and int(found.points.sum()) == len(points)
    place = 0
    for number in range(len(found)):
        mine = points[place : place + int(found.points[number])]
        values = [value for _, value in mine]
        place += len(mine)
        assert (found.first[number], found.last[number]) == (mine[0][0], mine[-1][0])
        assert (found.lowest[number], found.highest[number]) == (min(values), max(values))
        assert min(values) <= found.mean[number] <= max(values)
        if max(map(abs, values)) < 1e290:
            assert found.mean[number] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9 * max(map(abs, values)))
    if points:
        coarse, values = found.coarser(7), [value for _, value in points]
        assert found.ends == coarse.ends == (values[0], values[-1]) and coarse.points.sum() == len(points)
        assert (coarse.lowest.min(), coarse.highest.max()) == (min(values), max(values)) and len(coarse) <= 7
        assert (coarse.first[0], coarse.last[-1]) == (points[0][0], points[-1][0])


def test_full_buckets_stay_as_they_are_while_the_file_grows():
    y = np.random.default_rng(0).normal(size=1600)
    x = np.arange(len(y), dtype=float)
    before, after = (bucketed(x[:end], y[:end], 0, 2000, 100) for end in (1500, 1520))
    assert (before.mean[:93] == after.mean[:93]).all() and (before.first[:93] == after.first[:93]).all()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_columns_are_the_declared_numbers_and_what_follows_from_them(tmp_path):
    write(tmp_path, line(1, tokens=10, seconds=0.5), line(2, tokens=30, seconds=0), line(4, tokens=20, seconds=2))
    columns = read(MetricsFile(tmp_path)).columns
    known = ["step", "loss", "lr", "grad_norm", "target_tokens", "tokens", "seconds", "peak_bytes"]
    assert list(columns) == [*known, "tokens_per_second", "total_tokens", "total_seconds"]
    assert columns["step"].tolist() == [1, 2, 4] and columns["loss"].tolist() == [1.0, 0.5, 0.25]
    assert columns["total_tokens"].tolist() == [10, 40, 60] and columns["total_seconds"].tolist() == [0.5, 0.5, 2.5]
    assert columns["tokens_per_second"][[0, 2]].tolist() == [20, 10] and np.isnan(columns["tokens_per_second"][1])


def test_a_number_that_a_step_declares_becomes_a_column_also_where_older_lines_lack_it(monkeypatch, tmp_path):
    declared = create_model("Declared", __base__=StepLine, entropy=(Maybe[Amount], None))
    monkeypatch.setattr(curves, "StepLine", declared)
    monkeypatch.setattr(curves, "FIELDS", curves._numeric_fields())
    monkeypatch.setattr(curves, "NAMES", (*curves.FIELDS, *curves.DERIVED))
    monkeypatch.setattr(curves, "_STEPS", curves._validator())
    assert curves.FIELDS["entropy"] and not curves.FIELDS["loss"]
    file = MetricsFile(tmp_path)
    write(tmp_path, line(1))
    assert (
        "entropy" not in read(file).columns and file.kept_bytes == 11 * 8
    )  # a column without a number takes no memory
    write(tmp_path, line(1), line(2, entropy=0.75))
    entropy = read(file).columns["entropy"]
    assert np.isnan(entropy[0]) and entropy[1] == 0.75


def test_the_columns_grow_with_the_file_and_a_torn_line_waits(tmp_path):
    file = MetricsFile(tmp_path)
    assert read(file).steps == 0
    write(tmp_path, line(1), line(2)[:50])
    first = read(file)
    assert (first.steps, first.problem) == (1, "")
    write(tmp_path, line(1), line(2), *(line(step) for step in range(3, 4000)))
    found = read(file)
    assert found.columns["step"].tolist() == list(range(1, 4000)) and found.columns["total_tokens"][-1] == 16 * 3999
    assert first.steps == 1  # what was given out does not change


@pytest.mark.parametrize("seconds", [0.5, 0.75], ids=["shorter", "other lines of the same length"])
def test_a_resumed_run_that_truncates_its_metrics_is_read_again(tmp_path, seconds):
    file, lines = MetricsFile(tmp_path), [line(step) for step in range(1, 101)]
    write(tmp_path, *lines)
    assert read(file).steps == 100
    with (tmp_path / "metrics.jsonl").open("r+b") as metrics:
        metrics.truncate(sum(map(len, lines[:60])))
    if seconds == 0.5:
        assert read(file).steps == 60
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.writelines(line(step, seconds=seconds, loss=9.0) for step in range(61, 121))
    found = read(file)
    assert found.columns["step"].tolist() == list(range(1, 121)) and found.columns["loss"][60] == 9.0
    assert found.columns["total_seconds"][-1] == 30 + 60 * seconds
    os.replace(tmp_path / "metrics.jsonl", tmp_path / "old")
    assert read(file).steps == 0


NESTED = b'{"step": ' + b"[" * 100_000 + b"\n"
HOSTILE = {
    "NaN": line(3, loss=float("nan")), "infinite": line(3, lr=float("inf")), "huge whole number": line(3, tokens=10**400),
    "endless digits": b'{"step": ' + b"9" * 100_000 + b"}\n", "nested": NESTED, "not UTF-8": line(3)[:-3] + b'\xff"}\n',
    "a list": b"[3]\n", "a number": b"3\n", "null": b"null\n", "empty": b"\n", "not JSON": b"{step: 3}\n",
    "two objects": line(3)[:-1] + line(4), "without a loss": line(3).replace(b'"loss":', b'"lost":'),
    "true": line(3, loss=True), "text": line(3, loss="1.0"), "no number": line(3, loss=None), "a list in it": line(3, loss=[1]),
    "the step again": line(2), "an earlier step": line(1), "half a step": line(2.0), "step below": line(-4),
    "closes the list": b'{"step": 3}], [{"step": 4}\n', "NUL": b"\0" * 1000 + b"\n",
}  # fmt: skip


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_the_curves_end_before_a_line_that_does_not_fit_and_name_it(tmp_path, bad):
    write(tmp_path, line(1), line(2), bad, line(5), line(6))
    found = read(MetricsFile(tmp_path))
    assert found.columns["step"].tolist() == [1, 2]
    assert found.problem.startswith("metrics.jsonl:3: ") and found.problem.isprintable()
    write(tmp_path, bad)
    assert read(MetricsFile(tmp_path)).steps <= 1


@pytest.mark.parametrize("ended", [b"", b'"}\n'], ids=["without an end", "with one"])
def test_a_line_of_200_megabytes_is_left_out_without_being_read(tmp_path, ended):
    write(tmp_path, line(1), b'{"step": 2, "loss": "')
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.truncate(200 * 2**20)
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.write(ended + line(3) * bool(ended))
    store = CurveStore()
    assert store.get(tmp_path).columns["step"].tolist() in ([1], [1, 3])  # a sample
    while (found := store.get(tmp_path)).reading:
        time.sleep(0.05)
    assert found.columns["step"].tolist() == [1] and "a line of more than" in found.problem


def test_bytes_and_steps_beyond_the_limits_are_not_read_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MOST_BYTES", 200_000)
    write(tmp_path, *(line(step) for step in range(1, 1001)))
    for _ in range(2):
        found = CurveStore().get(tmp_path)
        assert found.is_sample and not found.reading and "at most 200,000 are read" in found.problem
        assert 300 < found.steps <= 402 and np.isnan(found.columns["total_tokens"]).all()
    monkeypatch.setattr(curves, "MOST_BYTES", 2**30)
    monkeypatch.setattr(curves, "MOST_STEPS", 700)
    found = read(MetricsFile(tmp_path))
    assert found.steps == 700 and "more than 700 steps" in found.problem


def test_columns_that_are_not_in_use_make_way_and_those_in_use_stay(tmp_path, monkeypatch):
    roots = [tmp_path / name for name in "abc"]
    for root in roots:
        root.mkdir()
        write(root, *(line(step) for step in range(1, 101)))
    store = CurveStore(most_bytes=100 * 11 * 8 * 2)
    for root in roots:
        assert store.get(root).steps == 100
    assert list(store._files) == roots  # all were used just now
    monkeypatch.setattr(curves, "IN_USE_SECONDS", -1.0)
    assert store.get(roots[0]).steps == 100
    assert list(store._files) == [roots[2], roots[0]]


# --- a million steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_steps_are_drawn_at_once_a_million_read_in_4_seconds_and_every_spike_is_in_the_picture(tmp_path, count):
    """Times are CPU times of this thread: the computer may be busy."""
    root, rng, times = tmp_path / "million", np.random.default_rng(7), {}
    losses, spikes = rng.uniform(1, 2, count), np.sort(rng.choice(count, 1000, replace=False))
    losses[spikes] = rng.uniform(50, 1000, 1000)
    text = line(1).decode().replace('"step": 1,', '"step": %d,').replace('"loss": 1.0,', '"loss": %r,')
    root.mkdir()
    with (root / "metrics.jsonl").open("w") as file:
        file.writelines(text % (step, loss) for step, loss in enumerate(losses.tolist(), start=1))
    site = Site.of(tmp_path)
    run_id = site.index.runs()[0].id

    def drawn(what, address=""):
        start, query = time.thread_time(), Query.parse(address)
        made = run.page(site, query, run_id)
        html = render(made, "/", query, "live")
        times[what] = time.thread_time() - start
        return made.values.curves, html

    assert drawn("first picture")[0].reading
    site.cache["curves"]._files[root] = file = MetricsFile(root)
    start = time.thread_time()
    assert file.read() and (file.curves().columns["loss"] == losses).all()
    times["exact"] = time.thread_time() - start
    view, html = drawn("whole")
    buckets = view.charts[0].series[0].buckets
    place = np.searchsorted(buckets.first, spikes + 1, "right") - 1
    assert all(buckets.highest[one] == losses[spikes[place == one]].max() for one in set(place.tolist()))
    band = re.search(r'id="chart-loss".*?class="band" points="([^"]*)"', html, re.DOTALL)[1].split()
    tops = np.array([float(corner.partition(",")[2]) for corner in band[: len(buckets)]])
    slope, base = np.polyfit(buckets.highest, tops, 1)
    assert slope < 0 and np.abs(base + slope * buckets.highest - tops).max() < 0.1
    assert tops[place].max() < charts.BOTTOM - 5, "above the other steps"
    drawn("zoom", f"from={0.4 * count}&to={0.5 * count}")
    print(times)
    assert times["first picture"] < 0.1 and times["exact"] < 4 and max(times["whole"], times["zoom"]) < 0.05

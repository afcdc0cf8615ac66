"""Charts: well-formed for any numbers and names, with every extreme at its place and figures that read well."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import parametrize
from tunix_rt.dashboard import charts
from tunix_rt.dashboard.charts import Bar, Chart, Series, bars, label, line_chart, log_ticks, smoothed, sparkline, ticks
from tunix_rt.runs.curves import bucketed

finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=30)
HOSTILE = '"><script>alert(1)</script>|;\n&\u202e\0'


def parsed(markup):
    """The markup as XML, which it also has to be. No element runs or styles anything."""
    root = ET.fromstring(f"<div>{markup}</div>")
    for one in root.iter():
        assert one.tag not in ("script", "style", "a", "image", "foreignObject")
        assert not any(name == "style" or name.startswith("on") or "href" in name for name in one.attrib)
    return root


def chart(y, x=None, count=50, **settings):
    x = np.arange(1, len(y) + 1, dtype=float) if x is None else x
    low, high = (float(x[0]), float(x[-1])) if len(y) else (0.0, 1.0)
    buckets = bucketed(x, np.array(y, dtype=float), low, high, count)
    series = Series(name=settings.pop("series_name", "loss"), buckets=buckets)
    return Chart(name="loss", title="Loss", series=(series,), low=low, high=high, **settings)


def coordinates(root, kind):
    found = " ".join(one.get("points") for one in root.iter() if one.get("class") == kind)
    return [tuple(map(float, pair.split(","))) for pair in found.split()]


@given(
    y=st.lists(finite, max_size=120), log=st.booleans(), smoothing=st.sampled_from([0.0, 0.9]), name=names,
    unit=st.sampled_from(["", "bytes", "seconds", "count"]), level=st.none() | finite,
)  # fmt: skip
def test_a_chart_is_well_formed_for_any_numbers_and_names(y, log, smoothing, name, unit, level):
    made = chart(y, log=log, smoothing=smoothing, unit=unit, series_name=name, level=level and ("predicted", level))
    root = parsed(line_chart(made))
    assert "nan" not in str(line_chart(made)).replace("loss-", "").lower() or "nan" in name.lower()
    for x, y_ in (place for kind in ("line", "band", "raw") for place in coordinates(root, kind)):
        assert charts.LEFT <= x <= charts.RIGHT and charts.TOP <= y_ <= charts.BOTTOM


parts = st.dictionaries(names, st.floats(0, 1e18), max_size=12)
rows = st.builds(Bar, name=names, parts=parts, measured=st.none() | st.floats(0, 1e300))


@given(losses=st.lists(st.floats(), max_size=40), rows=st.lists(rows, max_size=6))
def test_sparklines_and_bars_are_well_formed_for_any_numbers_and_names(losses, rows):
    parsed(sparkline(tuple(losses)) + bars(rows, title="Memory", limit=1e9))


def test_text_of_a_file_is_escaped_everywhere():
    made = str(line_chart(chart([3, 1, 2], series_name=HOSTILE, level=(HOSTILE, 2.0))))
    made += str(bars([Bar(name=HOSTILE, parts={HOSTILE: 1}, measured=2)], title=HOSTILE))
    parsed(made)
    assert "<script" not in made and "\u202e" not in made and "\0" not in made
    points = ET.fromstring(str(line_chart(chart([3, 1, 2], series_name=HOSTILE)))).find(".//svg").get("data-points")
    assert len(points.split("\n")) == 1 and len(points.split("|")) == 4  # a name cannot add points


def test_the_sentence_has_first_last_lowest_and_highest_and_the_table_all_values():
    root = parsed(line_chart(chart([3.0, 0.5, 4.25, 2.0])))
    assert root.find(".//desc").text == "loss by step, 4 values: first 3, last 2, lowest 0.5 at 2, highest 4.25 at 3."
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert rows[1:] == [["loss", str(n), "1", *[text] * 3] for n, text in enumerate(["3", "0.5", "4.25", "2"], start=1)]
    assert root.find(".//svg").get("role") == "img"
    assert root.find(".//svg").get("data-points") == "loss|66;1;3|254;2;0.5|442;3;4.25|630;4;2"


def test_smoothing_keeps_the_raw_values_in_sight_and_says_so():
    rough = [1.0, 3.0] * 20
    plain, smooth = (parsed(line_chart(chart(rough, smoothing=weight))) for weight in (0.0, 0.9))
    assert coordinates(smooth, "raw") == coordinates(plain, "line") != coordinates(smooth, "line")
    assert "smoothed 0.9" in "".join(smooth.find(".//figcaption").itertext())
    banded = parsed(line_chart(chart(rough * 100, smoothing=0.9)))
    assert coordinates(banded, "band") and "mean and range of up to 128 steps" in "".join(banded.itertext())
    assert smoothed(np.array([2.0, 2.0, 2.0]), 0.9).tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_ticks_are_round_and_lie_within_the_axis():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(0, 1e6) == [0, 2e5, 4e5, 6e5, 8e5, 1e6]
    assert [*log_ticks(1e-3, 20), *log_ticks(0.9, 30)] == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 1, 2, 5, 10, 20])


@given(low=st.floats(-1e300, 1e300), span=st.floats(0, 1e300))
def test_there_are_never_many_ticks(low, span):
    assert 1 <= len(ticks(low, low + span)) <= 8
    if low > 0 and span > 0:
        assert 1 <= len(log_ticks(low, low + span)) <= 16


@parametrize("value", "unit", "text")
def test_figures_read_well(value, unit, text):
    assert label(value, unit) == text


def test_axes_of_a_learning_rate_and_of_memory_read_well():
    texts = [one.text for one in parsed(line_chart(chart([0, 2e-5, 1e-5]))).iter("text")]
    assert {"0", "5e-6", "1e-5", "1.5e-5", "2e-5"} <= set(texts)
    made = line_chart(chart([12 * 2**30] * 5, unit="bytes", level=("predicted", 14.0 * 2**30)))
    texts = [one.text for one in parsed(made).iter("text")]
    assert {"0 GiB", "5 GiB", "10 GiB"} <= set(texts)
    assert re.search('class="level">predicted, 14 GiB<', made) and 'class="level" d="M66 ' in made

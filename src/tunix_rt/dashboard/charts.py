"""Charts as SVG: pure functions from numbers to markup. Colours are the classes s0 to s7 of the stylesheet; text is escaped."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape

from tunix_rt.dashboard.formats import MISSING, visible
from tunix_rt.runs.curves import Buckets, Column

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 66, 630, 8, 196
"""Of the area inside the axes."""
COLOURS = 8
ROW = 46
"""Height of a bar with its text and what was measured."""
TABLE_ROWS = 12
LARGEST = 1e300
"""Larger values are drawn here, so that a difference of two is a number."""
UNITS: Mapping[str, tuple[tuple[float, str], ...]] = {
    "": ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1, "")),
    "count": ((1, ""),),
    "bytes": ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")),
    "seconds": ((3600, " h"), (60, " min"), (1, " s")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`marks`: few points, each drawn as a dot."""

    name: str
    buckets: Buckets
    marks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """What one chart shows, from x = `low` to `high`."""

    name: str
    """Of letters and underscores; unique on a page."""
    title: str
    series: tuple[Series, ...]
    low: float
    high: float
    x_name: str = "step"
    x_unit: str = "count"
    unit: str = ""
    log: bool = False
    smoothing: float = 0.0
    """0 to below 1: the share of the mean before in each point of the line."""
    level: tuple[str, float] | None = None
    """What a horizontal line is, and where."""


# --- numbers ----------------------------------------------------------------------------------------------------------


def _scale(value: float, unit: str) -> tuple[float, str]:
    for scale, suffix in UNITS[unit]:
        if abs(value) >= scale:
            return scale, suffix
    return UNITS[unit][-1]


def _number(value: float, digits: int) -> str:
    if 1e3 <= abs(value) < 1e15:
        return f"{value:,.0f}" if digits < 10 else f"{value:,.15g}"
    mantissa, e, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def label(value: float, unit: str = "") -> str:
    """Four digits: `2e-5`, `0.1774`, `13.28 GiB`, `1,024`."""
    scale, suffix = _scale(value, unit)
    return _number(value / scale, 4) + suffix


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten; at least one value."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough)) if 1e-290 < rough < math.inf else 0.0
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough), 0.0)
    if not step or low + step == low or high - step == high:
        return [low, high] if high > low else [low]
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def log_ticks(low: float, high: float) -> list[float]:
    """Decades; with 2 and 5 between them where there are few, and even steps where there are fewer still."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors, every = ((1, 2, 5) if last - first <= 3 else (1,)), max(1, (last - first) // 6)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    found = [one for one in found if low <= one <= high]
    return found if len(found) > 1 else ticks(low, high)


def smoothed(values: Column, weight: float) -> Column:
    """The exponential mean, without the pull of its beginning: the first value stays as it is."""
    found, mean, share = np.empty_like(values), 0.0, 0.0
    for place, value in enumerate(values.tolist()):
        mean, share = weight * mean + (1 - weight) * value, weight * share + (1 - weight)
        found[place] = mean / share
    return found


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from `low` to `high` on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    unit: str
    log: bool = False

    def at(self, values: Iterable[float]) -> list[float]:
        kept = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        low, high = self.low, self.high
        if self.log:
            low, high, kept = math.log10(low), math.log10(high), np.log10(kept)
        pixels = self.start + (kept - low) / ((high - low) or 1.0) * (self.end - self.start)
        return [float(one) for one in pixels.round(1).tolist()]

    def marks(self) -> list[tuple[float, str]]:
        """Pixel and text of every tick, round in the unit that is shown."""
        scale, suffix = _scale(max(abs(self.low), abs(self.high)), self.unit)
        found = (log_ticks if self.log else ticks)(self.low / scale, self.high / scale)
        found = [one for one in found if self.unit != "count" or one == round(one)] or found
        texts = [_number(one, 10) + suffix for one in found]
        return list(zip(self.at([one * scale for one in found]), texts, strict=True))


def _upright(chart: Chart) -> _Axis:
    """The axis of the values, with room above and below."""
    parts = [part for one in chart.series for part in (one.buckets.lowest, one.buckets.highest)]
    values = np.clip(np.concatenate([*parts, [chart.level[1]] if chart.level else []]), -LARGEST, LARGEST)
    if log := chart.log and bool((values > 0).any()):
        values = values[values > 0]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if log:
        margin = (high / low) ** 0.04 if high / low > 1.01 else 2.0
        return _Axis(max(low / margin, 1e-300), min(high * margin, LARGEST), BOTTOM, TOP, chart.unit, log=True)
    low = 0.0 if chart.unit == "bytes" and low > 0 else low
    room = 0.04 * (high - low) if high - low > 1e-9 * max(abs(high), 1e-280) else (abs(high) * 0.05 or 1.0)
    return _Axis(0.0 if 0 <= low < room * 2 else low - room, high + room, BOTTOM, TOP, chart.unit)


# --- pieces: from numbers and escaped text ----------------------------------------------------------------------------


def _points(across: Sequence[float], upright: Sequence[float]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in zip(across, upright, strict=True))


def _line(across: Sequence[float], upright: Sequence[float], kind: str, *, dots: bool = False) -> str:
    circles = [f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="2.5"/>' for x, y in zip(across, upright, strict=True)]
    line = f'<polyline class="{kind}" points="{_points(across, upright)}"/>' if len(across) > 1 else ""
    return line + "".join(circles if dots or not line else ())


def _middle(buckets: Buckets) -> Column:
    return np.asarray(buckets.first / 2 + buckets.last / 2)


def _draw(series: Series, number: int, across: _Axis, upright: _Axis, smoothing: float) -> str:
    buckets, parts = series.buckets, []
    x, weight = across.at(_middle(buckets)), 0.0 if series.marks else smoothing
    if len(buckets) > 1 and int(buckets.points.max()) > 1:
        low, high = upright.at(buckets.lowest), upright.at(buckets.highest)
        parts.append(f'<polygon class="band" points="{_points([*x, *x[::-1]], [*high, *low[::-1]])}"/>')
    elif weight:
        parts.append(_line(x, upright.at(buckets.mean), "raw"))
    parts.append(_line(x, upright.at(smoothed(buckets.mean, weight)), "line", dots=series.marks))
    return f'<g class="s{number % COLOURS}">{"".join(parts)}</g>'


def _grid(across: _Axis, upright: _Axis) -> str:
    lines, texts = [f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"], []
    for place, text in upright.marks():
        lines.append(f"M{LEFT} {place:g}H{RIGHT}")
        texts.append(f'<text x="{LEFT - 6}" y="{place + 4:g}" text-anchor="end">{text}</text>')
    for place, text in across.marks():
        lines.append(f"M{place:g} {BOTTOM}v4")
        x, anchor = (RIGHT + 8, "end") if place > RIGHT - 30 else (place, "middle")
        texts.append(f'<text x="{x:g}" y="{BOTTOM + 16}" text-anchor="{anchor}">{text}</text>')
    return f'<path class="axis" d="{"".join(lines)}"/>{"".join(texts)}'


def _where(buckets: Buckets, unit: str) -> list[str]:
    """The x of each bucket, from its first point to its last."""
    pairs = zip(buckets.first.tolist(), buckets.last.tolist(), strict=True)
    return [label(a, unit) if a == b else f"{label(a, unit)} to {label(b, unit)}" for a, b in pairs]


def _sentence(chart: Chart, series: Series) -> str:
    buckets, where = series.buckets, _where(series.buckets, chart.x_unit)
    if not where:
        return f"{visible(series.name)}: no values here."
    low, high = int(buckets.lowest.argmin()), int(buckets.highest.argmax())
    first, last, lowest, highest = (
        label(one, chart.unit) for one in (*buckets.ends, float(buckets.lowest[low]), float(buckets.highest[high]))
    )
    parts = f"first {first}, last {last}, lowest {lowest} at {where[low]}, highest {highest} at {where[high]}"
    return f"{visible(series.name)} by {chart.x_name}, {int(buckets.points.sum()):,} values: {parts}."


def _crosshair(chart: Chart, series: Series, across: _Axis) -> str:
    """The name, then `pixel;x;value` of each bucket, between bars."""
    buckets, rows = series.buckets, [visible(series.name).replace("|", "/").replace("\n", " ")]
    values = zip(buckets.mean.tolist(), buckets.lowest.tolist(), buckets.highest.tolist(), strict=True)
    places = zip(across.at(_middle(buckets)), _where(buckets, chart.x_unit), values, strict=True)
    for pixel, where, (mean, low, high) in places:
        span = "" if low == high else f" ({label(low, chart.unit)} to {label(high, chart.unit)})"
        rows.append(f"{pixel:g};{where};{label(mean, chart.unit)}{span}")
    return "|".join(rows)


def _legend(names: Sequence[tuple[str, str]]) -> str:
    items = [f'<li class="{kind}">{escape(visible(name))}</li>' for kind, name in names]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(chart: Chart) -> str:
    rows = []
    for one in chart.series:
        few = one.buckets.coarser(TABLE_ROWS)
        columns = [
            [label(value, chart.unit) for value in part.tolist()] for part in (few.lowest, few.mean, few.highest)
        ]
        for cells in zip(_where(few, chart.x_unit), (f"{count:,}" for count in few.points), *columns, strict=True):
            marked = "".join(f'<td class="n">{cell}</td>' for cell in cells)
            rows.append(f'<tr><th scope="row">{escape(visible(one.name))}</th>{marked}</tr>')
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("curve", chart.x_name, "values", "lowest", "mean", "highest")
    )
    title = escape(f"Values of {chart.title}")
    return (
        f'<details><summary>{title}</summary><div class="scroll" tabindex="0" role="region" aria-label="{title}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _how(chart: Chart, upright: _Axis) -> str:
    """In which way the picture is not the plain values, one by one."""
    drawn = [one.buckets for one in chart.series if len(one.buckets)]
    most, low = (
        max((int(one.points.max()) for one in drawn), default=0),
        min((one.lowest.min() for one in drawn), default=1),
    )
    parts = [f"by {chart.x_name}"]
    parts += [f"mean and range of up to {most:,} steps"] if most > 1 else []
    parts += [f"smoothed {chart.smoothing:g}"] if chart.smoothing else []
    parts += ["log axis" if upright.log else "no log axis: nothing is above 0"] if chart.log else []
    return ", ".join([*parts, *(["0 and below lie on the lower edge"] if upright.log and low <= 0 else [])])


# --- charts -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2048)
def sparkline(losses: tuple[float, ...]) -> Markup:
    """The loss of a run in a line of a table."""
    values = [max(-LARGEST, min(one, LARGEST)) for one in losses if math.isfinite(one)]
    if not values:
        return Markup(MISSING)
    across = _Axis(0, max(1, len(values) - 1), 2, 98, "").at(range(len(values)))
    line = _line(across, _Axis(min(values), max(values), 22, 2, "").at(values), "line")
    text = f"loss from {label(values[0])} to {label(values[-1])}"
    size = 'viewBox="0 0 100 24" width="100" height="24"'
    return Markup(f'<svg class="spark s0" {size} role="img" aria-label="{text}">{line}</svg>')


@lru_cache(maxsize=256)
def line_chart(chart: Chart) -> Markup:
    """A figure: axes, a band from the lowest to the highest value of each bucket, a line of their means, a legend, and the
    values as a sentence and as a table. A chart that is asked for again is not drawn again."""
    upright, across = _upright(chart), _Axis(chart.low, chart.high, LEFT, RIGHT, chart.x_unit)
    drawn = [_draw(one, number, across, upright, chart.smoothing) for number, one in enumerate(chart.series)]
    names = [(f"s{number % COLOURS}", one.name) for number, one in enumerate(chart.series)]
    if chart.level:
        drawn.append(f'<path class="level" d="M{LEFT} {upright.at([chart.level[1]])[0]:g}H{RIGHT}"/>')
        names.append(("level", f"{chart.level[0]}, {label(chart.level[1], chart.unit)}"))
    title, name = escape(chart.title), escape(chart.name)
    points = escape("\n".join(_crosshair(chart, one, across) for one in chart.series))
    return Markup(
        f'<figure class="chart"><figcaption>{title} <small>{_how(chart, upright)}</small></figcaption>'
        f'<svg id="chart-{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text" '
        f'data-low="{float(chart.low)!r}" data-high="{float(chart.high)!r}" data-left="{LEFT}" data-right="{RIGHT}" '
        f'data-points="{points}"><title id="{name}-title">{title}</title>'
        f'<desc id="{name}-text">{escape(" ".join(_sentence(chart, one) for one in chart.series))}</desc>'
        f"{_grid(across, upright)}{''.join(drawn)}</svg>{_legend(names) if len(names) > 1 else ''}"
        f'<output class="readout"></output>{_table(chart)}</figure>'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bytes by part, one after the other; and what was measured, which is drawn below them."""

    name: str
    parts: Mapping[str, float]
    measured: float | None = None


def _stacks(rows: Sequence[Bar]) -> tuple[list[str], list[list[float]]]:
    """The parts by name, the largest first and no more than there are colours; and their bytes in each row."""
    largest: dict[str, float] = {}
    for row in rows:
        for name, size in row.parts.items():
            largest[name] = max(largest.get(name, 0), size)
    order = sorted((name for name in largest if largest[name] > 0), key=lambda name: -largest[name])
    kept, other = (order, []) if len(order) <= COLOURS else (order[: COLOURS - 1], order[COLOURS - 1 :])
    sizes = [
        [*(row.parts.get(name, 0) for name in kept), sum(row.parts.get(name, 0) for name in other)] for row in rows
    ]
    return [*kept, *(["other parts"] if other else [])], sizes


def bars(rows: Sequence[Bar], *, title: str, limit: float | None = None) -> Markup:
    """Memory as stacked horizontal bars. `limit` is a line across them: what the device has."""
    names, sizes = _stacks(rows)
    most = max([*map(sum, sizes), *(row.measured or 0 for row in rows), limit or 0], default=0) or 1
    across = _Axis(0, most, 30, WIDTH - 30, "bytes")
    height, legend = ROW * len(rows) + 24, [(f"s{number}", name) for number, name in enumerate(names)]
    drawn = [f'<text x="{x:g}" y="{height - 4}" text-anchor="middle">{text}</text>' for x, text in across.marks()]
    sentences = []
    for top, row, lengths in zip(range(0, height, ROW), rows, sizes, strict=False):
        edges = across.at(np.cumsum([0, *lengths]))
        texts = [f"predicted {label(sum(lengths), 'bytes')}"] if any(lengths) else []
        for number, (a, b) in enumerate(pairwise(edges)):
            if b > a:
                place = f'x="{a:g}" y="{top + 19}" width="{b - a:g}" height="12"'
                drawn.append(f'<rect class="s{number} part" {place}/>')
        if row.measured is not None:
            width = across.at([row.measured])[0] - 30
            drawn.append(f'<rect class="measured" x="30" y="{top + 32}" width="{width:g}" height="7"/>')
            texts.append(f"measured {label(row.measured, 'bytes')}")
        sentences.append(f"{visible(row.name).replace('_', ' ')}: {', '.join(texts)}")
        drawn.append(f'<text x="30" y="{top + 15}">{escape(sentences[-1])}</text>')
    legend += [("measured", "measured")] if any(row.measured is not None for row in rows) else []
    if limit is not None:
        drawn.append(f'<path class="level" d="M{across.at([limit])[0]:g} 0V{height - 20}"/>')
        legend.append(("level", f"limit, {label(limit, 'bytes')}"))
    head = escape(visible(title))
    return Markup(
        f'<figure class="bars"><figcaption>{head}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{head}. {escape("; ".join(sentences))}.">{"".join(drawn)}</svg>{_legend(legend)}</figure>'
    )

"""Small SVG charts written by hand: no script, no font, no library; colours come from the page (light and dark)."""

import math
from dataclasses import dataclass
from html import escape
from typing import Optional, Sequence

WIDTH, HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 46
_DASHES = ("", "7 4", "2 3", "9 3 2 3")  # so that lines differ without colour too
COLOURS = 6
_OWN_STYLE = ("svg{--s0:#0969b8;--s1:#c4500a;--s2:#11795a;--s3:#9a3f8f;--s4:#8a6d00;--s5:#50626f;background:#fff}"
              "text{font:14px system-ui,sans-serif;fill:#1b1f24}.grid{stroke:#d0d7de}.axis{stroke:#57606a}"
              ".ideal{stroke:#57606a;stroke-dasharray:4 4}")

Value = Optional[float]


@dataclass(frozen=True)
class Series:
    """One line or cloud of points; None breaks a line. ``low`` and ``high`` draw an interval at each point."""

    name: str
    x: Sequence[float]
    y: Sequence[Value]
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    line: bool = True
    points: bool = True


@dataclass(frozen=True)
class Row:
    """One row of a chart with horizontal marks: a value per series, with an optional interval."""

    label: str
    values: Sequence[Value]
    intervals: Sequence[Optional[tuple[float, float]]] = ()


def number(value: Value, digits: int = 3) -> str:
    """A number for people: ``digits`` significant ones, thousands separated; a dash for an unknown one."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** digits:
        return f"{value:,.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    """Label of an axis: no digits that say nothing."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False  # only whole numbers mean something

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(value) if self.log else value
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            return [tick for tick in ticks(self.low, self.high) if not self.whole or tick == round(tick)]
        first, last = math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))
        step = max(1, math.ceil((last - first) / 8))
        return [2.0 ** k for k in range(first, last + 1, step) if self.low * 0.999 <= 2.0 ** k <= self.high * 1.001]


def _finite(values: Sequence[Value]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _style(index: int) -> str:
    return f'stroke="var(--s{index % COLOURS})" stroke-dasharray="{_DASHES[index // COLOURS % len(_DASHES)]}"'


def legend(names: Sequence[str]) -> str:
    """Names beside their colours, as HTML."""
    keys = "".join(f'<li><svg width="30" height="10" aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" '
                   f'stroke-width="3" {_style(i)}/></svg> {escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{keys}</ul>'


def _axes(x: _Scale, y: _Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                     f'<text x="{_LEFT - 6}" y="{at + 5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in x.ticks():
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - _BOTTOM + 19}" text-anchor="middle">{_tick(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" '
                 f'y2="{HEIGHT - _BOTTOM}"/>')
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{(_LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
                 f'<text transform="translate(15 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}'
                 '</text>')
    return parts


def _draw(series: Series, index: int, x: _Scale, y: _Scale) -> list[str]:
    parts, path, pen = [], [], "M"
    for place, (horizontal, vertical) in enumerate(zip(series.x, series.y)):
        if vertical is None or not math.isfinite(vertical):
            pen = "M"
            continue
        at_x, at_y = x(horizontal), y(vertical)
        path.append(f"{pen}{at_x:.1f} {at_y:.1f}")
        pen = "L"
        low, high = (bounds[place] if place < len(bounds) else None for bounds in (series.low, series.high))
        if low is not None and high is not None:
            parts.append(f'<line stroke-width="1.5" opacity="0.7" {_style(index)} x1="{at_x:.1f}" x2="{at_x:.1f}" '
                         f'y1="{y(low):.1f}" y2="{y(high):.1f}"/>')
        if series.points:
            parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3.2" fill="var(--s{index % COLOURS})"/>')
    if series.line and path:
        parts.insert(0, f'<path fill="none" stroke-width="2" {_style(index)} d="{"".join(path)}"/>')
    return parts


def _wrap(parts: Sequence[str], description: str, height: float = HEIGHT) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
            f'{"".join(parts)}</svg>')


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, description: str,
               y_limits: Optional[tuple[float, float]] = None, x_limits: Optional[tuple[float, float]] = None,
               x_log: bool = False, diagonal: bool = False) -> str:
    """SVG and legend of lines over a common x axis, "" if there is nothing to draw.

    ``diagonal`` adds the line y = x. Points outside ``y_limits`` extend them.
    """
    horizontal = [value for one in series for value in _finite(one.x)]
    vertical = [value for one in series for values in (one.y, one.low, one.high) for value in _finite(values)]
    if not horizontal or not any(_finite(one.y) for one in series):
        return ""
    low, high = min(vertical), max(vertical)
    if y_limits is not None:
        low, high = min(low, y_limits[0]), max(high, y_limits[1])
    elif high == low:
        low, high = low - 0.5, high + 0.5
    left, right = x_limits or (min(horizontal), max(horizontal))
    if left == right:
        left, right = (left / 2, right * 2) if x_log else (left - 0.5, right + 0.5)
    x = _Scale(left, right, _LEFT + 8, WIDTH - _RIGHT - 8, x_log,
               all(value == round(value) for value in horizontal))
    y = _Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = _axes(x, y, x_label, y_label)
    if diagonal:
        parts.append(f'<line class="ideal" x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(1):.1f}" y2="{y(1):.1f}"/>')
    for index, one in enumerate(series):
        parts += _draw(one, index, x, y)
    return _wrap(parts, description) + (legend([one.name for one in series]) if len(series) > 1 else "")


def row_chart(rows: Sequence[Row], names: Sequence[str], *, x_label: str, description: str, bars: bool,
              start: float = 0.0) -> str:
    """SVG and legend of horizontal bars from ``start``, or of dots with intervals; "" if there is nothing to draw."""
    values = [value for row in rows for value in _finite(row.values)]
    values += [bound for row in rows for interval in row.intervals if interval for bound in interval]
    if not values:
        return ""
    pitch, group_gap = 20, 14
    tall = len(rows) * (len(names) * pitch + group_gap)
    left = min(210, 20 + 8 * max(len(row.label) for row in rows))
    x = _Scale(min(start, *values), max(*values, start + 1e-9) * (1.12 if bars else 1.04), left, WIDTH - 60)
    parts, top = [], 8.0
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="4" y2="{top + tall}"/>'
                     f'<text x="{x(tick):.1f}" y="{top + tall + 16}" text-anchor="middle">{_tick(tick)}</text>')
    for row in rows:
        label = row.label if len(row.label) <= 24 else row.label[:23] + "\N{HORIZONTAL ELLIPSIS}"
        middle = top + len(names) * pitch / 2 + 5
        parts.append(f'<text x="{left - 8}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        for index, value in enumerate(row.values):
            if value is not None and math.isfinite(value):
                interval = row.intervals[index] if index < len(row.intervals) else None
                parts += _mark(x, value, interval, index, top + index * pitch + pitch / 2, bars)
        top += len(names) * pitch + group_gap
    parts.append(f'<text x="{(left + WIDTH) / 2:.0f}" y="{top + 36}" text-anchor="middle">{escape(x_label)}</text>')
    return _wrap(parts, description, top + 44) + (legend(names) if len(names) > 1 else "")


def _mark(x: _Scale, value: float, interval: Optional[tuple[float, float]], index: int, at: float,
          bars: bool) -> list[str]:
    parts, end = [], x(value)
    if bars:
        parts.append(f'<rect x="{x(x.low):.1f}" y="{at - 7:.1f}" width="{max(1.0, end - x(x.low)):.1f}" height="14" '
                     f'fill="var(--s{index % COLOURS})"/>')
    if interval:
        parts.append(f'<line stroke-width="2" {_style(index)} x1="{x(interval[0]):.1f}" x2="{x(interval[1]):.1f}" '
                     f'y1="{at:.1f}" y2="{at:.1f}"/>')
        end = max(end, x(interval[1]))
    if not bars:
        parts.append(f'<circle cx="{x(value):.1f}" cy="{at:.1f}" r="5" fill="var(--s{index % COLOURS})"/>')
    return parts + [f'<text x="{end + 8:.1f}" y="{at + 5:.1f}">{number(value)}</text>']


def standalone(charts: Sequence[tuple[str, str]], names: Sequence[str]) -> str:
    """An SVG file of its own: (title, chart) side by side, charts as the functions above return them, ``names`` as the
    legend below. Charts are ``WIDTH`` x ``HEIGHT``."""
    parts, top = [], 26
    for place, (title, chart) in enumerate(charts):
        inner = chart[chart.index(">") + 1:chart.index("</svg>")]
        parts.append(f'<g transform="translate({place * WIDTH} {top})">{inner}</g>'
                     f'<text x="{place * WIDTH + WIDTH / 2:.0f}" y="18" text-anchor="middle">{escape(title)}</text>')
    for index, name in enumerate(names):
        left, at = 70 + 170 * index, top + HEIGHT + 12
        parts.append(f'<line x1="{left}" x2="{left + 28}" y1="{at}" y2="{at}" stroke-width="3" {_style(index)}/>'
                     f'<text x="{left + 36}" y="{at + 5}">{escape(name)}</text>')
    size = f'{len(charts) * WIDTH} {top + HEIGHT + 28}'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img"><style>{_OWN_STYLE}</style>'
            f'{"".join(parts)}</svg>')

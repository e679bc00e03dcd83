"""Charts as SVG text: lines over steps, and stacked areas. No script, no fonts, no network.

Colours come from the page's style sheet by class (`c0` ... `c7`), so that light and dark need no second drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_MOST_POINTS = 300  # of a chart with few lines; many share twice as many, so that the page stays small
_FEWEST_POINTS = 60  # of a line
_MOST_MISSING = 40
COLOURS = 8


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, e.g. Series(label="reward", points=[(1, 0.1), (2, 0.3)])."""

    label: str
    points: Points
    colour: int = 0
    marked: bool = False
    """Points are drawn too; for few of them."""
    band: Points = field(default=())
    """(step, half width) of a band about the line."""
    missing: Sequence[float] = field(default=())
    """Steps whose value was not finite."""


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """From data to the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x, self.y
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = (min(max(y, y0), y1) - y0) / (y1 - y0)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)


def lines(
    series: Sequence[Series],
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    most: int = _MOST_POINTS,
) -> str:
    """Lines over steps with a legend; empty text when there is nothing to draw.

    Args:
        series: those without points are left out.
        low: the vertical axis starts here or below; None = at the data.
        high: and ends here or above.
        unit: after each number of a tooltip.
        most: points of a line; fewer where many share the drawing.
    """
    most = max(_FEWEST_POINTS, min(most, 2 * most // max(1, len(series))))
    drawn = [_thinned(s, most) for s in series if s.points]
    if not drawn:
        return ""
    of_each = max(_bucket(s, most) for s in series if s.points)
    values = [y for s in drawn for _, y in s.points] + [y for s in drawn for edge in _edges(s) for _, y in edge]
    bottom, top = min([*values, *([] if low is None else [low])]), max([*values, *([] if high is None else [high])])
    ticks = _ticks(bottom, top)
    xs = [x for s in series for x, _ in s.points]
    scale = _Scale(x=(min(xs), max(xs)), y=(ticks[0], ticks[-1]))
    body = [_frame(scale, ticks)]
    body += [_band(s, scale) for s in drawn if s.band]
    body += [_line(s, scale, unit) for s in drawn]
    body += [_missing(s, scale) for s in drawn]
    legend = [(s.label, s.colour) for s in drawn] if len(drawn) > 1 else []
    return _svg("".join(body), legend, thinned=of_each, missing=any(s.missing for s in drawn))


def stacked(layers: Mapping[str, Points], *, unit: str = "") -> str:
    """Areas on top of each other, the first layer at the bottom.

    Args:
        layers: label -> (step, value); a step that a layer lacks counts 0.
        unit: after each number of a tooltip.
    """
    whole = [Series(label=label, points=points) for label, points in layers.items() if points]
    thin = {series.label: _thinned(series, _MOST_POINTS).points for series in whole}
    if not thin:
        return ""
    steps = sorted({x for points in thin.values() for x, _ in points})
    total = dict.fromkeys(steps, 0.0)
    bands = []
    for label, points in thin.items():
        value, lower = dict(points), dict(total)
        total = {x: lower[x] + value.get(x, 0.0) for x in steps}
        bands.append((label, lower, total))
    ticks = _ticks(0.0, max(total.values()))
    xs = [x for series in whole for x, _ in series.points]
    scale = _Scale(x=(min(xs), max(xs)), y=(ticks[0], ticks[-1]))
    body = [_frame(scale, ticks)]
    for i, (label, lower, upper) in enumerate(bands):
        shape = [scale.at(x, upper[x]) for x in steps] + [scale.at(x, lower[x]) for x in reversed(steps)]
        mean = sum(upper[x] - lower[x] for x in steps) / len(steps)
        tip = f"<title>{escape(label)}: mean {number(mean)}{unit} a step</title>"
        body.append(f'<polygon class="f{i % COLOURS}" points="{_path(shape)}">{tip}</polygon>')
    legend = [(label, i) for i, (label, _, _) in enumerate(bands)]
    return _svg("".join(body), legend, thinned=max(_bucket(series, _MOST_POINTS) for series in whole))


def _bucket(series: Series, most: int) -> int:
    """Points that become one."""
    return max(1, -(-len(series.points) // most))


def _thinned(series: Series, most: int) -> Series:
    """At most `most` points: each the mean of as many neighbours."""
    size = _bucket(series, most)
    if size == 1:
        return series
    return replace(series, points=_means(series.points, size), band=_means(series.band, size))


def _means(points: Points, size: int) -> Points:
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose the data."""
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-12):
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """A value in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:.5g}"


def _tick_label(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3 or step < 1e-9:
        return f"{value:.6g}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9) + (1 if '25' in f'{step:.3g}' else 0))}f}"


def _frame(scale: _Scale, ticks: Sequence[float]) -> str:
    """Grid and axes' numbers."""
    x0, x1 = scale.x
    step, parts = ticks[1] - ticks[0], []
    for tick in ticks:
        _, y = scale.at(x0, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_tick_label(tick, step)}</text>'
        )
    for x in _step_ticks(x0, x1):
        at, _ = scale.at(x, ticks[0])
        anchor = "end" if at > WIDTH - _RIGHT - 1 else "middle"  # the last label must not leave the drawing
        at = WIDTH - 2 if anchor == "end" else at
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{x}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    return "".join(parts)


def _step_ticks(low: float, high: float) -> list[int]:
    if high <= low:
        return [round(low)]
    inner = [round(t) for t in _ticks(low, high) if low < t < high and t == round(t)]
    margin = (high - low) / 12
    return [round(low), *(t for t in inner if t - low > margin and high - t > margin), round(high)]


def _line(series: Series, scale: _Scale, unit: str) -> str:
    places = [scale.at(x, y) for x, y in series.points]
    dashed = " dash" * (series.colour >= COLOURS)
    line = f'<polyline class="s{series.colour % COLOURS}{dashed}" points="{_path(places)}"/>'
    parts = [line] if len(places) > 1 else []
    shown = series.marked or len(places) == 1
    for (x, y), (px, py) in zip(series.points, places, strict=True):
        tip = f"<title>{escape(series.label)}, step {x:g}: {number(y)}{unit}</title>"
        kind = f'class="d{series.colour % COLOURS}" r="3.5"' if shown else 'class="hit" r="6"'
        parts.append(f'<circle {kind} cx="{px:.1f}" cy="{py:.1f}">{tip}</circle>')
    return "".join(parts)


def _missing(series: Series, scale: _Scale) -> str:
    """Marks on the lower axis."""
    parts = []
    for x in series.missing[:_MOST_MISSING]:
        at, y = scale.at(min(max(x, scale.x[0]), scale.x[1]), scale.y[0])
        tip = f"<title>{escape(series.label)}, step {x:g}: not finite</title>"
        parts.append(f'<path class="gone" d="M{at:.1f} {y:.1f}l-5 -9h10z">{tip}</path>')
    return "".join(parts)


def _band(series: Series, scale: _Scale) -> str:
    upper, lower = _edges(series)
    around = [scale.at(x, y) for x, y in [*upper, *reversed(lower)]]
    return f'<polygon class="b{series.colour % COLOURS}" points="{_path(around)}"/>'


def _edges(series: Series) -> tuple[Points, Points]:
    """The upper and the lower edge of the band."""
    middle = dict(series.points)
    known = [(x, middle[x], half) for x, half in series.band if x in middle]
    return [(x, y + half) for x, y, half in known], [(x, y - half) for x, y, half in known]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _svg(body: str, legend: Sequence[tuple[str, int]], *, thinned: int, missing: bool = False) -> str:
    keys = "".join(
        f'<span><i class="k{c % COLOURS}{" dash" * (c >= COLOURS)}"></i>{escape(label)}</span>' for label, c in legend
    )
    keys += f"<span>each point is the mean of {thinned} steps</span>" if thinned > 1 else ""
    keys += "<span>red triangles: not finite</span>" if missing else ""
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg>'
    return drawing + (f'<div class="legend">{keys}</div>' if keys else "")

"""Line charts as SVG text, without a plotting library."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 48
COLORS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#475569", "#b45309", "#0e7490", "#be123c", "#4d7c0f")


@dataclass(slots=True, frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


def distribution(name: str, values: Sequence[float]) -> Curve:
    """The cumulative distribution of the values, in at most 200 points."""
    ordered = sorted(values)
    n = len(ordered)
    places = sorted({min(n - 1, round(k * (n - 1) / 200)) for k in range(201)}) if n else []
    return Curve(name, [(ordered[place], (place + 1) / n) for place in places])


def chart(title: str, x_title: str, y_title: str, curves: Sequence[Curve], log_x: bool = False) -> str:
    """One chart. A logarithmic axis omits points that are not above zero."""
    curves = [Curve(curve.name, [p for p in curve.points if not log_x or p[0] > 0]) for curve in curves]
    points = [point for curve in curves for point in curve.points]
    xs = _ticks_log(points) if log_x else _ticks([x for x, _ in points])
    ys = _ticks([y for _, y in points])
    area = _Area(xs, ys, log_x)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *(_grid(area, xs, ys)),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text>",
    ]
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{area.x(x):.1f},{area.y(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        place = f'x="{WIDTH - RIGHT - 8}" y="{HEIGHT - BOTTOM - 10 - 16 * (len(curves) - 1 - number)}"'
        parts.append(f'<text {place} text-anchor="end" fill="{color}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Area:
    """Maps values to pixels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log_x: bool) -> None:
        self._log = log_x
        self._x = (self._scaled(xs[0]), self._scaled(xs[-1]))
        self._y = (ys[0], ys[-1])

    def _scaled(self, x: float) -> float:
        return log10(x) if self._log else x

    def x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (self._scaled(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _grid(area: _Area, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    parts = []
    for x in xs:
        at = f"{area.x(x):.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for y in ys:
        at = f"{area.y(y):.1f}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(at) + 4:.1f}" text-anchor="end">{y:g}</text>')
    return parts


def _ticks(values: Sequence[float]) -> list[float]:
    """Four to nine round numbers that enclose the values."""
    high = max([*values, 0.0])
    low = min([*values, 0.0])
    span = (high - low) or 1.0
    size = 10.0 ** floor(log10(span / 4))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if span / (size * k) <= 8)
    first = floor(low / step)
    return [round(step * k, 12) for k in range(first, max(first + 1, ceil(high / step)) + 1)]


def _ticks_log(points: Sequence[tuple[float, float]]) -> list[float]:
    xs = [x for x, _ in points] or [1.0]
    low, high = floor(log10(min(xs))), ceil(log10(max(xs)))
    return [float(10.0**k) for k in range(low, max(high, low + 1) + 1)]

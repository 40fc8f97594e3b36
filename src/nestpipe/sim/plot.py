"""Line charts as SVG.  The same numbers give the same bytes; the picture has its own background."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nestpipe.schedule.view.svg import COLOURS, GRID, INK, PAPER, QUIET

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 54, 56
LEAST_APART = 15.0
"""Least pixels between two names at the right."""
COLOUR_NAMES = (*COLOURS, "#555555", "#cc3311")

Line = Sequence[tuple[float, float]]


def plot(
    lines: Mapping[str, Line], title: str, across: str, up: str, rings: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Draws every line with its name at its end.  An axis is logarithmic if its values differ a lot.

    `rings`: a point of a line to draw a ring around.
    """
    xs = sorted({x for line in lines.values() for x, _ in line})
    across_axis = Axis.over(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    heights = [y for line in lines.values() for _, y in line]
    low, high = min(heights), max(heights)
    room = 0.06 * (high - low) or 1.0
    near = high < 1.5 * low  # show the differences, not the height
    up_axis = Axis.over(low - room if near else low, high + room, HEIGHT - BOTTOM, TOP, from_zero=not near)
    x_of, y_of = across_axis.place, up_axis.place
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="28" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>',
    ]
    for tick in up_axis.ticks():
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{QUIET}">{_word(tick)}</text>')
    last = -math.inf
    for value in xs:
        x = x_of(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}" stroke="{QUIET}"/>'
        )
        if x - last > 34:
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle" fill="{QUIET}">{_word(value)}</text>'
            )
            last = x
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 14}" text-anchor="middle" fill="{INK}">{escape(across)}</text>')
    parts.append(
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle" '
        f'fill="{INK}">{escape(up)}</text>'
    )
    ends = _apart({name: y_of(line[-1][1]) for name, line in lines.items()})
    for (name, line), colour in zip(lines.items(), COLOUR_NAMES):
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.6" fill="{colour}"/>' for x, y in line]
        if rings and name in rings:
            x, y = rings[name]
            parts.append(
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="7" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{ends[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Axis:
    """From `low` at pixel `begin` to `high` at `end`, linear or logarithmic."""

    low: float
    high: float
    begin: float
    end: float
    powers: bool

    @staticmethod
    def over(low: float, high: float, begin: float, end: float, from_zero: bool = False) -> Axis:
        """Logarithmic if all values are positive and the highest is many times the lowest."""
        if low > 0 and high >= 8 * low:
            return Axis(low, high, begin, end, True)
        return Axis(0.0 if from_zero else low, high if high > low else low + 1, begin, end, False)

    def place(self, value: float) -> float:
        if self.powers:
            return self.begin + math.log(value / self.low) / math.log(self.high / self.low) * (self.end - self.begin)
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """About five round numbers."""
        if self.powers:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [d * 10.0**p for p in powers for d in (1, 2, 5) if self.low <= d * 10.0**p <= self.high]
        span = self.high - self.low
        unit = 10.0 ** math.floor(math.log10(span))
        step = next(s for s in (unit / 5, unit / 2, unit, 2 * unit) if span / s <= 7)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _apart(places: Mapping[str, float]) -> dict[str, float]:
    """Moves names down until none overlap, then all up if the last one left the picture."""
    found: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(places.items(), key=lambda item: item[1]):
        found[name] = last = max(y, last + LEAST_APART)
    over = max(0.0, last - (HEIGHT - BOTTOM))
    return {name: y - over for name, y in found.items()}


def _word(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"

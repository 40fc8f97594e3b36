"""Lines over an axis, as an SVG picture.  The same numbers give the same bytes; the background is part of the picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from nestpipe.schedule.draw_svg import COLOURS, GRID, INK, PAPER, QUIET

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 54, 56
LEAST_APART = 15.0
"""Pixels between two names at the right."""
COLOUR_NAMES = (*COLOURS, "#555555", "#cc3311")

Line = Sequence[tuple[float, float]]


def plot(lines: Mapping[str, Line], title: str, across: str, up: str) -> str:
    """Every line with its name at its end.  Both axes by powers where values differ a lot."""
    values = sorted({x for line in lines.values() for x, _ in line})
    heights = [y for line in lines.values() for _, y in line]
    x_of = _scale(values, LEFT, WIDTH - RIGHT)
    low, high = (
        (0.0, max(heights) * 1.06) if max(heights) < 12 * min(heights) else (min(heights) / 1.2, max(heights) * 1.2)
    )
    y_of = _axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="28" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>',
    ]
    for tick in _ticks(low, high):
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{QUIET}">{_word(tick)}</text>')
    last = -math.inf
    for value in values:
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
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{ends[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(values: Sequence[float], begin: float, end: float):  # type: ignore[no-untyped-def]
    """By powers where all are positive and the last is many times the first."""
    if values[0] > 0 and values[-1] >= 8 * values[0]:
        return _axis(values[0], values[-1], begin, end)
    low, span = values[0], (values[-1] - values[0]) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def _axis(low: float, high: float, begin: float, end: float):  # type: ignore[no-untyped-def]
    if low > 0:
        return lambda value: begin + math.log(value / low) / math.log(high / low) * (end - begin)
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _ticks(low: float, high: float) -> list[float]:
    if low > 0:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [d * 10.0**p for p in powers for d in (1, 2, 5) if low <= d * 10.0**p <= high]
    step = 10 ** math.floor(math.log10(high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 7)
    return [i * step for i in range(int(high / step) + 1)]


def _apart(places: Mapping[str, float]) -> dict[str, float]:
    """Moved down as little as keeps names from lying on each other, then up where the last left the picture."""
    found: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(places.items(), key=lambda item: item[1]):
        found[name] = last = max(y, last + LEAST_APART)
    over = max(0.0, last - (HEIGHT - BOTTOM))
    return {name: y - over for name, y in found.items()}


def _word(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"

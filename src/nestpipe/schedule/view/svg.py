"""A schedule as an SVG picture: a row per lane, time to scale, a box per action, a colour per batch.

The same spans give the same bytes.  The background is part of the picture, so it reads alike on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nestpipe.schedule.stages import LANES, STAGES, tint
from nestpipe.schedule.view.trace import TimedAction

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#997700", "#009988")
"""One per batch, in turn; told apart by colour-blind readers, too."""

INK, QUIET, GRID, PAPER, BAND = "#24292f", "#636c76", "#d8dee4", "#ffffff", "#f3f5f8"
LEFT, RIGHT, TOP, BOTTOM = 176, 18, 46, 50
ROW, BOX = 36, 26
LEAST_WIDTH, LEAST_BOX = 1080.0, 6.0
"""Pixels: of the picture, and of its narrowest box, for which the picture grows."""

LETTER = 5.7
"""Pixels of an average letter at size 10, on the safe side."""


def svg(spans: Sequence[TimedAction], title: str, clock: str, to_fit: bool = False) -> str:
    """The picture.  `clock` says what its time is; it begins at 0 and ends with the last span.

    `to_fit`: of a real run, some of whose actions take a thousandth of others: the picture does not grow to show them.
    """
    end = max((s.stop for s in spans), default=1.0)
    narrowest = min((s.stop - s.start for s in spans if s.stop > s.start), default=end)
    scale = max((LEAST_WIDTH - LEFT - RIGHT) / end, 0.0 if to_fit else LEAST_BOX / narrowest)
    lanes = [lane for lane in LANES if any(s.action.lane == lane for s in spans)]
    several = any(s.action.micro > 0 for s in spans)
    width, height = LEFT + end * scale + RIGHT, TOP + ROW * len(lanes) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {height}" width="{_n(width)}" height="{height}" '
        f'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="10" role="img" aria-label="{escape(title)}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="27" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>',
        *_lanes(lanes, spans, width),
        *_ruler(end, scale, TOP + ROW * len(lanes)),
        *_waits(spans, scale, lanes),
        *(_box(s, scale, lanes, several) for s in spans),
        *_legend(sorted({s.action.batch for s in spans}), clock, height - 16),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lanes(lanes: Sequence[str], spans: Sequence[TimedAction], width: float) -> Iterator[str]:
    """Bands with the lane's name and, where it has several stages, the tint of each."""
    present = {s.action.stage for s in spans}
    for i, lane in enumerate(lanes):
        y = TOP + ROW * i
        if i % 2 == 0:
            yield f'<rect x="8" y="{y}" width="{_n(width - 16)}" height="{ROW}" fill="{BAND}"/>'
        stages = [stage for stage in _stages(lane) if stage in present]
        if len(stages) == 1:
            named = lane if lane == stages[0] else f"{lane}: {stages[0]}"
            yield f'<text x="16" y="{y + ROW / 2 + 4:g}" font-size="12" font-weight="bold" fill="{INK}">{named}</text>'
            continue
        yield f'<text x="16" y="{y + 15}" font-size="12" font-weight="bold" fill="{INK}">{lane}</text>'
        x = 16.0
        for stage in stages:
            fill = tint("#57606a", STAGES[stage].white)
            yield f'<rect x="{_n(x)}" y="{y + 21}" width="7" height="9" rx="1.5" fill="{fill}"/>'
            yield f'<text x="{_n(x + 9)}" y="{y + 29}" font-size="8" fill="{QUIET}">{stage}</text>'
            x += 9 + len(stage) * LETTER * 0.82 + 7


def _ruler(end: float, scale: float, bottom: int) -> Iterator[str]:
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if end / s <= 16), end)
    for i in range(int(end / step) + 1):
        x = _n(LEFT + i * step * scale)
        yield f'<path d="M{x} {TOP}V{bottom}" stroke="{GRID}" stroke-width="1"/>'
        yield f'<text x="{x}" y="{bottom + 14}" text-anchor="middle" font-size="9" fill="{QUIET}">{i * step:g}</text>'


def _waits(spans: Sequence[TimedAction], scale: float, lanes: Sequence[str]) -> Iterator[str]:
    """A faint line from what ended last to what had waited for it on another lane."""
    by_name = {s.action.name: s for s in spans}
    for span in spans:
        for wait in (by_name[name] for name in span.action.waits if name in by_name):
            if wait.action.lane != span.action.lane and abs(wait.stop - span.start) < 1e-9:
                x = _n(LEFT + span.start * scale)
                ys = sorted(TOP + ROW * (lanes.index(s.action.lane) + 0.5) for s in (wait, span))
                yield f'<path d="M{x} {ys[0]:g}V{ys[1]:g}" stroke="{QUIET}" stroke-width="0.7" opacity="0.6"/>'


def _box(span: TimedAction, scale: float, lanes: Sequence[str], several: bool) -> str:
    action = span.action
    x, y = LEFT + span.start * scale, TOP + ROW * lanes.index(action.lane) + (ROW - BOX) / 2
    width = max((span.stop - span.start) * scale - 1, 0.5)
    colour = COLOURS[action.batch % len(COLOURS)]
    shape = (
        f'<rect x="{_n(x + 0.5)}" y="{y:g}" width="{_n(width)}" height="{BOX}" rx="2" '
        f'fill="{tint(colour, STAGES[action.stage].white)}" stroke="{colour}" stroke-width="0.8"/>'
    )
    number = f"{action.batch}.{action.micro}" if several and action.micro >= 0 else str(action.batch)
    text = _fitting(action.stage, number, width)
    ink = INK if STAGES[action.stage].white else PAPER
    middle = x + 0.5 + width / 2
    letters = f'<text x="{_n(middle)}" y="{y + BOX / 2 + 3.5:g}" text-anchor="middle" fill="{ink}">{text}</text>'
    return f"<g><title>{action}: {span.start:g} to {span.stop:g}</title>{shape}{letters if text else ''}</g>"


def _fitting(stage: str, number: str, width: float) -> str:
    """The whole label, its numbers alone, or nothing."""
    texts = (f"{stage} {number}", number, number.split(".")[0])
    return next((text for text in texts if len(text) * LETTER <= width + 1), "")


def _legend(batches: Sequence[int], clock: str, y: int) -> Iterator[str]:
    x = LEFT
    for batch in batches[: 2 * len(COLOURS)]:
        yield f'<rect x="{x}" y="{y - 9}" width="11" height="11" rx="2" fill="{COLOURS[batch % len(COLOURS)]}"/>'
        yield f'<text x="{x + 16}" y="{y}" font-size="11" fill="{INK}">batch {batch}</text>'
        x += 74
    yield f'<text x="16" y="{y}" font-size="9" fill="{QUIET}">{escape(clock)}</text>'


def _stages(lane: str) -> list[str]:
    return [stage.name for stage in STAGES.values() if stage.lane == lane]


def _n(pixels: float) -> str:
    return f"{pixels:.1f}"

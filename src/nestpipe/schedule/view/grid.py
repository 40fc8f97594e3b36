"""A schedule as a grid for the terminal: a row per lane, a column per time slot, folded to the width there is.

A slot is the time between two moments at which something starts or stops, so columns are not to scale; the first line of each
fold says when they begin.  Readable without colour: a bar opens a cell, dots are idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from nestpipe.schedule.stages import LANES
from nestpipe.schedule.view.trace import TimedAction

COLOURS = ("color(117)", "color(215)", "color(150)", "color(218)", "color(222)", "color(183)")
"""One per batch, in turn: light, with black letters, on a dark terminal and on a light one."""

MARKS = {"bar": "│", "idle": "·", "more": "…"}
ASCII_MARKS = {"bar": "|", "idle": ".", "more": "~"}


@dataclass(frozen=True)
class _Cell:
    """An action in slots `start` to `stop` of its lane."""

    text: str
    batch: int
    start: int
    stop: int


def grid(spans: Sequence[TimedAction], width: int, plain: bool = False) -> Iterator[Text]:
    """The lines, none wider than `width` unless a single cell is.  `plain`: in ASCII."""
    marks = ASCII_MARKS if plain else MARKS
    times = sorted({_moment(t) for s in spans for t in (s.start, s.stop)})
    slot = {time: i for i, time in enumerate(times)}
    cells: dict[str, list[_Cell]] = {}
    for s in spans:
        cell = _Cell(str(s.action), s.action.batch, slot[_moment(s.start)], slot[_moment(s.stop)])
        if cell.stop > cell.start:
            cells.setdefault(s.action.lane, []).append(cell)
    every = [cell for row in cells.values() for cell in row]
    widths = _widths(every, len(times) - 1)
    margin = 1 + max((len(lane) for lane in cells), default=0)
    for number, (first, last) in enumerate(_folds(every, widths, width - margin)):
        if number:
            yield Text()
        yield Text("time".ljust(margin) + _ruler(times, widths, first, last), style="dim")
        for lane in LANES:
            if lane in cells:
                line = Text(lane.ljust(margin), style="bold")
                for text, batch in _row(cells[lane], widths, first, last, marks):
                    style = "dim not bold" if batch is None else f"black not bold on {COLOURS[batch % len(COLOURS)]}"
                    line.append(text, style)
                yield line


def _moment(time: float) -> float:
    """Micro-batches of a third of a unit must meet where they meet."""
    return round(time, 9)


def _widths(cells: Sequence[_Cell], slots: int) -> list[int]:
    """Columns per slot such that every cell has room for its text and a bar."""
    widths = [1] * slots
    for cell in sorted(cells, key=lambda c: (c.stop - c.start, c.start)):
        missing = len(cell.text) + 1 - sum(widths[cell.start : cell.stop])
        for i in range(max(0, missing)):
            widths[cell.start + i % (cell.stop - cell.start)] += 1
    return widths


def _folds(cells: Sequence[_Cell], widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Ranges of slots that fit, cut where it hurts least: no text lost, in the second half, few cells cut, late."""
    first = 0
    while first < len(widths):
        last = first + 1
        while last < len(widths) and sum(widths[first : last + 1]) <= room:
            last += 1
        if last < len(widths):
            middle = first + (last - first + 1) // 2
            last = min(range(first + 1, last + 1), key=lambda i: _cost_of_fold(cells, widths, i, middle))
        yield first, last
        first = last


def _cost_of_fold(cells: Sequence[_Cell], widths: Sequence[int], at: int, middle: int) -> tuple[int, bool, int, int]:
    lost, cut = _hurt(cells, widths, at)
    return lost, at < middle, cut, -at


def _hurt(cells: Sequence[_Cell], widths: Sequence[int], at: int) -> tuple[int, int]:
    """How many cells a fold before slot `at` leaves without room for their text on either side, and how many it cuts."""
    cut = [c for c in cells if c.start < at < c.stop]
    rooms = (max(sum(widths[c.start : at]), sum(widths[at : c.stop])) for c in cut)
    return sum(room <= len(c.text) for c, room in zip(cut, rooms)), len(cut)


def _ruler(times: Sequence[float], widths: Sequence[int], first: int, last: int) -> str:
    """The time at the beginning of each slot, where there is room for it."""
    line, at = "", 0
    for i in range(first, last):
        if len(line) <= at:
            line = line.ljust(at) + f"{times[i]:.4g} "
        at += widths[i]
    return line[:at].rstrip()


def _row(
    cells: Sequence[_Cell], widths: Sequence[int], first: int, last: int, marks: dict[str, str]
) -> Iterator[tuple[str, int | None]]:
    """Pieces of a lane's line, each with its batch; None where it idles."""
    at = first
    for cell in cells:
        start, stop = max(cell.start, first), min(cell.stop, last)
        if start >= stop:
            continue
        if start > at:
            yield marks["idle"] * sum(widths[at:start]), None
        room = sum(widths[start:stop])
        text = (marks["bar"] if cell.start >= first else marks["more"]) + cell.text
        yield (text if len(text) <= room else text[: room - 1] + marks["more"]).ljust(room), cell.batch
        at = stop
    if at < last:
        yield marks["idle"] * sum(widths[at:last]), None

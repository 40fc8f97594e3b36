"""Grid and picture show every action once, in its lane, in order, and fit."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from nestpipe.schedule import BUILDERS, LANES, build
from nestpipe.schedule.clock import ClockSpan, nominal, run
from nestpipe.schedule.view.grid import grid
from nestpipe.schedule.view.svg import svg

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def spans_of(schedule: str, batches: int, micros: int) -> list[ClockSpan]:
    actions = build(schedule, batches, micros)
    return run(actions, nominal(actions))


def cells(lines: list[str], lane: str) -> list[str]:
    """Labels in the rows of a lane; once for those that a fold has cut."""
    rows = " ".join(line.removeprefix(lane) for line in lines if line.startswith(lane + " "))
    found = re.findall(r"[|~]([a-z_]+ \d+(?:\.\d+)?)(?![\d~])", rows)
    return [label for i, label in enumerate(found) if label not in found[:i]]


@pytest.mark.parametrize("width", [60, 80, 120, 200, 2000])
@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("micros", [1, 3])
def test_every_action_is_in_the_grid_and_in_order(schedule: str, micros: int, width: int) -> None:
    spans = spans_of(schedule, 4, micros)
    lines = [line.plain for line in grid(spans, width, plain=True)]
    assert max(map(len, lines)) <= width and "".join(lines).isascii()
    for lane in LANES:
        assert cells(lines, lane) == [str(s.action) for s in spans if s.action.lane == lane]


def test_a_wide_terminal_needs_no_fold() -> None:
    lines = list(grid(spans_of("dbp", 3, 1), 1000))
    assert len(lines) == len(LANES), (
        "a line of times, and one for every lane but replica, which one group does not have"
    )
    assert len({len(line.plain.rstrip()) for line in lines[1:]}) == 1


def test_what_runs_at_the_same_time_is_in_the_same_columns() -> None:
    lines = {line.plain.split()[0]: line.plain for line in grid(spans_of("dbp", 3, 1), 1000, plain=True)}
    sync = lines["update"].index("|sync 0")
    retrieve = lines["storage"].index("|retrieve 1")
    assert sync == retrieve, "both start when retrieve 0 has stopped"
    assert lines["time"][lines["compute"].index("|compute 0.0") :].startswith("11 ")


def test_batches_are_told_apart_by_colour_only_in_addition() -> None:
    line = next(line for line in grid(spans_of("dbp", 3, 1), 1000) if line.plain.startswith("data"))
    assert len({str(span.style) for span in line.spans if "on color" in str(span.style)}) == 3
    assert "│load 0│load 1" in line.plain.replace(" ", "").replace("load", "load ")


def test_nothing_to_draw() -> None:
    assert list(grid([], 80)) == []
    ElementTree.fromstring(svg([], "nothing", "time"))


@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize(("batches", "micros"), [(1, 1), (6, 1), (3, 4), (14, 2)])
def test_every_action_is_a_box_of_its_own(schedule: str, batches: int, micros: int) -> None:
    spans = spans_of(schedule, batches, micros)
    picture = ElementTree.fromstring(svg(spans, "a <title> & more", "time"))
    width, height = (float(picture.attrib[key]) for key in ("width", "height"))
    boxes: list[tuple[float, float, float]] = []
    titles = []
    for group in picture.iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None
        x, y, wide, high = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0 and x + wide <= width and y >= 0 and y + high <= height and wide > 0
        boxes.append((y, x, x + wide))
        titles.append(group.findtext(f"{SVG}title", "").split(":")[0])
        if text is not None:
            assert len(text.text or "") * 5.5 <= wide + 2, f"{text.text} does not fit"
    assert titles == [str(s.action) for s in spans]
    boxes.sort()
    for (row, _, right), (other, left, _) in zip(boxes, boxes[1:]):  # noqa: RUF007
        assert row != other or right <= left + 0.11, "boxes of a lane overlap"


def test_a_picture_has_its_own_background_and_legend() -> None:
    text = svg(spans_of("dbp", 3, 1), "dbp", "nominal time")
    assert re.search(r'<rect width="100%" height="100%"[^>]* fill="#ffffff"/>', text)
    assert all(f">batch {b}</text>" in text for b in range(3)) and ">nominal time</text>" in text
    assert text == svg(spans_of("dbp", 3, 1), "dbp", "nominal time")


@pytest.mark.parametrize("schedule", BUILDERS)
def test_the_pictures_in_the_docs_are_up_to_date(schedule: str, tmp_path: Path) -> None:
    """Else: nestpipe schedule S --svg docs/schedule-S.svg, for nested and semi_async with --micro 4 --batches 3."""
    from nestpipe.cli.main import main

    kept = DOCS / f"schedule-{schedule}.svg"
    if not kept.exists():
        pytest.skip("not drawn for the docs")
    size = ["--micro", "4", "--batches", "3"] if schedule in ("nested", "semi_async") else []
    assert main(["schedule", schedule, *size, "--svg", str(tmp_path / "now.svg")]) == 0
    assert (tmp_path / "now.svg").read_text() == kept.read_text()

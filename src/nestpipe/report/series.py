"""Charts over steps from the lines of metrics.jsonl: loss, throughput, metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from nestpipe.report.files import mapping, number

MOST_POINTS = 2000
"""The most points of a line in a chart; of longer lines only the lowest and highest of every piece stay."""

MOST = 2.0**53
"""Numbers beyond it are not exact in a browser, and no run gets there."""

Points = list[tuple[float, float]]


def charts(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The charts that the run has values for; each has lines of (step, value)."""
    records = list(records)
    lines = [record for record in records if number(record.get("step")) is not None]
    held_out = [{"step": line["step"], **mapping(line.get("eval"))} for line in lines if mapping(line.get("eval"))]
    found = [
        _chart(
            "loss",
            "",
            [
                ("in training", _line(lines, "loss")),
                ("held out, log loss", _line(held_out, "log_loss")),
                ("held out", _line(held_out, "loss")),
            ],
        ),
        _chart(
            "throughput",
            "samples/s",
            [("since the last line", _rates(lines)), ("so far", _line(lines, "samples_per_s"))],
        ),
        _chart(
            "AUC",
            "",
            [
                ("in training", _line(lines, "auc")),
                ("held out", _line(held_out, "auc")),
                ("best possible", _line(held_out, "bayes_auc")),
            ],
        ),
        _chart("NE", "", [("in training", _line(lines, "ne")), ("held out", _line(held_out, "ne"))]),
    ]
    waits = [{"step": line["step"], **mapping(line.get("waiting"))} for line in lines if mapping(line.get("waiting"))]
    names = [("measured", "measured"), ("planned", "planned"), ("fixed batch, planned", "fixed")]
    found.append(_chart("waiting for other workers", "share of the step", [(n, _line(waits, key)) for n, key in names]))
    ranking: dict[str, list[str]] = {}
    for record in held_out:
        for key in record:
            family, at, _ = key.partition("@")
            if at and key not in ranking.setdefault(family.upper(), []):
                ranking[family.upper()].append(key)
    for family, keys in ranking.items():
        found.append(_chart(f"{family}, held out", "", [(key.upper(), _line(held_out, key)) for key in keys]))
    return [chart for chart in found if chart["lines"]]


def _chart(title: str, unit: str, lines: list[tuple[str, Points]]) -> dict[str, Any]:
    return {
        "title": title,
        "unit": unit,
        "lines": [{"name": name, "points": thinned(points)} for name, points in lines if points],
    }


def _line(records: list[dict[str, Any]], key: str) -> Points:
    found = []
    for record in records:
        step, value = number(record["step"]), number(record.get(key))
        if step is not None and value is not None and abs(step) < MOST and abs(value) < MOST:
            found.append((step, value))
    return sorted(found)


def _rates(records: list[dict[str, Any]]) -> Points:
    """Samples per second between two lines of the log; `samples_per_s` itself is the mean since the start."""
    samples, seconds = dict(_line(records, "samples")), dict(_line(records, "seconds"))
    steps = [step for step in samples if step in seconds]
    found = []
    for before, step in itertools.pairwise(steps):
        if seconds[step] > seconds[before]:
            found.append((step, (samples[step] - samples[before]) / (seconds[step] - seconds[before])))
    return found


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points, which still include every peak and every dip."""
    if len(points) <= most:
        return points
    size = -(-len(points) // (most // 2 - 1))
    found = {points[0], points[-1]}
    for i in range(0, len(points), size):
        piece = points[i : i + size]
        found |= {min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])}
    return sorted(found)

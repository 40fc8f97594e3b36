"""What a reader told of its data (data.json of a run) as a section of the page: what each filter left, lengths, ties, notes."""

from __future__ import annotations

from typing import Any

from nestpipe.report.files import ReportError, count, mapping, number, sequence, text

LENGTHS = {"least": "least", "median": "median", "mean": "mean", "p90": "90 %", "p99": "99 %", "most": "most"}
"""Figures of the lengths of histories, and what the page calls them; 90 %: so many users have at most that length."""


def shape_data(found: Any, where: str, advice: str) -> dict[str, Any]:
    """What the file lacks, or has as something else, is left out."""
    if not isinstance(found, dict):
        raise ReportError(f"{where} does not describe data: {advice}")
    lengths, ties = mapping(found.get("lengths")), mapping(found.get("ties"))
    told = [(name, number(lengths.get(key))) for key, name in LENGTHS.items()]
    tied: dict[str, Any] = {key: count(ties.get(key)) for key in ("events", "users")}
    known = None not in tied.values()
    tied |= {"last": count(ties.get("last")), "order": text(ties.get("order"))}
    return {
        "stages": [_stage(mapping(stage)) for stage in sequence(found.get("stages"))],
        "lengths": [(name, round(value, 1)) for name, value in told if value is not None],
        "histogram": _bars(sequence(lengths.get("histogram"))),
        "ties": {key: value for key, value in tied.items() if value is not None} if known else None,
        "notes": [note for each in sequence(found.get("notes")) if (note := text(each))],
    }


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    counts = {key: count(stage.get(key)) for key in ("users", "items", "events")}
    return {"name": text(stage.get("name")) or "?", **counts}


def _bars(histogram: list[Any]) -> list[dict[str, Any]]:
    """A bar for each [upper bound, users], named by the lengths that it holds; without a bound: all that are longer."""
    found: list[dict[str, Any]] = []
    below: int | None = None
    for pair in histogram:
        bound, users = sequence(pair) if len(sequence(pair)) == 2 else (None, None)
        upper, height = count(bound), count(users)
        if height is None or height < 0:
            continue
        if upper is None:
            name = f"over {below}" if below is not None else "any"
        elif below is None:
            name = f"up to {upper}"
        else:
            name = str(upper) if upper == below + 1 else f"{below + 1} to {upper}"
        found.append({"name": name, "upper": upper, "users": height})
        below = upper if upper is not None else below
    return found

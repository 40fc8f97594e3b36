"""The JSON of a bench as the data of a page: a ladder's rungs, or the table of `bench clustering` or `bench gr`."""

from __future__ import annotations

import statistics
from typing import Any

from nestpipe.report.files import ReportError, count, mapping, number, sequence, text
from nestpipe.schedule.stages import STAGES

CLUSTERING = "rows sent per batch and worker, by how samples are divided into micro-batches"

BETWEEN_HOSTS = ("wire", "engine", "counted")
"""How the bytes between hosts are known."""


def shape_bench(result: dict[str, Any], where: str, date: str | None = None) -> dict[str, Any]:
    """The data of the page.  `where` is the file that errors name; `date` is for a bench that has none of its own."""
    again = "make it again with `nestpipe bench … --json FILE`"
    if "rungs" not in result:
        return _table_alone(result, where, again)
    if not isinstance(result["rungs"], list) or not result["rungs"]:
        raise ReportError(f"{where} has no rungs: {again}")
    rungs = []
    for i, rung in enumerate(result["rungs"], 1):
        shaped = _rung(mapping(rung))
        if shaped is None:
            raise ReportError(f"{where}: rung {i} has no name or no step times (step_ms_all): {again}")
        rungs.append(shaped)
    against = list(dict.fromkeys(name for rung in rungs for name in rung["ratios"]))
    command, rounds = text(result.get("command")), count(result.get("rounds"))
    hosts, each = count(result.get("hosts")), count(result.get("workers_per_host"))
    inside = text(result.get("inside"))
    facts = [
        ("workers", count(result.get("workers"))),
        *([("hosts", f"{hosts}, with {each} workers each")] if hosts and each and hosts > 1 and each > 1 else []),
        ("links", text(result.get("link")) or "none: all workers on loopback"),
        *([("inside a host", inside)] if inside else []),
        *([("disks", text(result["disk"]))] if result.get("disk") else []),
        ("rounds", rounds),
        ("date", text(result.get("date")) or (f"{date} (the file's)" if date else None)),
        ("command", command or "not in this file"),
    ]
    return {
        "kind": "bench",
        "title": text(result.get("title")) or "bench",
        "subtitle": "bench",
        "facts": [(name, value) for name, value in facts if value is not None],
        "rungs": rungs,
        "against": against,
        "limit": _limit(result, rungs),
        "hidden": [_hidden(mapping(h)) for h in sequence(result.get("hidden"))],
        "stages": _stages(rungs),
        "table": None,
    }


def _rung(rung: dict[str, Any]) -> dict[str, Any] | None:
    name = text(rung.get("name"))
    all_ms = [number(ms) for ms in sequence(rung.get("step_ms_all"))]
    times = [ms for ms in all_ms if ms is not None and ms >= 0]
    if name is None or not times or len(times) != len(all_ms):
        return None
    stages = {
        stage: {kind: max(0.0, number(mapping(ms).get(f"{kind}_ms")) or 0.0) for kind in ("busy", "exposed")}
        for stage, ms in mapping(rung.get("stages")).items()
    }
    wire = number(rung.get("wire_bytes"))
    between = mapping(rung.get("between_hosts"))
    return {
        "name": name,
        "peer": text(rung.get("peer")),
        "median": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "all": times,
        "cpu": number(rung.get("cpu_ms")),
        "samples_per_s": number(rung.get("samples_per_s")),
        "mb_sent": None if wire is None else wire / 1e6,
        "mb_between": {k: None if (n := number(between.get(k))) is None else n / 1e6 for k in BETWEEN_HOSTS},
        "ratios": {k: spread for k, v in mapping(rung.get("ratios")).items() if (spread := _spread(v)) is not None},
        "of_limit": _spread(rung.get("of_limit")),
        "stages": stages,
    }


def _spread(value: Any) -> dict[str, float] | None:
    found = {key: number(mapping(value).get(key)) for key in ("median", "low", "high")}
    whole = {key: item for key, item in found.items() if item is not None}
    return whole if len(whole) == 3 else None


def _limit(result: dict[str, Any], rungs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What no schedule can beat.  Older files have only each rung's ratio to it, which gives about the same."""
    told = mapping(result.get("limit"))
    spread = _spread(told.get("ms"))
    if spread is not None:
        return {"ms": spread["median"], "about": False, "rungs": [n for n in sequence(told.get("rungs")) if text(n)]}
    ratios = [
        rung["median"] / rung["of_limit"]["median"] for rung in rungs if rung["of_limit"] and rung["of_limit"]["median"]
    ]
    return {"ms": statistics.median(ratios), "about": True, "rungs": []} if ratios else None


def _hidden(hidden: dict[str, Any]) -> str:
    stages = " and ".join(s for s in sequence(hidden.get("stages")) if text(s))
    share, exposed, left = (
        number(hidden.get(key)) or 0.0 for key in ("hidden_share", "exposed_ms", "still_exposed_ms")
    )
    return (
        f"{stages}: {hidden.get('exposed')!s} exposes {exposed:.1f} ms a step, "
        f"{hidden.get('hidden')!s} {left:.1f}: {share:.1%} hidden."
    )


def _stages(rungs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The stages of all rungs in the order of a batch, with their colours."""
    there = dict.fromkeys(stage for rung in rungs for stage in rung["stages"])
    known = [stage for stage in STAGES if stage in there]
    return [{"name": stage, "colour": colour_of(stage)} for stage in (*known, *(s for s in there if s not in STAGES))]


def colour_of(stage: str) -> str:
    return STAGES[stage].colour if stage in STAGES else "#c9ced6"


def _table_alone(result: dict[str, Any], where: str, again: str) -> dict[str, Any]:
    rows = result.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and row for row in rows):
        raise ReportError(f"{where} is neither a trace nor the figures of a bench: {again}, or give a run directory")
    columns = list(rows[0])
    cells = [[row.get(c) if isinstance(row.get(c), str) else number(row.get(c)) for c in columns] for row in rows]
    return {
        "kind": "bench",
        "title": text(result.get("title")) or CLUSTERING,
        "subtitle": "bench",
        "facts": [("command", text(result.get("command")) or "nestpipe bench clustering")],
        "rungs": [],
        "against": [],
        "limit": None,
        "hidden": [],
        "stages": [],
        "table": {"columns": [c.replace("_", " ") for c in columns], "rows": cells},
    }

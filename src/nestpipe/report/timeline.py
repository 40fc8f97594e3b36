"""A trace as the page draws it: per worker its lanes, each a few columns of numbers, and what the compute lane waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestpipe.report.exposed import BETWEEN, COMPUTE, UNKNOWN, Ran, Wait, stage_sums, waits
from nestpipe.report.files import ReportError, read_json
from nestpipe.schedule.stages import LANES, STAGES
from nestpipe.schedule.view.svg import COLOURS
from nestpipe.schedule.view.trace import current, problems

FIRST_VIEW = 3
"""Steps that the page shows at first; all of the trace is a key away."""

NAMES = (*STAGES, BETWEEN, UNKNOWN)
"""Spans name their stage by its place in this."""


def read_timeline(path: Path, advice: str) -> dict[str, Any]:
    return shape_timeline(read_json(path, advice), str(path), advice)


def shape_timeline(trace: Any, where: str, advice: str) -> dict[str, Any]:
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ReportError(f"{where} is not a trace: {advice}")
    try:
        wrong = problems(current(trace))
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        by_worker: dict[int, list[Ran]] = {}
        for event in events if not wrong else ():
            by_worker.setdefault(event["pid"], []).append(_ran(event))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        wrong = [f"malformed ({error!r})"]
    if wrong:
        raise ReportError(f"{where} is not a trace that nestpipe wrote ({wrong[0]}): {advice}")
    if not by_worker:
        raise ReportError(f"{where} has no actions in it: {advice}")
    workers = [_worker(rank, spans) for rank, spans in sorted(by_worker.items())]
    begin = min(s.start for spans in by_worker.values() for s in spans)
    end = max(s.stop for spans in by_worker.values() for s in spans)
    return {
        "begin": begin,
        "end": max(end, begin + 1),
        "view": _view(next(iter(by_worker.values())), begin, max(end, begin + 1)),
        "spans": len(events),
        "steps": len({s.batch for spans in by_worker.values() for s in spans if s.lane == COMPUTE}),
        "stages": list(NAMES),
        "colours": list(COLOURS),
        "white": {str(NAMES.index(stage.name)): stage.white for stage in STAGES.values() if stage.white},
        "buckets": NAMES.index("reduce"),
        "workers": workers,
    }


def sums_of(timeline: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of the first worker: what a summary would tell."""
    sums: dict[str, dict[str, float]] = timeline["workers"][0]["sums"]
    return sums


def _ran(event: dict[str, Any]) -> Ran:
    args = event["args"]
    if not all(isinstance(args[key], int) and abs(args[key]) < 2**53 for key in ("batch", "micro")):
        raise ValueError("batch and micro must be whole numbers")
    start, dur = float(event["ts"]), float(event["dur"])
    if not start + dur < 1e15:  # nan, too; some thirty years
        raise ValueError(f"ts {start} and dur {dur}")
    after = args.get("after")
    return Ran(
        args["stage"], args["batch"], args["micro"], start, start + dur, after if isinstance(after, str) else None
    )


def _worker(rank: int, spans: list[Ran]) -> dict[str, Any]:
    waited = waits(spans)
    lanes = []
    for lane in LANES:
        its = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        if its:
            lanes.append({"name": lane, **_columns(its)})
    steps = max(1, len({s.batch for s in spans if s.lane == COMPUTE}))
    return {
        "name": f"worker {rank}",
        "lanes": lanes,
        "exposed": _columns(waited),
        "exposed_ms": sum(w.stop - w.start for w in waited) / 1e3 / steps,
        "sums": stage_sums(spans, waited),
    }


def _columns(spans: list[Ran] | list[Wait]) -> dict[str, list[Any]]:
    return {
        "stage": [NAMES.index(s.stage) for s in spans],
        "batch": [s.batch for s in spans],
        "micro": [s.micro for s in spans],
        "start": [_short(s.start) for s in spans],
        "stop": [_short(s.stop) for s in spans],
    }


def _short(microseconds: float) -> float | int:
    """To a tenth of a microsecond; whole ones without a point, which saves a fifth of the page."""
    found = round(microseconds, 1)
    return int(found) if found == int(found) else found


def _view(spans: list[Ran], begin: float, end: float) -> list[float]:
    starts: dict[int, float] = {}
    for s in spans:
        if s.stage == "compute":
            starts[s.batch] = min(s.start, starts.get(s.batch, s.start))
    times = sorted(starts.values())
    if len(times) < FIRST_VIEW + 2:
        return [begin, end]
    return [times[-FIRST_VIEW - 1], times[-1]]

"""Reads the trace of a real run back as spans, to draw a few of its batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nestpipe.schedule.action import Action
from nestpipe.schedule.clock import ClockSpan
from nestpipe.schedule.view.trace import current, problems


def read_trace(path: Path, worker: int) -> list[ClockSpan]:
    """The spans of one worker, in milliseconds.  ValueError, in one line, for what is not such a trace."""
    try:
        trace = current(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is not a trace: `nestpipe train … --trace {path}` writes one")
    try:
        wrong = problems(trace)
    except (KeyError, TypeError, AttributeError) as error:
        wrong = [f"malformed ({error!r})"]
    if wrong:
        raise ValueError(f"{path} is not a trace that nestpipe wrote: {wrong[0]}")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    workers = sorted({event["pid"] for event in events})
    if worker not in workers:
        there = f"workers {workers[0]} to {workers[-1]}" if workers else "no worker"
        raise ValueError(f"{path} has no worker {worker}: it has {there}")
    return [
        ClockSpan(
            Action(event["args"]["stage"], event["args"]["batch"], event["args"]["micro"], (), ()),
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
        )
        for event in events
        if event["pid"] == worker
    ]


def excerpt(spans: Sequence[ClockSpan], batches: int) -> list[ClockSpan]:
    """What ran while `batches` batches in the middle of the spans were trained, from time 0 on."""
    syncs = sorted((s for s in spans if s.action.stage == "sync"), key=lambda s: s.start)
    if not syncs:
        raise ValueError("the trace has no batch that was trained")
    first = max(0, (len(syncs) - batches) // 2)
    begin = syncs[first].start
    later = syncs[first + batches].start if first + batches < len(syncs) else max(s.stop for s in spans)
    return [
        ClockSpan(s.action, max(s.start, begin) - begin, min(s.stop, later) - begin)
        for s in spans
        if s.stop > begin and s.start < later
    ]

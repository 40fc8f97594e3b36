"""Spans as a trace that ui.perfetto.dev and chrome://tracing open: a process per worker, a thread per lane.

The same for spans of the virtual clock and of a real run; a time unit of the former is shown as a millisecond.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from nestpipe.schedule.action import Action, label
from nestpipe.schedule.stages import LANES, RENAMED, STAGES

Trace = dict[str, Any]
VIRTUAL = 1e-3
"""Seconds that a unit of the virtual clock stands for."""


class TimedAction(Protocol):
    """An action as it ran or would run: `timeline.Span`, `clock.ClockSpan`."""

    @property
    def action(self) -> Action: ...
    @property
    def start(self) -> float: ...
    @property
    def stop(self) -> float: ...


def merge(workers: Sequence[Sequence[TimedAction]], offsets: Sequence[float] | None = None, unit: float = 1.0) -> Trace:
    """One trace of the spans of all workers, by rank.  It begins at 0 with whichever of them was first.

    `offsets` are what to add to each worker's clock, in its own unit, to have one clock; `unit` is in seconds.
    """
    offsets = [0.0] * len(workers) if offsets is None else offsets
    if len(offsets) != len(workers):
        raise ValueError(f"there are {len(workers)} workers and {len(offsets)} clock offsets")
    begin = min((s.start + offset for spans, offset in zip(workers, offsets) for s in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(workers):
        lanes = {s.action.lane for s in spans}
        events += _metadata(rank, [lane for lane in LANES if lane in lanes])
    for rank, (spans, offset) in enumerate(zip(workers, offsets)):
        ordered = sorted(spans, key=lambda s: (s.start, s.stop, LANES.index(s.action.lane)))
        afters = _afters(ordered)
        events += [_event(rank, s, (offset - begin), unit, after) for s, after in zip(ordered, afters)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _afters(spans: Sequence[TimedAction]) -> list[str | None]:
    """Per span, in order of time: what ended last of all that it came after, so what it had to wait for if it waited."""
    by_name = {s.action.name: s for s in spans}
    on_lane: dict[str, TimedAction] = {}
    found: list[str | None] = []
    for span in spans:
        before = [by_name[name] for name in span.action.after if name in by_name]
        before += [on_lane[span.action.lane]] if span.action.lane in on_lane else []
        found.append(str(max(before, key=lambda s: s.stop).action) if before else None)
        on_lane[span.action.lane] = span
    return found


def _metadata(rank: int, lanes: Sequence[str]) -> list[dict[str, Any]]:
    def named(what: str, tid: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}

    found = [named("process_name", 0, name=f"worker {rank}"), named("process_sort_index", 0, sort_index=rank)]
    for lane in lanes:
        tid = _thread(lane)
        found += [named("thread_name", tid, name=lane), named("thread_sort_index", tid, sort_index=tid)]
    return found


def _thread(lane: str) -> int:
    return 1 + LANES.index(lane)


def _event(rank: int, span: TimedAction, shift: float, unit: float, after: str | None) -> dict[str, Any]:
    # Both ends in whole nanoseconds: what only touches must not overlap once it is rounded.
    start, stop = (round((at + shift) * unit * 1e9) for at in (span.start, span.stop))
    action = span.action
    args = {"stage": action.stage, "batch": action.batch, "micro": action.micro}
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.stage,
        "pid": rank,
        "tid": _thread(action.lane),
        "ts": start / 1000,
        "dur": (stop - start) / 1000,
        "args": args if after is None else {**args, "after": after},
    }


def current(trace: Any) -> Any:
    """A trace that was read from a file, with the stages of older runs under today's names."""
    for event in trace.get("traceEvents", ()) if isinstance(trace, dict) else ():
        args = event.get("args") if isinstance(event, dict) else None
        stage = args.get("stage") if isinstance(args, dict) else None
        if isinstance(args, dict) and isinstance(stage, str) and stage in RENAMED:
            args["stage"] = event["cat"] = RENAMED[stage]
            event["name"] = label((args["stage"], args.get("batch", -1), args.get("micro", -1)))
    return trace


def problems(trace: Trace) -> list[str]:
    """What is wrong with a trace, one line each: fields, names, metadata, and actions of a lane that overlap."""
    found: list[str] = []
    names: dict[tuple[str, int, int], str] = {}
    lanes: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for number, event in enumerate(trace.get("traceEvents", [])):
        where = f"event {number}"
        if event.get("ph") == "M":
            if event.get("name") in ("process_name", "thread_name"):
                names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
        elif event.get("ph") == "X":
            wrong = _fields(event)
            found += [f"{where}: {what}" for what in wrong]
            if not wrong:
                start = round(event["ts"] * 1000)
                row = (start, start + round(event["dur"] * 1000), event["name"])
                lanes[event["pid"], event["tid"]].append(row)
                if names.get(("thread_name", event["pid"], event["tid"])) != STAGES[event["args"]["stage"]].lane:
                    found.append(f"{where}: thread {event['tid']} is not named after the lane of {event['name']}")
                if ("process_name", event["pid"], 0) not in names:
                    found.append(f"{where}: worker {event['pid']} has no name")
        else:
            found.append(f"{where}: ph is {event.get('ph')!r}, neither X nor M")
    for (rank, _), rows in sorted(lanes.items()):
        rows.sort()
        for (_, stop, one), (start, _, other) in itertools.pairwise(rows):
            if start < stop:
                found.append(f"worker {rank}: {one} and {other} overlap on their lane")
    return found


def _fields(event: dict[str, Any]) -> list[str]:
    kinds = {"name": str, "pid": int, "tid": int, "ts": int | float, "dur": int | float, "args": dict}
    wrong = [f"{key} is {event.get(key)!r}" for key, kind in kinds.items() if not isinstance(event.get(key), kind)]
    if wrong:
        return wrong
    wrong = [f"{key} is {event[key]}, below 0" for key in ("ts", "dur") if not event[key] >= 0]
    args = event["args"]
    if set(args) - {"after"} != {"stage", "batch", "micro"} or args["stage"] not in STAGES:
        return [*wrong, f"args are {args}"]
    if event["name"] != label((args["stage"], args["batch"], args["micro"])):
        wrong.append(f"name is {event['name']!r}, args say {label((args['stage'], args['batch'], args['micro']))}")
    return wrong

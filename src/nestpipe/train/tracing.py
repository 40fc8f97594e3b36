"""A real run's trace: when every action of the last steps ran, on all workers, in one file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.launch.signals import last_words
from nestpipe.schedule.action import Action
from nestpipe.schedule.timeline import FEW, Span, Timeline
from nestpipe.schedule.view.trace import Trace, merge
from nestpipe.train.rundir import RunDirectory

FEW_WORKERS = 16
"""Whose last steps the run directory keeps."""

Row = tuple[Any, ...]


def write_trace(path: str, timeline: Timeline, world: World) -> None:
    """Worker 0 writes the file; all workers call it together."""
    trace = gather_trace(timeline, world)
    if trace is not None:
        Path(path).write_text(json.dumps(trace))


def gather_trace(timeline: Timeline, world: World, few: bool = False) -> Trace | None:
    """The trace, on worker 0.  All workers call it together: clocks are set by a moment that all of them share.

    `few`: the last steps of the first workers alone.
    """
    if few:
        mine: dict[str, Any] = {"spans": _rows(timeline)[-FEW:] if world.rank < FEW_WORKERS else []}
    else:
        mine = {"spans": _rows(timeline)}
    everyone: list[dict[str, Any] | None] = [mine]
    if world.size > 1:
        group = world.groups["metrics"]
        dist.barrier(group=group)
        mine["now"] = time.perf_counter()
        everyone = [None] * world.size
        dist.gather_object(mine, everyone if world.rank == 0 else None, group=group)
    if world.rank:
        return None
    workers, offsets = [], []
    for worker in everyone[:FEW_WORKERS] if few else everyone:
        assert worker is not None
        workers.append(_spans(worker["spans"]))
        offsets.append(mine.get("now", 0.0) - worker.get("now", 0.0))
    return merge(workers, offsets)


@contextmanager
def kept_if_it_fails(directory: RunDirectory, timeline: Timeline, world: World) -> Iterator[None]:
    """A run that an error or a signal ends leaves worker 0's last steps: others may be gone, so nobody is asked."""
    if world.rank:
        yield
        return

    def keep() -> None:
        with suppress(Exception):  # what ended the run is what must be told
            directory.write_trace(merge([_spans(_rows(timeline)[-FEW:])]))

    last_words.append(keep)
    try:
        yield
    except BaseException:
        keep()
        raise
    finally:
        last_words.remove(keep)


def _rows(timeline: Timeline) -> list[Row]:
    return [(*s.action.name, s.start, s.stop, s.action.after) for s in list(timeline.kept)]


def _spans(rows: list[Row]) -> list[Span]:
    return [Span(Action(stage, b, m, after, ()), start, stop, None) for stage, b, m, start, stop, after in rows]

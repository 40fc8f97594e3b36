"""A real run's trace: when every action of the last steps ran, on all workers, in one file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.schedule.action import Action
from nestpipe.schedule.timeline import Span, Timeline
from nestpipe.schedule.trace import merge


def write_trace(path: str, timeline: Timeline, world: World) -> None:
    """Worker 0 writes the file; all workers call it together.  Clocks are set by a moment that all of them share."""
    mine: dict[str, Any] = {"spans": [(*s.action.name, s.start, s.stop) for s in timeline.kept]}
    everyone: list[dict[str, Any] | None] = [mine]
    if world.size > 1:
        group = world.groups["metrics"]
        dist.barrier(group=group)
        mine["now"] = time.perf_counter()
        everyone = [None] * world.size
        dist.all_gather_object(everyone, mine, group=group)
    if world.rank:
        return
    workers, offsets = [], []
    for worker in everyone:
        assert worker is not None
        workers.append(
            [Span(Action(stage, b, m, (), ()), start, stop, None) for stage, b, m, start, stop in worker["spans"]]
        )
        offsets.append(mine.get("now", 0.0) - worker.get("now", 0.0))
    Path(path).write_text(json.dumps(merge(workers, offsets)))

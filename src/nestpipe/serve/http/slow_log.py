"""The last slow requests, and a line in the log for each."""

from __future__ import annotations

import logging
from collections import deque
from datetime import UTC, datetime
from typing import Any

from nestpipe.serve.scheduler.jobs import RankJob

log = logging.getLogger("nestpipe.serve.slow")

MOST = 100


class SlowLog:
    """Keeps the last ones, newest first."""

    def __init__(self, slow_ms: float) -> None:
        self._slow = slow_ms / 1e3
        self._kept: deque[dict[str, Any]] = deque(maxlen=MOST)

    def ended(self, job: RankJob, trace: str, seconds: float) -> None:
        if seconds < self._slow:
            return
        spent: dict[str, float] = {}
        for what, took in job.steps:
            spent[what] = spent.get(what, 0.0) + took
        started = job.started if job.started is not None else job.ended
        waited = (started or job.arrived) - job.arrived
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "trace": trace,
            "user": job.user,
            "path": job.path.value,
            "outcome": job.outcome.value if job.outcome is not None else "",
            "version": job.model.version,
            "ms": round(1e3 * seconds, 2),
            "waited_ms": round(1e3 * waited, 2),
            "steps_ms": {what: round(1e3 * took, 2) for what, took in spent.items()},
            "events": len(job.history),
            "blocks": job.complete,
            "candidates": len(job.candidates),
        }
        self._kept.appendleft(entry)
        log.info("slow request: %s", entry)

    def kept(self) -> list[dict[str, Any]]:
        return list(self._kept)

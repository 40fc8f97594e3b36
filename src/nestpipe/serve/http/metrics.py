"""What Prometheus reads, and the last minutes for the page."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from nestpipe.serve.instance.compute import ComputeThread
from nestpipe.serve.scheduler.jobs import Path

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SECONDS = 300
"""How far the page looks back."""
_GAUGES = {
    "arena_bytes": "bytes of blocks in the arena",
    "arena_limit": "bytes that the arena may take",
    "dram_bytes": "bytes of blocks in the tier behind the arena",
    "dram_limit": "bytes that the tier may take",
    "prefixes": "users with cached blocks",
    "pins": "pins on prefixes",
    "queue": "rankings that wait",
    "ahead": "prefixes that wait to be computed ahead",
}


class Metrics:
    """Of one instance; the event loop alone writes."""

    def __init__(self, compute: ComputeThread, clock: Any = time.monotonic) -> None:
        self._compute, self._clock = compute, clock
        self._registry = CollectorRegistry()
        latency = Histogram(
            "nestpipe_rank_seconds",
            "from a request's first byte to its answer",
            ["path"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._latency = {path.value: latency.labels(path.value) for path in Path}
        self._answers = Counter("nestpipe_answers", "answers by status", ["status"], registry=self._registry)
        self._nonfinite = Counter(
            "nestpipe_nonfinite_scores", "scores that were NaN or infinite", registry=self._registry
        )
        self._by_status: dict[int, Any] = {}
        self._registry.register(_Levels(compute))
        self._lines: deque[dict[str, Any]] = deque(maxlen=SECONDS)
        self._open: dict[str, Any] | None = None

    def answered(self, status: int, path: str | None, seconds: float, nonfinite: int = 0) -> None:
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._answers.labels(str(status))
        counter.inc()
        now = self._now()
        if path is not None:
            self._latency[path].observe(seconds)
            now["latencies"].append(seconds)
            now["paths"][path] = now["paths"].get(path, 0) + 1
        else:
            now["refused"] += 1
        if nonfinite:
            self._nonfinite.inc(nonfinite)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def recent(self) -> list[dict[str, Any]]:
        """A line for every second with requests, and for this one: how many, quantiles in ms, paths, fill levels."""
        return [*self._lines, _line(self._now())]

    def _now(self) -> dict[str, Any]:
        """The second that it is; the one before becomes a line, so that nobody sorts its latencies again."""
        second = int(self._clock())
        if self._open is None or second != self._open["second"]:
            if self._open is not None:
                self._lines.append(_line(self._open))
            shot = self._compute.snapshot
            levels = {key: shot[key] for key in ("arena_bytes", "dram_bytes", "queue", "version")}
            self._open = {"second": second, "latencies": [], "paths": {}, "refused": 0, **levels}
        return self._open


def _line(second: dict[str, Any]) -> dict[str, Any]:
    ordered = sorted(second["latencies"])
    quantile = {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {**{key: value for key, value in second.items() if key != "latencies"}, "count": len(ordered), **quantile}


class _Levels:
    """Levels and counts of the compute thread, as of its last snapshot."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute = compute

    def collect(self) -> Any:
        shot = self._compute.snapshot
        for name, says in _GAUGES.items():
            yield GaugeMetricFamily(f"nestpipe_{name}", says, value=shot[name])
        for name, says in (("counts", "what the relay has done"), ("cache", "blocks that moved")):
            family = GaugeMetricFamily(f"nestpipe_{name}", says, labels=["what"])
            for what, count in sorted(shot[name].items()):
                family.add_metric([what], count)
            yield family
        version = GaugeMetricFamily("nestpipe_version", "1 for the version that serves", labels=["version"])
        for one in shot["versions"]:
            version.add_metric([one], float(one == shot["version"]))
        yield version

"""Runs, traces and benches to make pages of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nestpipe.schedule import build
from nestpipe.schedule.clock import nominal, run
from nestpipe.schedule.view.trace import VIRTUAL, Trace, merge


def a_trace(schedule: str = "nested", batches: int = 12, micros: int = 4, workers: int = 2) -> Trace:
    actions = build(schedule, batches, micros)
    spans = run(actions, nominal(actions))
    return merge([spans] * workers, [0.5 * worker for worker in range(workers)], VIRTUAL)


def a_summary(**changes: Any) -> dict[str, Any]:
    stages = {
        "embed": {"busy_ms": 4.0, "hidden_ms": 3.0, "exposed_ms": 1.0},
        "compute": {"busy_ms": 9.0, "hidden_ms": 0.0, "exposed_ms": 9.0},
    }
    summary = {
        "recipe": "dlrm",
        "schedule": "nested",
        "workers": 2,
        "micro_batches": 4,
        "micro_batches_chosen": [[0, 4]],
        "steps": 60,
        "samples": 6000,
        "seconds": 1.5,
        "samples_per_s": 4000.0,
        "loss": 0.5,
        "metrics": {"auc": 0.8, "ne": 0.79, "log_loss": 0.47, "samples": 500},
        "digest": "ab" * 32,
        "seed": 7,
        "rows": 1234,
        "bytes_sent": 6_000_000,
        "stages": stages,
        "step_ms": 10.0,
        "buffer_bytes": {"now": 1, "peak": 2_000_000},
    }
    return summary | changes


def a_bench(**changes: Any) -> dict[str, Any]:
    def rung(name: str, times: list[float], peer: str | None = None) -> dict[str, Any]:
        even = {"median": 1.0, "low": 0.9, "high": 1.1}
        stages = {"embed": {"busy_ms": 30.0, "hidden_ms": 20.0, "exposed_ms": 10.0}}
        stages["compute"] = {"busy_ms": 90.0, "hidden_ms": 0.0, "exposed_ms": 90.0}
        found = {"name": name, "peer": peer, "step_ms": sorted(times)[1], "step_ms_all": times, "cpu_ms": 50.0}
        found |= {"samples_per_s": 1e4, "wire_bytes": 8.9e6, "ratios": {"serial": even}}
        return found if peer else found | {"stages": stages, "of_limit": even}

    rungs = [rung("serial", [300.0, 290.0, 310.0]), rung("nested N=8", [200.0, 195.0, 250.0])]
    rungs.append(rung("torchrec", [400.0, 390.0, 420.0], "torchrec"))
    bench = {"title": "A ladder", "workers": 2, "rounds": 3, "rungs": rungs, "hidden": [], "link": "500mbit"}
    bench |= {"limit": {"rungs": ["compute alone"], "ms": {"median": 180.0, "low": 170.0, "high": 190.0}}}
    return bench | {"date": "2026-11-16 12:00", "command": "nestpipe bench a"} | changes


def a_data(**changes: Any) -> dict[str, Any]:
    """What a reader tells of its data."""
    stages = [("read", 6040, 3706, 1_000_209), ("5-core", 6034, 3416, 999_611), ("last 200", 6034, 3391, 711_302)]
    bounds = [(5, 0), (10, 0), (20, 90), (50, 1740), (100, 1402), (200, 1290), (500, 1190), (None, 322)]
    lengths = {"least": 18, "median": 96.0, "mean": 165.66, "p90": 400, "p99": 910, "most": 2314}
    return {
        "stages": [dict(zip(("name", "users", "items", "events"), stage)) for stage in stages],
        "lengths": lengths | {"histogram": [list(pair) for pair in bounds]},
        "ties": {"events": 541_000, "users": 6034},
        "notes": ["Ratings below 4 count as events."],
    } | changes


def a_run(path: Path, summary: dict[str, Any] | None = None, trace: Trace | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text('[model]\nkind = "dlrm"\n')
    lines: list[dict[str, Any]] = [
        {
            "step": 20 * i,
            "loss": 1 / i,
            "samples": 2000 * i,
            "seconds": 0.5 * i,
            "samples_per_s": 4000.0,
            "auc": 0.6 + i / 50,
        }
        for i in range(1, 4)
    ]
    lines.append({"step": 60, "eval": {"auc": 0.8, "ne": 0.79, "log_loss": 0.47, "bayes_auc": 0.82}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(json.dumps(summary or a_summary()))
    (path / "trace.json").write_text(json.dumps(trace or a_trace()))
    return path

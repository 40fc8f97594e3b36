"""Ladders: rungs of one workload run side by side, interleaved, and compared by their slowest worker.

A rung is a worker program under torchrun, ours or a peer's, that reads a JSON config and writes a JSON report.  Every repeat runs
all rungs once, so that a noisy minute of the machine hits all of them alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestpipe.train.recipe import build

REPOSITORY = Path(__file__).parents[3]
LADDERS = REPOSITORY / "bench"
PEER_SCRIPTS = {"torchrec": LADDERS / "peers" / "torchrec_dlrm.py"}
PEER_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
RUNG_SECONDS = 600.0
"""A rung that takes longer is given up."""


@dataclass(frozen=True)
class Rung:
    name: str
    set: dict[str, Any] = field(default_factory=dict)
    """What this rung sets beside the workload."""
    peer: str | None = None
    """Whose program runs it; None: ours."""


@dataclass(frozen=True)
class Ladder:
    title: str
    worker: str
    """The module that runs our rungs."""
    rungs: list[Rung]
    workload: dict[str, Any] = field(default_factory=dict)
    workers: int = 2
    repeats: int = 5


class BenchError(RuntimeError):
    """A ladder cannot be run, or a rung failed; the message is one line."""


def ladders() -> list[str]:
    return sorted(path.stem for path in LADDERS.glob("*.toml"))


def load_ladder(name: str) -> Ladder:
    path = LADDERS / f"{name}.toml"
    if not path.is_file():
        there = ", ".join(ladders()) or f"none in {LADDERS}: run it from a checkout of the repository"
        raise BenchError(f"no ladder {name!r}; there are {there}")
    values = tomllib.loads(path.read_text())
    rungs = [Rung(r["name"], r.get("set", {}), r.get("peer")) for r in values.pop("rungs")]
    workload = values.pop("workload", {})
    plain = build(_Plain, values, name)
    return Ladder(plain.title, plain.worker, rungs, workload, plain.workers, plain.repeats)


@dataclass(frozen=True)
class _Plain:
    title: str
    worker: str
    workers: int = 2
    repeats: int = 5


def run_ladder(ladder: Ladder, peers: list[str], repeats: int, tell: Callable[[float, str], None]) -> dict[str, Any]:
    """Runs all rungs `repeats` times, interleaved.  Returns per rung the step times, their median and spread, and ratios."""
    rungs = [rung for rung in ladder.rungs if rung.peer is None or rung.peer in peers]
    for peer in peers:
        if peer not in PEER_SCRIPTS:
            raise BenchError(f"no peer {peer!r}; there are {', '.join(PEER_SCRIPTS)}")
        if not PEER_PYTHON.is_file():
            raise BenchError(f"{peer} is not installed: run `make bench-peers` first")
    reports: dict[str, list[dict[str, Any]]] = {rung.name: [] for rung in rungs}
    for repeat in range(repeats):
        for number, rung in enumerate(rungs):
            tell((repeat * len(rungs) + number) / (repeats * len(rungs)), f"repeat {repeat + 1}/{repeats}: {rung.name}")
            reports[rung.name].append(_run(ladder, rung))
    return {
        "title": ladder.title,
        "workers": ladder.workers,
        "repeats": repeats,
        "rungs": [_summary(rung, reports[rung.name]) for rung in rungs],
    }


def _run(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
        config, out = Path(folder) / "config.json", Path(folder) / "out.json"
        config.write_text(json.dumps({**ladder.workload, **rung.set}))
        python, program = (sys.executable, ["-m", ladder.worker])
        if rung.peer is not None:
            python, program = str(PEER_PYTHON), [str(PEER_SCRIPTS[rung.peer])]
        command = [
            python,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ladder.workers),
            "--standalone",
            *program,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        try:
            done = subprocess.run(
                [*command, "--config", str(config), "--out", str(out)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=RUNG_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"rung {rung.name!r} did not end within {RUNG_SECONDS:g} s") from None
        if done.returncode or not out.is_file():
            last = (
                [line for line in done.stderr.splitlines() if "Error" in line]
                or done.stderr.splitlines()
                or ["no word"]
            )
            raise BenchError(f"rung {rung.name!r} failed with exit code {done.returncode}: {last[0].strip()}")
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def _summary(rung: Rung, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest worker's mean step time of each repeat; their median, least and most."""
    steps = [len(report["step_ms_by_rank"][0]) for report in reports]
    step_ms = [1e3 * max(report["window_s_by_rank"]) / n for report, n in zip(reports, steps)]
    cpu_ms = [1e3 * max(report["cpu_s_by_rank"]) / n for report, n in zip(reports, steps)]
    summary = {
        "name": rung.name,
        "peer": rung.peer,
        "step_ms": statistics.median(step_ms),
        "step_ms_all": step_ms,
        "cpu_ms": statistics.median(cpu_ms),
        "samples_per_s": statistics.median(report["samples_per_s"] for report in reports),
        "first_losses": reports[0]["first_losses"],
    }
    if "stage_ms_by_rank" in reports[0]:
        stages = reports[0]["stage_ms_by_rank"][0]
        summary["stage_ms"] = {
            stage: statistics.median(max(rank[stage] for rank in report["stage_ms_by_rank"]) for report in reports)
            for stage in stages
        }
        summary["bytes_sent"] = statistics.median(max(report["bytes_sent_by_rank"]) for report in reports)
    return summary

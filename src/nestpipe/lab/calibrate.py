"""Makes a profile of this machine for the simulator from two serial rungs on two hosts with a slow link.

Stages of a serial step do not overlap, so the time of a stage is its cost.  Steps with one micro-batch and with eight
tell what a batch costs and what a micro-batch adds.  The costs of a byte and of a message are fitted: between two
micro-batches a shaped link accumulates credit, so that small messages pass faster than its rate.  The simulator models
that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from nestpipe.config.toml import toml_value
from nestpipe.lab.ladder import Ladder, load_ladder
from nestpipe.lab.network import BURST_BYTES, megabytes_per_ms
from nestpipe.lab.running import run_ladder
from nestpipe.lab.settings import read_settings
from nestpipe.schedule import serial
from nestpipe.sim.figures import WARMUP, Settings, run
from nestpipe.sim.profile import read_profile
from nestpipe.sim.systems import SYSTEMS, System

LADDER = "lab"
LINK = "250mbit"
"""Slow, so that the wire is most of a message.  Predictions are for faster links."""
MB_PER_MS = megabytes_per_ms(LINK)
KEY_BYTES, FLOAT_BYTES = 8, 4


def calibrate(tell: Callable[[float, str], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the profile, and the ladder's figures that they come from.  Shaped links need root."""
    ladder = load_ladder(LADDER).only(["serial N=1", "serial N=8"])
    measured = run_ladder(ladder, [], ladder.rounds, tell, LINK)
    return profile_of(ladder, measured), measured


def profile_of(ladder: Ladder, measured: dict[str, Any]) -> dict[str, Any]:
    rungs = {rung["name"]: rung for rung in measured["rungs"]}
    one, several = rungs["serial N=1"], rungs["serial N=8"]
    settings = read_settings({**ladder.workload, **next(r for r in ladder.rungs if r.name == "serial N=8").set})
    workload, options, many = settings.workload, settings.options, settings.pipeline.micro_batches
    assert isinstance(many, int) and options.compute_ms is not None

    def busy(rung: dict[str, Any], *stages: str) -> float:
        return sum(rung["stages"].get(stage, {}).get("busy_ms", 0.0) for stage in stages)

    # What travels: keys to other owners, their rows back, and the gradients of these rows to the owners.
    remote = (ladder.workers - 1) / ladder.workers
    dense_mb = FLOAT_BYTES * options.dense_parameters / 1e6
    sparse_mb = one["bytes_sent"] / 1e6 - 2 * remote * dense_mb
    row_bytes = FLOAT_BYTES * workload["dim"]
    rows_mb = sparse_mb / remote * row_bytes / (2 * row_bytes + KEY_BYTES)
    keys_mb = rows_mb * KEY_BYTES / row_bytes
    stages: dict[str, dict[str, float]] = {}
    for stage in one["stages"]:
        if stage in ("embed", "grad", "reduce", "between"):
            continue
        per_micro = max(0.0, (busy(several, stage) - busy(one, stage)) / (many - 1))
        device = options.compute_ms if stage == "compute" else 0.0
        sent_ms = keys_mb * remote / MB_PER_MS if stage == "route" else 0.0
        host = max(0.0, busy(one, stage) - device - per_micro - sent_ms)
        stages[stage] = {"host": host, "device": device, "per_micro": per_micro}
    values: dict[str, Any] = {
        "title": f"{ladder.title}; measured on {ladder.workers} hosts with links of {LINK}",
        "samples": workload["batch"],
        "workers": ladder.workers,
        "micro_batches": many,
        "groups": 1,
        "reference_workers": ladder.workers,
        "buckets": one["buckets"],
        "buckets_final": [0.0] * one["buckets"],  # complete before the stand-in's backward pass takes its time
        "machine_cores": float(len(os.sched_getaffinity(0))),
        "network": {
            "mb_per_ms": MB_PER_MS,
            "rows_mb": rows_mb,
            "keys_mb": keys_mb,
            "dense_mb": dense_mb,
            "burst_mb": BURST_BYTES / 1e6,
        },
        "stages": stages,
    }
    share, message_ms = _fit(values, busy(one, "embed", "grad"), busy(several, "embed", "grad"))
    return _with_messages(values, share, message_ms)


def _with_messages(values: dict[str, Any], share: float, message_ms: float) -> dict[str, Any]:
    """`message_ms` is time of the host: copies, system calls, wake-ups."""
    messages = {stage: {"per_micro": message_ms} for stage in ("embed", "grad")}
    return {**values, "network": {**values["network"], "share": share}, "stages": {**values["stages"], **messages}}


def _fit(values: dict[str, Any], one_ms: float, several_ms: float) -> tuple[float, float]:
    """Fits the share of the link's rate and the cost of a message, so that simulated All2All takes as long as real ones.

    Searches a grid, then a finer one around its best point.
    """
    several = System("serial", "", serial, True)

    def off(share: float, message_ms: float) -> float:
        profile = read_profile(_with_messages(values, float(share), float(message_ms)), "calibration")
        steps = Settings(steps=WARMUP + 2)
        found = (
            run(SYSTEMS["torchrec"], profile, profile.workers, steps),
            run(several, profile, profile.workers, steps),
        )
        return sum((ms.raw_comm_ms / wanted - 1) ** 2 for ms, wanted in zip(found, (one_ms, several_ms)))

    shares, messages = np.linspace(0.7, 1.0, 7), np.linspace(0.0, 6.0, 7)
    for _ in range(2):
        best = min(((s, m) for s in shares for m in messages), key=lambda pair: off(*pair))
        shares = np.clip(best[0] + np.linspace(-0.05, 0.05, 5), 0.5, 1.0)
        messages = np.maximum(0.0, best[1] + np.linspace(-1.0, 1.0, 5))
    return float(best[0]), float(best[1])


def to_toml(values: dict[str, Any]) -> str:
    """The profile as TOML that `sim.profile` reads."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = ["# Measured by `nestpipe simulate --calibrate`.", *(f"{key} = {_value(v)}" for key, v in plain.items())]
    tables = {"network": values["network"], **{f"stages.{name}": cost for name, cost in values["stages"].items()}}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(v)}" for key, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else toml_value(value)

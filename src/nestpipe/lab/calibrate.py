"""A profile of this machine for the simulator: two serial rungs, measured on two hosts with a slow link.

Serial steps have nothing beside each other, so what a stage takes is its own cost.  With one micro-batch and with eight, that
gives what a batch costs and what a micro-batch adds.  What a byte and a message take is fitted: between two micro-batches a
shaped link saves up, so that small messages go through faster than its rate, as the simulator knows.
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
from nestpipe.schedule import serial
from nestpipe.sim.figures import WARMUP, Settings, run
from nestpipe.sim.profile import read_profile
from nestpipe.sim.systems import SYSTEMS, System

LADDER = "lab"
LINK = "250mbit"
"""Slow, so that the wire is most of a message; what is to be predicted is on faster links."""
MB_PER_MS = megabytes_per_ms(LINK)
KEY_BYTES, FLOAT_BYTES = 8, 4


def calibrate(tell: Callable[[float, str], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The profile's values, and the ladder's figures that they come from.  Needs root, for the links."""
    ladder = load_ladder(LADDER).only(["serial N=1", "serial N=8"])
    measured = run_ladder(ladder, [], ladder.rounds, tell, LINK)
    return profile_of(ladder, measured), measured


def profile_of(ladder: Ladder, measured: dict[str, Any]) -> dict[str, Any]:
    workload, rungs = ladder.workload, {rung["name"]: rung for rung in measured["rungs"]}
    many = next(rung for rung in ladder.rungs if rung.name == "serial N=8").set["micro_batches"]
    one, several = rungs["serial N=1"], rungs["serial N=8"]

    def busy(rung: dict[str, Any], *stages: str) -> float:
        return sum(rung["stages"].get(stage, {}).get("busy_ms", 0.0) for stage in stages)

    # Of a worker's rows the share that others own travels, and their gradients back, and the keys before that.
    remote = (ladder.workers - 1) / ladder.workers
    dense_mb = FLOAT_BYTES * workload["dense_parameters"] / 1e6
    sparse_mb = one["bytes_sent"] / 1e6 - 2 * remote * dense_mb
    row_bytes = FLOAT_BYTES * workload["dim"]
    rows_mb = sparse_mb / remote * row_bytes / (2 * row_bytes + KEY_BYTES)
    keys_mb = rows_mb * KEY_BYTES / row_bytes
    stages: dict[str, dict[str, float]] = {}
    for stage in one["stages"]:
        if stage in ("embed", "grad", "reduce", "between"):
            continue
        per_micro = max(0.0, (busy(several, stage) - busy(one, stage)) / (many - 1))
        device = float(workload["compute_ms"]) if stage == "compute" else 0.0
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
        "buckets_final": [0.0] * one["buckets"],  # before the stand-in's backward pass begins to take its time
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
    """`message_ms` is the host's: copies, system calls, waking up."""
    messages = {stage: {"per_micro": message_ms} for stage in ("embed", "grad")}
    return {**values, "network": {**values["network"], "share": share}, "stages": {**values["stages"], **messages}}


def _fit(values: dict[str, Any], one_ms: float, several_ms: float) -> tuple[float, float]:
    """Share of the link's rate and cost of a message with which simulated serial steps spend on All2All what real ones did.

    Found by trying, on a grid and then on a finer one around its best point.
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
    """As `sim.profile` reads it."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = ["# Measured by `nestpipe simulate --calibrate`.", *(f"{key} = {_value(v)}" for key, v in plain.items())]
    tables = {"network": values["network"], **{f"stages.{name}": cost for name, cost in values["stages"].items()}}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(v)}" for key, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else toml_value(value)

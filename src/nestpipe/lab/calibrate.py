"""A profile of this machine for the simulator: two serial rungs, measured on two hosts with a slow link.

Serial steps have nothing beside each other, so what a stage takes is its own cost.  With one micro-batch and with eight, that
gives what a batch costs and what a micro-batch adds; and for messages, what a byte takes and what a message takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nestpipe.lab.ladder import Ladder, load_ladder, run_ladder
from nestpipe.lab.network import megabytes_per_ms
from nestpipe.train.recipe import toml_value

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
    # Two messages of a batch, or two of each micro-batch: the same bytes.
    message_ms = max(0.0, (busy(several, "embed", "grad") - busy(one, "embed", "grad")) / (2 * many - 2))
    wire_ms = busy(one, "embed", "grad") - 2 * message_ms
    share = min(1.0, 2 * rows_mb * remote / MB_PER_MS / wire_ms)
    stages: dict[str, dict[str, float]] = {}
    for stage in one["stages"]:
        if stage in ("embed", "grad", "reduce", "agree", "between"):
            continue
        per_micro = max(0.0, (busy(several, stage) - busy(one, stage)) / (many - 1))
        device = float(workload["compute_ms"]) if stage == "compute" else 0.0
        sent_ms = keys_mb * remote / (MB_PER_MS * share) + message_ms if stage == "route" else 0.0
        host = max(0.0, busy(one, stage) - device - per_micro - sent_ms)
        stages[stage] = {"host": host, "device": device, "per_micro": per_micro}
    return {
        "title": f"{ladder.title}; measured on {ladder.workers} hosts with links of {LINK}",
        "samples": workload["batch"],
        "workers": ladder.workers,
        "micro_batches": many,
        "groups": 1,
        "reference_workers": ladder.workers,
        "buckets": one["buckets"],
        "machine_cores": float(len(os.sched_getaffinity(0))),
        "network": {
            "mb_per_ms": MB_PER_MS,
            "rows_mb": rows_mb,
            "keys_mb": keys_mb,
            "dense_mb": dense_mb,
            "share": share,
            "peer_ms": message_ms / (ladder.workers - 1),
        },
        "stages": stages,
    }


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

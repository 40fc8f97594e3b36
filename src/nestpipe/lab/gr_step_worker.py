"""Training steps of `nestpipe bench gr` in a process of its own: ours, or plain torch of the same equations.

    python -m nestpipe.lab.gr_step_worker --config FILE.json --out FILE.json

The config is a `StepWorkload` with `variant` ("ours" or "plain"), `turns`, `core`, the files `data` and `weights`, and
`places`, for how many of which the check's weights are made.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.lab.gr_training import Histories, Training, check_loss, without_kernels
from nestpipe.lab.gr_worker import run_worker
from nestpipe.lab.gr_workloads import StepWorkload, read_batches
from nestpipe.lab.peak_memory import give_back
from nestpipe.models.flops import measured_peak


def run(config: dict[str, Any], turns: Any) -> dict[str, Any]:
    variant, count, places = (config.pop(key) for key in ("variant", "turns", "places"))
    data, weights = (Path(config.pop(key)) for key in ("data", "weights"))
    workload = StepWorkload(**config)
    if variant == "plain":
        without_kernels()
    turns.wait(0)
    batches = [Histories(drawn) for drawn in read_batches(data, workload.batches)]
    with np.load(weights) as given:
        loss = check_loss(workload, places, batches[0], dict(given))
    training = Training(workload, fused=variant == "ours")
    training.step(batches[0])
    give_back()
    turns.done(0)
    taken = []
    for turn in range(1, count + 1):
        turns.wait(turn)
        batch = batches[(turn - 1) % len(batches)]
        training.step(batch)  # finds caches and memory as others left them: not timed
        peak = measured_peak(torch.device("cpu"))
        start = time.perf_counter()
        for _ in range(workload.steps):
            training.step(batch)
        taken.append({"seconds": (time.perf_counter() - start) / workload.steps, "peak": peak})
        give_back()  # or all variants would hold their most at once
        turns.done(turn)
    return {
        "turns": taken,
        "flops": [training.flops(batch) for batch in batches],
        "check_loss": loss,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    run_worker(run, __doc__ or "")

"""Training steps of `nestpipe bench gr` in a process of its own: ours, or plain torch of the same equations.

    python -m nestpipe.lab.gr_step_worker --config FILE.json --out FILE.json

The config is a `StepWorkload` with `variant` ("ours" or "plain"), `turns`, `core`, the files `data` and `weights`, and
`places`, for how many of which the check's weights are made.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.lab.gr_training import Histories, Training, check_loss, without_kernels
from nestpipe.lab.gr_worker import run_worker
from nestpipe.lab.gr_workloads import StepWorkload, read_batches
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
    turns.done(0)

    def step(turn: int) -> None:
        training.step(batches[(turn - 1) % len(batches)])

    taken = turns.take(count, workload.steps, step, lambda: measured_peak(torch.device("cpu")))
    return {
        "turns": taken,
        "flops": [training.flops(batch) for batch in batches],
        "check_loss": loss,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    run_worker(run, __doc__ or "")

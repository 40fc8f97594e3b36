"""One operator of `nestpipe bench gr` in a process of its own: its time, turn by turn, or its memory.

    python -m nestpipe.lab.gr_operator_worker --config FILE.json --out FILE.json

The config is an `OperatorWorkload` with `variant` ("ours" or "padded"), `turns` and `core`.  With no turns, the extra memory
of one forward and backward pass is measured; inputs and the gradient that comes in are there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.jagged import JaggedTensor
from nestpipe.lab.gr_worker import run_worker
from nestpipe.lab.gr_workloads import OperatorWorkload
from nestpipe.lab.peak_memory import extra_bytes
from nestpipe.models.flops import PASSES, Trained, measured_peak
from nestpipe.ops.attention import (
    SCORE_BIAS,
    THREE_CHANNELS,
    Attention,
    jagged_attention,
    jagged_attention_reference,
)
from nestpipe.ops.event_times import TIME_BUCKETS, EventTimes

OPERATORS: dict[str, Callable[..., Tensor]] = {"ours": jagged_attention, "padded": jagged_attention_reference}


def passes(workload: OperatorWorkload, variant: str) -> Callable[[], None]:
    """A forward and a backward pass, to be called again and again."""
    draw = np.random.default_rng(1)
    lengths = torch.tensor(workload.lengths)
    times = np.concatenate([np.cumsum(draw.integers(1, 10_000, n + 1)) for n in workload.lengths])
    longest = max(workload.lengths)
    attention = Attention(workload.heads, 1 / longest, THREE_CHANNELS if workload.kind == "fuxi" else SCORE_BIAS)
    shapes = [(workload.tokens, workload.dim)] * 3 + [(2 * longest - 1,), (TIME_BUCKETS + 1,)]
    inputs = [torch.from_numpy(draw.standard_normal(s, np.float32)).requires_grad_() for s in shapes]
    incoming = torch.ones(workload.tokens, attention.channels * workload.dim)

    def once() -> None:
        events = EventTimes(JaggedTensor(torch.from_numpy(times), lengths=lengths + 1))  # which keeps what it makes
        found = OPERATORS[variant](*inputs, events, attention)
        torch.autograd.grad(found, inputs, incoming)

    return once


def flops(workload: OperatorWorkload) -> int:
    """Of pairs of places that look back, forward and backward."""
    trained = Trained()
    trained.add(torch.tensor(workload.lengths))
    products = 4 if workload.kind == "fuxi" else 2
    return PASSES * 2 * products * workload.dim * trained.pairs


def run(config: dict[str, Any], turns: Any) -> dict[str, Any]:
    variant, count = config.pop("variant"), config.pop("turns")
    workload = OperatorWorkload(**{**config, "lengths": tuple(config["lengths"])})
    # Compiles kernels, on the shortest histories that use all of them.
    passes(OperatorWorkload("tiny", workload.kind, workload.heads, (3, 2), workload.heads * 2), variant)()
    once = passes(workload, variant)
    if not count:
        return {"extra_bytes": extra_bytes(once)}
    turns.wait(0)
    once()
    turns.done(0)
    taken = turns.take(count, 1, lambda turn: once(), lambda: measured_peak(torch.device("cpu")))
    return {"turns": taken, "flops": flops(workload)}


if __name__ == "__main__":
    run_worker(run, __doc__ or "")

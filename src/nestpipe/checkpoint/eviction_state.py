"""The eviction state of all workers, merged into what a manifest holds.  Plain values in, plain values out."""

from __future__ import annotations

from typing import Any

import numpy as np


def merge_eviction_states(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts are summed over the workers.  Everything else is equal on all of them and comes from worker 0."""
    merged = dict(workers[0])
    if merged:
        by_group = zip(*(worker["groups"] for worker in workers))
        merged["groups"] = [
            {
                **parts[0],
                "evicted": np.sum([part["evicted"] for part in parts], axis=0).tolist(),
                "forgotten": sum(part["forgotten"] for part in parts),
            }
            for parts in by_group
        ]
    return merged

"""How long histories are, as a report tells it."""

from __future__ import annotations

from typing import Any

import numpy as np

BOUNDS = (3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
"""Upper bounds of the histogram of lengths."""


def describe_lengths(lengths: np.ndarray) -> dict[str, Any]:
    """Users, events, quantiles and a histogram: [upper bound, users], ...  Without users, only the first two."""
    if not len(lengths):
        return {"users": 0, "events": 0}
    least, median, p90, p99, most = np.quantile(lengths, (0, 0.5, 0.9, 0.99, 1), method="lower").tolist()
    bounds = [*(bound for bound in BOUNDS if bound < most), most]
    counts, _ = np.histogram(lengths, [0, *(bound + 1 for bound in bounds)])
    return {
        "users": len(lengths),
        "events": int(lengths.sum()),
        "least": int(least),
        "median": int(median),
        "mean": round(float(lengths.mean()), 2),
        "p90": int(p90),
        "p99": int(p99),
        "most": int(most),
        "histogram": [[int(bound), int(count)] for bound, count in zip(bounds, counts)],
    }

"""What inexactness costs: HSTU on MovieLens-100K, exact and inexact ways to train it, side by side.

    python bench/inexact.py --data u.data [--epochs 40] [--seeds 5] [--workers 2] [--results inexact-runs] [--json FILE]

flat and HSP are synchronous training; they differ by rounding.  2D-SP averages the replicas' tables every k steps.
`semi_async` reads rows that are one batch old.  Every worker is a replica group of its own.  All take row-wise Adagrad,
which 2D-SP is published for.  Printed: the mean of each metric over seeds, and the mean difference to flat with a 95 %
interval by Student's t over seeds; the share of stale reads; the speed here, where nothing but this machine's loopback
is between workers.
"""

from __future__ import annotations

import statistics

from paired_seeds import compare, parser, train_all, write

COMMON = ["tables.optimizer=rowwise_adagrad", "tables.lr=0.05", "pipeline.micro_batches=2"]
AVERAGED = ["pipeline.schedule=nested", "pipeline.group_size=1", "pipeline.replicas=average"]
VARIANTS = {
    "flat": ["pipeline.schedule=nested"],
    "HSP": ["pipeline.schedule=nested", "pipeline.group_size=1"],
    "2D-SP, k = 10": [*AVERAGED, "pipeline.average_every=10"],
    "2D-SP, k = 100": [*AVERAGED, "pipeline.average_every=100"],
    "semi_async": ["pipeline.schedule=semi_async"],
}
METRICS = ("hr@10", "ndcg@10")


def main() -> None:
    options = parser(__doc__, "inexact-runs").parse_args()
    found = train_all(VARIANTS, COMMON, METRICS, options)
    figures = compare(found, ("flat",), METRICS)
    print(f"\n{'':22s} {'samples/s':>10s}")
    for variant, runs in found.items():
        rates = [run["samples_per_s"] for run in runs]
        figures[variant]["samples_per_s"] = rates
        print(f"{variant:22s} {statistics.median(rates):10,.0f}")
    write(figures, options)


if __name__ == "__main__":
    main()

"""How fast long histories are drawn, on one core: tokens a second of CPU time.

python bench/long_histories.py [--users 400] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from nestpipe.data.long_histories import LongHistoriesData


def drawn(data: LongHistoriesData, users: int) -> tuple[int, float]:
    """Tokens of the first users' batches, and CPU seconds of this thread."""
    source = data.open("train", 1)
    source.take(np.arange(2), 0)  # compiles
    began = time.thread_time()
    tokens = sum(int(batch.loss_terms.sum()) for batch, _ in source.read(0, users, 0) if batch.loss_terms is not None)
    return tokens, time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for negatives in (0, 128):
        runs = [drawn(LongHistoriesData(negatives=negatives), args.users) for _ in range(args.repeats)]
        rates = sorted(tokens / seconds / 1e6 for tokens, seconds in runs)
        print(
            f"{negatives} negatives: {statistics.median(rates):.2f} million tokens/s ({rates[0]:.2f} to {rates[-1]:.2f})"
        )
    source = LongHistoriesData(users=1_000_000).open("train", 1)
    units = np.arange(1_000_000)
    began = time.thread_time()
    source.lengths(units, 0)
    print(f"lengths of a million users, in an epoch's order: {1000 * (time.thread_time() - began):.0f} ms")


if __name__ == "__main__":
    main()

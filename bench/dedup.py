"""Measures dedup against torch.unique, one thread each, on 212,992 power-law keys.

    python bench/dedup.py [--repeats 60] [--at-least 6]

The keys are 26 features x 8,192 samples with 100,000 ids each and exponent 1.05, in three layouts: each feature's ids
in a range of its own ("offset"), all in the same range ("plain"), and scattered over all 64 bits by a bijection
("scrambled").  torch and dedup take turns.  The first dedup after torch finds the caches full of torch's data ("in
turns"); the next one finds them warm ("again").  Times are CPU times of the calling thread, which does all the work.
Wall-clock times would grow with the load of the machine, and more so for the longer call.  `best` is the ratio of the
two minima; the spread is the quartiles over all turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from nestpipe.keys import dedup
from nestpipe.keys.mixing import mix

FEATURES, SAMPLES, IDS, EXPONENT = 26, 8192, 100_000, 1.05


def layouts(seed: int = 0) -> dict[str, np.ndarray]:
    u = np.random.default_rng(seed).random((FEATURES, SAMPLES))
    span = (IDS + 1.0) ** (1 - EXPONENT) - 1
    ids = np.exp(np.log1p(u * span) / (1 - EXPONENT)).astype(np.int64).clip(1, IDS) - 1
    offset = (ids + IDS * np.arange(FEATURES)[:, None]).reshape(-1)
    return {"offset": offset, "plain": ids.reshape(-1), "scrambled": mix(offset.view(np.uint64)).view(np.int64)}


def check(keys: np.ndarray) -> int:
    """Compares dedup with numpy's sort; returns the number of unique keys."""
    unique, inverse = dedup(keys)
    _, first = np.unique(keys, return_index=True)
    np.testing.assert_array_equal(unique, keys[np.sort(first)])
    np.testing.assert_array_equal(unique[inverse], keys)
    return len(unique)


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="turns per layout")
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="exit with 1 if a best ratio with warm caches is below this"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    print(
        f"{'keys':10s} {'unique':>7s}  {'torch ms':>14s}  {'dedup ms':>14s}  {'best':>5s}  ratio over turns (quartiles)"
    )
    for name, keys in layouts().items():
        unique, tensor = check(keys), torch.from_numpy(keys)
        theirs, turns, again = (np.empty(arguments.repeats) for _ in range(3))
        for i in range(arguments.repeats):
            theirs[i] = seconds(lambda: torch.unique(tensor, return_inverse=True))  # noqa: B023
            turns[i] = seconds(lambda: dedup(keys))  # noqa: B023
            again[i] = seconds(lambda: dedup(keys))  # noqa: B023
        for how, ours in (("in turns", turns), ("again", again)):
            quartiles = np.percentile(theirs / ours, [25, 50, 75])
            best = theirs.min() / ours.min()
            failed |= how == "again" and best < arguments.at_least
            print(
                f"{name:10s} {unique:7d}  {theirs.min() * 1e3:6.2f} {np.median(theirs) * 1e3:7.2f}  "
                f"{ours.min() * 1e3:6.2f} {np.median(ours) * 1e3:7.2f}  {best:5.1f}  "
                f"{quartiles[1]:.1f} ({quartiles[0]:.1f} to {quartiles[2]:.1f}) {how}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""`nestpipe bench clustering`: rows sent per batch by how samples are divided into micro-batches, and the cost of that.

Rows are counted on one worker.  Dedup per micro-batch sends the distinct keys of each micro-batch.  Window dedup sends
the distinct keys of the batch, which no division can beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nestpipe.data.clustering import compile_clustering, part_of_samples
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.ratings import read_ratings

PARTS = (4, 8, 16, 32)
BATCHES = 5
WINDOW, LEAST_BEFORE = 50, 10
"""MovieLens: a sample is the last WINDOW items before a rating, if there are at least LEAST_BEFORE."""


def measure(movielens: str | None, tell: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """Returns one row per kind of data and number of micro-batches."""
    compile_clustering()
    kinds: dict[str, Callable[[np.random.Generator], KeyedJaggedTensor]] = {
        "26 one-hot features, power law, batch 2,048": power_law,
        "200 interest groups, histories of 50, batch 2,048": interest_groups,
    }
    if movielens is not None:
        kinds["MovieLens, last 50 items, batch 1,024"] = movielens_windows(movielens)
    rows = []
    for number, (name, draw) in enumerate(kinds.items()):
        tell(number / len(kinds), name)
        batches = [draw(np.random.default_rng(seed)) for seed in range(BATCHES)]
        rows += [{"data": name, "micro_batches": parts, **divide(batches, parts)} for parts in PARTS]
    return rows


def divide(batches: list[KeyedJaggedTensor], parts: int) -> dict[str, float]:
    """Means over the batches, and the median of CPU milliseconds."""
    random_rows, clustered_rows, unique, cpu = [], [], [], []
    for seed, batch in enumerate(batches):
        shuffled = np.random.default_rng(seed).permutation(np.arange(batch.stride()) % parts)
        start = time.process_time()
        clustered = part_of_samples(batch, parts)
        cpu.append(1e3 * (time.process_time() - start))
        unique.append(rows_sent(batch, np.zeros(batch.stride(), np.int64)))
        random_rows.append(rows_sent(batch, shuffled))
        clustered_rows.append(rows_sent(batch, clustered))
    scattered, together, least = (float(np.mean(rows)) for rows in (random_rows, clustered_rows, unique))
    return {
        "random": scattered,
        "clustered": together,
        "window": least,
        "fewer": 1 - together / scattered,
        "fewer_at_most": 1 - least / scattered,
        "cpu_ms": float(np.median(cpu)),
    }


def rows_sent(batch: KeyedJaggedTensor, part_of: np.ndarray) -> int:
    """Counts the distinct (part, feature, key) of a batch."""
    features, samples = len(batch.keys()), batch.stride()
    sample = np.repeat(np.tile(np.arange(samples), features), batch.lengths().numpy())
    feature = np.repeat(np.repeat(np.arange(features), samples), batch.lengths().numpy())
    keys, place = np.unique(batch.values().numpy(), return_inverse=True)
    return len(np.unique((part_of[sample] * features + feature) * len(keys) + place))


def power_law(rng: np.random.Generator) -> KeyedJaggedTensor:
    ids = _ranks(rng, 100_000, 1.05, 26 * 2048)
    return _batch([f"f{f}" for f in range(26)], ids, np.ones(26 * 2048, np.int64), 2048)


def interest_groups(rng: np.random.Generator) -> KeyedJaggedTensor:
    """Nine of ten items of a history come from the 5,000 items of the user's own group, the others from any."""
    groups, items, samples, length = 200, 5_000, 2048, 50
    own = rng.integers(0, groups, samples)
    group = np.where(rng.random((samples, length)) < 0.9, own[:, None], rng.integers(0, groups, (samples, length)))
    ids = group * items + _ranks(rng, items, 1.05, samples * length).reshape(samples, length)
    return _batch(["history"], ids.reshape(-1), np.full(samples, length), samples)


def movielens_windows(path: str) -> Callable[[np.random.Generator], KeyedJaggedTensor]:
    """Draws batches of random samples; every rating with enough items before it makes a sample."""
    ratings = read_ratings(path)
    _, offsets = ratings.by_user()
    begins = np.repeat(offsets[:-1], np.diff(offsets))
    at = np.arange(len(ratings.item))
    usable = at[at - begins >= LEAST_BEFORE]

    def draw(rng: np.random.Generator) -> KeyedJaggedTensor:
        chosen = rng.choice(usable, 1024, replace=False)
        lengths = np.minimum(WINDOW, chosen - begins[chosen])
        ids = np.concatenate([ratings.item[end - n : end] for end, n in zip(chosen, lengths)])
        return _batch(["history"], ids, lengths, 1024)

    return draw


def _ranks(rng: np.random.Generator, count: int, exponent: float, size: int) -> np.ndarray:
    """Whole numbers from 0, with a probability that falls by a power of their rank."""
    cumulative = np.cumsum(np.arange(1, count + 1) ** -exponent)
    return np.searchsorted(cumulative, rng.random(size) * cumulative[-1])


def _batch(names: list[str], ids: np.ndarray, lengths: np.ndarray, samples: int) -> KeyedJaggedTensor:
    values = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
    return KeyedJaggedTensor(names, values, lengths=torch.from_numpy(lengths.astype(np.int64)), stride=samples)

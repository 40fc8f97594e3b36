"""The workload that every system of the benchmark trains on: same samples, same first rows.

Needs only numpy, so that any environment can read it. Everything is a pure function of the config (a dict, see
DEFAULTS) and of (rank, step) or (feature): all processes get the same bytes, whichever trainer they run.
"""

from functools import lru_cache

import numpy as np

DEFAULTS = {
    "seed": 1,
    "batch": 2048,  # per worker
    "features": 26,  # one-hot, one table each
    "ids": 100_000,  # rows per table
    "dim": 64,
    "dense_features": 13,
    "bottom": [512, 256, 64],
    "top": [512, 256, 1],
    "zipf": 1.05,
    "dense_optimizer": "adam",  # or "sgd"
    "dense_lr": 0.001,
    "sparse_lr": 0.02,  # row-wise Adagrad
    "sparse_eps": 1e-8,
    "distinct_batches": 20,
    "warmup": 10,
    "turns": 12,
    "steps": 10,  # per turn
}

# SeedSequence streams. Samples use [seed, rank, step], so these need another length.
_PERMUTE, _PLANT, _ROWS = 1, 2, 3


def samples(config: dict, rank: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One worker's batch: (dense [B, 13] float32, ids [F, B] int64, labels [B] float32)."""
    cdf, permutation, planted, slope = _world(
        config["seed"], config["features"], config["ids"], config["zipf"], config["dense_features"]
    )
    features, batch = config["features"], config["batch"]
    rng = np.random.default_rng([config["seed"], rank, step])
    dense = rng.standard_normal((batch, config["dense_features"]), dtype=np.float32)
    popularity = np.searchsorted(cdf, rng.random((features, batch)), side="right")  # 0 is the hottest
    ids = np.take_along_axis(permutation, popularity, axis=1)
    logit = dense @ slope + np.take_along_axis(planted, ids, axis=1).sum(axis=0)
    labels = rng.random(batch, dtype=np.float32) < 1 / (1 + np.exp(-logit))
    return dense, ids, labels.astype(np.float32)


def first_rows(config: dict, feature: int) -> np.ndarray:
    """The table of one feature before the first step: [ids, dim] float32, uniform in +-1/sqrt(ids) like TorchRec's."""
    rng = np.random.default_rng([config["seed"], _ROWS, feature, 0])
    unit = rng.random((config["ids"], config["dim"]), dtype=np.float32)
    return (2 * unit - 1) * np.float32(config["ids"] ** -0.5)


@lru_cache(maxsize=2)
def _world(seed: int, features: int, ids: int, zipf: float, dense_features: int):
    """What all batches share: popularity, the ids by popularity, and the truth behind the labels."""
    weight = np.arange(1, ids + 1, dtype=np.float64) ** -zipf
    cdf = np.cumsum(weight)
    cdf /= cdf[-1]  # ends in exactly 1.0 and random() < 1, so searchsorted stays inside
    permutation = np.stack([np.random.default_rng([seed, _PERMUTE, f, 0]).permutation(ids) for f in range(features)])
    rng = np.random.default_rng([seed, _PLANT, 0, 0])
    planted = rng.standard_normal((features, ids), dtype=np.float32) * np.float32(features**-0.5)
    slope = rng.standard_normal(dense_features).astype(np.float32) * np.float32(dense_features**-0.5)
    return cdf, permutation, planted, slope

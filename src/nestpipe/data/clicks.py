"""Synthetic clicks with a planted signal: an endless supply of data whose best possible AUC is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.checks import check_number, check_split, check_whole, per_feature
from nestpipe.data.clicks_kernels import draw_clicks
from nestpipe.data.counter import derive
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.stream import sample_ends

CHUNK = 2048
"""Samples drawn at a time; results do not depend on it."""

# Shares of the logit's variance: effects of single ids, of dense features, and products between two features.
ID_SHARE, DENSE_SHARE, PRODUCT_SHARE = 0.65, 0.20, 0.15


@dataclass(frozen=True)
class ClicksData:
    """Clicks on ids that follow a power law.  Sample i depends on (seed, split, i) alone; every epoch is the same.

    logit = bias + effects of ids + effects of dense features + products of the effects of features 0 and 1, 2 and 3...
    The products are what a model without interactions cannot learn; they reuse the effects, because factors of their
    own would take far more samples to find than the effects do.
    """

    features: int = 10
    """Sparse features, named f0, f1, ..."""
    ids: int | Sequence[int] = 2000
    """Different ids of a feature: one number, or one for each feature."""
    zipf: float = 1.2
    """Exponent of the power law that ids follow; 0 draws all ids alike."""
    hot: int | Sequence[int] = 1
    """Mean ids in a bag: one number, or one for each feature.  1: always one id; h > 1: 0 to 2h ids, some bags none."""
    dense: int = 4
    """Dense features."""
    samples: int = 400_000
    """Training samples of an epoch, over all workers."""
    eval_samples: int = 20_000
    """Held-out samples, over all workers."""
    signal: float = 1.6
    """Spread (standard deviation) of the logit: 0 leaves nothing to learn, 1.6 allows an AUC of about 0.8."""
    bias: float = -1.0
    """Added to every logit; below 0, clicks are rarer than no clicks."""
    products: int = 3
    """Products between features (2k, 2k+1); no more than features // 2 of them are used."""

    def __post_init__(self) -> None:
        check_whole("features", self.features)
        per_feature("ids", self.ids, self.features, 1, 2**40)
        check_number("zipf", self.zipf, 0.0, 10.0)
        per_feature("hot", self.hot, self.features, 1, 10_000)
        check_whole("dense", self.dense, 0)
        check_whole("samples", self.samples)
        check_whole("eval_samples", self.eval_samples, 0)
        check_number("signal", self.signal, 0.0)
        check_number("bias", self.bias)
        check_whole("products", self.products, 0)

    def open(self, split: str, seed: int) -> ClicksSource:
        check_split(split)
        return ClicksSource(self, split, seed)


class ClicksSource:
    """Draws samples on demand; unit = sample.  extras["truth"] is the probability each label was drawn with."""

    def __init__(self, data: ClicksData, split: str, seed: int) -> None:
        self.extent = data.samples if split == "train" else data.eval_samples
        self.piece = 8 * CHUNK
        self.features = [f"f{f}" for f in range(data.features)]
        self.dense_features = data.dense
        self.data = data
        self._draw_key = derive(seed, "clicks", "draw", split)
        # The world (which ids exist, what they do) is one and the same for both splits.
        self._feature_keys = np.array([derive(seed, "clicks", "ids", f) for f in range(data.features)], np.uint64)
        self._effect_key = derive(seed, "clicks", "effects")
        self._ids = np.array(per_feature("ids", data.ids, data.features, 1, 2**40), np.int64)
        self._hot = np.array(per_feature("hot", data.hot, data.features, 1, 10_000), np.int64)
        self._plan_signal(seed)

    def _plan_signal(self, seed: int) -> None:
        data = self.data
        self._products = min(data.products, data.features // 2)
        shares = np.array([ID_SHARE, DENSE_SHARE * (data.dense > 0), PRODUCT_SHARE * (self._products > 0)])
        spread = data.signal * np.sqrt(shares / shares.sum())
        # A bag sums the effects of about `hot` ids, as sum pooling does; smaller effects give it the same spread.
        self._id_scale = spread[0] / np.sqrt(data.features * self._hot)
        self._product_scale = np.zeros(data.features)
        for k in range(self._products):
            scale = spread[2] / np.sqrt(self._products)
            self._product_scale[2 * k : 2 * k + 2] = np.sqrt(scale / self._hot[2 * k : 2 * k + 2])
        signs = [1.0 if derive(seed, "clicks", "dense", d) & np.uint64(1) else -1.0 for d in range(data.dense)]
        self._dense_weights = np.array(signs) * spread[1] / np.sqrt(max(1, data.dense))

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        for at in range(start, stop, CHUNK):
            count = min(CHUNK, stop - at)
            yield self._draw(at, count), sample_ends(at, count)

    def _draw(self, start: int, count: int) -> Batch:
        lengths, values, dense, truth, labels = draw_clicks(
            start, count, self._draw_key, self._feature_keys, self._effect_key,
            self._ids, self._hot, float(self.data.zipf),
            self._id_scale, self._product_scale, self._dense_weights, float(self.data.bias),
        )  # fmt: skip
        return Batch(
            KeyedJaggedTensor(self.features, torch.from_numpy(values), lengths=torch.from_numpy(lengths), stride=count),
            torch.from_numpy(dense) if self.data.dense else None,
            torch.from_numpy(labels),
            {"truth": torch.from_numpy(truth)},
        )

    def bayes_auc(self, samples: int | None = None) -> float:
        """The AUC that the best possible model is expected to have on the first `samples` samples (all by default)."""
        stop = self.extent if samples is None else min(samples, self.extent)
        truth = [chunk.extras["truth"].numpy() for chunk, _ in self.read(0, stop, 0)]
        return expected_auc(np.concatenate(truth)) if truth else float("nan")


def expected_auc(truth: np.ndarray) -> float:
    """AUC of ranking by the true probabilities: the expected number of rightly ordered pairs over that of pairs."""
    click = truth.astype(np.float64)
    none = 1.0 - click
    _, group = np.unique(truth, return_inverse=True)
    clicks, nones = np.bincount(group, click), np.bincount(group, none)
    own = (click * none).sum()  # a sample is no pair with itself
    pairs = clicks.sum() * nones.sum() - own
    below = np.cumsum(nones) - nones
    right = (clicks * below).sum() + 0.5 * ((clicks * nones).sum() - own)
    return float(right / pairs) if pairs > 0 else float("nan")

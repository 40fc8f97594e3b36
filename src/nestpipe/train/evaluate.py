"""Held-out metrics: AUC and friends for clicks, hit rate and NDCG over the whole catalogue for sequences."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from nestpipe.config.training import EvalConfig
from nestpipe.data.source import Source
from nestpipe.data.stream import Stream
from nestpipe.models.hstu import HSTU
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.metrics import ClickMetrics, RankMetrics, target_ranks


def evaluate(pipeline: TrainPipeline, source: Source, section: EvalConfig) -> dict[str, float]:
    """Metrics over all workers' held-out samples, exact.  All workers call it together; nothing is trained."""
    if source.extent == 0:
        return {}
    world = pipeline.world
    stream = Stream(_first(source, section.max_samples), section.batch_size, rank=world.rank, workers=world.size)
    try:
        if isinstance(pipeline.model, HSTU):
            return _ranking(pipeline, stream, source.catalogue, section)  # type: ignore[attr-defined]
        return _clicks(pipeline, stream)
    finally:
        stream.close()


def _clicks(pipeline: TrainPipeline, stream: Stream) -> dict[str, float]:
    predicted, best = ClickMetrics(logits=True), ClickMetrics(logits=False)
    for batch, logits in pipeline.evaluate(stream):
        if batch.labels is not None:
            predicted.update(logits, batch.labels)
            if "truth" in batch.extras:
                best.update(batch.extras["truth"], batch.labels)
    group = pipeline.world.groups.get("metrics")
    found = predicted.compute(group)
    bayes = best.compute(group)
    if bayes["samples"]:
        found["bayes_auc"] = bayes["auc"]
    return found


def _ranking(pipeline: TrainPipeline, stream: Stream, catalogue: np.ndarray, section: EvalConfig) -> dict[str, float]:
    """Ranks every user's last item among all items but those in the history that the model was shown."""
    items = functional.normalize(pipeline.rows(HSTU.table, catalogue), dim=1, eps=1e-6)
    metrics = RankMetrics(section.top_k)
    for batch, queries in pipeline.evaluate(stream):
        features = batch.sparse_features
        target = np.searchsorted(catalogue, features["target"].values().numpy())
        history = features["history"]
        seen = np.searchsorted(catalogue, history.values().numpy())
        scores = queries.to(items) @ items.T
        exclude = (torch.from_numpy(seen), history.offsets())
        metrics.update(target_ranks(scores, torch.from_numpy(target), exclude))
    return metrics.compute(pipeline.world.groups.get("metrics"))


class _Head:
    """The first samples of a source whose units are samples."""

    def __init__(self, source: Source, extent: int) -> None:
        self.source = source
        self.extent = extent
        self.piece = source.piece
        self.features = source.features
        self.dense_features = source.dense_features
        self.read = source.read


def _first(source: Source, samples: int | None) -> Source:
    return source if samples is None or samples >= source.extent else _Head(source, samples)

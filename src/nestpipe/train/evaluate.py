"""Held-out metrics, by what the data and the model's outputs are.

- On sequences (a source with a `catalogue`), for a model that names its item `table`: hit rate and NDCG over the whole
  catalogue.  Outputs are a query [B, n] for each sample; an item scores the product of query and vector.  Vectors are the
  table's rows, or what the model's `item_vectors(rows)` makes of them.
- On ranking requests, for a ranking model: AUC, GAUC and log loss of every action (`evaluate_ranking`).
- Where outputs are one number for each label: AUC and friends.  Outputs are logits, labels are 0 or 1.
- Otherwise: the mean loss.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.config.training import EvalConfig
from nestpipe.data.batch import Batch
from nestpipe.data.source import Source
from nestpipe.data.stream import Stream
from nestpipe.infer.scoring import check_queries, first_samples, item_vectors, ranks_items
from nestpipe.models.ranking import RankingModel
from nestpipe.nn.collections import collections_in
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.evaluate_ranking import evaluate_ranking
from nestpipe.train.metrics import ClickMetrics, RankMetrics, are_scores, target_ranks

log = logging.getLogger(__name__)


def evaluate(pipeline: TrainPipeline, source: Source, section: EvalConfig) -> dict[str, float]:
    """Metrics over all workers' held-out samples, exact.  All workers call it together; nothing is trained."""
    if source.extent == 0:
        return {}
    world = pipeline.world
    stream = Stream(first_samples(source, section.max_samples), section.batch_size, rank=world.rank, workers=world.size)
    try:
        if isinstance(pipeline.model, RankingModel):
            return evaluate_ranking(pipeline, stream, source)
        if ranks_items(pipeline.model, source):
            return _ranking(pipeline, stream, source.catalogue, section)  # type: ignore[attr-defined]
        return _clicks_or_loss(pipeline, stream)
    finally:
        stream.close()


def rehearse(pipeline: TrainPipeline, source: Source, section: EvalConfig) -> None:
    """Evaluates on a sample a worker and forgets the result: a fault shows before hours of training, not after them."""
    _check_item_table(pipeline.model, source)
    with torch.random.fork_rng(devices=[]):
        evaluate(pipeline, source, replace(section, max_samples=pipeline.world.size))


def _check_item_table(model: nn.Module, source: Source) -> None:
    """ValueError if the model's `table` is none of its tables."""
    if ranks_items(model, source):
        tables = [table.name for collection in collections_in(model) for table in collection.tables]
        if model.table not in tables:
            raise ValueError(
                f"the model's attribute table is {model.table!r}, and its tables are {', '.join(tables) or '(none)'}: name "
                "that of the items, which an evaluation ranks"
            )


def by_popularity(world: World, model: nn.Module, source: Source, section: EvalConfig) -> dict[str, float]:
    """The metrics of recommending everybody the most popular items; {} where items are not ranked, or not counted.

    All workers call it together.
    """
    count = getattr(source, "popularity", None)
    if count is None or not source.extent or not ranks_items(model, source):
        return {}
    scores = torch.from_numpy(count())
    stream = Stream(first_samples(source, section.max_samples), section.batch_size, rank=world.rank, workers=world.size)
    metrics = RankMetrics(section.top_k)
    try:
        for batch in stream:
            _rank(batch, scores.expand(len(batch), -1), source.catalogue, metrics)  # type: ignore[attr-defined]
    finally:
        stream.close()
    return metrics.compute(world.groups.get("metrics"))


def best_possible(model: nn.Module, source: Source, section: EvalConfig) -> dict[str, float]:
    """The hit rates that no model can exceed on this source, where it knows them; {} otherwise.  Exchanges nothing."""
    known = getattr(source, "best_hit_rates", None)
    if known is None or not source.extent or not ranks_items(model, source):
        return {}
    return dict(known(section.top_k, section.max_samples))


def _clicks_or_loss(pipeline: TrainPipeline, stream: Stream) -> dict[str, float]:
    predicted, best = ClickMetrics(logits=True), ClickMetrics(logits=False)
    sums = torch.zeros(4, dtype=torch.float64)
    """Loss, its terms, samples, and batches whose outputs are no scores of clicks: all workers choose by all of them."""
    for batch, loss, outputs in pipeline.evaluate_with_loss(stream):
        scores = are_scores(outputs, batch.labels)
        if batch.terms():  # without terms there is no mean
            sums += torch.tensor([float(loss) * batch.terms(), batch.terms(), 0.0, 0.0], dtype=torch.float64)
        sums += torch.tensor([0.0, 0.0, len(batch), not scores], dtype=torch.float64)
        if scores:
            predicted.update(outputs, batch.labels)
            if "truth" in batch.extras:
                best.update(batch.extras["truth"], batch.labels)
    Exchange(pipeline.world, "metrics").all_reduce(sums)
    total, terms, samples, others = sums.tolist()
    if others:
        log.info("the held-out metric is the loss: the model's outputs are not one logit for each label")
        return {"loss": total / terms if terms else float("nan"), "samples": int(samples)}
    group = pipeline.world.groups.get("metrics")
    found = predicted.compute(group)
    bayes = best.compute(group)
    if bayes["samples"]:
        found["bayes_auc"] = bayes["auc"]
    return found


def _ranking(pipeline: TrainPipeline, stream: Stream, catalogue: np.ndarray, section: EvalConfig) -> dict[str, float]:
    """Ranks every user's last item among all items but those in the history that the model was shown."""
    items = item_vectors(pipeline.model, pipeline.rows(pipeline.model.table, catalogue))
    metrics = RankMetrics(section.top_k)
    for batch, queries in pipeline.evaluate(stream):
        check_queries(batch, queries, items)
        _rank(batch, queries.to(items) @ items.T, catalogue, metrics)
    return metrics.compute(pipeline.world.groups.get("metrics"))


def _rank(batch: Batch, scores: Tensor, catalogue: np.ndarray, metrics: RankMetrics) -> None:
    """Notes the place of each sample's target among all items but those in its history."""
    features = batch.sparse_features
    target = np.searchsorted(catalogue, features["target"].values().numpy())
    history = features["history"]
    seen = np.searchsorted(catalogue, history.values().numpy())
    metrics.update(target_ranks(scores, torch.from_numpy(target), (torch.from_numpy(seen), history.offsets())))

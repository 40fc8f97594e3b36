"""Held-out metrics of a ranking model, from the scores that a server would give: relay inference, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange
from nestpipe.data.batch import Batch
from nestpipe.data.source import Source
from nestpipe.data.stream import Stream
from nestpipe.infer.contract import History
from nestpipe.infer.relay import Relay
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.metrics import ClickMetrics, GroupedAuc


@dataclass
class BatchRows:
    """A `RowReader` of the rows of one batch at a time."""

    dim: int
    keys: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    def read(self, table: str, keys: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.rows[table][np.searchsorted(self.keys[table], keys)]
        return found


def evaluate_ranking(pipeline: TrainPipeline, stream: Stream, source: Source) -> dict[str, float]:
    """AUC, GAUC (by user) and log loss of every action, and the best possible AUC where the source knows it.

    All workers call it together.
    """
    actions = pipeline.model.actions
    predicted, best = [ClickMetrics() for _ in actions], [ClickMetrics() for _ in actions]
    grouped = [GroupedAuc() for _ in actions]
    for batch, logits in score_batches(pipeline, stream):
        masks = batch.sparse_features["label"].values()
        counts = batch.sparse_features["candidate"].lengths()
        truth = torch.from_numpy(source.best_logits(batch)) if hasattr(source, "best_logits") else None
        for number in range(len(actions)):
            labels = ((masks >> number) & 1).double()
            predicted[number].update(logits[:, number], labels)
            grouped[number].update(logits[:, number], labels, counts)
            if truth is not None:
                best[number].update(truth[:, number], labels)
    group = pipeline.world.groups.get("metrics")
    metrics: dict[str, float] = {}
    for name, clicks, by_user, bound in zip(actions, predicted, grouped, best):
        found = clicks.compute(group)
        metrics[f"auc/{name}"], metrics[f"gauc/{name}"] = found["auc"], by_user.compute(group)
        metrics[f"log_loss/{name}"] = found["log_loss"]
        if hasattr(source, "best_logits"):
            metrics[f"best_auc/{name}"] = bound.compute(group)["auc"]
        metrics["samples"] = found["samples"]
    return metrics


def score_batches(pipeline: TrainPipeline, stream: Iterator[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """This worker's batches with the logits [candidates, actions] of their requests.  All workers iterate to the end."""
    model, alive = pipeline.model, Exchange(pipeline.world, "metrics")
    tables = {model.table: ("history", "candidate"), **{name: (name,) for name in model.config.context}}
    reader = BatchRows(model.config.dim, {}, {})
    pipeline.settle()
    relay = Relay(model, reader, "training")
    while True:
        batch = next(stream, None)
        more = torch.tensor([int(batch is not None)])
        alive.all_reduce(more)
        if not int(more):
            return
        for table, features in tables.items():
            parts = [batch.sparse_features[name].values().numpy() for name in features] if batch is not None else []
            reader.keys[table] = np.unique(np.concatenate([np.zeros(1, np.int64), *parts]))
            reader.rows[table] = pipeline.rows(table, reader.keys[table]).detach().cpu().float().numpy()
        if batch is not None:
            yield batch, torch.from_numpy(_scores(relay, batch))


def requests_of(batch: Batch, context: tuple[str, ...]) -> Iterator[tuple[History, int, np.ndarray]]:
    """History, time and candidates of every request of a batch."""
    features = batch.sparse_features
    names = ("history", "action", "time", "candidate", *context)
    values = {name: features[name].values().numpy() for name in names}
    ends = {name: features[name].offsets().numpy() for name in names}
    for b in range(len(batch)):
        own = {name: values[name][ends[name][b] : ends[name][b + 1]] for name in names}
        start = int(batch.extras["start"][b]) if "start" in batch.extras else 0
        more = {name: own[name] for name in context}
        history = History(own["history"], own["action"].astype(np.int32), own["time"][:-1], start, more)
        yield history, int(own["time"][-1]), own["candidate"]


def _scores(relay: Relay, batch: Batch) -> np.ndarray:
    found = [np.empty((0, len(relay.actions)), np.float32)]
    for history, now, candidates in requests_of(batch, relay.context):
        found.append(relay.rank(relay.window(history), now, candidates))
    return np.concatenate(found)

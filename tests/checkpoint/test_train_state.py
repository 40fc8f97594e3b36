"""Checkpoints need a `TrainState` and nothing else: `TrainPipeline` is one, and so is any trainer with the same members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestpipe import EmbeddingBagCollection, EmbeddingBagConfig, TrainPipeline, World
from nestpipe.checkpoint import CheckpointWriter, Folder, TrainState, restore
from nestpipe.checkpoint.eviction_state import merge_eviction_states
from nestpipe.tables.config import EmbeddingConfig
from nestpipe.tables.group import group_tables
from nestpipe.tables.optimizers import Adagrad
from nestpipe.tables.store import make_store


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("item", embedding_dim=4, feature_names=["item"])])
        self.dense = nn.Linear(4, 1)


class Trainer:
    """A trainer of one's own: a dense layer and a table, without batches, stages or schedules."""

    def __init__(self) -> None:
        self.world = World.single()
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.dense_rate = None
        self.next_batch = 0
        (group,) = group_tables([EmbeddingConfig("item", 4, ["item"])], Adagrad(0.1))
        self.stores = [make_store(group, 0, 0, None)]
        self.settled = 0

    def train(self, keys: list[int]) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 2)).sum().backward()
        self.optimizer.step()
        rows = np.full((len(keys), 4), self.next_batch, np.float32)
        self.stores[0].writeback(np.zeros(len(keys), np.uint16), np.array(keys), rows, rows + 0.5)
        self.next_batch += 1

    def settle(self) -> None:
        self.settled += 1

    def resume_at(self, batch: int) -> None:
        self.next_batch = batch

    def eviction_state(self) -> dict[str, Any]:
        return {}

    def restore_eviction(self, state: dict[str, Any]) -> None:
        assert state == {}

    def content(self) -> tuple[Any, ...]:
        _, keys, slots = self.stores[0].index.items()
        order = np.argsort(keys)
        rows = [part.tobytes() for part in self.stores[0].read(slots[order])]
        state = [
            (name, torch.as_tensor(entry).tolist())
            for parameter in self.model.parameters()
            for name, entry in sorted(self.optimizer.state[parameter].items())
        ]
        dense = [parameter.tolist() for parameter in self.model.parameters()]
        return self.next_batch, keys[order].tolist(), rows, state, dense, self.optimizer.param_groups[0]["lr"]


def test_a_pipeline_is_a_train_state() -> None:
    """mypy checks the types, where `train.checkpoints` passes a pipeline to `restore`; this checks the members."""
    model = Ranker()
    pipeline = TrainPipeline(model, torch.optim.Adam(model.dense.parameters()))
    try:
        assert isinstance(pipeline, TrainState) and [store.group.tables[0].name for store in pipeline.stores] == [
            "item"
        ]
        assert pipeline.eviction_state() == {}
        pipeline.restore_eviction({})
        with pytest.raises(ValueError, match="seconds, clock and groups"):
            pipeline.restore_eviction({"x": 1})
    finally:
        pipeline.close()


def test_any_trainer_can_be_saved_and_restored(tmp_path: Path) -> None:
    """A full checkpoint and an incremental one of a trainer that is no pipeline: rows, dense state and step come back."""
    trainer = Trainer()
    assert isinstance(trainer, TrainState) and not isinstance(trainer.model, TrainState)
    folder = Folder(tmp_path)
    writer = CheckpointWriter(trainer, folder)
    for keys in ([1, 2, 3], [3, 9]):
        trainer.train(keys)
        writer.save({}, {})
        writer.wait()
    assert [saved.full for saved in writer.poll()] == [True, False] and trainer.settled == 2
    last = folder.find()
    assert last is not None and sum(file.rows for file in last.manifest.of("rows")) == 2
    again = Trainer()
    again.optimizer.param_groups[0]["lr"] = 0.5
    restore(again, folder.chain(last))
    assert again.content() == trainer.content()


def test_eviction_states_are_merged() -> None:
    """Counts are summed over the workers.  Everything else is worker 0's.  Without eviction there is nothing."""
    clock = {"seconds": 2.5, "clock": [[0, 1.0]]}
    workers = [
        {**clock, "groups": [{"evicted": [1, 2], "forgotten": 3, "horizons": [[4, 1]]}]},
        {**clock, "groups": [{"evicted": [10, 0], "forgotten": 5, "horizons": [[4, 1]]}]},
    ]
    assert merge_eviction_states(workers) == {
        **clock,
        "groups": [{"evicted": [11, 2], "forgotten": 8, "horizons": [[4, 1]]}],
    }
    assert merge_eviction_states([{}, {}]) == {}

"""The cost of a checkpoint follows the number of changed rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowWiseAdagrad, TrainPipeline
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.load import restore
from nestpipe.checkpoint.writer import CheckpointWriter, Saved

ROWS = 40_000


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("item", 32, ["item"])])
        self.dense = nn.Linear(32, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.dense(self.sparse(batch.sparse_features).values()).squeeze(1)
        assert batch.labels is not None
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def batches(*ranges: tuple[int, int]) -> Iterator[Batch]:
    for first, last in ranges:
        keys = torch.arange(first, last)
        yield Batch(KeyedJaggedTensor(["item"], keys, lengths=torch.ones_like(keys)), labels=(keys % 2).float())


def saved(writer: CheckpointWriter) -> Saved:
    writer.save({}, {})
    writer.wait()
    (one,) = writer.poll()
    return one


@pytest.mark.slow
def test_an_incremental_checkpoint_writes_what_changed(tmp_path: Path) -> None:
    """After a step that touched 1 % of the rows: less than 3 % of a full checkpoint's bytes, and the base is named."""
    model = Ranker()
    pipeline = TrainPipeline(model, torch.optim.Adam(model.parameters()), RowWiseAdagrad(0.1), schedule="nested")
    writer = CheckpointWriter(pipeline, Folder(tmp_path))
    data = batches((0, ROWS), (100, 100 + ROWS // 100))
    assert pipeline.progress(data)
    full = saved(writer)
    assert pipeline.progress(data)
    part = saved(writer)
    pipeline.close()
    assert full.full and not part.full and full.bytes > ROWS * 33 * 4
    assert part.bytes < 0.03 * full.bytes, (part, full)
    last = Folder(tmp_path).find()
    assert last is not None and [base.name for base in last.manifest.base] == ["step-00000001"]
    assert last.manifest.groups[0].rows == ROWS and sum(file.rows for file in last.manifest.of("rows")) == ROWS // 100


@pytest.mark.slow
def test_training_continues_while_rows_are_written(tmp_path: Path) -> None:
    """Steps between the snapshot and the commit are not in the checkpoint."""
    model = Ranker()
    pipeline = TrainPipeline(model, torch.optim.Adam(model.parameters()), RowWiseAdagrad(0.1), schedule="dbp")
    writer = CheckpointWriter(pipeline, Folder(tmp_path))
    data = batches((0, ROWS), *[(0, ROWS // 10)] * 6)
    assert pipeline.progress(data)
    before = pipeline.rows("item", np.arange(ROWS))
    writer.save({}, {})
    while pipeline.progress(data):
        pass
    writer.wait()
    assert not torch.equal(before, pipeline.rows("item", np.arange(ROWS)))
    last = Folder(tmp_path).find()
    assert last is not None and last.manifest.step == 1

    again = TrainPipeline(Ranker(), None, RowWiseAdagrad(0.1))
    again.optimizer = torch.optim.Adam(again.model.parameters())
    restore(again, [last])
    assert torch.equal(before, again.rows("item", np.arange(ROWS))) and again.next_batch == 1
    pipeline.close()
    again.close()

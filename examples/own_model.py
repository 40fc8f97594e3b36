"""Your own model on two workers, in your own loop.

    torchrun --nproc-per-node 2 examples/own_model.py

Each worker makes its own batches, as if it read its own files.  The pipeline shards the tables, moves rows and gradients, and
sums dense gradients: the loss that it prints is that of the global batch, the same on every worker.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from nestpipe import (
    Adam,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PipelineConfig,
    TrainPipeline,
    World,
)

STEPS, BATCH, USERS, ITEMS = 200, 256, 1_000, 300


class Ranker(nn.Module):
    """Will this user like this item, given the items of their history?"""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            [
                EmbeddingBagConfig("user", embedding_dim=16, feature_names=["user"]),
                EmbeddingBagConfig("item", embedding_dim=16, feature_names=["item", "history"]),
            ]
        )
        self.dense = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss over this batch's samples, and anything else."""
        logits = self.dense(self.sparse(batch.sparse_features).values()).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def batches(rank: int, steps: int) -> Iterator[Batch]:
    """Some users like most items, and most users like some items."""
    generator = torch.Generator().manual_seed(rank)  # its own: the pipeline reads batches ahead, on another thread
    for _ in range(steps):
        users = torch.randint(USERS, (BATCH,), generator=generator)
        items = torch.randint(ITEMS, (BATCH,), generator=generator)
        lengths = torch.randint(6, (BATCH,), generator=generator)  # a history may be empty
        history = torch.randint(ITEMS, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(
            ["user", "item", "history"],
            torch.cat([users, items, history]),
            lengths=torch.cat([torch.ones(2 * BATCH, dtype=torch.int64), lengths]),
        )
        yield Batch(features, labels=(users % 7 + items % 5 > 5).float())


def main() -> None:
    torch.manual_seed(0)
    world = World.join()
    model = Ranker()
    pipeline = TrainPipeline(
        model,
        torch.optim.Adam(model.parameters(), 1e-2),
        Adam(1e-2),
        PipelineConfig(schedule="nested", micro_batches=2),
        world=world,
    )
    data = batches(world.rank, STEPS)
    while step := pipeline.progress(data):
        if step.batch % 50 == 49 and world.rank == 0:
            print(f"step {step.batch + 1}  loss {step.loss:.4f}  {step.samples} samples on {world.size} workers")
    rows = pipeline.rows("item", torch.arange(5).numpy())  # all workers ask together
    if world.rank == 0:
        exposed = {stage: ms["exposed_ms"] for stage, ms in pipeline.timeline.report().items()}
        print(f"exposed per step: {', '.join(f'{stage} {ms:.1f} ms' for stage, ms in exposed.items() if ms >= 0.05)}")
        print(f"rows of items 0 to 4: {list(rows.shape)}, norm {float(rows.norm()):.3f}")
    pipeline.close()
    world.leave()


if __name__ == "__main__":
    main()

"""Retrieval with two towers: one makes a vector of a user, the other of an item, and near vectors are good matches.

    pip install 'nestpipe[examples]'                        # faiss-cpu, for the search at the end
    python examples/two_tower.py                            # one worker
    torchrun --nproc-per-node 2 examples/two_tower.py       # two

Training is your own loop over TrainPipeline.  Afterwards the item tower makes a vector of every item, faiss indexes them, and
the user tower asks for the ten nearest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import faiss
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import (
    Adam,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PipelineConfig,
    TrainPipeline,
    World,
)

USERS, ITEMS, TASTES = 500, 200, 10  # user u likes items i with i % TASTES == u % TASTES
BATCH, NEGATIVES = 256, 16
TEMPERATURE = 0.1


class TwoTower(nn.Module):
    """In training the loss of telling the item that a user chose from others; else a unit vector for every user."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        # One id a sample: a bag.  Items are looked up id by id, since negatives must not be pooled.
        self.users = EmbeddingBagCollection([EmbeddingBagConfig("user", dim, ["user"])])
        self.items = EmbeddingCollection([EmbeddingConfig("item", dim, ["chosen", "negatives"])])
        self.user_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        users = functional.normalize(self.user_tower(self.users(batch.sparse_features).values()), dim=1)
        if not self.training:  # nothing to compare with: only the vectors are wanted
            return users.new_zeros(()), users
        rows = self.items(batch.sparse_features)
        chosen = self.item_vectors(rows["chosen"].values())
        negatives = self.item_vectors(rows["negatives"].values()).view(len(batch), NEGATIVES, -1)
        # The chosen item stands first, and the loss is that of a choice among all.  Negatives come with each sample.  With
        # other samples' items as negatives, a batch could not be cut into micro-batches without changing the loss.
        candidates = torch.cat([chosen.unsqueeze(1), negatives], dim=1)
        logits = torch.einsum("bd,bnd->bn", users, candidates) / TEMPERATURE
        first = torch.zeros(len(batch), dtype=torch.int64, device=logits.device)
        return functional.cross_entropy(logits, first), users.detach()

    def item_vectors(self, rows: Tensor) -> Tensor:
        """From rows of the item table to the vectors that are searched."""
        return functional.normalize(self.item_tower(rows), dim=1)


def batches(rank: int, steps: int) -> Iterator[Batch]:
    """What users chose, and for each choice some items at random."""
    draw = torch.Generator().manual_seed(rank)  # its own: the pipeline reads batches ahead, on another thread
    for _ in range(steps):
        users = torch.randint(USERS, (BATCH,), generator=draw)
        chosen = torch.randint(ITEMS // TASTES, (BATCH,), generator=draw) * TASTES + users % TASTES
        negatives = torch.randint(ITEMS, (BATCH * NEGATIVES,), generator=draw)
        yield batch_of(users, chosen, negatives)


def batch_of(users: Tensor, chosen: Tensor, negatives: Tensor) -> Batch:
    """One user and one choice for each sample, and as many negatives as there are for each."""
    each = torch.ones(len(users), dtype=torch.int64)
    lengths = torch.cat([each, each * (len(chosen) // len(users)), each * (len(negatives) // len(users))])
    features = KeyedJaggedTensor(
        ["user", "chosen", "negatives"], torch.cat([users, chosen, negatives]), lengths=lengths
    )
    return Batch(features)


def main(steps: int = 150) -> float:
    """Trains, and returns the share of the ten nearest items that are to the user's taste; 1 in TASTES would be chance."""
    torch.manual_seed(0)  # the same dense weights on every worker
    world = World.join()
    model = TwoTower()
    pipeline = TrainPipeline(
        model,
        torch.optim.Adam(model.parameters(), 3e-3),
        Adam(3e-2),
        PipelineConfig(schedule="nested", micro_batches=4),
        world=world,
    )
    train = batches(world.rank, steps)
    while step := pipeline.progress(train):
        if world.rank == 0 and (step.batch + 1) % 50 == 0:
            print(f"step {step.batch + 1}  loss {step.loss:.3f}")

    # Every item's vector: its row, through the item tower.  All workers ask for rows together.
    with torch.no_grad():
        items = model.item_vectors(pipeline.rows("item", np.arange(ITEMS)))
    # A few users' vectors, from the model as it is used in production: without items.
    users, none = torch.arange(50), torch.empty(0, dtype=torch.int64)
    queries = torch.cat([outputs for _, outputs in pipeline.evaluate(iter([batch_of(users, none, none)]))])
    pipeline.close()

    # The inner product of unit vectors is their cosine.  For millions of items take an approximate index, such as
    # faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT).
    index = faiss.IndexFlatIP(items.shape[1])
    index.add(items.numpy())
    _, nearest = index.search(queries.numpy(), 10)
    good = float((nearest % TASTES == users.numpy()[:, None] % TASTES).mean())
    if world.rank == 0:
        print(f"user 7 likes items 7, 17, 27, ...; nearest: {', '.join(map(str, nearest[7]))}")
        print(f"{good:.0%} of the ten nearest items are to the user's taste (by chance {1 / TASTES:.0%})")
    world.leave()
    return good


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

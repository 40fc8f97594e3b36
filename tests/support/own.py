"""Classes of a user's own, written to files of a folder: what tests of `module:Class` name in a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODELS = '''
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from nestpipe import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from nestpipe.models.dlrm import DLRM
from nestpipe.models.hstu import HSTU

with Path("imported").open("a") as file:
    file.write("x")

@dataclass(frozen=True)
class RankerConfig:
    dim: int = 4
    """Width of a row."""
    scale: float = 1.0

    def __post_init__(self):
        if self.dim < 1:
            raise ValueError(f"model.dim must be at least 1, not {self.dim}")

class Ranker(nn.Module):
    def __init__(self, config: RankerConfig, features, tables):
        super().__init__()
        self.sparse = EmbeddingBagCollection([tables.bag(f, config.dim, [f]) for f in features])
        self.dense = nn.Linear(config.dim * len(features), 1)

    def forward(self, batch):
        logits = self.dense(self.sparse(batch.sparse_features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()

class MyDLRM(DLRM):
    """Built in, under a name of one's own."""

class MyHSTU(HSTU):
    """With dropout."""

class WithDict(Ranker):
    def forward(self, batch):
        loss, logits = super().forward(batch)
        return loss, {"logits": logits}

class NoKeys(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("item", 2, ["f0"])])

    def forward(self, batch):
        logits = self.sparse(batch.sparse_features).values().sum(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()

class NextItem(nn.Module):
    """The mean of a history is the query for what comes next."""
    table = "item"

    def __init__(self, source, tables):
        super().__init__()
        self.items = len(source.catalogue)
        self.sparse = EmbeddingCollection([tables.sequence("item", 8, ["history", "target", "negatives"])])
        self.mix = nn.Linear(8, 8)

    def forward(self, batch):
        found = self.sparse(batch.sparse_features)
        history, target = found["history"], found["target"]
        sample, _ = history.places()
        sums = torch.zeros(len(batch), 8).index_add(0, sample, history.values())
        query = self.mix(sums / history.lengths().unsqueeze(1))
        if not self.training:
            return query.new_zeros(()), query
        rows, _ = target.places()
        return -(query[rows] * target.values()).sum(1).mean(), query.detach()

class WrongTable(NextItem):
    table = "itme"

class WrongQuery(NextItem):
    def forward(self, batch):
        loss, query = super().forward(batch)
        return loss, query[:, :3]

class Nested(nn.Module):
    @dataclass(frozen=True)
    class Config:
        depth: int = 3

    def __init__(self, config: Config, *args, extra=None, **more):
        super().__init__()
        self.depth = config.depth

class NeedsWidth(nn.Module):
    def __init__(self, config: RankerConfig, width):
        super().__init__()

class Positional(nn.Module):
    def __init__(self, features, /):
        super().__init__()

class NoType(nn.Module):
    def __init__(self, config):
        super().__init__()

class NoSuchType(nn.Module):
    def __init__(self, config: Missing):
        super().__init__()

class DictConfig(nn.Module):
    def __init__(self, config: dict):
        super().__init__()

class MaybeConfig(nn.Module):
    def __init__(self, config: RankerConfig | None = None):
        super().__init__()

@dataclass
class Warm:
    dim: int = 1

class NotFrozen(nn.Module):
    def __init__(self, config: Warm):
        super().__init__()

@dataclass(frozen=True)
class OddConfig:
    things: set[int]

class OddField(nn.Module):
    def __init__(self, config: OddConfig):
        super().__init__()

@dataclass(frozen=True)
class KindConfig:
    kind: str = "x"

class KindField(nn.Module):
    def __init__(self, config: KindConfig):
        super().__init__()

class NotAModule:
    pass

def function():
    pass
'''

DATA = '''
from __future__ import annotations
from dataclasses import dataclass
import numpy as np
import torch
from nestpipe import Batch, KeyedJaggedTensor

@dataclass(frozen=True)
class Evens:
    """Samples n with the feature f0 = n % ids; the label says whether that is even."""
    samples: int = 400
    """How many."""
    ids: int = 50

    def open(self, split, seed):
        return EvensSource(self.samples if split == "train" else 100, self.ids)

class EvensSource:
    features = ["f0"]
    dense_features = 0
    piece = 64

    def __init__(self, extent, ids):
        self.extent, self.ids = extent, ids

    def read(self, start, stop, epoch):
        for at in range(start, stop, 64):
            n = torch.arange(at, min(at + 64, stop)) % self.ids
            features = KeyedJaggedTensor(["f0"], n, lengths=torch.ones(len(n), dtype=torch.int64))
            yield Batch(features, labels=(n % 2 == 0).float()), np.arange(at, min(at + 64, stop)) + 1

class Plain:
    def open(self, split, seed):
        pass

@dataclass
class NotFrozen:
    def open(self, split, seed):
        pass

@dataclass(frozen=True)
class NoOpen:
    path: str = ""

@dataclass(frozen=True)
class WrongOpen:
    def open(self, split):
        pass

@dataclass(frozen=True)
class OpensList:
    def open(self, split, seed):
        return []
'''

RECIPE = """
[data]
kind = "clicks"
samples = 600
eval_samples = 100
features = 3
ids = 60
[model]
kind = "own_models:Ranker"
dim = 4
[train]
batch_size = 50
log_every = 1
"""


def write(folder: Path) -> Path:
    """own_models.py, own_data.py, modules that cannot be imported, and own.toml.  Importing the first writes `imported`."""
    for name, text in {
        "own_models.py": MODELS,
        "own_data.py": DATA,
        "own.toml": RECIPE,
        "own_fails.py": "import os\nnumber = 1 / 0\n",
        "own_syntax.py": "x = 1\ndef f(:\n",
        "own_lacks.py": "import no_such_module\n",
        "own_exits.py": "import sys\nsys.exit(3)\n",
    }.items():
        (folder / name).write_text(text)
    return folder


@contextmanager
def importable() -> Iterator[None]:
    """Inside, modules of a user's may be imported; afterwards this process does not know them."""
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]

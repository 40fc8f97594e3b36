"""NestPipe: exactly synchronous training of recommendation models with very large embedding tables.

Names are imported when they are first used, so that `nestpipe --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nestpipe.version import VERSION as __version__

if TYPE_CHECKING:
    from nestpipe.comm.world import World
    from nestpipe.data.batch import Batch
    from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from nestpipe.embedding import EmbeddingBagCollection, EmbeddingCollection
    from nestpipe.late_layers import LateLinear, LateStack
    from nestpipe.pipeline import Progress, TrainPipeline
    from nestpipe.tables.config import EmbeddingBagConfig, EmbeddingConfig
    from nestpipe.tables.life import TableLife
    from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad

_HOME = {
    "SGD": "nestpipe.tables.optimizers",
    "Adagrad": "nestpipe.tables.optimizers",
    "Adam": "nestpipe.tables.optimizers",
    "Batch": "nestpipe.data.batch",
    "EmbeddingBagCollection": "nestpipe.embedding",
    "EmbeddingBagConfig": "nestpipe.tables.config",
    "EmbeddingCollection": "nestpipe.embedding",
    "EmbeddingConfig": "nestpipe.tables.config",
    "JaggedTensor": "nestpipe.data.jagged",
    "KeyedJaggedTensor": "nestpipe.data.jagged",
    "KeyedTensor": "nestpipe.data.jagged",
    "LateLinear": "nestpipe.late_layers",
    "LateStack": "nestpipe.late_layers",
    "Progress": "nestpipe.pipeline",
    "RowWiseAdagrad": "nestpipe.tables.optimizers",
    "TableLife": "nestpipe.tables.life",
    "TrainPipeline": "nestpipe.pipeline",
    "World": "nestpipe.comm.world",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "LateLinear",
    "LateStack",
    "Progress",
    "RowWiseAdagrad",
    "TableLife",
    "TrainPipeline",
    "World",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nestpipe' has no attribute {name!r}")

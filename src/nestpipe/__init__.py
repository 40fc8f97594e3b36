"""NestPipe: exactly synchronous training of recommendation models with very large embedding tables.

Names are imported when they are first used, so that `nestpipe --help` need not wait for torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from nestpipe.errors import NestPipeError
from nestpipe.version import VERSION as __version__

if TYPE_CHECKING:
    from nestpipe.comm.world import World
    from nestpipe.config.eviction import EvictionPolicy
    from nestpipe.config.pipeline import PipelineConfig
    from nestpipe.data.batch import Batch
    from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from nestpipe.data.source import Source
    from nestpipe.nn.collections import EmbeddingBagCollection, EmbeddingCollection
    from nestpipe.nn.deferred import DeferredLinear, DeferredStack
    from nestpipe.pipeline import Progress, TrainPipeline
    from nestpipe.tables.config import EmbeddingBagConfig, EmbeddingConfig, TableDefaults
    from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad

_HOME = {
    "SGD": "nestpipe.tables.optimizers",
    "Adagrad": "nestpipe.tables.optimizers",
    "Adam": "nestpipe.tables.optimizers",
    "Batch": "nestpipe.data.batch",
    "EmbeddingBagCollection": "nestpipe.nn.collections",
    "EmbeddingBagConfig": "nestpipe.tables.config",
    "EmbeddingCollection": "nestpipe.nn.collections",
    "EmbeddingConfig": "nestpipe.tables.config",
    "JaggedTensor": "nestpipe.data.jagged",
    "KeyedJaggedTensor": "nestpipe.data.jagged",
    "KeyedTensor": "nestpipe.data.jagged",
    "DeferredLinear": "nestpipe.nn.deferred",
    "DeferredStack": "nestpipe.nn.deferred",
    "PipelineConfig": "nestpipe.config.pipeline",
    "Progress": "nestpipe.pipeline.progress",
    "RowWiseAdagrad": "nestpipe.tables.optimizers",
    "EvictionPolicy": "nestpipe.config.eviction",
    "Source": "nestpipe.data.source",
    "TableDefaults": "nestpipe.tables.config",
    "TrainPipeline": "nestpipe.pipeline.pipeline",
    "World": "nestpipe.comm.world",
}

FORMER = {"LateLinear": "DeferredLinear", "LateStack": "DeferredStack", "TableLife": "EvictionPolicy"}
"""Names of before, which still work."""

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "DeferredLinear",
    "DeferredStack",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EvictionPolicy",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "NestPipeError",
    "PipelineConfig",
    "Progress",
    "RowWiseAdagrad",
    "Source",
    "TableDefaults",
    "TrainPipeline",
    "World",
    "__version__",
]

# A library stays silent until its user configures logging.
logging.getLogger("nestpipe").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    name = FORMER.get(name, name)
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nestpipe' has no attribute {name!r}")

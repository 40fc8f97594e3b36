"""NestPipe: exactly synchronous training of recommendation models with very large embedding tables."""

from nestpipe.comm.world import World
from nestpipe.data.batch import Batch
from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from nestpipe.embedding import EmbeddingBagCollection, EmbeddingCollection
from nestpipe.pipeline import Progress, TrainPipeline
from nestpipe.tables.config import EmbeddingBagConfig, EmbeddingConfig
from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad

__version__ = "0.1.0"

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
    "Progress",
    "RowWiseAdagrad",
    "TrainPipeline",
    "World",
]

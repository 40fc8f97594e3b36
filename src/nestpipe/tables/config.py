"""Table configuration: name, dimension, features, first values, optimizer and eviction policy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from nestpipe.config.eviction import EvictionPolicy
from nestpipe.tables.optimizers import SparseOptimizer

DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


@dataclass(frozen=True)
class TableConfig:
    """A dynamic table: keys are any int64, rows appear on first touch.  Base of the two kinds below."""

    name: str
    embedding_dim: int
    feature_names: Sequence[str] = field(default_factory=list)
    dtype: str = "float32"
    init: str = "uniform"
    """First values: "uniform" in [-init_scale, init_scale) or "normal" with that standard deviation."""
    init_scale: float = 0.01
    optimizer: SparseOptimizer | None = None
    """None: the pipeline's `sparse_optimizer`."""
    eviction: EvictionPolicy | None = None
    """When a key gets a row and when it loses it.  None: it gets one from the first batch and keeps it."""
    life: InitVar[EvictionPolicy | None] = field(default=None, kw_only=True)
    """Old spelling of `eviction=`.  Accepted by the constructor only; read `eviction`."""

    def __post_init__(self, life: EvictionPolicy | None) -> None:
        where = f"table {self.name!r}"
        if not self.name:
            raise ValueError("a table needs a name")
        if self.embedding_dim < 1:
            raise ValueError(f"{where}: embedding_dim must be at least 1, not {self.embedding_dim}")
        if isinstance(self.feature_names, str):
            raise TypeError(
                f"{where}: feature_names is a list of names, not {self.feature_names!r}: use [{self.feature_names!r}]"
            )
        if not self.feature_names:
            raise ValueError(f"{where}: feature_names is empty, so no feature would use the table")
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}: dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.init not in ("uniform", "normal"):
            raise ValueError(f"{where}: init must be 'uniform' or 'normal', not {self.init!r}")
        if not (math.isfinite(self.init_scale) and self.init_scale >= 0):
            raise ValueError(f"{where}: init_scale must be a finite number of at least 0, not {self.init_scale}")
        if life is not None:
            if self.eviction is not None:
                raise ValueError(f"{where}: life is the old spelling of eviction; pass only eviction")
            object.__setattr__(self, "eviction", life)

    @property
    def name_hash(self) -> int:
        """64 stable bits of the name.  First values depend on these, the seed and the key."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class EmbeddingConfig(TableConfig):
    """A table whose features are looked up id by id (sequences)."""


@dataclass(frozen=True)
class EmbeddingBagConfig(TableConfig):
    """A table whose features are pooled over the ids of a sample."""

    pooling: str = "sum"

    def __post_init__(self, life: EvictionPolicy | None) -> None:
        super().__post_init__(life)
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"table {self.name!r}: pooling must be 'sum' or 'mean', not {self.pooling!r}")


@dataclass(frozen=True)
class TableDefaults:
    """Settings shared by all tables of a model that creates its own table configs."""

    dtype: str = "float32"
    init: str = "uniform"
    init_scale: float = 0.01
    eviction: EvictionPolicy | None = None

    def bag(self, name: str, dim: int, features: Sequence[str], pooling: str = "sum") -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name, dim, features, self.dtype, self.init, self.init_scale, eviction=self.eviction, pooling=pooling
        )

    def sequence(self, name: str, dim: int, features: Sequence[str]) -> EmbeddingConfig:
        return EmbeddingConfig(name, dim, features, self.dtype, self.init, self.init_scale, eviction=self.eviction)

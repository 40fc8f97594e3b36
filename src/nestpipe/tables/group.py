"""Table groups: the tables of a model that share dimension, dtype, optimizer and eviction policy, stored and moved as
one.

A model with 26 tables of one dimension has one group, so it runs one kernel and sends one message instead of 26.  A row
in a group is identified by (table number, key).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.config.eviction import EvictionPolicy
from nestpipe.ops.rows import Array
from nestpipe.tables.config import DTYPES, TableConfig
from nestpipe.tables.optimizers import SparseOptimizer

MAX_TABLES = 1 << 15


@dataclass(frozen=True)
class TableGroup:
    """Tables in the order of their numbers.  It depends on the model alone, so it is the same on every worker."""

    tables: tuple[TableConfig, ...]
    dim: int
    dtype: np.dtype
    optimizer: SparseOptimizer
    stamped: bool = False
    """Rows carry a version after their other state (`--check staleness`)."""
    eviction: EvictionPolicy | None = None
    """With a policy, rows carry their frequency and last batch between optimizer state and version."""

    @property
    def optimizer_width(self) -> int:
        """Numbers of optimizer state per row."""
        return self.optimizer.state_width(self.dim)

    @property
    def state_width(self) -> int:
        """Numbers stored per row beside its values: optimizer state, eviction columns and stamp."""
        return self.optimizer_width + 2 * (self.eviction is not None) + self.stamped

    @property
    def eviction_dtype(self) -> np.dtype:
        """Integers as wide as the group's floats."""
        return np.dtype(f"i{self.dtype.itemsize}")

    def eviction_columns(self, state: Array) -> Array:
        """The usage [R, 2] in state [R, S]: each row's frequency and last batch, a view of the bits as integers.

        As floats they would be exact only up to 2**24.  State is only ever copied bit for bit, so integers are safe
        there.
        """
        integers = self.eviction_dtype if isinstance(state, np.ndarray) else getattr(torch, self.eviction_dtype.name)
        return state.view(integers)[:, self.optimizer_width : self.optimizer_width + 2]

    @property
    def kept_width(self) -> int:
        """Numbers of state that a checkpoint keeps: all but the stamp, which has no meaning in another process."""
        return self.state_width - self.stamped

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


def group_tables(
    tables: Iterable[TableConfig], default_optimizer: SparseOptimizer, stamped: bool = False
) -> list[TableGroup]:
    """Groups in order of their first table."""
    groups: dict[tuple[int, str, SparseOptimizer, EvictionPolicy | None], list[TableConfig]] = {}
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ValueError(f"two tables are named {table.name!r}: list all its features in one feature_names")
        seen.add(table.name)
        optimizer = table.optimizer or default_optimizer
        groups.setdefault((table.embedding_dim, table.dtype, optimizer, table.eviction), []).append(table)
    made = []
    for (dim, dtype, optimizer, eviction), members in groups.items():
        if len(members) > MAX_TABLES:
            raise ValueError(f"{len(members)} tables of dimension {dim} in one model; {MAX_TABLES} is the most")
        made.append(TableGroup(tuple(members), dim, DTYPES[dtype], optimizer, stamped, eviction))
    return made

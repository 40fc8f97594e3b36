"""A table group: the tables of a model that share dimension, dtype, optimizer and life, stored and moved as one.

A model with 26 tables of one dimension is one group, so every kernel and every message is one, not 26.  Inside a group a row is
named by (table number, key).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nestpipe.tables.config import DTYPES, TableConfig
from nestpipe.tables.eviction.policy import EvictionPolicy
from nestpipe.tables.optimizers import SparseOptimizer

MAX_TABLES = 1 << 15


@dataclass(frozen=True)
class TableGroup:
    """Tables in the order of their numbers.  The same on every worker: it is made from the model alone."""

    tables: tuple[TableConfig, ...]
    dim: int
    dtype: np.dtype
    optimizer: SparseOptimizer
    stamped: bool = False
    """Rows carry a version beside their optimizer state (`--check staleness`)."""
    life: EvictionPolicy | None = None
    """Rows carry how often and when they were seen last, between optimizer state and version."""

    @property
    def optimizer_width(self) -> int:
        """Numbers of optimizer state per row."""
        return self.optimizer.state_width(self.dim)

    @property
    def state_width(self) -> int:
        """Numbers stored per row beside its values: optimizer state, and life and the stamp where there are such."""
        return self.optimizer_width + 2 * (self.life is not None) + self.stamped

    @property
    def life_dtype(self) -> np.dtype:
        """Whole numbers as wide as the group's own."""
        return np.dtype(f"i{self.dtype.itemsize}")

    def life_in(self, state: np.ndarray) -> np.ndarray:
        """The part [R, 2] of state [R, S] that holds life: sightings and last batch, as whole numbers in these bits.

        As floats they would be exact only up to 2**24.  Nothing computes with them there: state is copied, bit for bit.
        """
        return state.view(self.life_dtype)[:, self.optimizer_width : self.optimizer_width + 2]

    @property
    def kept_width(self) -> int:
        """Of these, what a checkpoint keeps: all but the stamp, which says nothing to another process."""
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
        groups.setdefault((table.embedding_dim, table.dtype, optimizer, table.life), []).append(table)
    made = []
    for (dim, dtype, optimizer, life), members in groups.items():
        if len(members) > MAX_TABLES:
            raise ValueError(f"{len(members)} tables of dimension {dim} in one model; {MAX_TABLES} is the most")
        made.append(TableGroup(tuple(members), dim, DTYPES[dtype], optimizer, stamped, life))
    return made

"""What averaging of replicas needs of the tables, told before anything is made."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.tables.config import TableConfig
from nestpipe.tables.optimizers import SparseOptimizer, with_moments


def check_averaging(default: SparseOptimizer, tables: Sequence[TableConfig]) -> None:
    """ValueError where replicas of these tables cannot be averaged.  `default`: the optimizer of tables that name none."""
    for table in tables:
        with_moments(table.optimizer or default, 1.0)
        if table.eviction is not None:
            raise ValueError(
                f"pipeline.replicas = 'average' cannot be used where rows are admitted or evicted (table {table.name!r}): leave "
                "out tables.admit_after, tables.ttl_steps, tables.ttl_minutes and tables.max_rows, or set "
                "pipeline.replicas = 'exact'"
            )

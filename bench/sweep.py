"""What a sweep over many rows costs, by age and under a budget, per million rows; and what a key without a row takes.

Times are CPU times of the one thread that does it all, so that it does not matter what else the machine does.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from nestpipe import Adam, EmbeddingConfig, EvictionPolicy, RowWiseAdagrad
from nestpipe.tables.eviction.frequency import FrequencyTable
from nestpipe.tables.eviction.sweep import Sweep
from nestpipe.tables.group import group_tables
from nestpipe.tables.optimizers import SparseOptimizer
from nestpipe.tables.store import RowStore

BATCH = 100_000
SHARE = 0.05
"""Of the rows that a sweep evicts."""


def filled(rows: int, dim: int, optimizer: SparseOptimizer) -> RowStore:
    """Rows of ten tables with frequencies by a power law, last seen at any time before the last batch."""
    random = np.random.default_rng(1)
    tables = [EmbeddingConfig(f"t{i}", dim, ["f"], eviction=EvictionPolicy(max_rows=1)) for i in range(10)]
    store = RowStore(group_tables(tables, optimizer)[0], 0)
    for start in range(0, rows, 1 << 20):
        count = min(1 << 20, rows - start)
        values = np.zeros((count, dim), np.float32)
        state = np.zeros((count, store.group.state_width), np.float32)
        usage = store.group.eviction_columns(state)
        usage[:, 0] = np.minimum(random.pareto(1.0, count) + 1, 1e6)
        usage[:, 1] = random.integers(0, BATCH - 1, count)
        keys = np.arange(start, start + count)
        store.writeback((keys % 10).astype(np.uint16), keys, values, state)
    return store


def measured(store: RowStore, rounds: int) -> dict[str, float]:
    """Milliseconds per million rows, the least of some rounds; and of a removal per million evicted."""
    flags, count = np.zeros(store.index.slots_used, np.uint8), len(store)
    best = {"by age": np.inf, "under a budget": np.inf}
    for _ in range(rounds):
        for kind in best:
            start = time.thread_time()
            sweep = Sweep(store.index, store.usage, flags, BATCH - 1, 10)
            left = sweep.choose_aged(int(SHARE * BATCH) if kind == "by age" else 0)
            if kind != "by age":
                sweep.choose_rare((left * SHARE).astype(np.int64))
            chosen = sweep.mark()
            best[kind] = min(best[kind], 1e9 * (time.thread_time() - start) / count)
            flags[chosen] = 0
    keys, tables = store.index.slot_keys.rows[chosen], store.index.slot_tables.rows[chosen]
    start = time.thread_time()
    store.remove(tables, keys)
    best["removal, per million evicted"] = 1e9 * (time.thread_time() - start) / len(chosen)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for dim, optimizer in ((16, RowWiseAdagrad()), (16, Adam())):
        store = filled(args.rows, dim, optimizer)
        state = store.group.state_width * 4
        for what, ms in measured(store, args.rounds).items():
            print(f"{type(optimizer).__name__}, {state} bytes of state a row: {what}: {ms:.1f} ms per million")
    frequencies = FrequencyTable()
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, args.rows)
    start = time.thread_time()
    frequencies.put(np.zeros(args.rows, np.uint16), keys, np.ones((args.rows, 2), np.int32))
    per_key = frequencies.nbytes() / args.rows
    print(
        f"a key without a row: {per_key:.1f} bytes; {1e9 * (time.thread_time() - start) / args.rows:.0f} ms per million"
    )


if __name__ == "__main__":
    main()

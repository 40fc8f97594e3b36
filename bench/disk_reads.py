"""Measures reads of cold random rows from the disk tier, with io_uring and with threads: rows/s and CPU.

    python bench/disk_reads.py [--path DIR] [--gb 2] [--rows 10000] [--repeats 10] [--dim 124]

Fills one table per way of reading with rows of 512 bytes (dim 124 and 16 bytes of header).  Then retrieves random keys
that were not read before, with both in turn.  The files bypass the page cache, so the machine's memory holds none of
their rows; a disk or a hypervisor may.  The files have no name and are gone when the program ends.  Rates are those of
whole `retrieve` calls: index, sort, read, check, copy.  CPU is the process time of all threads, without interrupts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import numpy as np

from nestpipe.tables.config import EmbeddingConfig
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore
from nestpipe.tables.group import group_tables
from nestpipe.tables.optimizers import SGD

BATCH = 50_000


def fill(store: TieredRowStore, rows: int) -> None:
    """Writes rows 0 to rows-1 in batches; all but the last few go straight to disk."""
    rng = np.random.default_rng(0)
    values = rng.random((BATCH, store.group.dim), np.float32)
    tables, state = np.zeros(BATCH, np.uint16), np.zeros((BATCH, 0), np.float32)
    start, cpu = time.perf_counter(), time.process_time()
    for first in range(0, rows, BATCH):
        count = min(BATCH, rows - first)
        keys = np.arange(first, first + count)
        values[:, 0] = np.arange(first, first + BATCH) % 1000
        store.writeback(tables[:count], keys, values[:count], state[:count])
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{store.disk.io:9} filled: {rows / wall:9,.0f} rows/s  {cpu / rows * 1e7:6.1f} ms CPU per 10k rows written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=str(Path(__file__).parent), help="directory on the disk to measure")
    parser.add_argument("--gb", type=float, default=2.0, help="size of each of the two files")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of a batch")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dim", type=int, default=124)
    settings = parser.parse_args()
    free = shutil.disk_usage(settings.path).free / 1e9
    if free < 3 * settings.gb:
        parser.error(f"{settings.path} has {free:.1f} GB free; --gb {settings.gb} wants {3 * settings.gb:.1f}")

    group = group_tables([EmbeddingConfig("cold", settings.dim, ["cold"])], SGD())[0]
    stores = [TieredRowStore(group, 0, 0, DiskTier(settings.path, 1), io) for io in ("io_uring", "threads")]
    rows = int(settings.gb * 1e9) // stores[0].disk.record_bytes
    batches = min(settings.repeats + 1, rows // settings.rows)
    orders = []
    for store in stores:
        fill(store, rows)
        orders.append(np.random.default_rng(1).permutation(rows)[: batches * settings.rows])

    tables = np.zeros(settings.rows, np.uint16)
    values, state = np.empty((settings.rows, settings.dim), np.float32), np.empty((settings.rows, 0), np.float32)
    rates: dict[str, list[tuple[float, float]]] = {store.disk.io: [] for store in stores}
    for batch in range(batches):
        for store, order in zip(stores, orders):
            keys = order[batch * settings.rows : (batch + 1) * settings.rows]
            start, cpu = time.perf_counter(), time.process_time()
            store.retrieve(tables, keys, values, state)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            assert np.array_equal(values[:, 0], keys % 1000)
            if batch:  # the first compiles
                rates[store.disk.io].append((settings.rows / wall, cpu / settings.rows * 1e7))
    print(
        f"{rows:,} rows of {stores[0].disk.record_bytes} bytes, {batches - 1} x {settings.rows} random rows, median [all]:"
    )
    for io, measured in rates.items():
        speed, cpu_ms = np.array(measured).T
        each = " ".join(f"{value / 1000:.0f}" for value in speed)
        print(f"{io:9} {np.median(speed):9,.0f} rows/s [{each}]k  {np.median(cpu_ms):6.1f} ms CPU per 10k rows")
    print("load average", *(f"{load:.1f}" for load in os.getloadavg()), "on", os.cpu_count(), "cores")


if __name__ == "__main__":
    main()

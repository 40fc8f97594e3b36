"""Measures reads of rows for inference: rows/s and latency, in memory, memory-mapped and from disk with a bounded cache.

    python bench/row_reader.py [--path DIR] [--rows 2000000] [--dim 64] [--reads 2000] [--keys 256 1088] [--stored float32]

Writes one table as an export for serving has it, and reads random keys of it, uniform and by a power law (exponent 1.05),
with these readers:

  memory        rows in an array in DRAM behind the same hash index that training has: what the others are compared with
  mapped hot    memory-mapped, all in the page cache and checked
  mapped cold   memory-mapped; before each read the file's pages are dropped (this file's alone: unmapped, then posix_fadvise)
                and every block counts as never checked
  disk          direct reads, and a cache of rows of a quarter of the file; timed after it has been filled by reads like these

P99 is over reads.  "disk kB" is what a read took from the disk, by /proc/self/io: it shows that cold is cold.  Direct reads pass
the page cache by; a hypervisor's cache, if there is one, they do not.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nestpipe.infer.block_kernels import hashes_of
from nestpipe.infer.block_layout import STORED
from nestpipe.infer.block_rows import CachedBlocks, MappedBlocks
from nestpipe.infer.row_reader import Rows, open_table
from nestpipe.infer.serving_files import ServingTable
from nestpipe.infer.table_writer import TableWriter
from nestpipe.tables.config import EmbeddingConfig
from nestpipe.tables.group import group_tables
from nestpipe.tables.optimizers import SGD
from nestpipe.tables.store import RowStore

PART = 200_000
ZIPF = 1.05
COLD_READS = 50


def written(directory: Path, rows: int, dim: int, stored: str) -> ServingTable:
    """Keys 0 to rows-1."""
    writer = TableWriter(directory, 0, "item", dim, "float32", stored)  # type: ignore[arg-type]
    order = np.argsort(hashes_of(np.arange(rows)))
    rng = np.random.default_rng(0)
    for at in range(0, rows, PART):
        keys = order[at : at + PART]
        writer.add(keys, rng.standard_normal((len(keys), dim), np.float32))
    return writer.finish()


def drawn(rng: np.random.Generator, rows: int, count: int, how: str) -> np.ndarray:
    if how == "uniform":
        return rng.integers(0, rows, count)
    ranks = np.exp(np.log1p(rng.random(count) * (rows ** (1 - ZIPF) - 1)) / (1 - ZIPF)).astype(np.int64) - 1
    return ranks.clip(0, rows - 1) * 7919 % rows


def timed(
    read: Callable[[np.ndarray], object], draw: Callable[[], np.ndarray], reads: int, before: Callable[[], None]
) -> np.ndarray:
    seconds = np.empty(reads)
    for i in range(reads):
        keys = draw()
        before()
        start = time.perf_counter()
        read(keys)
        seconds[i] = time.perf_counter() - start
    return seconds


def from_disk() -> int:
    """Bytes that this process has had read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="where the file goes")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--reads", type=int, default=2000)
    parser.add_argument("--keys", type=int, nargs="+", default=[256, 1088])
    parser.add_argument("--stored", choices=STORED, default="float32")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="row-reader-", dir=args.path))
    try:
        measure(directory, args)
    finally:
        shutil.rmtree(directory)


def measure(directory: Path, args: argparse.Namespace) -> None:
    table = written(directory, args.rows, args.dim, args.stored)
    config = EmbeddingConfig("item", args.dim, ["item"])
    memory = table.bytes // 4
    mapped, cached = open_table(directory, table, None), open_table(directory, table, memory)
    assert isinstance(mapped, MappedBlocks) and isinstance(cached, CachedBlocks)
    readers = {name: Rows([config], 0, {"item": one}) for name, one in (("mapped", mapped), ("disk", cached))}
    store = RowStore(group_tables([config], SGD())[0], 0)
    everything = np.arange(args.rows)
    for at in range(0, args.rows, PART):
        keys = everything[at : at + PART]
        tables, state = np.zeros(len(keys), np.uint16), np.empty((len(keys), 0), np.float32)
        store.writeback(tables, keys, readers["mapped"].read("item", keys), state)
    print(
        f"{args.rows:,} rows of {args.dim} {args.stored}, {table.bytes / 1e6:,.0f} MB; cache of {memory / 1e6:,.0f} MB"
    )

    def in_memory(keys: np.ndarray) -> None:
        values, state = np.empty((len(keys), args.dim), np.float32), np.empty((len(keys), 0), np.float32)
        store.retrieve(np.zeros(len(keys), np.uint16), keys, values, state)

    def drop() -> None:
        mapped.file.drop_pages()
        mapped.forget_checks()

    print(
        f"{'keys':>5} {'drawn':8} {'reader':12} {'p50 ms':>8} {'p99 ms':>8} {'rows/s':>12} {'p99 over memory':>16} {'disk kB':>8}"
    )
    for count in args.keys:
        for how in ("uniform", "zipf"):
            rng = np.random.default_rng(1)

            def draw(rng: np.random.Generator = rng, count: int = count, how: str = how) -> np.ndarray:
                return drawn(rng, args.rows, count, how)

            kinds: list[tuple[str, Callable[[np.ndarray], object], int, Callable[[], None]]] = [
                ("memory", in_memory, args.reads, lambda: None),
                ("mapped hot", lambda keys: readers["mapped"].read("item", keys), args.reads, lambda: None),
                ("disk", lambda keys: readers["disk"].read("item", keys), args.reads, lambda: None),
                ("mapped cold", lambda keys: readers["mapped"].read("item", keys), COLD_READS, drop),
            ]
            base = 0.0
            for name, read, reads, before in kinds:
                if name == "mapped hot":
                    readers["mapped"].read("item", everything)
                if name == "disk":
                    for _ in range(2 * args.rows // count // 4):
                        read(draw())
                before_bytes = from_disk()
                seconds = timed(read, draw, reads, before)
                taken = (from_disk() - before_bytes) / reads / 1e3
                p50, p99 = 1e3 * np.quantile(seconds, [0.5, 0.99])
                base = base or p99
                rate = count / np.mean(seconds)
                line = f"{count:5} {how:8} {name:12} {p50:8.3f} {p99:8.3f} {rate:12,.0f}"
                print(f"{line} {p99 - base:13.3f} ms {taken:8,.0f}", flush=True)


if __name__ == "__main__":
    main()

"""Relay inference on one core: full against on cache, and full against its matrix products alone, in one run.

    python bench/relay.py [--kind hstu] [--lengths 1024 2048 4096] [--rounds 9] [--cpu] [--json FILE]

L = 4, d = 128, 2 heads, 256 candidates, drawn weights, rows in memory.  Rounds take turns; medians and quartiles of ratios within
rounds.  "products" runs the same products, in number and shape, on matrices of their own, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numba
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from nestpipe.infer.history import BLOCK, aligned_floats, complete_blocks
from nestpipe.infer.relay import Relay
from nestpipe.ops.attention import SCORE_BIAS, TWO_CHANNELS
from nestpipe.ops.gemm import multiply, prepared, tile_gemm
from ranking_oracle import DrawnRows, ranker, some_history


class MemoryRows:
    """Rows of keys 0 to n, one after another."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.dim = rows, rows.shape[1]

    def read(self, table: str, keys: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.rows[keys]
        return found


@numba.njit(nogil=True)
def multiply_often(gemm, times, m, n, k, a, b, c, add):  # type: ignore[no-untyped-def]
    products = prepared(gemm, a)
    for _ in range(times):
        multiply(products, m, n, k, a.ctypes.data, k, b.ctypes.data, n, add, c.ctypes.data, n)


def products_of(shape: Any, columns: int, length: int, candidates: int) -> list[tuple[int, int, int, int]]:
    """(how many, m, n, k) of full inference."""
    blocks, chunks = complete_blocks(length) + (length > 0), -(-candidates // BLOCK)
    layers, inner, wide = shape.layers, shape.inner, shape.wide
    deep = shape.channels * inner
    scored = shape.mode != TWO_CHANNELS
    through = (layers - 1) * blocks + layers * chunks
    """Times that a tile of tokens goes through a whole layer."""
    pairs = (layers - 1) * blocks * (blocks + 1) // 2
    found = [
        (through, BLOCK, columns, wide),
        ((1 + scored) * blocks, BLOCK, inner, wide),
        (through, BLOCK, wide, deep),
    ]
    if scored:
        tiles = (pairs + layers * chunks * blocks) * shape.heads
        found += [(tiles, BLOCK, BLOCK, shape.head_wide), (tiles, BLOCK, shape.head_wide, BLOCK)]
    if shape.mode != SCORE_BIAS:
        found += [(2 * pairs, BLOCK, inner, BLOCK), (layers * blocks, 2, inner, BLOCK)]
    if shape.hidden:
        found += [(through, BLOCK, 2 * shape.hidden, wide), (through, BLOCK, wide, shape.hidden)]
    return found


def timed(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return (clock() - start) * 1e3


def spread(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(middle), float(low), float(high)


def measure(kind: str, length: int, candidates: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    model = ranker(kind, dim=128, blocks=4, heads=2, max_length=4096)
    rows = DrawnRows(128).read("item", np.arange(5000))
    relay = Relay(model, MemoryRows(rows), "bench")
    history, asked = some_history(length, 1, items=5000), np.arange(candidates)
    now, complete = int(history.times[-1]) + 60, complete_blocks(length)
    blocks = [aligned_floats(relay.block_floats) for _ in range(complete)]
    for index in range(complete):
        relay.encode_block(history, index, blocks)
    alone = [
        (count, m, n, k, aligned_floats(m * k), aligned_floats(k * n), aligned_floats(m * n))
        for count, m, n, k in products_of(relay._shape, relay._weights.mixed.shape[2], length, candidates)
    ]
    for *_, a, b, c in alone:
        a[:], b[:], c[:] = 0.5, 0.25, 0

    def products_alone() -> None:
        for count, m, n, k, a, b, c in alone:
            multiply_often(tile_gemm(torch.float32), count, m, n, k, a, b, c, False)

    works = {
        "full": lambda: relay.rank(history, now, asked),
        "on cache": lambda: relay.open(history, now, blocks).score(asked),
        "products": products_alone,
        "last block": lambda: relay.encode_block(history, complete - 1, blocks),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 2):
        for name, work in works.items():
            took = timed(work, clock)
            if round_ >= 2:
                taken[name].append(took)
    pairs = list(zip(taken["full"], taken["on cache"], taken["products"]))
    return {
        "length": length,
        "ms": {name: spread(values) for name, values in taken.items()},
        "full over cache": spread([full / cache for full, cache, _ in pairs]),
        "full over products": spread([full / products for full, _, products in pairs]),
        "blocks MB": complete * relay.block_floats * 4 / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="hstu", choices=["hstu", "alpha", "beta", "gamma"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--candidates", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time instead of the clock, for a machine that others use"
    )
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if given.cpu else time.perf_counter
    found = [measure(given.kind, length, given.candidates, given.rounds, clock) for length in given.lengths]
    for one in found:
        ms = "  ".join(
            f"{name} {middle:.1f} ({low:.1f} to {high:.1f})" for name, (middle, low, high) in one["ms"].items()
        )
        print(f"{given.kind}, {one['length']} events, {given.candidates} candidates, ms: {ms}")
        for name in ("full over cache", "full over products"):
            middle, low, high = one[name]
            print(f"  {name} {middle:.2f} ({low:.2f} to {high:.2f})")
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

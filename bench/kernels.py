"""What the less obvious parts of the host's kernels bring: each kernel as it is beside the same without one idea.

    python bench/kernels.py [--rounds 60]

Prefetching, the tiles of the interaction, the runs of `dedup`, widened and turned products, the backward pass of ReLU.
Both versions take turns in this process, on one thread.  Time is the thread's CPU time.  Before each call another array
is read, so that caches are as cold as between the stages of a step.  Printed: the median of each, and median and
quartiles of the ratio over all turns, without / with.  An idea that brings less than 3 % should go.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch

from dedup import layouts
from nestpipe.keys.index import HashIndex
from nestpipe.nn.torch_private import relu_backward
from nestpipe.ops import host_products, interaction_kernels, pooling_kernels
from nestpipe.ops import rows_kernels as row_kernels
from nestpipe.tables import snapshot
from nestpipe.tables.disk import kernels as disk_kernels

KEYS = {name: importlib.import_module(f"nestpipe.keys.{name}") for name in ("dedup", "firsts", "index")}
RANDOM = np.random.default_rng(0)
OTHER = np.zeros(48 << 20, np.uint8)


def variant(module: types.ModuleType, *changes: tuple[str, object]) -> types.ModuleType:
    """The module once more, not cached, with other values for some of its names."""
    source = Path(str(module.__file__)).read_text().replace("cache=True, ", "").replace(", cache=True", "")
    copy = types.ModuleType(f"{module.__name__}_variant")
    sys.modules[copy.__name__] = copy  # where dataclasses look for it
    exec(compile(source, str(module.__file__), "exec"), copy.__dict__)
    for name, value in changes:
        assert hasattr(copy, name), f"{module.__name__} has no {name}"
        setattr(copy, name, value)
    return copy


@numba.njit(inline="always")
def no_prefetch(array, at):  # type: ignore[no-untyped-def]
    pass


@numba.njit
def no_tile(scales, scale_at, rows, row_at, stride, count, out, out_at):  # type: ignore[no-untyped-def]
    pass


@numba.njit
def one_run(keys, limit):  # type: ignore[no-untyped-def]
    """As `dedup._runs`, but never cuts."""
    if np.uint64(keys.max()) - np.uint64(keys.min()) >= limit:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.full(1, keys.shape[0]), np.full(1, keys.min())


def compare(name: str, rounds: int, without: Callable[[], object], with_it: Callable[[], object]) -> None:
    times = np.empty((rounds, 2))
    for work in (without, with_it):
        work()
    for i in range(rounds):
        for which in (i % 2, 1 - i % 2):
            OTHER[::64] += 1
            start = time.thread_time()
            (without, with_it)[which]()
            times[i, which] = time.thread_time() - start
    low, middle, high = np.percentile(times[:, 0] / times[:, 1], [25, 50, 75])
    one, other = 1e3 * np.median(times, axis=0)
    print(f"{name:48s} {one:8.3f} {other:8.3f} ms   {middle:5.2f} ({low:.2f} to {high:.2f})", flush=True)


def prefetching(rounds: int) -> None:
    rows_of = variant(row_kernels, ("prefetch", no_prefetch))
    pool_of = variant(pooling_kernels, ("prefetch_row", rows_of.prefetch_row))
    index_of = variant(KEYS["index"], ("prefetch", no_prefetch))
    disk_of = variant(disk_kernels, ("prefetch", no_prefetch))
    notes_of = variant(snapshot, ("prefetch", no_prefetch))

    samples, lookups, dim = 2048, 26, 64
    rows = np.ones((60_000, dim), np.float32)
    index = RANDOM.integers(0, len(rows), samples * lookups).astype(np.int32)
    bags = np.ones(len(index), np.int64), np.empty(0, np.float32), np.zeros(lookups, bool), dim * np.arange(lookups)
    out, stride, grads = np.empty(len(index) * dim, np.float32), lookups * dim, np.zeros_like(rows)
    one = np.ones(1, np.float32)
    pools = [lambda m=m: m.pool(rows, index, *bags, out, stride) for m in (pool_of, pooling_kernels)]
    compare("prefetch: pool 2048 x 26 x 64", rounds, *pools)
    backs = [lambda m=m: m.pool_backward(out, stride, index, *bags, grads, one) for m in (pool_of, pooling_kernels)]
    compare("prefetch: pool_backward 2048 x 26 x 64", rounds, *backs)
    for dim in (64, 16):
        many, some = np.ones((1_000_000, dim), np.float32), RANDOM.integers(0, 1_000_000, 20_000)
        target = np.empty((len(some), dim), np.float32)
        gathers = [lambda m=m: m.gather(many, some, target) for m in (rows_of, row_kernels)]  # noqa: B023
        compare(f"prefetch: gather 20,000 of 1,000,000 x {dim}", rounds, *gathers)

    keys = RANDOM.permutation(2_000_000) * 7919
    some = RANDOM.choice(keys, 50_000)
    indexes = [kind(4_000_000) for kind in (index_of.HashIndex, HashIndex)]
    for made in indexes:
        made.insert(keys)
    compare("prefetch: HashIndex.find 50,000 of 2,000,000", rounds, *(lambda i=i: i.find(some) for i in indexes))
    compare("prefetch: HashIndex.insert of known keys", rounds, *(lambda i=i: i.insert(some) for i in indexes))

    where, flags = RANDOM.integers(-1000, 1000, 5_000_000), np.zeros(5_000_000, np.uint8)
    some = RANDOM.integers(0, len(where), 50_000)
    slots, places = np.empty_like(some), np.empty_like(some)
    locates = [lambda m=m: m.locate(where, some, slots, places) for m in (disk_of, disk_kernels)]
    compare("prefetch: disk locate 50,000 of 5,000,000", rounds, *locates)
    notes = [lambda m=m: m._note_changes(flags, some, slots) for m in (notes_of, snapshot)]
    compare("prefetch: snapshot's note of 50,000 changes", rounds, *notes)
    dense = variant(KEYS["firsts"], ("prefetch", no_prefetch))
    dedup_of = variant(KEYS["dedup"], ("store_dense", dense.store_dense))
    for name in ("offset", "plain"):
        ids = layouts()[name]
        compare(f"prefetch: dedup, {name}", rounds, *(lambda m=m: m.dedup(ids) for m in (dedup_of, KEYS["dedup"])))  # noqa: B023


def tiles(rounds: int) -> None:
    plain = variant(interaction_kernels, ("TILE_BYTES", 1 << 40), ("_sum_scaled_rows", no_tile))
    for samples, vectors, dim in ((256, 26, 64), (2048, 26, 64)):
        first = RANDOM.standard_normal((samples, 1, dim), np.float32)
        others = RANDOM.standard_normal((samples, vectors, dim), np.float32)
        grads = RANDOM.standard_normal((samples, dim + vectors * (vectors + 1) // 2), np.float32)
        passed = np.empty_like(first), np.empty_like(others)
        works = [
            lambda m=m: m.interact_backward(grads, first, others, *passed)  # noqa: B023
            for m in (plain, interaction_kernels)
        ]
        compare(f"tiles: interact_backward {samples} x {vectors + 1} x {dim}", rounds, *works)


def runs(rounds: int) -> None:
    whole = variant(KEYS["dedup"], ("_runs", one_run))
    for name, ids in layouts().items():
        compare(f"runs: dedup, {name}", rounds, *(lambda m=m: m.dedup(ids) for m in (whole, KEYS["dedup"])))  # noqa: B023


def products(rounds: int) -> None:
    weight, total = torch.randn(512, 415), torch.zeros(512, 415)
    for samples in (256, 2048):
        grads, inputs = torch.randn(samples, 512), torch.randn(samples, 415)
        pairs = [(grads, inputs)] * (2048 // samples)

        def plain(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for grad, _ in pairs:
                grad @ weight
            host_products.add_weight_products_reference(total, pairs)

        def wide(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            widened = host_products.widened(weight)
            for grad, _ in pairs:
                (grad @ widened)[:, :415]
            host_products.add_weight_products(total, pairs)

        compare(f"products: 415 x 512 backward, {2048 // samples} x {samples}", rounds, plain, wide)
    pairs = [(torch.randn(256, 512), torch.randn(256, 13))]
    narrow = torch.zeros(512, 13)
    ways = host_products.add_weight_products_reference, host_products.add_weight_products
    compare("products: 13 x 512 weight, 256", rounds, *(lambda way=way: way(narrow, pairs) for way in ways))
    value, grad = torch.randn(256, 512).relu_(), torch.randn(256, 512)
    masked = lambda: grad.masked_fill_(value <= 0, 0)  # noqa: E731
    compare("relu_backward 256 x 512, by masked_fill_", rounds, masked, lambda: relu_backward(grad, value, grad))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="turns of each pair")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':48s} {'without':>8s} {'with':>8s}      ratio (quartiles)")
    for part in (prefetching, tiles, runs, products):
        part(arguments.rounds)


if __name__ == "__main__":
    main()

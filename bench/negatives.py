"""The sampled-softmax loss, forward and backward, by four ways to the negatives' vectors: time in turns, and memory.

    python bench/negatives.py [--positions 4096] [--negatives 128] [--dim 256] [--rows 100000] [--rounds 7] [--json FILE]

  fused         ours on the host: cosines from distinct rows and an index, nothing laid out
  recomputed    ours on a device, here on the host: segments of positions, gathered again in the backward pass
  offload       all vectors [positions, negatives, D] are kept on the host; segments of 100 positions are fetched, and
                fetched again in the backward pass (the published way; device and host are one memory here)
  materialised  all vectors are gathered, and autograd keeps what it needs

Then ways to score twice as many negatives as are drawn (sharing, histories of 64 positions), beside as many drawn ones and
pools.

Time: all ways take turns in one process on one thread; medians, and the ratio to `fused` with its quartiles over turns.
Memory: each way and number of negatives in a process of its own; what the loss adds to the most memory resident.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.cosine_segments import SHORTEST, SegmentedCosines
from nestpipe.ops.sampled_softmax import EXCLUDED, pooled_softmax_loss, sampled_softmax_loss
from nestpipe.ops.sharing import share

TEMPERATURE = 0.05
SEGMENT = 100
NUMBERS = (32, 64, 128)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def softmax_loss(cosines: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    collides = functional.pad(negatives == target[:, None], (1, 0))
    logits = (cosines / TEMPERATURE).masked_fill(collides, EXCLUDED)
    return -functional.log_softmax(logits, dim=1)[:, 0].mean()


def fused(queries: Tensor, rows: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    return sampled_softmax_loss(queries, rows, target, negatives, TEMPERATURE)


def recomputed(queries: Tensor, rows: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    index = torch.cat([target[:, None], negatives], dim=1)
    return softmax_loss(SegmentedCosines.apply(queries, rows, index), target, negatives)


def materialised(queries: Tensor, rows: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    index = torch.cat([target[:, None], negatives], dim=1)
    unit = functional.normalize(queries, dim=1, eps=SHORTEST)
    vectors = functional.normalize(functional.embedding(index, rows), dim=2, eps=SHORTEST)
    return softmax_loss(torch.einsum("nd,nkd->nk", unit, vectors), target, negatives)


class OffloadedProducts(torch.autograd.Function):
    """[n, k]: products of queries and unit rows by index, through a host copy of all the rows' vectors."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        kept = rows.new_empty(*index.shape, rows.shape[1])
        buffer = rows.new_empty(SEGMENT, index.shape[1], rows.shape[1])
        parts = []
        for start in range(0, len(index), SEGMENT):
            span = slice(start, start + SEGMENT)
            torch.index_select(rows, 0, index[span].reshape(-1), out=kept[span].view(-1, rows.shape[1]))
            fetched = buffer[: len(index[span])]
            fetched.copy_(kept[span])
            parts.append(torch.bmm(fetched, queries[span].unsqueeze(2)).squeeze(2))
        ctx.save_for_backward(queries, index, kept)
        ctx.rows = rows.shape
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        queries, index, kept = ctx.saved_tensors
        by_queries, by_rows = torch.empty_like(queries), queries.new_zeros(ctx.rows)
        buffer = torch.empty_like(kept[:SEGMENT])
        for start in range(0, len(index), SEGMENT):
            span = slice(start, start + SEGMENT)
            fetched = buffer[: len(index[span])]
            fetched.copy_(kept[span])
            grad = grads[0][span]
            by_queries[span] = torch.bmm(grad.unsqueeze(1), fetched).squeeze(1)
            uses = grad.unsqueeze(2) * queries[span].unsqueeze(1)
            by_rows.index_add_(0, index[span].reshape(-1), uses.view(-1, ctx.rows[1]))
        return by_queries, by_rows, None


def offload(queries: Tensor, rows: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    index = torch.cat([target[:, None], negatives], dim=1)
    unit, vectors = (functional.normalize(x, dim=1, eps=SHORTEST) for x in (queries, rows))
    return softmax_loss(OffloadedProducts.apply(unit, vectors, index), target, negatives)


WAYS: dict[str, Loss] = {
    "fused": fused,
    "recomputed": recomputed,
    "offload": offload,
    "materialised": materialised,
}


def ways_to_many(options: argparse.Namespace) -> dict[str, Loss]:
    """Losses of half the negatives, shared to all of them; of all; and of pools.  They are different losses."""
    positions, half = options.positions, options.negatives // 2
    lengths = torch.tensor([64] * (positions // 64) + [positions % 64] * (positions % 64 > 0))
    histories = JaggedTensor(torch.empty(positions), lengths=lengths)
    logits, foreign = (share(kind, 2, histories) for kind in ("logits", "negatives"))
    few, pool = slice(half), torch.randint(0, options.rows, (8 * options.negatives,), dtype=torch.int32)
    return {
        f"{half}": lambda q, r, t, n: sampled_softmax_loss(q, r, t, n[:, few], TEMPERATURE),
        f"{half} -> {2 * half} logits": lambda q, r, t, n: sampled_softmax_loss(
            q, r, t, n[:, few], TEMPERATURE, logits
        ),
        f"{half} -> {2 * half} negatives": lambda q, r, t, n: sampled_softmax_loss(
            q, r, t, n[:, few], TEMPERATURE, foreign
        ),
        f"{2 * half}": lambda q, r, t, n: fused(q, r, t, n[:, : 2 * half]),
        f"pool of {2 * half}": lambda q, r, t, n: pooled_softmax_loss(q, r, t, pool[: 2 * half], TEMPERATURE),
        f"pool of {len(pool)}": lambda q, r, t, n: pooled_softmax_loss(q, r, t, pool, TEMPERATURE),
    }


def inputs(positions: int, negatives: int, dim: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    queries, table = torch.randn(positions, dim), torch.randn(rows, dim)
    drawn = torch.randint(0, rows, (positions, 1 + negatives), dtype=torch.int32)
    return queries.requires_grad_(), table.requires_grad_(), drawn[:, 0].contiguous(), drawn[:, 1:].contiguous()


def train(loss: Loss, given: tuple[Tensor, ...]) -> list[Tensor]:
    found = loss(*given)
    return [found.detach(), *torch.autograd.grad(found, given[:2])]


def times(options: argparse.Namespace) -> dict[str, Any]:
    given = inputs(options.positions, options.negatives, options.dim, options.rows)
    wanted = train(materialised, given)
    for name, way in WAYS.items():
        for a, b in zip(train(way, given), wanted):
            assert (a - b).abs().max() <= 1e-4 * max(1.0, b.abs().max()), f"{name} computes something else"
    return in_turns(WAYS, given, options.rounds, "fused")


def in_turns(ways: dict[str, Loss], given: tuple[Tensor, ...], rounds: int, base: str) -> dict[str, Any]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        train(way, given)
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            train(ways[name], given)
            took[name].append(1e3 * (time.perf_counter() - start))
    figures = {}
    for name, ms in took.items():
        low, middle, high = np.percentile(np.array(ms) / np.array(took[base]), [25, 50, 75])
        figures[name] = {"ms": float(np.median(ms)), "ratio": middle, "quartiles": [low, high], "all_ms": ms}
        print(f"{name:22s} {np.median(ms):8.0f} ms   {middle:5.2f} ({low:.2f} to {high:.2f}) times {base}", flush=True)
    return figures


def resident() -> float:
    """The most that was ever resident, in MB.  Not ru_maxrss, in which a process begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def extra_memory(way: str, options: argparse.Namespace) -> float:
    """In this process: what one loss, forward and backward, adds to the most memory resident, in MB."""
    train(WAYS[way], inputs(8, 4, options.dim, 16))
    given = inputs(options.positions, options.negatives, options.dim, options.rows)
    before = resident()
    train(WAYS[way], given)
    return resident() - before


def memory(options: argparse.Namespace, ways: list[str]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for way in ways:
        found[way] = {}
        for number in NUMBERS:
            sizes = [
                "--positions",
                options.positions,
                "--negatives",
                number,
                "--dim",
                options.dim,
                "--rows",
                options.rows,
            ]
            command = [sys.executable, __file__, "--memory-of", way, *map(str, sizes)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[way][number] = float(done.stdout)
        told = ", ".join(f"{number}: {mb:.0f} MB" for number, mb in found[way].items())
        print(f"{way:22s} {told}   ({found[way][128] - found[way][32]:+.0f} MB from 32 to 128)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--negatives", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="whose memory is measured")
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(extra_memory(options.memory_of, options))
        return
    sizes = f"{options.positions} positions, {options.negatives} negatives, d {options.dim}, {options.rows} rows"
    print(f"time, {sizes}, {options.rounds} turns")
    found = {"sizes": sizes, "time": times(options)}
    print("ways to more negatives")
    many = inputs(options.positions, options.negatives, options.dim, options.rows)
    found["many"] = in_turns(ways_to_many(options), many, options.rounds, str(options.negatives // 2 * 2))
    print("memory that the loss adds, by number of negatives; the gradient of all rows is part of it")
    found["memory_mb"] = memory(options, options.ways)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What workers wait for the most loaded one: planned for long histories, and measured on two workers with and without balance.

    python bench/balance.py [--users 8] [--batches 200]
    python bench/balance.py --measure [--pin] [--rounds 6] [--steps 12] [--set KEY=VALUE]

Planned: lengths as in KuaiRand-27K (log-normal, a share of each user's events kept, cut at 8,192), the cost n + n^2 / 1000.
Measured: both trainings have the same global batches and run in turn in the same processes, so step times are compared batch by
batch.  With --pin every worker has a core of its own, as workers on hosts of their own have: otherwise the lanes of the more
loaded one run on the core that the other one leaves free while it waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

LONG = ["data.users=4000", "data.items=5000", "data.mean_length=400.0", "data.max_length=2048", "data.negatives=16",
        "data.balance_every=8", "model.max_length=2048", "model.dim=64", "model.blocks=2", "model.dropout=0.0",
        "train.batch_size=8", "pipeline.schedule=nested", "pipeline.micro_batches=8"]  # fmt: skip
WARMING_STEPS = 32
"""Before the first round: kernels are compiled, and fits hold by then."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=8, help="histories a worker")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--measure", action="store_true", help="train on two workers instead of planning")
    parser.add_argument("--pin", action="store_true", help="a core of its own for every worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12, help="steps of a round, with and without balance")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    return parser.parse_args()


def long_histories(rng: np.random.Generator, count: int) -> np.ndarray:
    """27K's median and 90 % give the log-normal; the share that filters keep is guessed."""
    raw = np.clip(np.exp(rng.normal(math.log(8594), math.log(24587 / 8594) / 1.2815515655, count)), 100, 228_000)
    kept = np.clip(rng.beta(4, 4 * 0.62 / 0.38, count), 0.02, 0.95) * 0.75
    return np.clip(raw * kept, 5, 8192).astype(np.int64)


def plan(args: argparse.Namespace) -> None:
    from nestpipe.data.balance.assign import assign, waiting
    from nestpipe.data.balance.costs import Cost

    cost = Cost()
    assign(np.ones(4), 2)  # compiles it
    print(
        f"{args.users} histories a worker, {args.batches} batches; share of the step lost waiting, mean and worst batch"
    )
    print("workers   fixed batch      by cost        a plan, ms (median, 99 %)")
    for workers in (2, 16, 128):
        rng = np.random.default_rng(7)
        fixed, balanced, seconds = [], [], []
        for _ in range(args.batches):
            costs = cost.of(long_histories(rng, workers * args.users))
            begin = time.perf_counter()
            chosen = assign(costs, workers)
            seconds.append(1e3 * (time.perf_counter() - begin))
            fixed.append(100 * float(waiting(costs.reshape(workers, -1).sum(1))))
            balanced.append(100 * float(waiting(np.bincount(chosen, costs, workers))))
        print(f"{workers:7}  {np.mean(fixed):5.1f} {max(fixed):5.1f} %  {np.mean(balanced):6.3f} {max(balanced):6.3f} %"
              f"  {np.median(seconds):6.3f} {np.quantile(seconds, 0.99):6.3f}")  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """On every worker: rounds of both trainings in turn."""
    if args.pin:  # before there are threads
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    import torch.distributed as dist

    from nestpipe.cli.recipes import read_recipe
    from nestpipe.comm.world import World
    from nestpipe.train.balance import LoadBalance
    from nestpipe.train.build import make_pipeline, open_source
    from nestpipe.train.streams import cost_plan, train_stream

    world = World.join(timeout=300)
    total = WARMING_STEPS + args.rounds * args.steps + 1
    runs: dict[str, Any] = {}
    for mode in ("none", "cost"):
        recipe = read_recipe("hstu", [*LONG, *args.set, f"data.balance={mode}", f"train.steps={total}"])
        source = open_source(recipe, "train", world)
        pipeline = make_pipeline(recipe, source, world)
        costs = cost_plan(recipe, pipeline.model, fitted=True)
        stream = train_stream(recipe, source, world, costs=costs)
        runs[mode] = pipeline, stream, LoadBalance(recipe, world, stream, costs, 0)
    found: dict[str, dict[str, list[float]]] = {mode: {"steps": [], "compute": [], "losses": []} for mode in runs}

    def take(mode: str, steps: int) -> None:
        pipeline, stream, balance = runs[mode]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step = pipeline.progress(stream)
            assert step is not None, "the data has ended: raise data.users"
            balance.after(step, lambda line: None)
            found[mode]["compute"].append(step.compute_seconds)
            found[mode]["losses"].append(step.loss)
        pipeline.settle()  # the other one has the same connections
        found[mode]["steps"].append((time.perf_counter() - begin) / steps)

    for mode in runs:
        take(mode, WARMING_STEPS)
    for number in range(args.rounds):
        for mode in ("none", "cost") if number % 2 else ("cost", "none"):
            take(mode, args.steps)
    told = {mode: balance.figures() for mode, (_, _, balance) in runs.items()}
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, found)
    if world.rank == 0:
        print(json.dumps({"workers": everyone, "balance": told["cost"]}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still run while Python shuts down


def show(found: dict[str, Any]) -> None:
    workers, balance = found["workers"], found["balance"]
    times = {mode: [max(w[mode]["steps"][i] for w in workers) for i in range(1, len(workers[0][mode]["steps"]))]
             for mode in ("none", "cost")}  # fmt: skip
    ratios = [a / b for a, b in zip(times["none"], times["cost"])]
    slowest = {}
    for mode, name in (("none", "fixed batch"), ("cost", "by cost")):
        compute = np.array([w[mode]["compute"][WARMING_STEPS:] for w in workers])
        slowest[mode] = float(compute.max(0).sum())
        waits = 100 * float(np.mean(1 - compute.mean(0) / compute.max(0)))
        print(f"{name:12} {1e3 * statistics.median(times[mode]):7.1f} ms a step, measured waiting {waits:.1f} %")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a fixed batch takes {middle:.3f} times as long (quartiles {low:.3f} to {high:.3f}; {len(ratios)} rounds)")
    print(
        f"CPU time of the slowest worker's compute, whatever else runs: {slowest['none'] / slowest['cost']:.3f} times"
    )
    print(f"planned waiting {balance['planned']['share']:.2%}, with a fixed batch {balance['fixed']['share']:.1%}; the cost was "
          f"off by {balance['held_out_error']:.1%} on steps not seen")  # fmt: skip
    both = itertools.zip_longest(*(workers[0][mode]["losses"] for mode in ("none", "cost")))
    print(f"losses differ by at most {max(abs(a - b) for a, b in both):.1e}")


def main() -> int:
    args = arguments()
    if not args.measure:
        plan(args)
        return 0
    if "RANK" in os.environ:
        measure(args)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *launcher, *sys.argv], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return 1
    show(json.loads(done.stdout.strip().splitlines()[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

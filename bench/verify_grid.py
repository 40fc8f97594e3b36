"""Runs `verify` over a grid: models x optimizers x workers x tiers x schedules, each against serial, bit for bit.

    python bench/verify_grid.py [--schedule dbp] [--steps 200] [--workers 1 2 3 4] [--micro 1] [--options plain]
    python bench/verify_grid.py --device sim --schedule dbp fwp nested --micro 1 3 4 --steps 6 --workers 1 2 3 \\
        --options plain "eviction, clipped" --in-turn
    python bench/verify_grid.py --models fuxi-alpha fuxi-beta fuxi-gamma sasrec --schedule dbp fwp nested --micro 1 3 \\
        --steps 12 --workers 1 2 3 --tiers dram --in-turn --options plain balance tokens pool in-batch "shared logits"
    python bench/verify_grid.py --groups 2/1 4/2 4/1 6/3 6/2 --schedule serial dbp fwp nested --micro 1 3 --steps 12 --in-turn \\
        --options plain "eviction, clipped"
    python bench/verify_grid.py --schedule fwp nested --micro 1 2 4 8 --options all --optimizers rowwise_adagrad --steps 50

Models and batches are small, so that a run is mostly schedule.  On disk, DRAM has room for a few rows.  For each number
of workers, processes start once and go through all settings; each setting is one `nestpipe verify`.  With `--groups` these are
workers/size of a shard group.  Each `verify` compares replicas, and the first step's gradients and the first losses are compared
with those of one group.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.streams import train_stream

if TYPE_CHECKING:
    from nestpipe.comm.world import World
    from nestpipe.config.recipe import Recipe
    from nestpipe.sparse.batch_context import BatchContext

MODELS = {
    "dlrm": ["data.features=4", "data.hot=[1,1,2,3]", "data.ids=300", "model.dim=8", "model.bottom=[8]", "model.top=[8]"],
    "hstu": ["data.users=400", "data.items=300", "data.max_length=12", "data.mean_length=6.0", "data.negatives=4",
             "model.dim=8", "model.max_length=12", "train.epochs=none"],
}  # fmt: skip
MODELS |= {f"fuxi-{v}": [*MODELS["hstu"], "model.kind=fuxi", f"model.variant={v}"] for v in ("alpha", "beta", "gamma")}
MODELS["sasrec"] = [*MODELS["hstu"], "model.kind=sasrec"]
OPTIONS = {
    "plain": [],
    "clustering": ["pipeline.clustering=true"],
    "by micro": ["memory.window_limit=0.0001"],  # dedup per micro-batch instead of per window
    "late": [
        "pipeline.early_reduce=false",
        "pipeline.early_update=false",
        "pipeline.look_ahead=0",
        "pipeline.early_prepare=false",
        "pipeline.early_retrieve=false",
    ],
    "early weights": ["pipeline.defer_weight_grads=false"],
    "far ahead": ["pipeline.look_ahead=8", "train.clip_norm=0.05"],
    "eviction, clipped": [
        "tables.admit_after=2",
        "tables.ttl_steps=5",
        "tables.max_rows=250",
        "tables.sweep_every=3",
        "train.clip_norm=0.05",
    ],
    "eviction": ["tables.admit_after=2", "tables.ttl_steps=5", "tables.max_rows=250", "tables.sweep_every=3"],
}
"""Settings on top of a schedule's own."""
OF_SEQUENCES = {
    "balance": ["data.balance=cost"],
    "tokens": ["data.balance=tokens"],
    "pool": ["data.negatives_from=pool"],
    "in-batch": ["data.negatives_from=pool", "data.sampling=in-batch", "model.logq=true", "data.balance=cost"],
    "shared logits": ["model.sharing=logits", "data.balance=cost"],
    "shared negatives": ["model.sharing=negatives", "data.sampling=popularity", "model.logq=true"],
}
"""More of them, for models of histories."""
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["dlrm", "hstu"], choices=MODELS)
    parser.add_argument("--schedule", nargs="+", default=["dbp"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument(
        "--groups",
        nargs="+",
        default=[],
        metavar="W/I",
        help="instead of --workers: workers, and how many a shard group has",
    )
    parser.add_argument("--group-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--micro", type=int, nargs="+", default=[1])
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--tiers", nargs="+", default=["dram", "disk"], choices=["dram", "disk"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--orders", type=int, default=10, help="with --device sim: seeded orders beside the late one")
    parser.add_argument("--options", nargs="+", default=["plain"], choices=[*OPTIONS, *OF_SEQUENCES, "all"])
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="optimizers take turns over the settings, instead of each in every setting",
    )
    args = parser.parse_args()
    args.options = list(OPTIONS) if "all" in args.options else args.options
    if "dlrm" in args.models and set(args.options) & set(OF_SEQUENCES):
        parser.error(f"{', '.join(OF_SEQUENCES)} are for models of histories: choose --models without dlrm")
    return args


def main() -> int:
    args = arguments()
    if "RANK" in os.environ:
        return go_through(args)
    failed = []
    for grouped in args.groups or map(str, args.workers):
        workers, _, size = grouped.partition("/")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        grouping = ["--group-size", size] if size else []
        if subprocess.run([sys.executable, *launcher, *sys.argv, *grouping], env=environment).returncode:
            failed.append(grouped)
    equal = "all equal (semi_async: as designed), bit for bit"
    print(f"not equal with {', '.join(failed)} workers" if failed else equal)
    return 1 if failed else 0


def settings_of(args: argparse.Namespace) -> list[tuple[str, str, str, str, int, str]]:
    """(model, optimizer, tier, schedule, micro-batches, options) of everything that is compared."""
    rest = itertools.product(args.tiers, args.schedule, args.micro, args.options)
    if not args.in_turn:
        return [
            (model, optimizer, *one)
            for model, optimizer, one in itertools.product(args.models, args.optimizers, list(rest))
        ]
    # Each round begins one optimizer later, so that none of them always meets the same options.
    count, found = len(args.optimizers), []
    for number, (model, one) in enumerate(itertools.product(args.models, list(rest))):
        found.append((model, args.optimizers[(number + number // count) % count], *one))
    return found


def go_through(args: argparse.Namespace) -> int:
    """Goes through all settings with one number of workers; the same on each of them."""
    from nestpipe.cli.recipes import RECIPES
    from nestpipe.comm.world import World
    from nestpipe.config.recipe import load_recipe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.models.kinds import KINDS as MODEL_KINDS
    from nestpipe.train.verify import verify

    world = World.join(timeout=120)
    grid = settings_of(args)
    different, started = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nestpipe-grid-") as folder:
        for number, (model, optimizer, tier, schedule, micro, options) in enumerate(grid, start=1):
            settings = [*MODELS[model], f"tables.optimizer={optimizer}", "train.batch_size=16", "train.epochs=none"]
            settings += [f"pipeline.micro_batches={micro}", "tables.lr=0.02", f"pipeline.schedule={schedule}"]
            settings += [*(OPTIONS | OF_SEQUENCES)[options], f"train.device={args.device}"]
            settings += [f"pipeline.group_size={args.group_size or 'none'}"]
            if tier == "disk":
                settings += [f"tables.disk_path={folder}", "tables.dram_rows=40"]
            recipe = load_recipe("dlrm" if model == "dlrm" else "hstu", settings, DATA, MODEL_KINDS, RECIPES)
            result = verify(recipe, args.steps, world, lambda done, what: None, orders=args.orders)
            found = result.get("simulated", {"races": []})
            as_designed = result.get("as_designed", False)  # semi_async is stale by design, and never called equal
            different += not (result["equal"] or as_designed) or bool(found["races"])
            outcome = (
                "equal" if result["equal"] else "as designed" if as_designed else result["first_difference"]["text"]
            )
            if args.group_size and args.device == "cpu" and not as_designed:
                far, grads, losses = against_one_group(recipe, world)
                different += far
                outcome += f"; one group: gradients {grads:.0e}, losses {losses:.0e}" + (" TOO FAR" if far else "")
            if "orders" in found:
                syncs = found["host_syncs_per_step"]
                total = sum(count for places in syncs.values() for count in places.values())
                mine = sum(syncs.get("MainThread", {}).values())
                outcome += f" in {found['orders']} orders, {len(found['races'])} races, host syncs a step: {total:.1f}"
                outcome += f", on the compute lane {mine:.1f}"
            left = (time.perf_counter() - started) / number * (len(grid) - number)
            if world.rank == 0:
                what = f"{model:10} {optimizer:16} {tier:5} {schedule:6} N={micro} {options:10}"
                size = f"{result['steps']} steps  {result['compared']['rows']:6} rows"
                groups = f"/{args.group_size}" if args.group_size else ""
                print(f"{world.size}{groups} workers  {what}  {size}  {outcome}  ({left:.0f} s left)", flush=True)
    world.leave()
    if world.rank == 0:
        groups = f" in groups of {args.group_size}" if args.group_size else ""
        equal = f"{len(grid) - different} of {len(grid)} equal (semi_async: as designed), bit for bit"
        print(f"{world.size} workers{groups}: {equal}", flush=True)
    os._exit(1 if different else 0)  # gloo's threads may still run while Python shuts down


def against_one_group(recipe: Recipe, world: World) -> tuple[bool, float, float]:
    """Whether groups are too far from one group of all workers; by how much the first step's row gradients differ (relative to
    the largest), and the first 5 losses (relative).
    """
    both = [first_steps(replace(recipe, pipeline=replace(recipe.pipeline, group_size=g)), world)
            for g in (recipe.pipeline.group_size, None)]  # fmt: skip
    (grads, losses), (flat_grads, flat_losses) = both
    assert sorted(grads) == sorted(flat_grads), "other rows were touched"
    scale = max(float(np.abs(grad).max()) for grad in flat_grads.values())
    apart = max(float(np.abs(grads[key] - flat_grads[key]).max()) for key in grads) / scale
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, flat_losses))
    return apart > 1e-6 or off > 1e-5, apart, off


def first_steps(recipe: Recipe, world: World) -> tuple[dict[tuple[int, int, int], np.ndarray], list[float]]:
    """Summed gradients of all rows in the first step, by (table group, table, key), and 5 losses; the same on every worker."""
    source = open_source(recipe, "train", world)
    pipeline = make_pipeline(recipe, source, world)
    stream = train_stream(replace(recipe, train=replace(recipe.train, steps=5)), source, world)
    mine, agree = {}, pipeline.stage("agree")

    def seen(context: BatchContext, micro: int) -> None:
        agree(context, micro)
        if context.number == 0 and context.routes is not None:
            for g, (plan, buffer) in enumerate(zip(context.routes.owned, context.buffers)):
                keys = zip(plan.tables.tolist(), plan.keys.tolist())
                mine.update({(g, *key): grad.copy() for key, grad in zip(keys, buffer.grads)})

    pipeline.replace_stages(agree=seen)
    losses = []
    while len(losses) < 5 and (step := pipeline.progress(stream)):
        losses.append(step.loss)
    pipeline.settle()
    stream.close()
    pipeline.close()
    everyone: list[dict[tuple[int, int, int], np.ndarray]] = [{}] * world.size
    dist.all_gather_object(everyone, mine, group=world.groups["metrics"])
    return {key: grad for one in everyone for key, grad in one.items()}, losses


if __name__ == "__main__":
    sys.exit(main())

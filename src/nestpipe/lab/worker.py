"""Our own worker of a ladder, started under torchrun like a peer's: same config, samples, first rows and clock.

    python -m torch.distributed.run --nproc-per-node 2 -m nestpipe.lab.worker --config FILE.json --out FILE.json

Samples come from bench/peers/same_samples.py and turns from bench/peers/turns.py, which peers read too.  To run it by
hand, create the files turn-0 to turn-12 beside --out first (bench/peers/README.md).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.writer import CheckpointWriter, Saved
from nestpipe.comm.world import World
from nestpipe.lab.fuxi_workload import FuXiWorkload
from nestpipe.lab.limits import leave_out
from nestpipe.lab.settings import PEERS, RungSettings, read_settings
from nestpipe.lab.summary import StageReport, mean_report
from nestpipe.lab.workloads import DLRMWorkload, HSTUWorkload, RungWorkload
from nestpipe.models.timed import Timed
from nestpipe.pipeline import TrainPipeline
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore
from nestpipe.tables.optimizers import RowWiseAdagrad
from nestpipe.train.tracing import write_trace


def run(settings: RungSettings, world: World, same: Any, turns: Any, folder: Path) -> dict[str, Any]:
    """Warms up, then trains the timed steps turn by turn.  Returns this worker's figures."""
    config, options = settings.workload, settings.options
    torch.manual_seed(config["seed"])
    workload = make_workload(settings, same, world.size)
    pipeline = make_pipeline(settings, workload.model(), world)
    workload.fill_tables(pipeline)
    data = workload.batches(world.rank)

    def step() -> float:
        done = pipeline.progress(data)
        assert done is not None, "the benchmark's batches never end"
        return done.loss

    turns.wait(0)
    losses = [step() for _ in range(config["warmup"])]
    saving = Saving(pipeline, options.checkpoint_every, folder / "checkpoints")
    turns.done(0)
    taken: list[TimedTurn] = []
    before = disk_rows(pipeline)
    for turn in range(1, config["turns"] + 1):
        turns.wait(turn)
        losses.append(step())  # finds the caches full of other rungs' data: not timed
        taken.append(take_turn(pipeline, step, saving, config["steps"]))
        losses += taken[-1].losses
        turns.done(turn)
    steps = (config["steps"] + 1) * config["turns"]
    rows = {what: (count - before[what]) / steps for what, count in disk_rows(pipeline).items()}
    if options.trace is not None:
        write_trace(options.trace, pipeline.timeline, world)
    pipeline.close()
    return {
        "step_s": [turn.step_s for turn in taken],
        "window_s": [turn.window_s for turn in taken],
        "cpu_s": [turn.cpu_s for turn in taken],
        "losses": losses,
        "stages": mean_report([turn.stages for turn in taken]),
        "bytes_sent": sum(turn.bytes_sent for turn in taken) / (config["steps"] * config["turns"]),
        "bytes_between": sum(turn.bytes_between for turn in taken) / (config["steps"] * config["turns"]),
        "disk_rows": rows,
        "micro_batches_chosen": pipeline.micro_batch_choices,
        "buckets": pipeline.options.buckets,
        "checkpoints": [vars(saved) for saved in saving.saved],
    }


def make_workload(settings: RungSettings, same: Any, workers: int) -> RungWorkload:
    config, options = settings.workload, settings.options
    if options.kind == "fuxi":
        return FuXiWorkload(config, workers)
    return DLRMWorkload(config, options, same) if options.kind == "dlrm" else HSTUWorkload(config, options)


def make_pipeline(settings: RungSettings, model: nn.Module, world: World) -> TrainPipeline:
    config, options = settings.workload, settings.options
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config["dense_optimizer"]]
    pipeline = TrainPipeline(
        model,
        kind(model.parameters(), lr=config["dense_lr"], fused=True),
        RowWiseAdagrad(config["sparse_lr"], config["sparse_eps"]),
        settings.pipeline,
        seed=config["seed"],
        tier=DiskTier(options.disk_path, options.dram_rows) if options.dram_rows else None,
        trace=options.trace is not None,
        world=world,
    )
    if isinstance(model, Timed):
        launch_ahead(pipeline, model)
    leave_out(pipeline, options.only)
    return pipeline


def launch_ahead(pipeline: TrainPipeline, model: Timed) -> None:
    """Starts the stand-in's micro-batch when its rows and the last dense step are there, as events start a stream."""
    spans, compute = pipeline.timeline.spans, pipeline.stage("compute")

    def launched(context: BatchContext, micro: int) -> None:
        waited_for = (("embed", context.number, micro), ("step", context.number - 1, -1))
        model.device.inputs_at = max((spans[name].stop for name in waited_for if name in spans), default=None)
        compute(context, micro)

    pipeline.replace_stages(compute=launched)


class Saving:
    """Checkpoints while the rung trains, one in the middle of every `every` steps; None: none."""

    def __init__(self, pipeline: TrainPipeline, every: int | None, folder: Path) -> None:
        self._every = every
        self._steps = 0
        self._writer = CheckpointWriter(pipeline, Folder(folder)) if every else None
        self.saved: list[Saved] = []

    def after_step(self) -> None:
        self._steps += 1
        if self._writer is not None and self._every and self._steps % self._every == self._every // 2:
            self._writer.save({}, {})

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.wait()
            self.saved += self._writer.poll()


@dataclass
class TimedTurn:
    """What one worker measured in one turn."""

    step_s: list[float]
    losses: list[float]
    stages: StageReport
    window_s: float
    """From the first step until nothing runs any more."""
    cpu_s: float
    bytes_sent: int
    bytes_between: int
    """Of these, to workers of other hosts."""


def take_turn(pipeline: TrainPipeline, step: Callable[[], float], saving: Saving, steps: int) -> TimedTurn:
    pipeline.timeline.restart()
    sent, between = pipeline.traffic.bytes_sent, bytes_between_hosts(pipeline)
    if pipeline.world.size > 1:
        dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    ends, losses = [start], []
    for _ in range(steps):
        losses.append(step())
        saving.after_step()
        ends.append(time.perf_counter())
    stages = pipeline.timeline.report()
    # Checkpoints and read-ahead count: they must not run on for free while other rungs have their turn.
    saving.finish()
    pipeline.settle()
    return TimedTurn(
        [end - begin for begin, end in itertools.pairwise(ends)],
        losses,
        stages,
        time.perf_counter() - start,
        time.process_time() - cpu,
        pipeline.traffic.bytes_sent - sent,
        bytes_between_hosts(pipeline) - between,
    )


def bytes_between_hosts(pipeline: TrainPipeline) -> int:
    """Bytes that this worker has sent to workers of other hosts, by torchrun's count of workers on a host."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", pipeline.world.size))
    sent = pipeline.traffic.by_rank()
    return sum(count for rank, count in sent.items() if rank // each != pipeline.world.rank // each)


def disk_rows(pipeline: TrainPipeline) -> dict[str, int]:
    """Rows that the disk tier has read, written, and written again to free space."""
    logs = [store.disk for store in pipeline.stores if isinstance(store, TieredRowStore)]
    return {what: sum(getattr(log, f"rows_{what}") for log in logs) for what in ("read", "written", "moved")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the report; turns are given in its folder")
    arguments = parser.parse_args()
    sys.path.insert(0, str(PEERS))
    import same_samples  # type: ignore[import-not-found]
    import turns  # type: ignore[import-not-found]

    settings = read_settings(json.loads(arguments.config.read_text()))
    torch.set_num_threads(1)
    world = World.join()
    folder = arguments.out.parent
    figures = run(settings, world, same_samples, turns.Turns(folder, world.rank), folder)
    ranks: list[Any] = [figures]
    if world.size > 1:
        ranks = [None] * world.size
        dist.all_gather_object(ranks, figures)
    if world.rank == 0:
        by_rank = ("step_s", "window_s", "cpu_s", "stages", "bytes_sent", "bytes_between")
        first = ("disk_rows", "micro_batches_chosen", "buckets", "checkpoints")
        report = {
            "system": f"nestpipe-{settings.pipeline.schedule}",
            "workers": world.size,
            **{f"{key}_by_rank": [rank[key] for rank in ranks] for key in by_rank},
            "first_losses": figures["losses"][:10],
            "final_loss": figures["losses"][-1],
            **{key: figures[key] for key in first},
            "config": settings.as_dict(),
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may still run while Python shuts down, which aborts one run in fifty

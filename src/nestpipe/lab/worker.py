"""Our own worker of a ladder, started under torchrun like a peer's: same config, samples, first rows and clock.

    python -m torch.distributed.run --nproc-per-node 2 -m nestpipe.lab.worker --config FILE.json --out FILE.json

The samples come from bench/peers/same_samples.py and the turns from bench/peers/turns.py, which the peers read too: by
hand, make the files turn-0 to turn-12 beside --out first (bench/peers/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.writer import CheckpointWriter, Saved
from nestpipe.comm.world import World
from nestpipe.config.micro_batches import AUTO
from nestpipe.config.pipeline import PipelineConfig
from nestpipe.data.batch import Batch
from nestpipe.lab.limits import leave_out
from nestpipe.lab.workloads import DLRMWorkload, HSTUWorkload, Workload
from nestpipe.models.timed import Timed
from nestpipe.pipeline import TrainPipeline
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore
from nestpipe.tables.optimizers import RowWiseAdagrad
from nestpipe.train.tracing import write_trace

PEERS = Path(__file__).parents[3] / "bench" / "peers"
OURS: dict[str, Any] = {
    "kind": "dlrm",  # or "hstu"
    "compute_ms": None,  # the model's own; a number: the `timed` model takes so long
    "dense_parameters": 500_000,  # of the `timed` model
    "dram_rows": 0,  # per worker, the others on disk; 0: all in DRAM
    "disk_path": tempfile.gettempdir(),
    "checkpoint_every": None,  # steps: a checkpoint in the background, of all that it costs
    "only": None,  # "compute": rows and gradients do not travel; "wire": nothing is computed.  For limits, not for losses
    "trace": None,  # a file: the last steps of all workers, for `nestpipe schedule FILE` and ui.perfetto.dev
}
"""What our own rungs may set beside the workload that peers share and the knobs of `PipelineConfig`."""


def pipeline_config(config: dict[str, Any]) -> PipelineConfig:
    """The knobs among a rung's settings; `PipelineConfig` has their defaults."""
    names = {field.name for field in fields(PipelineConfig)} | set(PipelineConfig.RENAMED)
    return PipelineConfig().changed(**{name: value for name, value in config.items() if name in names})


def launch_ahead(pipeline: TrainPipeline, model: Timed) -> None:
    """The stand-in begins with a micro-batch when its rows are there and the dense step is taken, as a stream does by events."""
    spans, compute = pipeline.timeline.spans, pipeline.stage("compute")

    def launched(context: BatchContext, micro: int) -> None:
        waited_for = (("embed", context.number, micro), ("step", context.number - 1, -1))
        model.device.inputs_at = max((spans[name].stop for name in waited_for if name in spans), default=None)
        compute(context, micro)

    pipeline.replace_stages(compute=launched)


class Saving:
    """Checkpoints of a rung, where it wants them: one in the middle of every so many steps, written while it trains."""

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
        """What is still being written must not be free of charge."""
        if self._writer is not None:
            self._writer.wait()
            self.saved += self._writer.poll()


def run(config: dict[str, Any], world: World, same: Any, turns: Any, folder: Path) -> dict[str, Any]:
    """Warm up, then the timed steps, turn by turn.  Returns this worker's figures."""
    torch.manual_seed(config["seed"])
    workload: Workload = DLRMWorkload(config, same) if config["kind"] == "dlrm" else HSTUWorkload(config)
    model = workload.model()
    knobs = pipeline_config(config)
    if config["only"] and knobs.micro_batches == AUTO:
        raise ValueError("a limit needs a given number of micro-batches: without messages workers cannot agree on one")
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config["dense_optimizer"]]
    pipeline = TrainPipeline(
        model,
        kind(model.parameters(), lr=config["dense_lr"], fused=True),
        RowWiseAdagrad(config["sparse_lr"], config["sparse_eps"]),
        knobs,
        seed=config["seed"],
        tier=DiskTier(config["disk_path"], config["dram_rows"]) if config["dram_rows"] else None,
        trace=config["trace"] is not None,
        world=world,
    )
    if isinstance(model, Timed):
        launch_ahead(pipeline, model)
    leave_out(pipeline, config["only"])
    workload.fill_tables(pipeline)
    data = workload.batches(world.rank)
    turns.wait(0)
    losses = [_step(pipeline, data) for _ in range(config["warmup"])]
    saving = Saving(pipeline, config["checkpoint_every"], folder / "checkpoints")
    turns.done(0)
    timeline, stages = pipeline.timeline, Stages()
    step_s: list[list[float]] = []
    window_s, cpu_s, sent = [], [], 0
    before = disk_rows(pipeline)
    for turn in range(1, config["turns"] + 1):
        turns.wait(turn)
        losses.append(_step(pipeline, data))  # finds the caches full of others' data: not timed
        timeline.restart()
        already = pipeline.traffic.bytes_sent
        if world.size > 1:
            dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        step_s.append([])
        last = start
        for _ in range(config["steps"]):
            losses.append(_step(pipeline, data))
            saving.after_step()
            now = time.perf_counter()
            step_s[-1].append(now - last)
            last = now
        stages.add(timeline.report())
        saving.finish()
        pipeline.settle()  # what was read ahead must not be free of charge, running while others have their turn
        window_s.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - cpu)
        sent += pipeline.traffic.bytes_sent - already
        turns.done(turn)
    rows = _per_step(disk_rows(pipeline), before, (config["steps"] + 1) * config["turns"])
    if config["trace"] is not None:
        write_trace(config["trace"], timeline, world)
    pipeline.close()
    return {
        "step_s": step_s,
        "window_s": window_s,
        "cpu_s": cpu_s,
        "losses": losses,
        "stages": stages.mean(),
        "bytes_sent": sent / (config["steps"] * config["turns"]),
        "disk_rows": rows,
        "micro_batches_chosen": pipeline.micro_batch_choices,
        "buckets": pipeline.options.buckets,
        "checkpoints": [vars(saved) for saved in saving.saved],
    }


def disk_rows(pipeline: TrainPipeline) -> dict[str, int]:
    """Rows that the disk tier has read, written, and written again to make room."""
    logs = [store.disk for store in pipeline.stores if isinstance(store, TieredRowStore)]
    return {what: sum(getattr(log, f"rows_{what}") for log in logs) for what in ("read", "written", "moved")}


def _per_step(after: dict[str, int], before: dict[str, int], steps: int) -> dict[str, float]:
    return {what: (count - before[what]) / steps for what, count in after.items()}


class Stages:
    """The mean of the timeline's reports of all turns."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {}
        self._turns = 0

    def add(self, report: dict[str, dict[str, float]]) -> None:
        self._turns += 1
        for stage, kinds in report.items():
            sums = self._sums.setdefault(stage, dict.fromkeys(kinds, 0.0))
            for kind, ms in kinds.items():
                sums[kind] += ms

    def mean(self) -> dict[str, dict[str, float]]:
        return {stage: {kind: ms / self._turns for kind, ms in sums.items()} for stage, sums in self._sums.items()}


def _step(pipeline: TrainPipeline, data: Iterator[Batch]) -> float:
    step = pipeline.progress(data)
    assert step is not None, "the benchmark's batches never end"
    return step.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the report; its folder is where turns are given")
    arguments = parser.parse_args()
    sys.path.insert(0, str(PEERS))
    import same_samples  # type: ignore[import-not-found]
    import turns  # type: ignore[import-not-found]

    config = {**same_samples.DEFAULTS, **OURS, **json.loads(arguments.config.read_text())}
    torch.set_num_threads(1)
    world = World.join()
    folder = arguments.out.parent
    figures = run(config, world, same_samples, turns.Turns(folder, world.rank), folder)
    ranks: list[Any] = [figures]
    if world.size > 1:
        ranks = [None] * world.size
        dist.all_gather_object(ranks, figures)
    if world.rank == 0:
        report = {
            "system": f"nestpipe-{pipeline_config(config).schedule}",
            "workers": world.size,
            "step_s_by_rank": [rank["step_s"] for rank in ranks],
            "window_s_by_rank": [rank["window_s"] for rank in ranks],
            "cpu_s_by_rank": [rank["cpu_s"] for rank in ranks],
            "first_losses": figures["losses"][:10],
            "final_loss": figures["losses"][-1],
            "stages_by_rank": [rank["stages"] for rank in ranks],
            "bytes_sent_by_rank": [rank["bytes_sent"] for rank in ranks],
            "disk_rows": ranks[0]["disk_rows"],
            "micro_batches_chosen": ranks[0]["micro_batches_chosen"],
            "buckets": ranks[0]["buckets"],
            "checkpoints": ranks[0]["checkpoints"],
            "config": config,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may still be at work when Python takes itself apart, which aborts one run in fifty

"""Our own worker of the DLRM ladder, started under torchrun like a peer's: same config, samples, first rows and clock.

    python -m torch.distributed.run --nproc-per-node 2 -m nestpipe.lab.dlrm_worker --config FILE.json --out FILE.json

The samples come from bench/peers/same_samples.py, which the peers read too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe import Batch, KeyedJaggedTensor, RowWiseAdagrad, TrainPipeline, World
from nestpipe.keys import owners_of
from nestpipe.models.dlrm import DLRM, DLRMConfig

PEERS = Path(__file__).parents[3] / "bench" / "peers"


def batches(config: dict[str, Any], rank: int, same: Any) -> Iterator[Batch]:
    """Endless batches out of a pool made here and now; every KeyedJaggedTensor is new, as a reader's would be."""
    names = [f"f{f}" for f in range(config["features"])]
    lengths = torch.ones(config["features"] * config["batch"], dtype=torch.int64)
    pool = [[torch.from_numpy(p) for p in same.samples(config, rank, i)] for i in range(config["distinct_batches"])]

    def cycle() -> Iterator[Batch]:
        for dense, ids, labels in itertools.cycle(pool):
            yield Batch(KeyedJaggedTensor(names, ids.view(-1), lengths=lengths), dense, labels)

    return cycle()


def fill_tables(pipeline: TrainPipeline, config: dict[str, Any], same: Any) -> None:
    """Gives every table the rows that the peers start from, so that losses can be compared."""
    for feature in range(config["features"]):
        group, number = pipeline.sparse.place_of(f"f{feature}")
        store = pipeline.sparse.stores[group]
        keys = np.arange(config["ids"], dtype=np.int64)
        tables = np.full(len(keys), number, np.uint16)
        mine = owners_of(tables, keys, pipeline.world.size) == pipeline.world.rank
        values = same.first_rows(config, feature)[mine]
        store.writeback(tables[mine], keys[mine], values, np.zeros((len(values), store.group.state_width), np.float32))


def run(config: dict[str, Any], world: World, same: Any) -> dict[str, Any]:
    """Warm up, then the timed steps.  Returns this worker's figures."""
    torch.manual_seed(config["seed"])
    settings = DLRMConfig(config["dim"], config["bottom"][:-1], config["top"][:-1])
    model = DLRM(settings, [f"f{f}" for f in range(config["features"])], config["dense_features"])
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config["dense_optimizer"]]
    pipeline = TrainPipeline(
        model,
        kind(model.parameters(), lr=config["dense_lr"]),
        RowWiseAdagrad(config["sparse_lr"], config["sparse_eps"]),
        schedule=config["schedule"],
        micro_batches=config["micro_batches"],
        seed=config["seed"],
        world=world,
    )
    fill_tables(pipeline, config, same)
    data = batches(config, world.rank, same)
    losses = [_step(pipeline, data) for _ in range(config["warmup"])]
    step_ms = []
    busy, sent = dict(pipeline.engine.timeline.busy), pipeline.sparse.traffic.bytes_sent
    if world.size > 1:
        dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    last = start
    for _ in range(config["steps"]):
        losses.append(_step(pipeline, data))
        now = time.perf_counter()
        step_ms.append(1000 * (now - last))
        last = now
    steps = config["steps"]
    return {
        "window_s": last - start,
        "cpu_s": time.process_time() - cpu,
        "step_ms": step_ms,
        "losses": losses,
        "stage_ms": {stage: 1e3 * (s - busy[stage]) / steps for stage, s in pipeline.engine.timeline.busy.items()},
        "bytes_sent": (pipeline.sparse.traffic.bytes_sent - sent) / steps,
    }


def _step(pipeline: TrainPipeline, data: Iterator[Batch]) -> float:
    step = pipeline.progress(data)
    assert step is not None, "the benchmark's batches never end"
    return step.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(PEERS))
    import same_samples  # type: ignore[import-not-found]

    config = {
        **same_samples.DEFAULTS,
        "schedule": "serial",
        "micro_batches": 1,
        **json.loads(arguments.config.read_text()),
    }
    torch.set_num_threads(1)
    world = World.join()
    figures = run(config, world, same_samples)
    ranks: list[Any] = [figures]
    if world.size > 1:
        ranks = [None] * world.size
        dist.all_gather_object(ranks, figures)
    if world.rank == 0:
        window_s = [rank["window_s"] for rank in ranks]
        report = {
            "system": "nestpipe-" + config["schedule"],
            "workers": world.size,
            "step_ms_by_rank": [rank["step_ms"] for rank in ranks],
            "window_s_by_rank": window_s,
            "cpu_s_by_rank": [rank["cpu_s"] for rank in ranks],
            "samples_per_s": world.size * config["batch"] * config["steps"] / max(window_s),
            "first_losses": figures["losses"][:10],
            "final_loss": figures["losses"][-1],
            "stage_ms_by_rank": [rank["stage_ms"] for rank in ranks],
            "bytes_sent_by_rank": [rank["bytes_sent"] for rank in ranks],
            "config": config,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    world.leave()


if __name__ == "__main__":
    main()

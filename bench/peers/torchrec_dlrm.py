"""Trains TorchRec's DLRM on the benchmark's samples: one worker under torchrun, with gloo, on the CPU, in one thread.

    python -m torch.distributed.run --nproc-per-node 2 bench/peers/torchrec_dlrm.py --config FILE.json --out FILE.json

TorchRec runs as shipped, with table-wise sharding. Two settings change it: `pieces_kb` (see `cut_all_to_all`), and
`our_interaction`, which computes the feature interaction with NestPipe's operation.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from same_samples import DEFAULTS, first_rows, samples
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from turns import Turns

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from nestpipe.ops.interaction import interact

CPU = torch.device("cpu")
PIPELINES = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}


def read_config(path: Path) -> dict:
    """The file's values over the defaults; an unknown key is an error."""
    given = json.loads(path.read_text())
    config = {**DEFAULTS, "pipeline": "sparse", "pieces_kb": None, "our_interaction": False, **given}
    unknown = set(config) - set(DEFAULTS) - {"pipeline", "pieces_kb", "our_interaction"}
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(sorted(unknown))}")
    if config["warmup"] < 1:
        raise ValueError(
            f"{path}: warmup is {config['warmup']}, has to be at least 1: TorchRec sets up in its first step"
        )
    if config["pipeline"] not in PIPELINES:
        raise ValueError(f"{path}: pipeline is {config['pipeline']!r}, has to be one of {', '.join(PIPELINES)}")
    if config["dense_optimizer"] not in ("adam", "sgd"):
        raise ValueError(f"{path}: dense_optimizer is {config['dense_optimizer']!r}, has to be adam or sgd")
    if config["bottom"][-1] != config["dim"]:
        raise ValueError(f"{path}: bottom ends in {config['bottom'][-1]}, has to end in dim = {config['dim']}")
    return config


@dataclass
class Batch(Pipelineable):
    """A batch for TorchRec's pipelines. On the CPU there is nothing to move, pin or record."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in (self.dense, self.sparse, self.labels)))

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> "Batch":
        return self


def batches(config: dict, rank: int):
    """Endless batches from a pool made in this call.

    Each KeyedJaggedTensor is new, as a reader's would be: it does not carry lengths and offsets that TorchRec computed
    before.
    """
    names = [f"f{f}" for f in range(config["features"])]
    lengths = torch.ones(config["features"] * config["batch"], dtype=torch.int32)
    pool = [[torch.from_numpy(part) for part in samples(config, rank, i)] for i in range(config["distinct_batches"])]

    def cycle():
        for dense, ids, labels in itertools.cycle(pool):
            yield Batch(dense, KeyedJaggedTensor(names, ids.view(-1), lengths=lengths), labels)

    return cycle()


def layers(width: int, widths: list[int]) -> list[nn.Module]:
    """Linear and ReLU in turn."""
    out = []
    for wider in widths:
        out += [nn.Linear(width, wider), nn.ReLU()]
        width = wider
    return out


class DLRM(nn.Module):
    """forward(batch) -> (loss, detached loss). Dense weights are drawn bottom to top right after torch.manual_seed."""

    def __init__(self, config: dict):
        super().__init__()
        self.features, self.dim = config["features"], config["dim"]
        self.our_interaction = config["our_interaction"]
        self.embeddings = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t{f}",
                    feature_names=[f"f{f}"],
                    num_embeddings=config["ids"],
                    embedding_dim=config["dim"],
                    pooling=PoolingType.SUM,
                    init_fn=partial(fill_rows, config, f),
                )
                for f in range(self.features)
            ],
        )
        pairs = torch.tril_indices(self.features + 1, self.features + 1, offset=-1)
        self.register_buffer("row", pairs[0], persistent=False)
        self.register_buffer("column", pairs[1], persistent=False)
        torch.manual_seed(config["seed"])
        self.bottom = nn.Sequential(*layers(config["dense_features"], config["bottom"]))
        self.top = nn.Sequential(*layers(config["dim"] + pairs.shape[1], config["top"])[:-1])
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        # The all-to-all starts here and .values() waits for it: the bottom MLP runs in between.
        coming = self.embeddings(batch.sparse)
        bottom = self.bottom(batch.dense)
        rows = coming.values().view(-1, self.features, self.dim)
        if self.our_interaction:
            interacted = interact(bottom, rows)
        else:
            vectors = torch.cat([bottom.unsqueeze(1), rows], dim=1)
            dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.row, self.column]
            interacted = torch.cat([bottom, dots], dim=1)
        logits = self.top(interacted).squeeze(1)
        loss = self.loss(logits, batch.labels)
        return loss, loss.detach()


@torch.no_grad()
def fill_rows(config: dict, feature: int, table: torch.Tensor) -> torch.Tensor:
    """Called by TorchRec on every worker; the table is empty on workers that do not own it."""
    return table.copy_(torch.from_numpy(first_rows(config, feature))) if table.numel() else table


def shard(config: dict) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Tables table-wise in blocks (0..12 on worker 0, 13..25 on worker 1), the dense part replicated by DDP.

    The plan is explicit: all tables have the same size, so blocks are balanced, and blocks in feature order put the
    output columns in feature order, which saves TorchRec a permute. The kernel has to be named: an explicit plan with
    the optimizer in `fused_params` defaults to `dense`, which leaves the tables out of the fused row-wise Adagrad.
    """
    workers, features = dist.get_world_size(), config["features"]
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": config["sparse_lr"],
            "eps": config["sparse_eps"],
        }
    )
    model = DLRM(config)
    plan = construct_module_sharding_plan(
        model.embeddings,
        {f"t{f}": table_wise(rank=f * workers // features, compute_kernel="fused") for f in range(features)},
        sharder=sharder,
        local_size=workers,
        world_size=workers,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
    )
    order = model.module.embeddings._embedding_names
    assert order == [f"f{f}" for f in range(features)], f"forward() relies on feature order, got {order}"
    replicated = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert not any("embeddings" in name for name in replicated), "the backward pass has to update the tables"
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config["dense_optimizer"]]
    dense = KeyedOptimizerWrapper(replicated, lambda params: kind(params, lr=config["dense_lr"], fused=True))
    return model, CombinedOptimizer([model.fused_optimizer, dense])


class Pieces:
    """The pieces of one all-to-all, waited for as one."""

    def __init__(self, works: list[dist.Work]):
        self.works = works

    def wait(self) -> bool:
        for work in self.works:
            work.wait()
        self.works = []
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def cut_all_to_all(piece_bytes: int, checked_calls: int = 100) -> None:
    """Replace torch.distributed.all_to_all_single: no message between two workers is larger than `piece_bytes`.

    gloo moves a large all-to-all half-duplex over a shaped link; several small ones in flight use both directions.
    NestPipe's own exchange is cut this way, so a fair comparison shows TorchRec with it, too.

    Each piece goes from every worker to the one `shift` ranks further on, so that it is one slice of input and output
    and nothing is packed or copied. All workers must make the same number of calls. Each derives it from its own
    largest split, sent or received. These are equal as long as batches have the same size and features are one-hot: a
    worker has one split per table owner, in proportion to the owner's tables, and the largest owner's counts. The first
    calls check this on a process group of their own.
    """
    whole, rank, workers = dist.all_to_all_single, dist.get_rank(), dist.get_world_size()
    side = dist.new_group(backend="gloo")
    to_check = iter(range(checked_calls))

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        sent = input_split_sizes or [input.shape[0] // workers] * workers
        received = output_split_sizes or [output.shape[0] // workers] * workers
        row_bytes = input.element_size() * input[:1].numel() if len(input) else input.element_size()
        per_piece = max(1, piece_bytes // row_bytes)
        pieces = -(-max(*sent, *received) // per_piece)
        if next(to_check, None) is not None:
            extremes = torch.tensor([pieces, -pieces])
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=side)
            assert extremes.sum() == 0, f"worker {rank} would cut into {pieces}, another into a different number"
        if pieces <= 1:
            return whole(output, input, output_split_sizes, input_split_sizes, group, async_op)

        works = []
        for shift in range(workers):
            to, source = (rank + shift) % workers, (rank - shift) % workers
            mine = input.narrow(0, sum(sent[:to]), sent[to])
            theirs = output.narrow(0, sum(received[:source]), received[source])
            step = per_piece if shift else max(1, len(mine))  # own rows cross no wire: one call
            for at in range(0, pieces * per_piece if shift else step, step):
                out, here = theirs[at : at + step], mine[at : at + step]
                out_sizes, in_sizes = [0] * workers, [0] * workers
                out_sizes[source], in_sizes[to] = len(out), len(here)
                works.append(whole(out, here, out_sizes, in_sizes, group, True))
        work = Pieces(works)
        return work if async_op else work.wait() and None

    dist.all_to_all_single = all_to_all_single


def train(config: dict, turns: Turns) -> dict:
    """Warms up, then trains the timed steps turn by turn. Returns this worker's figures."""
    model, optimizer = shard(config)
    data = batches(config, dist.get_rank())
    pipeline = PIPELINES[config["pipeline"]](model, optimizer, CPU)
    turns.wait(0)
    losses = [pipeline.progress(data) for _ in range(config["warmup"])]
    pipelined = [module.forward.name for module in getattr(pipeline, "_pipelined_modules", [])]
    assert config["pipeline"] == "base" or pipelined, "TrainPipelineSparseDist found no module to pipeline"

    turns.done(0)
    step_s, window_s, cpu_s = [], [], []
    for turn in range(1, config["turns"] + 1):
        turns.wait(turn)
        losses.append(pipeline.progress(data))  # finds the caches full of other rungs' data: not timed
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        step_s.append([])
        last = start
        for _ in range(config["steps"]):
            losses.append(pipeline.progress(data))
            now = time.perf_counter()
            step_s[-1].append(now - last)
            last = now
        window_s.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - cpu)
        turns.done(turn)

    # Train what the pipeline has already read, untimed, so that no worker leaves with an all-to-all in flight. Without
    # this, one run in about 40 aborted on exit, and with it none of about 40; whether this was the cause is not known.
    nothing = iter(())
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(nothing)
    dist.barrier()
    return {
        "step_s": step_s,
        "window_s": window_s,
        "cpu_s": cpu_s,
        "losses": [loss.item() for loss in losses],
        "pipelined": pipelined,
    }


def report(config: dict, ranks: list[dict]) -> dict:
    losses = [sum(each) / len(ranks) for each in zip(*(rank["losses"] for rank in ranks))]
    return {
        "system": f"torchrec-{config['pipeline']}" + ("-pieces" if config["pieces_kb"] else ""),
        "workers": len(ranks),
        "step_s_by_rank": [rank["step_s"] for rank in ranks],
        "window_s_by_rank": [rank["window_s"] for rank in ranks],
        "cpu_s_by_rank": [rank["cpu_s"] for rank in ranks],
        "first_losses": losses[:10],
        "final_loss": losses[-1],
        "pipelined_modules": ranks[0]["pipelined"],
        "config": config,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the report; turns are given in its folder")
    arguments = parser.parse_args()
    config = read_config(arguments.config)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if config["pieces_kb"]:
        cut_all_to_all(config["pieces_kb"] * 1000)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, train(config, Turns(arguments.out.parent, dist.get_rank())))
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(report(config, ranks), indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may still run while Python shuts down, which aborts one run in fifty

"""The digest of a model: SHA-256 over all tables and dense state, the same for any number of workers that hold the same bits.

The byte layout is in docs/digest.md, so that another program can recompute it; a change here is a change there and of VERSION.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.checkpoint.replicas import compare_replicas
from nestpipe.pipeline import TrainPipeline
from nestpipe.sparse.walk import walk

VERSION = b"nestpipe-digest-1\0"


def digest(pipeline: TrainPipeline) -> str:
    """In hex, on every worker.  All workers call it together, between two steps.

    Replicas are compared first (ReplicasDiffer), and each row counts once.  Those that train on their own are averaged before.
    """
    pipeline.unite()
    compare_replicas(pipeline, f"after step {pipeline.next_batch}")
    sha = hashlib.sha256(VERSION)
    tables = [(t.name, number, store) for store in pipeline.stores for number, t in enumerate(store.group.tables)]
    for name, number, store in sorted(tables, key=lambda table: table[0]):
        group = store.group
        lives = group.eviction is not None  # "lives" and "life": the words of the digest's layout, which is fixed
        sha.update(
            (b"table that lives\0" if lives else b"table\0") + name.encode() + b"\0" + group.dtype.name.encode() + b"\0"
        )
        sha.update(np.array([group.dim, group.optimizer_width], "<u8").tobytes())
        rows = 0
        for keys, values, state in walk(pipeline.topology.shard, store, number):
            row = np.dtype([("key", "<i8"), ("values", f"<f{group.dtype.itemsize}", (group.dim,)),
                            ("state", f"<f{group.dtype.itemsize}", (group.optimizer_width,)),
                            ("life", "<i8", (2 if lives else 0,))])  # fmt: skip
            packed = np.empty(len(keys), row)
            packed["key"], packed["values"] = keys, values
            if group.optimizer_width:
                packed["state"] = state[:, : group.optimizer_width]
            if lives:
                packed["life"] = group.eviction_columns(state)
            sha.update(packed.tobytes())
            rows += len(keys)
        sha.update(np.array([rows], "<u8").tobytes())
        if lives:
            waiting = 0
            frequencies = store.frequencies
            for keys, life, _ in walk(pipeline.topology.shard, frequencies, number) if frequencies is not None else ():
                sha.update(np.column_stack([keys, life]).astype("<i8").tobytes())
                waiting += len(keys)
            sha.update(np.array([waiting], "<u8").tobytes())
    for name, tensor in sorted(dense_state(pipeline), key=lambda item: item[0]):
        sha.update(b"dense\0" + name.encode() + b"\0" + str(tensor.dtype).removeprefix("torch.").encode() + b"\0")
        sha.update(np.array([tensor.dim(), *tensor.shape], "<u8").tobytes())
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    # Only the first worker of a group has seen the rows; all take the word of worker 0.
    result = torch.frombuffer(bytearray(sha.digest()), dtype=torch.uint8)
    if pipeline.world.size > 1:
        dist.broadcast(result, 0, group=pipeline.world.groups["metrics"])
    return result.numpy().tobytes().hex()


def dense_state(pipeline: TrainPipeline) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, and the dense optimizer's state as `optimizer.<parameter>.<entry>`."""
    names = {}
    for name, parameter in pipeline.model.named_parameters():
        names[parameter] = name
        yield name, parameter
    yield from pipeline.model.named_buffers()
    if pipeline.optimizer is not None:
        for parameter, state in pipeline.optimizer.state.items():
            for entry, value in state.items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                yield f"optimizer.{names[parameter]}.{entry}", tensor

"""Restores a pipeline from a checkpoint, on any number of workers: everybody takes the rows that are now its own.

Each file is read whole, its digest checked, before anything of it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nestpipe.checkpoint.dense import restore_dense
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import File, Group
from nestpipe.checkpoint.tensors import read_arrays, read_tensors
from nestpipe.checkpoint.writer import describe
from nestpipe.keys import owners_of
from nestpipe.pipeline import TrainPipeline
from nestpipe.tables.group import TableGroup

SEED_OF_OTHERS = 7_368_787
"""Random numbers of workers that had none in the checkpoint begin from this, the step and the rank."""


def restore(
    pipeline: TrainPipeline, chain: list[Checkpoint], tell: Callable[[float], None] = lambda done: None
) -> None:
    """Tables, dense state and random state as of the last of the chain; the next batch is the one after it.

    The pipeline is fresh; all workers call it together.  `tell` hears how much is done.
    """
    last = chain[-1]
    check_tables(pipeline, chain)
    dense = next(iter(last.manifest.of("dense")))
    restore_dense(pipeline, read_tensors(last.path / dense.name, dense.written), str(last.path))
    files = [(checkpoint, file) for checkpoint in chain for file in _in_order(checkpoint.manifest.files)]
    total = sum(file.bytes for _, file in files) or 1
    done = 0
    for checkpoint, file in files:
        # Where the number of workers is the same, so are the owners: nobody reads what is another's.
        if checkpoint.manifest.workers != pipeline.world.size or file.worker == pipeline.world.rank:
            _apply(pipeline, checkpoint, file)
        done += file.bytes
        tell(done / total)
    _restore_random(pipeline, last)
    pipeline.resume_at(last.manifest.step)


def check_tables(pipeline: TrainPipeline, chain: list[Checkpoint]) -> None:
    """CheckpointError unless rows of the chain fit this model's tables."""
    for checkpoint in chain:
        theirs = checkpoint.manifest.groups
        ours = [describe(group) for group in pipeline.sparse.groups]
        if len(theirs) != len(ours):
            raise CheckpointError(f"{checkpoint.path} has {len(theirs)} groups of tables and the model {len(ours)}")
        for a, b in zip(theirs, ours):
            for what in ("tables", "dim", "dtype", "state_width", "optimizer"):
                if getattr(a, what) != getattr(b, what):
                    raise CheckpointError(
                        f"{checkpoint.path}: {what} of {_name(a)} is {getattr(a, what)!r} in the checkpoint and "
                        f"{getattr(b, what)!r} in the model: change the model back, or start anew and import the tables"
                    )


def _in_order(files: list[File]) -> list[File]:
    """Of one checkpoint: keys that went, then rows, since some may have come back."""
    return [f for f in files if f.kind == "removed"] + [f for f in files if f.kind == "rows"]


def read_rows(checkpoint: Checkpoint, file: File, group: Group) -> tuple[np.ndarray, ...]:
    """Tables, keys, values and state of a file of rows; CheckpointError if they are not of their shapes."""
    path = checkpoint.path / file.name
    arrays = read_arrays(path, file.written)
    n, dtype = file.rows, np.dtype(group.dtype)
    wanted: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "keys": ((n,), np.dtype(np.int64)),
        "tables": ((n,), np.dtype(np.uint16)),
    }
    if file.kind == "rows":
        wanted |= {"values": ((n, group.dim), dtype), "state": ((n, group.state_width), dtype)}
    for name, (shape, kind) in wanted.items():
        if name not in arrays or arrays[name].shape != shape or arrays[name].dtype != kind:
            raise CheckpointError(f"{path}: {name} must be {kind} {list(shape)}")
    if n and int(arrays["tables"].max()) >= len(group.tables):
        raise CheckpointError(f"{path}: there are {len(group.tables)} tables in the group, and it has rows of others")
    return tuple(arrays[name] for name in ("tables", "keys", "values", "state") if name in wanted)


def _apply(pipeline: TrainPipeline, checkpoint: Checkpoint, file: File) -> None:
    world = pipeline.world
    group: TableGroup = pipeline.sparse.groups[file.group]
    store = pipeline.sparse.stores[file.group]
    arrays = read_rows(checkpoint, file, checkpoint.manifest.groups[file.group])
    mine = owners_of(arrays[0], arrays[1], world.size) == world.rank
    if not mine.all():
        arrays = tuple(array[mine] for array in arrays)
    if file.kind == "removed":
        store.remove(arrays[0], arrays[1])
        return
    tables, keys, values, kept = arrays
    state = np.zeros((len(keys), group.state_width), group.dtype)
    state[:, : group.kept_width] = kept
    store.writeback(tables, keys, np.ascontiguousarray(values), state)


def _restore_random(pipeline: TrainPipeline, last: Checkpoint) -> None:
    world = pipeline.world
    if last.manifest.workers != world.size:
        torch.manual_seed(SEED_OF_OTHERS * (last.manifest.step + 1) + world.rank)
        return
    file = next(file for file in last.manifest.of("worker") if file.worker == world.rank)
    torch.set_rng_state(read_tensors(last.path / file.name, file.written)["random"])


def _name(group: Group) -> str:
    return f"table {group.tables[0]!r}" if len(group.tables) == 1 else f"tables {', '.join(group.tables[:3])}"

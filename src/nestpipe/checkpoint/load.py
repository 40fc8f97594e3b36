"""Restores a train state from a checkpoint, on any number of workers: each takes the rows that it now owns.

Workers own ranges of hashes, so a worker reads only the files of workers whose ranges overlap its own: about
W / W' + 1 files for W writers and W' readers.  Each file is read whole and its digest checked before any of it is used.
Where there are several shard groups, each reads all rows, and replicas are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nestpipe.checkpoint.dense import restore_dense
from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import File, Group
from nestpipe.checkpoint.replicas import compare_replicas, topology_of
from nestpipe.checkpoint.row_files import DuplicateKeyCheck, count_rows, in_order, read_rows
from nestpipe.checkpoint.saved_rows import SavedRows, saved_rows_of
from nestpipe.checkpoint.tensors import read_tensors
from nestpipe.checkpoint.train_state import TrainState
from nestpipe.checkpoint.worker_state import restore_worker
from nestpipe.comm.exchange import Exchange
from nestpipe.comm.members import Members
from nestpipe.comm.topology import ReplicaGroup, ShardGroup
from nestpipe.comm.world import World
from nestpipe.keys import share_of
from nestpipe.tables.snapshot import Rows

RESHARD_SEED = 7_368_787
"""On another number of workers, each seeds its random state from this, the step and its rank."""


def restore(
    state: TrainState, chain: list[Checkpoint], on_progress: Callable[[float], None] = lambda done: None
) -> None:
    """Restores tables, dense state, random state and `next_batch` from the last checkpoint of the chain.

    `state` has not trained yet.  All workers call it together.  `on_progress` gets the fraction done.
    """
    last = chain[-1]
    saved, topology = saved_rows_of(state), topology_of(state)
    shard = topology.shard
    check_tables(saved, chain)
    dense = next(iter(last.manifest.of("dense")))
    restore_dense(state, read_tensors(last.path / dense.name, dense.written), str(last.path / dense.name))
    total = sum(file.bytes for checkpoint in chain for file in in_order(checkpoint.manifest.files)) or 1
    done = 0
    for checkpoint in chain:
        # The first fills empty tables, so their index has exactly its keys.  Later ones need an index of their own.
        duplicates = [
            DuplicateKeyCheck(rows.index if checkpoint is chain[0] else count_rows(checkpoint, number))
            for number, rows in enumerate(saved)
        ]
        for file in in_order(checkpoint.manifest.files):
            if has_rows_for(shard, file.worker, checkpoint.manifest.owners):
                _apply(shard, saved[file.group], checkpoint, file, duplicates[file.group])
            done += file.bytes
            on_progress(done / total)
    _check_counts(state.world, topology.replicas, saved, last)
    compare_replicas(state, f"after step {last.manifest.step} was read", "checkpoint")
    restore_eviction(state, last)
    _restore_worker(state, last)
    state.resume_at(last.manifest.step)


def has_rows_for(shard: Members, worker: int, workers: int) -> bool:
    """Whether `worker` of the `workers` that wrote a checkpoint may have owned keys that this worker owns now."""
    theirs, ours = share_of(worker, workers), share_of(shard.rank, shard.size)
    return max(theirs.start, ours.start) < min(theirs.stop, ours.stop)


def check_tables(saved: list[SavedRows], chain: list[Checkpoint]) -> None:
    """Raises CheckpointError unless the rows of the chain fit this model's tables."""
    for checkpoint in chain:
        theirs = checkpoint.manifest.groups
        ours = [rows.group for rows in saved]
        if len(theirs) != len(ours):
            raise CheckpointError(
                f"{checkpoint.path} has {len(theirs)} groups of tables and the model has {len(ours)}: tables of one "
                "group share dim, optimizer and eviction policy (tables.admit_after, ttl, max_rows); leave these "
                "unchanged, or start a new run and import the tables"
            )
        for a, b in zip(theirs, ours):
            for what in ("tables", "dim", "dtype", "state_width", "optimizer"):
                if getattr(a, what) != getattr(b, what):
                    raise CheckpointError(
                        f"{checkpoint.path}: {what} of {_name(a)} is {getattr(a, what)!r} in the checkpoint and "
                        f"{getattr(b, what)!r} in the model: change the model back, or start a new run and import "
                        "the tables"
                    )


def _apply(
    shard: ShardGroup, saved: SavedRows, checkpoint: Checkpoint, file: File, duplicates: DuplicateKeyCheck
) -> None:
    rows = read_rows(checkpoint, file)
    if checkpoint.manifest.owners != shard.size:
        mine = shard.owns(rows.tables, rows.keys)
        rows = Rows(rows.tables[mine], rows.keys[mine], rows.values[mine], rows.state[mine])
    if file.kind == "removed":
        saved.remove(rows.tables, rows.keys)
        return
    duplicates.add(rows, checkpoint, file)
    saved.put(rows)


def _check_counts(world: World, replicas: ReplicaGroup, saved: list[SavedRows], last: Checkpoint) -> None:
    """Raises CheckpointError unless the workers of the first group have as many rows as the manifest says."""
    counts = torch.tensor([len(rows) if replicas.counts else 0 for rows in saved], dtype=torch.int64)
    Exchange(world, "checkpoint").all_reduce(counts)
    for count, group in zip(counts.tolist(), last.manifest.groups):
        if count != group.rows:
            raise CheckpointError(
                f"{last.path}: {_name(group)} has {count:,} rows in its files and {group.rows:,} in its manifest; "
                f"{RECOVERY_HINT}"
            )


def restore_eviction(state: TrainState, last: Checkpoint) -> None:
    try:
        state.restore_eviction(last.manifest.life)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{last.path}: its eviction state cannot be read ({error}); {RECOVERY_HINT}") from None


def _restore_worker(state: TrainState, last: Checkpoint) -> None:
    world = state.world
    if last.manifest.workers != world.size:
        torch.manual_seed(RESHARD_SEED * (last.manifest.step + 1) + world.rank)
        return
    file = next(file for file in last.manifest.of("worker") if file.worker == world.rank)
    restore_worker(state, last.path / file.name, file.written)


def _name(group: Group) -> str:
    return f"table {group.tables[0]!r}" if len(group.tables) == 1 else f"tables {', '.join(group.tables[:3])}"

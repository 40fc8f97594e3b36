"""Restores a pipeline from a checkpoint, on any number of workers: everybody takes the rows that are now its own.

Owners are by ranges of hashes, so a worker reads the files of those workers alone whose ranges overlap with its own: of W that
have written and W' that read, W / W' + 1 or so.  Each file is read whole, its digest checked, before anything of it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nestpipe.checkpoint.dense import restore_dense
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.kept import Kept, kept_of
from nestpipe.checkpoint.manifest import File, Group
from nestpipe.checkpoint.row_files import NoKeyTwice, count_rows, in_order, read_rows
from nestpipe.checkpoint.tensors import OTHERWISE, read_tensors
from nestpipe.checkpoint.worker_state import restore_worker
from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.keys import owners_of, share_of
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.tables.snapshot import Rows

SEED_OF_OTHERS = 7_368_787
"""Random numbers of workers that had none in the checkpoint begin from this, the step and the rank."""


def restore(
    pipeline: TrainPipeline, chain: list[Checkpoint], tell: Callable[[float], None] = lambda done: None
) -> None:
    """Tables, dense state and random state as of the last of the chain; the next batch is the one after it.

    The pipeline is fresh; all workers call it together.  `tell` hears how much is done.
    """
    last = chain[-1]
    kept = kept_of(pipeline)
    check_tables(kept, chain)
    dense = next(iter(last.manifest.of("dense")))
    restore_dense(pipeline, read_tensors(last.path / dense.name, dense.written), str(last.path / dense.name))
    total = sum(file.bytes for checkpoint in chain for file in in_order(checkpoint.manifest.files)) or 1
    done = 0
    for checkpoint in chain:
        # The first fills empty tables: what it brings twice is there already.  Of others the keys must be remembered.
        once = [
            NoKeyTwice(one.index if checkpoint is chain[0] else count_rows(checkpoint, number))
            for number, one in enumerate(kept)
        ]
        for file in in_order(checkpoint.manifest.files):
            if has_rows_for(pipeline.world, file.worker, checkpoint.manifest.workers):
                _apply(pipeline.world, kept[file.group], checkpoint, file, once[file.group])
            done += file.bytes
            tell(done / total)
    _check_counts(pipeline.world, kept, last)
    restore_life(pipeline, last)
    _restore_own(pipeline, last)
    pipeline.resume_at(last.manifest.step)


def has_rows_for(world: World, worker: int, workers: int) -> bool:
    """Whether one of the `workers` that wrote a checkpoint may have owned what this one owns now."""
    theirs, ours = share_of(worker, workers), share_of(world.rank, world.size)
    return max(theirs.start, ours.start) < min(theirs.stop, ours.stop)


def check_tables(kept: list[Kept], chain: list[Checkpoint]) -> None:
    """CheckpointError unless rows of the chain fit this model's tables."""
    for checkpoint in chain:
        theirs = checkpoint.manifest.groups
        ours = [one.group for one in kept]
        if len(theirs) != len(ours):
            raise CheckpointError(
                f"{checkpoint.path} has {len(theirs)} groups of tables and the model {len(ours)}: a group is of one dim, "
                "optimizer and life (tables.admit_after, ttl, max_rows); leave these as they were, or start anew and import "
                "the tables"
            )
        for a, b in zip(theirs, ours):
            for what in ("tables", "dim", "dtype", "state_width", "optimizer"):
                if getattr(a, what) != getattr(b, what):
                    raise CheckpointError(
                        f"{checkpoint.path}: {what} of {_name(a)} is {getattr(a, what)!r} in the checkpoint and "
                        f"{getattr(b, what)!r} in the model: change the model back, or start anew and import the tables"
                    )


def _apply(world: World, kept: Kept, checkpoint: Checkpoint, file: File, once: NoKeyTwice) -> None:
    rows = read_rows(checkpoint, file)
    if checkpoint.manifest.workers != world.size:
        mine = owners_of(rows.tables, rows.keys, world.size) == world.rank
        rows = Rows(rows.tables[mine], rows.keys[mine], rows.values[mine], rows.state[mine])
    if file.kind == "removed":
        kept.remove(rows.tables, rows.keys)
        return
    once.add(rows, checkpoint, file)
    kept.put(rows)


def _check_counts(world: World, kept: list[Kept], last: Checkpoint) -> None:
    """All workers together have as many rows as the checkpoint says."""
    counts = torch.tensor([len(one) for one in kept], dtype=torch.int64)
    Exchange(world, "checkpoint").all_reduce(counts)
    for count, group in zip(counts.tolist(), last.manifest.groups):
        if count != group.rows:
            raise CheckpointError(
                f"{last.path}: {_name(group)} has {count:,} rows in its files and {group.rows:,} in its manifest; {OTHERWISE}"
            )


def restore_life(pipeline: TrainPipeline, last: Checkpoint) -> None:
    try:
        pipeline.restore_eviction(last.manifest.life)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{last.path}: life of its tables is not to be read ({error}); {OTHERWISE}") from None


def _restore_own(pipeline: TrainPipeline, last: Checkpoint) -> None:
    world = pipeline.world
    if last.manifest.workers != world.size:
        torch.manual_seed(SEED_OF_OTHERS * (last.manifest.step + 1) + world.rank)
        return
    file = next(file for file in last.manifest.of("worker") if file.worker == world.rank)
    restore_worker(pipeline, last.path / file.name, file.written)


def _name(group: Group) -> str:
    return f"table {group.tables[0]!r}" if len(group.tables) == 1 else f"tables {', '.join(group.tables[:3])}"

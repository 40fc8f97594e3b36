"""Verifies a checkpoint and its base: reads every byte and checks all that can be checked without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import File
from nestpipe.checkpoint.row_files import DuplicateKeyCheck, count_rows, in_order, read_rows
from nestpipe.checkpoint.tensors import read_tensors
from nestpipe.checkpoint.worker_state import read_worker
from nestpipe.keys import HashIndex


@dataclass(frozen=True)
class Checked:
    """What was read and found correct."""

    checkpoints: int
    files: int
    bytes: int
    rows: int
    """In the tables after the last checkpoint."""


def check_chain(chain: list[Checkpoint], on_progress: Callable[[float], None] = lambda done: None) -> Checked:
    """Raises CheckpointError, naming the file, if anything is wrong.  `on_progress` gets the fraction done.

    Checks digests, shapes, owners, duplicate keys within a checkpoint, and the row counts of every manifest.
    """
    total = sum(checkpoint.manifest.bytes for checkpoint in chain)
    files = done = 0
    for file in _checked_files(chain):
        files, done = files + 1, done + file.bytes
        on_progress(done / total)
    return Checked(len(chain), files, done, sum(group.rows for group in chain[-1].manifest.groups if not group.waiting))


def _checked_files(chain: list[Checkpoint]) -> Iterator[File]:
    """Checks the files of the chain one by one, and yields each."""
    for checkpoint in chain:
        for file in checkpoint.manifest.of("dense"):
            read_tensors(checkpoint.path / file.name, file.written)
            yield file
        for file in checkpoint.manifest.of("worker"):
            read_worker(checkpoint.path / file.name, file.written)
            yield file
    counts = [[0] * len(checkpoint.manifest.groups) for checkpoint in chain]
    for group in range(len(chain[-1].manifest.groups)):
        for worker in _workers_to_replay(chain):
            yield from _replay(chain, group, worker, counts)
    for checkpoint, found in zip(chain, counts):
        for rows, wanted in zip(found, checkpoint.manifest.groups):
            if rows != wanted.rows:
                raise CheckpointError(
                    f"{checkpoint.path}: the group of table {wanted.tables[0]!r} has {rows:,} rows in its files and "
                    f"{wanted.rows:,} in its manifest; {RECOVERY_HINT}"
                )


def _workers_to_replay(chain: list[Checkpoint]) -> list[int | None]:
    """Workers to replay one at a time, which saves memory.  [None]: all at once, as their number changed."""
    sizes = {checkpoint.manifest.owners for checkpoint in chain}
    return [None] if len(sizes) > 1 else list(range(sizes.pop()))


def _replay(chain: list[Checkpoint], group: int, worker: int | None, counts: list[list[int]]) -> Iterator[File]:
    """Applies the files of one group as a restore would.  Adds to `counts` the number of keys after each checkpoint."""
    live = HashIndex(1 + sum(count_rows(checkpoint, group) for checkpoint in chain))
    for checkpoint, found in zip(chain, counts):
        duplicates = DuplicateKeyCheck(live if checkpoint is chain[0] else count_rows(checkpoint, group))
        for file in in_order(checkpoint.manifest.files):
            if file.group != group or worker not in (None, file.worker):
                continue
            rows = read_rows(checkpoint, file)
            if file.kind == "removed":
                live.delete(rows.keys, rows.tables)
            else:
                duplicates.add(rows, checkpoint, file)
                live.insert(rows.keys, rows.tables)
            yield file
        found[group] += len(live)

"""Writes checkpoints in the background, on all workers, and commits each by one act.

`save` blocks training only to finish the last batch and to copy the dense model.  Rows are copied and written while
the next batches train.  Every worker writes its own rows into a shared directory.  Worker 0 commits once all files are
there.
"""

from __future__ import annotations

import errno
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.checkpoint.dense import clone_dense, named_dense
from nestpipe.checkpoint.errors import CheckpointError, NotWritten
from nestpipe.checkpoint.eviction_state import merge_eviction_states
from nestpipe.checkpoint.folder import Checkpoint, Folder
from nestpipe.checkpoint.manifest import MOST_BYTES, Base, File, Group, Manifest
from nestpipe.checkpoint.plain_file import Place, read_plain, remove_plain, write_plain
from nestpipe.checkpoint.saved_rows import saved_rows_of
from nestpipe.checkpoint.tensors import check_kinds, write_tensors
from nestpipe.checkpoint.train_state import TrainState
from nestpipe.checkpoint.worker_state import clone_worker
from nestpipe.comm.exchange import Exchange
from nestpipe.errors import NestPipeError
from nestpipe.files import FileError
from nestpipe.tables.snapshot import Snapshot

log = logging.getLogger("nestpipe.checkpoint")

SHARD_BYTES = 1 << 26
"""Size of the largest file of rows, about, and of the buffer for one.  Pages that are never used take no memory."""
PART_ROWS = 1 << 14
"""Number of rows copied at a time."""
REASON_BYTES = 512
"""Longest error message that a worker sends to the others."""
HEARTBEAT_SECONDS = 0.5
"""Interval in which workers that wait for a checkpoint check that the others are alive."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and its cost."""

    step: int
    full: bool
    bytes: int
    """Size over all workers."""
    seconds: float
    """Time in the background."""


@dataclass(frozen=True)
class _Job:
    """One checkpoint to write: everything that the background thread needs."""

    step: int
    base: list[Base]
    snapshots: list[Snapshot]
    dense: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    rows: list[int]
    eviction: dict[str, Any]
    data: dict[str, Any]
    """This worker's part of the data position."""
    about: dict[str, Any]
    """Manifest fields from the caller: trainer, metrics, recipe."""


class CheckpointWriter:
    """One per run and worker.  All workers call its methods together, between the same two batches."""

    def __init__(
        self,
        state: TrainState,
        folder: Folder,
        *,
        keep: int = 3,
        full_every: int = 10,
        best: str | None = None,
        loaded: list[Checkpoint] | None = None,
    ) -> None:
        """`loaded`: the chain that `state` was restored from.  The next checkpoint may be incremental on it."""
        self._state = state
        self.folder = folder
        self._keep, self._full_every, self._best = keep, full_every, best
        self._chain: list[Base] = [checkpoint.base for checkpoint in loaded or []]
        self.last_step = loaded[-1].manifest.step if loaded else None
        """Step of the last checkpoint that was saved or loaded."""
        self._exchange = Exchange(state.world, "checkpoint")
        self._alive = Exchange(state.world, "metrics")
        self._thread: threading.Thread | None = None
        self._saved: list[Saved] = []
        self._error: BaseException | None = None
        self._saved_rows = saved_rows_of(state)
        widest = max((_row_bytes(rows.group) for rows in self._saved_rows), default=0)
        self._memory = np.empty(max(SHARD_BYTES, widest), np.uint8)
        check_kinds(named_dense(state))
        if state.world.rank == 0:  # leftovers of a killed process would collide with the same step
            folder.tidy()
        token = torch.tensor([secrets.randbits(40) if state.world.rank == 0 else 0])
        self._alive.all_reduce(token)  # no worker writes before the folder is tidy
        self._token, self._attempts = int(token), 0
        for rows in self._saved_rows:
            rows.follow_changes()

    def save(self, data: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Starts a checkpoint of the current state.  Waits first if the previous one is still being written."""
        self.wait()
        self._state.settle()
        if hasattr(self._state, "refresh"):  # a pipeline: what follows must not depend on rows that are not saved
            self._state.refresh()
        full = not self._chain or len(self._chain) >= self._full_every
        job = _Job(
            step=self._state.next_batch,
            base=[] if full else list(self._chain),
            snapshots=[rows.snapshot(full) for rows in self._saved_rows],
            dense=clone_dense(self._state) if self._state.world.rank == 0 else {},
            own=clone_worker(self._state),
            rows=[len(rows) for rows in self._saved_rows],
            eviction=self._state.eviction_state(),
            data=data,
            about=dict(about),
        )
        self.last_step = job.step
        self._attempts += 1
        self._thread = threading.Thread(target=self._run, args=(job,), name="nestpipe-checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> list[Saved]:
        """Checkpoints committed since the last call.  Raises an error of the background thread."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> None:
        """Blocks until nothing is being written.  Raises an error of the background thread; PeerLost without a peer."""
        while self._thread is not None:
            self._thread.join(HEARTBEAT_SECONDS)
            writing = torch.tensor([int(self._thread.is_alive())])
            # A disk may take an hour.  A worker that died or stalls is still noticed by the usual deadline.
            self._alive.all_reduce(writing, dist.ReduceOp.MAX)
            if not int(writing):
                self._thread = None
        if self._error is not None:
            self.poll()

    def let_finish(self, seconds: float) -> None:
        """After a failure elsewhere: waits up to `seconds` for a checkpoint that is being written.  Raises nothing."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, job: _Job) -> None:
        """The background thread.  After an error the next checkpoint is a full one."""
        started = time.perf_counter()
        try:
            saved = self._write(job, started)
            self._saved.append(saved)
        except BaseException as error:
            self._chain = []
            self._error = error
        finally:
            for snapshot in job.snapshots:
                if not snapshot.over:
                    snapshot.abandon()

    def _write(self, job: _Job, started: float) -> Saved:
        world = self._state.world
        problem: BaseException | None = None
        self.folder.attempt = f"{self._token:010x}-{self._attempts}"
        directory = self.folder.writing(job.step)
        try:
            self.folder.start_writing(job.step)
            self._write_files(job, directory)
        except Exception as error:
            problem = error
        self._agree(problem, job.step)
        manifest = None
        if world.rank == 0:
            try:
                manifest = self._manifest(job, directory)
                self._chain = [*job.base, self.folder.commit(job.step, manifest)]
            except Exception as error:
                problem = error
        self._agree(problem, job.step)
        if world.rank:
            self._chain = [*job.base, Base("", "")]  # all workers need its length, to agree on the next full one
            return Saved(job.step, not job.base, 0, time.perf_counter() - started)
        assert manifest is not None
        try:
            self.folder.prune(self._keep, self._best)
        except (OSError, CheckpointError, FileError) as error:
            log.warning("old checkpoints were not removed (%s); trying again after the next one", error)
        saved = Saved(job.step, not job.base, manifest.bytes, time.perf_counter() - started)
        log.info("checkpoint of step %d: %.1f MB in %.1f s", saved.step, saved.bytes / 1e6, saved.seconds)
        return saved

    def _write_files(self, job: _Job, directory: Place) -> None:
        """Writes this worker's files, and its part of the manifest."""
        rank = self._state.world.rank
        files: list[File] = []
        for g, (saved, snapshot) in enumerate(zip(self._saved_rows, job.snapshots)):
            for number, rows in enumerate(snapshot.shards(self._memory, PART_ROWS)):
                tensors = {
                    "keys": rows.keys,
                    "tables": rows.tables,
                    "values": rows.values,
                    "state": rows.state[:, : saved.group.state_width],
                }
                written = write_tensors(directory / f"worker{rank}-group{g}-{number:05d}.safetensors", tensors)
                files.append(File(**asdict(written), kind="rows", worker=rank, group=g, rows=len(rows)))
            if count := len(snapshot.removed_keys):
                tensors = {"keys": snapshot.removed_keys, "tables": snapshot.removed_tables}
                written = write_tensors(directory / f"worker{rank}-group{g}-removed.safetensors", tensors)
                files.append(File(**asdict(written), kind="removed", worker=rank, group=g, rows=count))
        written = write_tensors(directory / f"worker{rank}.safetensors", job.own)
        files.append(File(**asdict(written), kind="worker", worker=rank))
        if rank == 0:
            written = write_tensors(directory / "dense.safetensors", job.dense)
            files.append(File(**asdict(written), kind="dense", worker=0))
        part = {"files": [asdict(file) for file in files], "rows": job.rows, "data": job.data, "life": job.eviction}
        write_plain(directory / _part(rank), json.dumps(part).encode())

    def _manifest(self, job: _Job, directory: Place) -> Manifest:
        """Merges the parts of all workers, and removes them."""
        world = self._state.world
        files: list[File] = []
        totals = [0] * len(job.rows)
        shared: dict[str, dict[str, Any]] = {}
        evictions: list[dict[str, Any]] = []
        for rank in range(world.size):
            path = directory / _part(rank)
            try:
                part = json.loads(read_plain(path, MOST_BYTES))
            except FileNotFoundError:
                raise CheckpointError(
                    f"rank 0 does not see {path} of rank {rank}: checkpoint.path must be a directory that all workers "
                    "share"
                ) from None
            files += [File(**file) for file in part["files"]]
            totals = [a + b for a, b in zip(totals, part["rows"])]
            for name, entries in part["data"].items():  # objects have entries of every worker
                if isinstance(entries, dict):
                    shared.setdefault(name, {}).update(entries)
            evictions.append(part["life"])
            remove_plain(path)
        groups = [replace(saved.group, rows=total) for saved, total in zip(self._saved_rows, totals)]
        return Manifest(
            job.step,
            world.size,
            files,
            groups,
            job.base,
            data={**job.data, **shared},
            life=merge_eviction_states(evictions),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            **job.about,
        )

    def _agree(self, problem: BaseException | None, step: int) -> None:
        """If any worker has a problem: removes what was written, raises the same NotWritten on all.  Collective."""
        world = self._state.world
        first = torch.tensor([world.size if problem is None else world.rank])
        self._exchange.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) == world.size:
            return
        message = torch.zeros(REASON_BYTES, dtype=torch.uint8)
        if problem is not None and int(first) == world.rank:
            text = _reason(problem).encode()[:REASON_BYTES]
            message[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self._exchange.all_reduce(message)
        reason = bytes(message.tolist()).rstrip(b"\0").decode(errors="ignore")
        if world.rank == 0:
            self.folder.discard(step)
        raise NotWritten(
            f"the checkpoint in {self.folder.path} was not written: rank {int(first)}: {reason}; "
            "earlier checkpoints are untouched"
        ) from problem


def _row_bytes(group: Group) -> int:
    """Size of a row with its key and its table."""
    return (group.dim + group.state_width) * np.dtype(group.dtype).itemsize + 10


def _reason(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{problem.strerror}: make room, or set checkpoint.path" if full else str(problem)
    text = " ".join(str(problem).split())
    return text if isinstance(problem, NestPipeError | OSError) else f"{type(problem).__name__} {text}".strip()


def _part(rank: int) -> str:
    return f"part-{rank}.json"

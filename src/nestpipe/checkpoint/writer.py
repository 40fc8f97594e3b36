"""Writes checkpoints of a pipeline in the background, on all workers, and commits each by one rename.

`save` stops training for as long as it takes to finish the last batch and to copy the dense model; rows are copied and written
while the next batches train.  Every worker writes its own rows into a directory that all of them see; worker 0 commits when all
have said that theirs are on disk.
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.checkpoint.dense import clone_dense, named
from nestpipe.checkpoint.errors import CheckpointError, NotWritten
from nestpipe.checkpoint.folder import Checkpoint, Folder
from nestpipe.checkpoint.kept import kept_of
from nestpipe.checkpoint.manifest import Base, File, Group, Manifest, seal
from nestpipe.checkpoint.tensors import check_kinds, write_tensors
from nestpipe.checkpoint.worker_state import clone_worker
from nestpipe.comm.exchange import Exchange
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.sparse.eviction_state import sum_over_workers as summed
from nestpipe.tables.snapshot import Snapshot

SHARD_BYTES = 1 << 26
"""Rows are written in files of at most about this size; the memory for one is kept, as far as it was ever used."""
PART_ROWS = 1 << 14
"""Rows copied at a time."""
WORDS_BYTES = 512
"""What a worker may say to the others of what went wrong."""
STILL_THERE_SECONDS = 0.5
"""Between two signs of life of workers that wait for a checkpoint."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is committed, and what it took."""

    step: int
    full: bool
    bytes: int
    """Of all workers."""
    seconds: float
    """In the background."""


@dataclass(frozen=True)
class _Job:
    step: int
    base: list[Base]
    cuts: list[Snapshot]
    dense: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    rows: list[int]
    life: dict[str, Any]
    """Of admission and eviction: this worker's counts, and what all have alike."""
    data: dict[str, Any]
    """This worker's part of the position in the data."""
    about: dict[str, Any]
    """Fields of the manifest that the caller fills: trainer, metrics, recipe."""


class CheckpointWriter:
    """One per run and worker.  Its methods are called by all workers alike, between the same two batches."""

    def __init__(
        self,
        pipeline: TrainPipeline,
        folder: Folder,
        *,
        keep: int = 3,
        full_every: int = 10,
        best: str | None = None,
        loaded: list[Checkpoint] | None = None,
    ) -> None:
        """`loaded`: the chain that the pipeline was restored from, on which the next checkpoint may stand."""
        self.pipeline = pipeline
        self.folder = folder
        self._keep, self._full_every, self._best = keep, full_every, best
        self._chain: list[Base] = [checkpoint.base for checkpoint in loaded or []]
        self.last_step = loaded[-1].manifest.step if loaded else None
        """Of the last checkpoint that was saved or loaded."""
        self._exchange = Exchange(pipeline.world, "checkpoint")
        self._alive = Exchange(pipeline.world, "metrics")
        self._thread: threading.Thread | None = None
        self._saved: list[Saved] = []
        self._error: BaseException | None = None
        self._kept = kept_of(pipeline)
        widest = max((_row_bytes(kept.group) for kept in self._kept), default=0)
        self._memory = np.empty(max(SHARD_BYTES, widest), np.uint8)
        check_kinds(named(pipeline))
        if pipeline.world.rank == 0:  # what a process that was killed has left would be in the way of the same step
            folder.tidy()
        self._alive.all_reduce(torch.zeros(1))  # nobody writes before that
        for kept in self._kept:
            kept.follow_changes()

    def save(self, data: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Begins a checkpoint of what is trained by now.  Waits for the one before, if that is still being written."""
        self.wait()
        self.pipeline.settle()
        full = not self._chain or len(self._chain) >= self._full_every
        job = _Job(
            step=self.pipeline.next_batch,
            base=[] if full else list(self._chain),
            cuts=[kept.cut(full) for kept in self._kept],
            dense=clone_dense(self.pipeline) if self.pipeline.world.rank == 0 else {},
            own=clone_worker(self.pipeline),
            rows=[len(kept) for kept in self._kept],
            life=self.pipeline.eviction_state(),
            data=data,
            about=dict(about),
        )
        self.last_step = job.step
        self._thread = threading.Thread(target=self._run, args=(job,), name="nestpipe-checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> list[Saved]:
        """What has been committed since it was last asked.  Raises what has gone wrong in the background."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> None:
        """Until nothing is being written.  Raises what has gone wrong; PeerLost if a worker gives no sign of life meanwhile."""
        while self._thread is not None:
            self._thread.join(STILL_THERE_SECONDS)
            writing = torch.tensor([int(self._thread.is_alive())])
            # A disk may take an hour.  A worker that has died or stalls is noticed as soon as in training.
            self._alive.all_reduce(writing, dist.ReduceOp.MAX)
            if not int(writing):
                self._thread = None
        if self._error is not None:
            self.poll()

    def let_finish(self, seconds: float) -> None:
        """After a failure elsewhere: what is being written gets a moment to be committed.  Asks nobody and raises nothing."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, job: _Job) -> None:
        """The background thread.  After an error the chain is given up: the next checkpoint is a full one."""
        started = time.perf_counter()
        try:
            saved = self._write(job, started)
            self._saved.append(saved)
        except BaseException as error:
            self._chain = []
            self._error = error
        finally:
            for cut in job.cuts:
                if not cut.over:
                    cut.abandon()

    def _write(self, job: _Job, started: float) -> Saved:
        world = self.pipeline.world
        problem: BaseException | None = None
        directory = self.folder.writing(job.step)
        try:
            self.folder.start_writing(job.step)
            self._write_mine(job, directory)
        except Exception as error:
            problem = error
        self._agree(problem, directory)
        manifest = None
        if world.rank == 0:
            try:
                manifest = self._manifest(job, directory)
                digest = seal(directory, manifest)
                path = self.folder.commit(job.step)
                self._chain = [*job.base, Base(path.name, digest)]
            except Exception as error:
                problem = error
        self._agree(problem, directory)
        if world.rank:
            self._chain = [*job.base, Base("", "")]  # its length decides alike everywhere when the next full one is due
            return Saved(job.step, not job.base, 0, time.perf_counter() - started)
        assert manifest is not None
        with suppress(OSError, CheckpointError):  # what could not be removed now is tried again after the next one
            self.folder.prune(self._keep, self._best)
        return Saved(job.step, not job.base, manifest.bytes, time.perf_counter() - started)

    def _write_mine(self, job: _Job, directory: Path) -> None:
        """This worker's files, and a part of the manifest that says what they are."""
        rank = self.pipeline.world.rank
        files: list[File] = []
        for g, (kept, cut) in enumerate(zip(self._kept, job.cuts)):
            for number, rows in enumerate(cut.shards(self._memory, PART_ROWS)):
                tensors = {
                    "keys": rows.keys,
                    "tables": rows.tables,
                    "values": rows.values,
                    "state": rows.state[:, : kept.group.state_width],
                }
                written = write_tensors(directory / f"worker{rank}-group{g}-{number:05d}.safetensors", tensors)
                files.append(File(**asdict(written), kind="rows", worker=rank, group=g, rows=len(rows)))
            if len(cut.removed_keys):
                tensors = {"keys": cut.removed_keys, "tables": cut.removed_tables}
                written = write_tensors(directory / f"worker{rank}-group{g}-removed.safetensors", tensors)
                files.append(File(**asdict(written), kind="removed", worker=rank, group=g, rows=len(cut.removed_keys)))
        written = write_tensors(directory / f"worker{rank}.safetensors", job.own)
        files.append(File(**asdict(written), kind="worker", worker=rank))
        if rank == 0:
            written = write_tensors(directory / "dense.safetensors", job.dense)
            files.append(File(**asdict(written), kind="dense", worker=0))
        part = {"files": [asdict(file) for file in files], "rows": job.rows, "data": job.data, "life": job.life}
        (directory / _part(rank)).write_text(json.dumps(part))

    def _manifest(self, job: _Job, directory: Path) -> Manifest:
        """All workers' parts as one; the parts go."""
        world = self.pipeline.world
        files: list[File] = []
        totals = [0] * len(job.rows)
        shared: dict[str, dict[str, Any]] = {}
        lives: list[dict[str, Any]] = []
        for rank in range(world.size):
            path = directory / _part(rank)
            try:
                part = json.loads(path.read_text())
            except FileNotFoundError:
                raise CheckpointError(
                    f"rank 0 does not see {path} of rank {rank}: checkpoint.path must be a directory that all workers share"
                ) from None
            files += [File(**file) for file in part["files"]]
            totals = [a + b for a, b in zip(totals, part["rows"])]
            for name, entries in part["data"].items():  # what is by name is of all workers together
                if isinstance(entries, dict):
                    shared.setdefault(name, {}).update(entries)
            lives.append(part["life"])
            path.unlink()
        groups = [replace(kept.group, rows=total) for kept, total in zip(self._kept, totals)]
        return Manifest(
            job.step,
            world.size,
            files,
            groups,
            job.base,
            data={**job.data, **shared},
            life=summed(lives),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            **job.about,
        )

    def _agree(self, problem: BaseException | None, directory: Path) -> None:
        """All workers ask together whether any has a problem.  If so, what was written goes, and all raise the same."""
        world = self.pipeline.world
        first = torch.tensor([world.size if problem is None else world.rank])
        self._exchange.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) == world.size:
            return
        words = torch.zeros(WORDS_BYTES, dtype=torch.uint8)
        if problem is not None and int(first) == world.rank:
            said = _in_words(problem).encode()[:WORDS_BYTES]
            words[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        self._exchange.all_reduce(words)
        reason = bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")
        if world.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise NotWritten(
            f"the checkpoint in {directory.parent} was not written: rank {int(first)}: {reason}; "
            "those before are untouched"
        ) from problem


def _row_bytes(group: Group) -> int:
    """Of a row with its key and its table."""
    return (group.dim + group.state_width) * np.dtype(group.dtype).itemsize + 10


def _in_words(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{problem.strerror}: make room, or set checkpoint.path" if full else str(problem)
    text = " ".join(str(problem).split())
    return text if isinstance(problem, CheckpointError | OSError) else f"{type(problem).__name__} {text}".strip()


def _part(rank: int) -> str:
    return f"part-{rank}.json"

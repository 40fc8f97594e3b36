"""Runs a function on W worker processes over gloo on loopback, and brings back what it returned on every rank.

A group of workers is started once per size and lives on: `run` gives it one job after another.  A job that fails, or outlives its
deadline, takes its group with it.  Workers come from a fork server in which torch and our kernels are already loaded, so that a
new group is there in a fraction of a second.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fork_server import Child
from nestpipe.comm.world import World

STARTUP = 170.0
"""Seconds that the first group may take: on a fresh machine numba compiles its kernels in that time."""
GRACE = 3.0
"""Seconds that the other workers get to report, once one has failed."""


@dataclass(frozen=True)
class Died:
    """What a worker left that ended without a word."""

    exit_code: int | None


class WorkerFailed(AssertionError):
    """A worker raised, died or was too slow; the message holds the tracebacks of all that reported one."""


def _serve(rank: int, size: int, meeting_point: str, timeout: float, file: int) -> None:
    """A worker's life: joins its group, then does jobs until the pipe closes."""
    pipe = Connection(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pipe
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = World.single()
    try:
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting_point}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
            world = World.join(timeout)
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = (True, function(world, *args))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # nothing to tidy up, and gloo's threads must not hold the process


class Group:
    """W living workers that share a World whose collectives give up after `timeout` seconds."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="nestpipe-workers-")
        self._pipes: list[Connection] = []
        self._processes = []
        where = str(Path(self._directory.name) / "store")
        for rank in range(size):
            ours, theirs = Pipe()
            self._processes.append(Child(_serve, (rank, size, where, timeout), [theirs.fileno()]))
            theirs.close()
            self._pipes.append(ours)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], deadline: float) -> list[Any]:
        """What function(world, *args) returned on each rank; `Died` where the worker ended; WorkerFailed if one raised."""
        job = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        until = time.monotonic() + deadline
        while len(results) + len(failures) < self.size:
            pending = [p for r, p in enumerate(self._pipes) if r not in results and r not in failures]
            ready = wait(pending, max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    good, answer = True, Died(self._processes[rank].join(GRACE))
                if good:
                    results[rank] = answer
                else:
                    failures[rank] = answer
                    until = min(until, time.monotonic() + GRACE)
        if len(results) < self.size:
            silent = [r for r in range(self.size) if r not in results and r not in failures]
            report = "\n".join(f"rank {rank} of {self.size} raised:\n{text}" for rank, text in failures.items())
            raise WorkerFailed(report or f"ranks {silent} of {self.size} were not done after {deadline:g} s")
        return [results[rank] for rank in range(self.size)]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()


_living: dict[int, Group] = {}


def _hello(world: World) -> int:
    return world.rank


def run(workers: int, function: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Any]:
    """function(world, *args) on every rank of a living group of `workers`: the results by rank.

    `function` is one of a test module's top level; what it takes and returns can be pickled.
    """
    if workers not in _living:
        group = Group(workers, timeout=30.0)
        group.call(_hello, (), STARTUP)
        _living[workers] = group
    try:
        results = _living[workers].call(function, args, deadline)
    except BaseException:
        _living.pop(workers).end()
        raise
    if any(isinstance(result, Died) for result in results):
        _living.pop(workers).end()
        raise WorkerFailed(f"workers ended in the middle of a job: {results}")
    return results


def run_once(
    workers: int, function: Callable[..., Any], *args: Any, timeout: float, deadline: float = 30.0
) -> list[Any]:
    """As `run`, on a group of its own that gives up after `timeout` seconds: for jobs in which workers die or stall."""
    group = Group(workers, timeout)
    try:
        group.call(_hello, (), STARTUP)
        return group.call(function, args, deadline)
    finally:
        group.end()

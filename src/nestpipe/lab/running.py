"""Runs the rungs of a ladder side by side, in turns of a few steps.

A rung is a worker program under torchrun, ours or a peer's.  It reads a JSON config, trains when its turn comes
(bench/peers/turns.py) and writes a JSON report.  All rungs are alive at once, so that a noisy minute of the machine
affects all of them; between its turns a rung is stopped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nestpipe.lab.disks import Disks, remove_abandoned_disks
from nestpipe.lab.ladder import REPOSITORY, BenchError, Ladder, Rung
from nestpipe.lab.network import Network, remove_abandoned
from nestpipe.lab.settings import PEERS, WorkerOptions
from nestpipe.lab.summary import summarise
from nestpipe.lab.turn_taking import TurnTaker, end_with_parent
from nestpipe.launch.signals import signals_held

PEER_SCRIPTS = {"torchrec": PEERS / "torchrec_dlrm.py"}
PEER_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
FIRST_PORT = 29_600
"""Of the first rung, if its workers have hosts of their own."""
START_SHARE = 5
"""Turns that take as long as starting a rung, for the progress bar."""


def run_ladder(
    ladder: Ladder,
    peers: list[str],
    rounds: int,
    tell: Callable[[float, str], None],
    link: str | None = None,
    disk: str | None = None,
) -> dict[str, Any]:
    """Starts all rungs, then lets each train once per round.  Returns their step times, spread and ratios.

    `link`: the rate of links in a lab with one worker per host; None: all workers on loopback.  `disk`: the rates of
    each host's disk; None: as fast as the machine's.
    """
    rungs = [rung for rung in ladder.rungs if rung.peer is None or rung.peer in peers]
    for peer in peers:
        if peer not in PEER_SCRIPTS:
            raise BenchError(f"no peer {peer!r}; there are {', '.join(PEER_SCRIPTS)}")
        if not PEER_PYTHON.is_file():
            raise BenchError(f"{peer} is not installed: run `make bench-peers` first")
    total = len(rungs) * (START_SHARE + rounds)
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="nestpipe-bench-")))
        network = disks = None
        if link is not None:
            remove_abandoned()
            network = running.enter_context(Network(ladder.workers, link))
        if disk is not None:
            remove_abandoned_disks()
            directory = str(ladder.workload.get("disk_path", WorkerOptions.disk_path))
            disks = running.enter_context(Disks(1 if network is None else ladder.workers, disk, directory))
        started: list[RunningRung] = []
        for rung in rungs:
            tell(len(started) * START_SHARE / total, f"starting {rung.name}")
            with signals_held():  # until somebody would end what was started
                started.append(RunningRung(ladder, rung, rounds, folder / str(len(started)), network, disks))
                running.callback(started[-1].stop)
            started[-1].train(0)
        if disks is not None:
            disks.shape()
        for turn in range(1, rounds + 1):
            for number, one in enumerate(started):
                done = START_SHARE * len(rungs) + (turn - 1) * len(rungs) + number
                tell(done / total, f"round {turn}/{rounds}: {one.rung.name}")
                one.train(turn)
        reports = [one.report() for one in started]
        for one, report in zip(started, reports):
            report["wire_bytes"] = one.wire_bytes
    return {**summarise(ladder, rungs, reports, rounds), "link": link, "disk": disk}


class RunningRung(TurnTaker):
    """The workers of one rung."""

    def __init__(
        self,
        ladder: Ladder,
        rung: Rung,
        rounds: int,
        folder: Path,
        network: Network | None = None,
        disks: Disks | None = None,
    ) -> None:
        super().__init__(f"rung {rung.name!r}", folder, ladder.workers)
        self.rung, self._network, self._disks = rung, network, disks
        self.wire_bytes: list[int] = []
        """Bytes that the busiest host sent in each turn, headers included."""
        config = folder / "config.json"
        config.write_text(json.dumps({**ladder.workload, **rung.set, "turns": rounds}))
        python, program = (sys.executable, ["-m", ladder.worker])
        if rung.peer is not None:
            python, program = str(PEER_PYTHON), [str(PEER_SCRIPTS[rung.peer])]
        program = [*program, "--config", str(config), "--out", str(self._out)]
        launcher = [python, "-m", "torch.distributed.run"]
        if network is None:
            command = [*launcher, "--nproc-per-node", str(ladder.workers), "--standalone", *program]
            self._processes = [self._start(command, "lo", 0)]
            return
        port = str(FIRST_PORT + int(folder.name))
        launcher += ["--nnodes", str(ladder.workers), "--nproc-per-node", "1"]
        launcher += ["--master-addr", network.hosts[0].address, "--master-port", port]
        self._processes = [
            self._start(host.command([*launcher, "--node-rank", str(rank), *program]), host.interface, rank, cores)
            for rank, (host, cores) in enumerate(zip(network.hosts, cores_of_hosts(ladder.workers)))
        ]

    def _start(
        self, command: list[str], interface: str, host: int, cores: set[int] | None = None
    ) -> subprocess.Popen[bytes]:
        """Pins the command and its children to `cores` (None: any) and to the disk of a host."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        return subprocess.Popen(
            command,
            env=environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=functools.partial(_prepare_child, cores, self._disks, host) if sys.platform == "linux" else None,
        )

    def train(self, turn: int) -> None:
        """Takes one turn; returns when all workers have finished it."""
        before = self._network.bytes_sent() if self._network else []
        super().train(turn)
        if self._network and turn:
            sent = (after - already for after, already in zip(self._network.bytes_sent(), before))
            self.wire_bytes.append(max(sent))


def cores_of_hosts(hosts: int) -> list[set[int] | None]:
    """An equal part of this machine's cores for each host; None for all if there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    each = len(mine) // hosts
    if not each:
        return [None] * hosts
    return [set(mine[host * each : (host + 1) * each]) for host in range(hosts)]


def _prepare_child(cores: set[int] | None, disks: Disks | None, host: int) -> None:
    """Runs in the child.  It must end with its ladder, or it would wait forever for workers that are stopped."""
    end_with_parent()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if disks is not None:
        disks.join(host)

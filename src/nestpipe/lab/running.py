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
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nestpipe.lab.disks import Disks, remove_abandoned_disks
from nestpipe.lab.ladder import OUR_WORKER, REPOSITORY, BenchError, Ladder, Rung
from nestpipe.lab.layout import Layout
from nestpipe.lab.network import Network, remove_abandoned
from nestpipe.lab.settings import PEERS, WorkerOptions, read_settings
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
    inside: str | None = None,
) -> dict[str, Any]:
    """Starts all rungs, then lets each train once per round.  Returns their step times, spread and ratios.

    `link`: the rate of the hosts' links; None: all workers on loopback.  `disk`: the rates of each host's disk; None: as
    fast as the machine's.  `inside`: the rate between workers of a host, where there is a link; None: unshaped.
    """
    layout = ladder.layout(link)
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
            network = running.enter_context(Network(layout.hosts, link, inside=inside))
        if disk is not None:
            remove_abandoned_disks()
            directory = str(ladder.workload.get("disk_path", WorkerOptions.disk_path))
            disks = running.enter_context(Disks(layout.hosts, disk, directory))
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
            report["wire_bytes"], report["between_bytes"] = one.wire_bytes, one.between_bytes
    if ladder.hosts is not None and layout.hosts > 1:
        tell(1.0, "counting what must travel between hosts")
        for rung, report in zip(rungs, reports):
            report["counted_bytes"] = _counted(ladder, rung, layout)
    places = {"hosts": layout.hosts, "workers_per_host": layout.per_host}
    return {**summarise(ladder, rungs, reports, rounds), **places, "link": link, "inside": inside, "disk": disk}


def _counted(ladder: Ladder, rung: Rung, layout: Layout) -> dict[str, float] | None:
    """Bytes between hosts by the keys alone, by what they are; None for rungs that cannot be counted."""
    if rung.peer is not None or ladder.worker != OUR_WORKER:
        return None
    from nestpipe.lab.counting import count_rung  # needs torch, which the ladder itself does not

    counted = count_rung(read_settings({**ladder.workload, **rung.set}), layout)
    return None if counted is None else {**vars(counted), "total": counted.total}


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
        self.between_bytes: list[int] = []
        """The same of all hosts together."""
        config = folder / "config.json"
        config.write_text(json.dumps({**ladder.workload, **rung.set, "turns": rounds}))
        python, program = (sys.executable, ["-m", ladder.worker])
        if rung.peer is not None:
            python, program = str(PEER_PYTHON), [str(PEER_SCRIPTS[rung.peer])]
        program = [*program, "--config", str(config), "--out", str(self._out)]
        launcher = [python, "-m", "torch.distributed.run"]
        layout = ladder.layout(None)
        if network is not None:
            layout = Layout(len(network.hosts), ladder.workers // len(network.hosts))
        launcher += ["--nproc-per-node", str(layout.per_host)]
        if layout.hosts == 1 and network is None:
            self._processes = [self._start([*launcher, "--standalone", *program], "lo", 0)]
            return
        address, port = "127.0.0.1", FIRST_PORT + int(folder.name)
        if network is not None:
            address = network.hosts[0].address
        else:
            port = _free_port()
        launcher += ["--nnodes", str(layout.hosts), "--master-addr", address, "--master-port", str(port)]
        for host, cores in enumerate(cores_of_hosts(layout.hosts)):
            command, interface = [*launcher, "--node-rank", str(host), *program], "lo"
            if network is not None:
                command, interface = network.hosts[host].command(command), network.hosts[host].interface
            self._processes.append(self._start(command, interface, host, cores))

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
            sent = [after - already for after, already in zip(self._network.bytes_sent(), before)]
            self.wire_bytes.append(max(sent))
            self.between_bytes.append(sum(sent))


def _free_port() -> int:
    """On loopback, where other programs have ports, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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

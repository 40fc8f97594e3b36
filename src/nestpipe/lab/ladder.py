"""Ladders: rungs of one workload run side by side, in turns of a few steps, and compared by their slowest worker.

A rung is a worker program under torchrun, ours or a peer's, that reads a JSON config, trains when its turn comes
(bench/peers/turns.py) and writes a JSON report.  All rungs are alive at once, so that a noisy minute of the machine hits all of
them alike; those whose turn it is not are stopped.  Ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.lab.disks import Disks, remove_abandoned_disks
from nestpipe.lab.network import Network, remove_abandoned
from nestpipe.schedule.parts import divide
from nestpipe.train.recipe import build

REPOSITORY = Path(__file__).parents[3]
LADDERS = REPOSITORY / "bench"
PEER_SCRIPTS = {"torchrec": LADDERS / "peers" / "torchrec_dlrm.py"}
PEER_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
TURN_SECONDS = 300.0
"""A rung whose turn takes longer is given up."""
STOP_SECONDS = 10.0
FIRST_PORT = 29_600
"""Of the first rung's workers, on hosts of their own."""
_LIBC = ctypes.CDLL(None)
START_SHARE = 5
"""Starting a rung takes as long as so many turns, for the estimate."""


@dataclass(frozen=True)
class Rung:
    name: str
    set: dict[str, Any] = field(default_factory=dict)
    """What this rung sets beside the workload."""
    peer: str | None = None
    """Whose program runs it; None: ours."""


@dataclass(frozen=True)
class Hides:
    """How much of what one rung exposes of some stages another one hides.

    Told twice: by the timelines, and by the step times, each compared with a rung that has nothing to hide.  The latter also
    counts what the hidden work takes away from the compute that it hides behind.
    """

    stages: list[str]
    exposed: str
    hidden: str
    without: list[str]
    """The same two rungs with nothing to hide."""


@dataclass(frozen=True)
class Mix:
    """How a rung's step should be divided, in percent: a workload made to resemble one elsewhere."""

    rung: str
    lookup: float
    all2all: float
    compute: float
    """All that is neither of the others."""


MIX_POINTS = 5.0
"""How far a measured share may be from the one wanted."""


@dataclass(frozen=True)
class Ladder:
    title: str
    worker: str
    """The module that runs our rungs."""
    rungs: list[Rung]
    workload: dict[str, Any] = field(default_factory=dict)
    workers: int = 2
    rounds: int = 12
    against: list[str] = field(default_factory=list)
    """Rungs that all others are compared with."""
    limit: list[str] = field(default_factory=list)
    """Rungs that do a part of a step's work each: in every round the slowest of them is what no schedule can beat."""
    hides: list[Hides] = field(default_factory=list)
    mix: Mix | None = None
    whole_turns: bool = False
    """Rungs are compared by all the time of their turns, for what comes once in a turn, and not by their median steps."""
    link: str | None = None
    """Of every worker's host; None: all on loopback."""
    disk: str | None = None
    """Rates of every host's disk, such as "read 20000/s, write 20mb/s"; None: as fast as the machine's."""

    def only(self, names: list[str]) -> Ladder:
        """With these rungs alone (none named: all of them), and of the comparisons those that they can answer."""
        there = [rung.name for rung in self.rungs]
        for name in names:
            if name not in there:
                raise BenchError(f"no rung {name!r} in this ladder; it has {', '.join(map(repr, there))}")
        if not names:
            return self
        limit = self.limit if set(self.limit) <= set(names) else []
        hides = [h for h in self.hides if {h.exposed, h.hidden, *h.without} <= set(names)]
        mix = self.mix if self.mix and self.mix.rung in names else None
        rungs = [rung for rung in self.rungs if rung.name in names]
        return replace(self, rungs=rungs, limit=limit, hides=hides, mix=mix)


class BenchError(RuntimeError):
    """A ladder cannot be run, or a rung failed; the message is one line."""


def ladders() -> list[str]:
    return sorted(path.stem for path in LADDERS.glob("*.toml"))


def load_ladder(name: str) -> Ladder:
    path = LADDERS / f"{name}.toml"
    if not path.is_file():
        there = ", ".join(ladders()) or f"none in {LADDERS}: run it from a checkout of the repository"
        raise BenchError(f"no ladder {name!r}; there are {there}")
    values = tomllib.loads(path.read_text())
    rungs = [Rung(r["name"], r.get("set", {}), r.get("peer")) for r in values.pop("rungs")]
    workload = values.pop("workload", {})
    hides = [Hides(**h) for h in values.pop("hides", [])]
    mix = build(Mix, values.pop("mix"), "mix") if "mix" in values else None
    return Ladder(rungs=rungs, workload=workload, hides=hides, mix=mix, **vars(build(_Plain, values, name)))


@dataclass(frozen=True)
class _Plain:
    title: str
    worker: str
    workers: int = 2
    link: str | None = None
    disk: str | None = None
    rounds: int = 12
    against: list[str] = field(default_factory=list)
    limit: list[str] = field(default_factory=list)
    whole_turns: bool = False


def run_ladder(
    ladder: Ladder,
    peers: list[str],
    rounds: int,
    tell: Callable[[float, str], None],
    link: str | None = None,
    disk: str | None = None,
) -> dict[str, Any]:
    """Starts all rungs, then lets each train once in every round.  Returns per rung the step times, their spread, and ratios.

    `link`: one worker per host in a lab whose links have this rate; None: all on loopback.  `disk`: the rates of each host's
    disk; None: as fast as the machine's.
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
            directory = ladder.workload.get("disk_path", tempfile.gettempdir())
            disks = running.enter_context(Disks(1 if network is None else ladder.workers, disk, directory))
        started: list[RunningRung] = []
        for rung in rungs:
            tell(len(started) * START_SHARE / total, f"starting {rung.name}")
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


class RunningRung:
    """The workers of one rung, alive until `stop`.  They train when told to and are stopped by signal in between."""

    def __init__(
        self,
        ladder: Ladder,
        rung: Rung,
        rounds: int,
        folder: Path,
        network: Network | None = None,
        disks: Disks | None = None,
    ) -> None:
        self.rung, self.folder, self.workers, self._network, self._disks = rung, folder, ladder.workers, network, disks
        self.wire_bytes: list[int] = []
        """Per turn: what the busiest host sent, headers and all."""
        folder.mkdir()
        config, self._out = folder / "config.json", folder / "out.json"
        config.write_text(json.dumps({**ladder.workload, **rung.set, "turns": rounds}))
        python, program = (sys.executable, ["-m", ladder.worker])
        if rung.peer is not None:
            python, program = str(PEER_PYTHON), [str(PEER_SCRIPTS[rung.peer])]
        program = [*program, "--config", str(config), "--out", str(self._out)]
        self._log = (folder / "log").open("w+")
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
        """On `cores` alone (None: wherever there is room) and with the disk of a host, and so is all that the command starts."""
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
        """One turn; returns when all workers are done with it."""
        before = self._network.bytes_sent() if self._network else []
        (
            self.folder / f"turn-{turn}"
        ).touch()  # first: who wakes after a long sleep and finds none believes the ladder gone
        self._signal(signal.SIGCONT)
        self._wait(lambda: all((self.folder / f"done-{turn}-{rank}").exists() for rank in range(self.workers)))
        if self._network and turn:
            sent = (after - already for after, already in zip(self._network.bytes_sent(), before))
            self.wire_bytes.append(max(sent))
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError, ValueError):  # gone, or not written yet
                os.kill(int(path.read_text()), number)

    def report(self) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        self._wait(lambda: all(process.poll() is not None for process in self._processes))
        if any(process.returncode for process in self._processes) or not self._out.is_file():
            raise self._failed()
        report: dict[str, Any] = json.loads(self._out.read_text())
        return report

    def stop(self) -> None:
        """Ends what still runs, workers and launcher."""
        running = [process for process in self._processes if process.poll() is None]
        if running:
            self._signal(signal.SIGCONT)
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TURN_SECONDS
        while not until():
            if any(process.poll() for process in self._processes):
                raise self._failed()
            if time.monotonic() > deadline:
                raise BenchError(f"rung {self.rung.name!r} did not end its turn within {TURN_SECONDS:g} s")
            time.sleep(0.01)

    def _failed(self) -> BenchError:
        self._log.seek(0)
        code = next((process.returncode for process in self._processes if process.returncode), 0)
        log = self._log.read()
        with tempfile.NamedTemporaryFile("w", prefix="nestpipe-bench-", suffix=".log", delete=False) as kept:
            kept.write(log)
        return BenchError(
            f"rung {self.rung.name!r} failed with exit code {code}: {cause(log)} (all it said: {kept.name})"
        )


def cause(log: str) -> str:
    """The line of a failed launch that says most: a worker's own error, what ended a worker, or the last word."""
    lines = [line.strip() for line in log.splitlines() if _WORD.search(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    lost = [line for line in errors if "PeerLost" in line]  # somebody else's fault
    ends = [line for line in lines if _END.search(line)]
    return ([e for e in errors if e not in lost] or ends or lost or lines[-1:] or ["no word"])[0]


_WORD = re.compile(r"\w")
_ERROR = re.compile(r"(\[rank\d+\]: ?)?(?!.*(ChildFailedError|Warning\b))([a-z_]\w*\.)*[A-Z]\w*(?:[a-z]\w*:\s|Error$)")
"""As Python ends a traceback: a class, which has capital and small letters, and what it says."""
_END = re.compile(r"^what\(\):|: error: |exitcode\s*: -\d+|Signal \d+")


def cores_of_hosts(hosts: int) -> list[set[int] | None]:
    """Hosts do not share cores: each has its part of this machine's, where there is one for each."""
    mine = sorted(os.sched_getaffinity(0))
    each = len(mine) // hosts
    if not each:
        return [None] * hosts
    return [set(mine[host * each : (host + 1) * each]) for host in range(hosts)]


def _prepare_child(cores: set[int] | None, disks: Disks | None, host: int) -> None:
    """A launcher whose ladder is killed must not stay, waiting for workers that nobody will wake."""
    _LIBC.prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if disks is not None:
        disks.join(host)


def summarise(ladder: Ladder, rungs: list[Rung], reports: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    summaries = [_summary(rung, report) for rung, report in zip(rungs, reports)]
    compared = "mean_ms_all" if ladder.whole_turns else "step_ms_all"
    by_name = {summary["name"]: summary[compared] for summary in summaries}
    for summary in summaries:
        summary["ratios"] = {
            name: _spread([theirs / ours for theirs, ours in zip(by_name[name], summary[compared])])
            for name in ladder.against
            if name in by_name
        }
    limits = [max(ms) for ms in zip(*(by_name[name] for name in ladder.limit if name in by_name))]
    for summary in summaries if limits else []:
        if summary["peer"] is None:
            summary["of_limit"] = _spread([ms / limit for ms, limit in zip(summary[compared], limits)])
    hidden = [_hidden(hides, summaries) for hides in ladder.hides]
    result = {"title": ladder.title, "workers": ladder.workers, "rounds": rounds, "rungs": summaries, "hidden": hidden}
    if limits:
        result["limit"] = {"rungs": ladder.limit, "ms": _spread(limits)}
    if ladder.mix is not None:
        others = {s["name"]: s[compared] for s in summaries if s["name"] not in (ladder.mix.rung, *ladder.limit)}
        reached = {
            name: _spread([theirs / ours for theirs, ours in zip(by_name[ladder.mix.rung], times)])
            for name, times in others.items()
        }
        result["mix"] = {**_mixed(ladder.mix, summaries), "reached": reached}
    return result


def _mixed(mix: Mix, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The shares of the rung's step, and how much faster it could be at most: if nothing but its compute were left."""
    parts = next(summary for summary in summaries if summary["name"] == mix.rung)["parts"]
    whole = sum(parts.values())
    found = {part: 100 * parts[part] / whole for part in ("lookup", "all2all")}
    found["compute"] = 100 - sum(found.values())
    holds = all(abs(found[part] - getattr(mix, part)) <= MIX_POINTS for part in found)
    return {"wanted": asdict(mix), "found": found, "holds": holds, "ideal": 100 / found["compute"]}


def _parts(ranks: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """What a step is spent on, as a mean over the workers.  With the slowest worker's time of every stage, a late lookup would
    count twice: there, and where the others waited for it.
    """
    divided = [divide({stage: kinds["exposed_ms"] for stage, kinds in rank.items()}) for rank in ranks]
    return {part: statistics.fmean(rank[part] for rank in divided) for part in divided[0]}


def _hidden(hides: Hides, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    rungs = {summary["name"]: summary for summary in summaries}
    exposed_ms, left_ms = (
        sum(rungs[name]["stages"].get(stage, {}).get("exposed_ms", 0.0) for stage in hides.stages)
        for name in (hides.exposed, hides.hidden)
    )
    slower_ms, still_slower_ms = (
        float(np.median(np.subtract(rungs[name]["step_ms_all"], rungs[without]["step_ms_all"])))
        for name, without in zip((hides.exposed, hides.hidden), hides.without)
    )
    return {
        **asdict(hides),
        "exposed_ms": exposed_ms,
        "still_exposed_ms": left_ms,
        "hidden_share": 1 - left_ms / max(exposed_ms, 1e-9),
        "slower_ms": slower_ms,
        "still_slower_ms": still_slower_ms,
        "hidden_share_of_step": 1 - still_slower_ms / max(slower_ms, 1e-9),
    }


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def _summary(rung: Rung, report: dict[str, Any]) -> dict[str, Any]:
    """Of the slowest worker, per turn: the median step, which a stall of the machine does not move, and the mean."""
    config = report["config"]
    steps = config["steps"]
    step_ms = [1e3 * max(statistics.median(rank) for rank in turn) for turn in zip(*report["step_s_by_rank"])]
    mean_ms = [1e3 * max(turn) / steps for turn in zip(*report["window_s_by_rank"])]
    cpu_ms = [1e3 * max(turn) / steps for turn in zip(*report["cpu_s_by_rank"])]
    middle = statistics.median(step_ms)
    summary = {
        "name": rung.name,
        "peer": rung.peer,
        "step_ms": middle,
        "step_ms_all": step_ms,
        "mean_ms_all": mean_ms,
        "cpu_ms": statistics.median(cpu_ms),
        "samples_per_s": 1e3 * report["workers"] * config["batch"] / statistics.median(mean_ms),
        "first_losses": report["first_losses"],
    }
    if report.get("wire_bytes"):
        summary["wire_bytes"] = statistics.median(report["wire_bytes"]) / (steps + 1)  # one step of a turn is not timed
    if "stages_by_rank" in report:
        ranks = report["stages_by_rank"]
        summary["stages"] = {
            stage: {kind: max(rank.get(stage, {}).get(kind, 0.0) for rank in ranks) for kind in kinds}
            for stage, kinds in ranks[0].items()
        }
        summary["parts"] = _parts(ranks)
        summary["bytes_sent"] = max(report["bytes_sent_by_rank"])
        summary["disk_rows"] = report.get("disk_rows", {})
        summary["micro_batches_chosen"] = report.get("micro_batches_chosen", [])
        summary["buckets"] = report.get("buckets", 1)
    return summary

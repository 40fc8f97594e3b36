"""Hosts with several workers: who is where, what shapes their links, and that nothing of them is left."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forks import Fork
from nestpipe.cli.main import main
from nestpipe.lab.ladder import Ladder, Rung, load_ladder
from nestpipe.lab.layout import Layout
from nestpipe.lab.network import Host, LabError, Network, known
from nestpipe.lab.running import RunningRung, run_ladder
from nestpipe.lab.summary import summarise

pytestmark = pytest.mark.usefixtures("alone_in_the_lab")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="network namespaces need root and iproute2",
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def of_hosts(**places: Any) -> Ladder:
    return Ladder("t", "lab_worker", [Rung("one", {"name": "one", "step_s": 0.01})], **places)


def test_who_is_where() -> None:
    """Promise: hosts of a ladder are what it says, and without them one for each worker that has a link."""
    assert of_hosts(workers=3).layout("500mbit") == Layout(3, 1)
    assert of_hosts(workers=3).layout(None) == Layout(1, 3)
    both = of_hosts(hosts=2, workers_per_host=3)
    assert both.workers == 6 and both.layout(None) == both.layout("500mbit") == Layout(2, 3)
    assert [Layout(2, 3).host_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    for wrong in ({"hosts": 0}, {"workers": 0}, {"hosts": 2, "workers_per_host": 0}, {"workers_per_host": 2}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            of_hosts(**wrong)


@pytest.mark.parametrize("linked", [True, False])
def test_a_launch_has_a_node_for_every_host(linked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Promise: torchrun learns hosts and workers of each, so that it sets LOCAL_WORLD_SIZE and consecutive ranks."""
    started: list[tuple[list[str], str, int]] = []

    def start(self: RunningRung, command: list[str], interface: str, host: int, cores: object = None) -> Any:
        started.append((command, interface, host))

    monkeypatch.setattr(RunningRung, "_start", start)
    plan = of_hosts(hosts=2, workers_per_host=2)
    RunningRung(plan, plan.rungs[0], 1, tmp_path / "0", Network(2, "500mbit", name="nptest") if linked else None)
    for number, (command, interface, host) in enumerate(started):
        flags = dict(itertools.pairwise(command))
        assert host == number and flags["--node-rank"] == str(number)
        assert flags["--nnodes"] == flags["--nproc-per-node"] == "2"
        assert (command[:4] == ["ip", "netns", "exec", f"nptest-{number}"]) is linked
        assert interface == (f"nptest-e{number}" if linked else "lo")
    assert len(started) == 2


@pytest.mark.slow
def test_hosts_without_a_link_train_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: without root, too, workers know how many are on their host."""

    def start(self: RunningRung, command: list[str], interface: str, host: int, cores: object = None) -> Fork:
        log = self.folder / f"log-{host}"
        return Fork(command[2], command[3:], self.folder, log, log, {**os.environ, "GLOO_SOCKET_IFNAME": interface})

    monkeypatch.setattr(RunningRung, "_start", start)
    result = run_ladder(of_hosts(hosts=2, workers_per_host=2, against=["one"]), [], 1, lambda done, what: None)
    assert (result["workers"], result["hosts"], result["workers_per_host"]) == (4, 2, 2)
    assert result["rungs"][0]["step_ms"] == pytest.approx(40.0)  # of the last of four workers
    assert result["rungs"][0]["between_hosts"]["wire"] is None


def report(**more: Any) -> dict[str, Any]:
    flat = [[0.1, 0.1]] * 4
    times: dict[str, Any] = {"step_s_by_rank": [[[s] for s in rank] for rank in flat], "window_s_by_rank": flat}
    about = {"workers": 4, "config": {"steps": 1, "batch": 10}, "cpu_s_by_rank": flat, "first_losses": []}
    return {**about, **times, **more}


def test_bytes_between_hosts_are_those_of_a_step() -> None:
    """Promise: a turn's bytes at the links are of all its steps, timed or not; workers tell theirs of one step."""
    plan = of_hosts(hosts=2, workers_per_host=2)
    told = {
        "wire_bytes": [500, 700],
        "between_bytes": [1000, 1200],
        "bytes_between_by_rank": [100.0, 150.0, 200.0, 50.0],
    }
    counted = {"keys": 100.0, "rows": 400.0, "total": 500.0}
    one = summarise(plan, plan.rungs, [report(**told, counted_bytes=counted)], 2)["rungs"][0]
    assert one["between_hosts"] == {
        "wire": 550.0, "engine": 500.0, "counted": 500.0, "parts": {"keys": 100.0, "rows": 400.0}
    }  # fmt: skip
    assert "between_hosts" not in summarise(plan, plan.rungs, [report(**told)], 2)["rungs"][0]


def ask(host: Host, code: str, *arguments: str) -> str:
    command = host.command([sys.executable, "-c", code, *arguments])
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


@needs_root
def test_workers_of_a_host_have_a_link_of_their_own() -> None:
    """Promise: what workers of one host send each other goes by its shaped loopback and never over the hosts' link."""
    talk = (
        "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); "
        "c = socket.create_connection((sys.argv[1], 7000)); p, _ = s.accept(); "
        "c.sendall(bytes(50000)); c.close(); print(len(p.makefile('rb').read()))"
    )
    with Network(2, "500mbit", inside="5gbit") as network:
        host = network.hosts[0]
        shaped = subprocess.run(
            ["tc", "-n", host.namespace, "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True
        ).stdout
        assert "tbf" in shaped and "rate 5Gbit" in shaped
        before = network.bytes_sent()[0]
        assert ask(host, talk, host.address) == "50000\n"
        assert network.bytes_sent()[0] - before < 5_000
        again = next(other for other in known() if other.name == network.name)
        assert (again.rate, again.inside) == ("500mbit", "5gbit")
    with pytest.raises(LabError, match="rate"):
        Network(2, "500mbit", inside="fast")


@needs_root
def test_lab_by_hand_tells_how_to_launch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hosts", "2", "--link", "100mbit", "--inside", "1gbit", "--workers-per-host", "2"]
    try:
        assert main(["lab", "up", *arguments]) == 0
        said = capsys.readouterr().out
        assert "2 hosts, links 100mbit, inside 1gbit" in said and "--nnodes 2 --nproc-per-node 2 --node-rank I" in said
    finally:  # not by `lab down`, which would remove labs of others on this machine, too
        for network in known():
            if network.owner == 0 and network.inside == "1gbit":
                network.down()


@pytest.mark.slow
@needs_root
def test_ctrl_c_leaves_no_host(tmp_path: Path) -> None:
    """Promise: in the middle of a ladder of hosts, neither a namespace nor a worker is left."""
    log = tmp_path / "log"
    arguments = ["bench", "groups-uniform", "--rounds", "1", "--workers-per-host", "2", "--inside", "5gbit"]
    bench = Fork("nestpipe", arguments, Path.cwd(), log, log, os.environ)
    name = f"np{bench.pid % 0x1000000:x}"

    def inside() -> list[str]:
        found = subprocess.run(["ip", "netns", "pids", f"{name}-1"], capture_output=True, text=True)
        return found.stdout.split()

    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and len(inside()) < 3:  # a launcher and its two workers
            assert bench.poll() is None, log.read_text()
            time.sleep(0.05)
        there = inside()
        assert len(there) >= 3, log.read_text()
        bench.send_signal(signal.SIGINT)
        bench.wait(60)
    finally:
        if bench.poll() is None:
            bench.send_signal(signal.SIGTERM)
            bench.wait(60)
    assert bench.returncode != 0 and name not in [network.name for network in known()]
    assert name not in subprocess.run("ip -br link; ip netns", shell=True, capture_output=True, text=True).stdout
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in there):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hosts", "0"], "--hosts must be at least 1"),
        (["--workers-per-host", "0"], "--workers-per-host must be at least 1"),
        (["--workers", "4", "--hosts", "2"], "--workers 4: for hosts give --hosts and --workers-per-host"),
        (["--link", "none", "--inside", "5gbit"], "--inside 5gbit shapes hosts that a link makes"),
    ],
)
def test_flags_that_make_no_hosts(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dlrm", *flags]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_ladders_of_groups_have_hosts() -> None:
    """Promise: a rung with groups by host finds several hosts, and the flat rung is there to compare with."""
    for name in ("groups-dlrm", "groups-hstu", "groups-timed", "groups-sharing", "groups-uniform"):
        found = load_ladder(name)
        assert found.hosts == 2 and found.link and found.against == ["nested"]
        assert any(rung.set.get("group_size") == "host" for rung in found.rungs)

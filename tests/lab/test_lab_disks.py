"""Shaped disks of a lab: rates that hold, control groups that are gone afterwards, and one line where it cannot be done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from forks import Fork
from nestpipe.cli.main import main
from nestpipe.lab import disks as lab_disks
from nestpipe.lab import network
from nestpipe.lab.disks import DiskRates, Disks, known_disks, remove_abandoned_disks
from nestpipe.lab.network import LabError


@pytest.fixture(autouse=True)
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else's lab on this machine is known to these tests."""
    for module in (lab_disks, network):
        monkeypatch.setattr(module, "REGISTER", tmp_path / "register")


HERE = tempfile.gettempdir()


def can_shape() -> bool:
    try:
        with Disks(1, "write 100mb/s", HERE) as disks:  # under this process's name: test processes ask at the same time
            disks.shape()
    except LabError:
        return False
    return True


shapes = pytest.mark.skipif(
    os.geteuid() != 0 or not can_shape(), reason="shaped disks need root, blkio of cgroup v1 and a local disk"
)
MOVES = """
import sys, tempfile
import numpy as np
from nestpipe.tables.disk.channel import DiskChannel
from nestpipe.tables.disk.file import DiskFile
file = DiskFile(tempfile.gettempdir(), "lab", "a test")
file.grow(8 << 20, 8 << 20)
channel = DiskChannel(file, 8 << 20)
channel.move_run(True, 0, 8 << 20, 0)
print("written", flush=True)
sys.stdin.readline()
channel.move_run(True, 0, 8 << 20, 0)
at = np.arange(4000) * 2048
channel.move(False, at, np.full(4000, 512), at)
"""


def counted(group: Path, what: str, way: str) -> int:
    """By the kernel, over all disks, of what it has let through at the group's rates."""
    lines = (line.split() for line in (group / f"blkio.throttle.{what}").read_text().splitlines())
    return sum(int(line[2]) for line in lines if line[1] == way)


def groups_left(name: str) -> list[str]:
    root = lab_disks._controller()
    return [path.name for path in root.glob(f"nestpipe-{name}-*")] if root else []


@pytest.mark.slow
@shapes
def test_rates_hold_from_shape_on_for_what_a_process_moves_past_the_page_cache() -> None:
    """The kernel has both rates, for the host's group; all 8 MB written and 4,000 reads afterwards were subject to them."""
    with Disks(2, "read 8000/s, write 20mb/s", HERE, name="nphold") as disks:
        other, group = disks.groups
        process = subprocess.Popen(
            [sys.executable, "-c", MOVES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: disks.join(1),
        )
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        limits = [group / f"blkio.throttle.{limit}_device" for limit in ("read_iops", "write_bps")]
        assert not any(limit.read_text() for limit in limits)
        disks.shape()
        before = counted(group, "io_service_bytes", "Write"), counted(group, "io_serviced", "Read")
        assert [limit.read_text().split()[1] for limit in limits] == ["8000", "20000000"]
        process.communicate("\n", timeout=60)
        assert counted(group, "io_service_bytes", "Write") - before[0] >= 8 << 20
        assert counted(group, "io_serviced", "Read") - before[1] >= 4000
        assert counted(other, "io_service_bytes", "Write") == counted(other, "io_serviced", "Read") == 0
        assert len(groups_left("nphold")) == 2 and "nphold" in [other.name for other in known_disks()]
    assert groups_left("nphold") == [] and "nphold" not in [other.name for other in known_disks()]


@shapes
def test_disks_whose_maker_died_are_removed_when_their_processes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_disks, "REMOVE_SECONDS", 0.2)
    gone = subprocess.Popen(["true"])
    gone.wait()
    disks = Disks(1, "read 100/s", HERE, name="npadead", owner=gone.pid)
    disks.up()
    sleeper = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: disks.join(0))
    try:
        assert remove_abandoned_disks() == [] and groups_left("npadead")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert remove_abandoned_disks() == ["npadead"] and groups_left("npadead") == []


@shapes
def test_lab_down_removes_them_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    root = lab_disks._controller()
    assert root is not None
    strange = root / "not-nestpipes"
    strange.mkdir()
    try:
        Disks(1, "read 100/s", HERE, name="npby", owner=0).up()
        assert main(["lab", "ls"]) == 0 and "npby: disks, read 100/s" in capsys.readouterr().out
        assert main(["lab", "down"]) == 0 and "npby: disks removed" in capsys.readouterr().out
        assert groups_left("npby") == [] and strange.is_dir()
    finally:
        strange.rmdir()


@pytest.mark.slow
@shapes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_group(number: signal.Signals, tmp_path: Path) -> None:
    """In the middle of a ladder, whatever it is doing."""
    arguments = ["bench", "dlrm-disk", "--disk", "read 20000/s", "--rounds", "1"]
    log = tmp_path / "log"
    bench = Fork("nestpipe", arguments, Path.cwd(), log, log, os.environ)
    name = f"np{bench.pid % 0x1000000:x}"
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and not any(
            (lab_disks._controller() or Path()).joinpath(group, "cgroup.procs").read_text()
            for group in groups_left(name)
        ):
            assert bench.poll() is None, log.read_text()
            time.sleep(0.05)
        bench.send_signal(number)
        bench.wait(60)
    finally:
        if bench.poll() is None:
            bench.send_signal(signal.SIGTERM)
            bench.wait(60)
    assert bench.returncode != 0 and groups_left(name) == []


@pytest.mark.parametrize(
    "rates", ["", "fast", "read 0/s", "read 5", "write -3mb/s", "read 5/s, read 6/s", "read 5/s; rm"]
)
def test_what_are_no_rates(rates: str) -> None:
    with pytest.raises(LabError, match="a disk's rates"):
        Disks(2, rates, HERE)


def test_rates() -> None:
    assert DiskRates.parse("read 20000/s, write 20mb/s") == DiskRates(reads=20_000, write_bytes=20_000_000)
    limits = DiskRates.parse("read 3mb/s, write 7/s, read 9/s").limits()
    assert limits == {
        "blkio.throttle.read_iops_device": 9,
        "blkio.throttle.read_bps_device": 3_000_000,
        "blkio.throttle.write_iops_device": 7,
    }


def test_where_it_cannot_be_done_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"root.*--disk none"):
        Disks(1, "read 5/s", HERE).up()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LabError, match="/dev/shm is on no disk"):
        lab_disks._device("/dev/shm")
    monkeypatch.setattr(lab_disks, "_controller", lambda: None)
    with pytest.raises(LabError, match=r"cgroup v1.*--disk none"):
        Disks(1, "read 5/s", HERE).up()

"""Disks of a given speed: one control group per host, in which the kernel throttles reads and writes.

The disk and its transfers are real, only delayed: an early request waits in the kernel and takes no CPU.  The kernel
counts in slices of a tenth of a second, so an idle disk serves at once what it could do in one slice.  Groups carry the
lab's own name and are recorded in a file before they are made.  So `down` can remove them after a crash, and never
touches others.  They belong to cgroup v1 (blkio.throttle).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from nestpipe.lab.network import REGISTER, LabError

BLKIO = "blkio"
REMOVE_SECONDS = 5.0
"""How long to wait for the last process of a group to end, which may take a moment longer than its parent."""
EXAMPLE = "read 20000/s, write 20mb/s"
_RATE = re.compile(r"(read|write) ([1-9]\d{0,8})(/s|mb/s)")


@dataclass(frozen=True)
class DiskRates:
    """What a disk serves per second.  None: as much as it can."""

    reads: int | None = None
    read_bytes: int | None = None
    writes: int | None = None
    write_bytes: int | None = None

    @staticmethod
    def parse(text: str) -> DiskRates:
        """Parses, for example, "read 20000/s, write 20mb/s": requests (/s) or millions of bytes (mb/s)."""
        found: dict[str, int] = {}
        for part in text.split(","):
            match = _RATE.fullmatch(part.strip())
            if match is None:
                raise LabError(f"a disk's rates look like {EXAMPLE!r} (requests or megabytes), not {text!r}")
            way, number, unit = match.groups()
            key = f"{way}s" if unit == "/s" else f"{way}_bytes"
            if key in found:
                raise LabError(f"a disk's rates name {way} twice in {unit}: {text!r}")
            found[key] = int(number) * (1 if unit == "/s" else 1_000_000)
        return DiskRates(**found)

    def limits(self) -> dict[str, int]:
        """The limits by file name in a control group."""
        named = {
            "read_iops_device": self.reads,
            "read_bps_device": self.read_bytes,
            "write_iops_device": self.writes,
            "write_bps_device": self.write_bytes,
        }
        return {f"blkio.throttle.{key}": value for key, value in named.items() if value is not None}


class Disks:
    """A control group for each of `hosts`.  `shape` limits its processes to these rates on the disk under `directory`.

    Use it as a context manager.  A process joins with `join`; its children join the same group.
    """

    def __init__(
        self, hosts: int, rates: str, directory: str, name: str | None = None, owner: int | None = None
    ) -> None:
        self.rates = rates
        self.directory = directory
        self.name = name or f"np{os.getpid() % 0x1000000:x}"
        self.owner = os.getpid() if owner is None else owner
        self._limits = DiskRates.parse(rates).limits()
        self._count = hosts
        self._device = ""
        self._root = _controller()

    @property
    def groups(self) -> list[Path]:
        return [self._root / f"nestpipe-{self.name}-{host}" for host in range(self._count)] if self._root else []

    @property
    def _file(self) -> Path:
        return REGISTER / f"disks-{self.name}.json"

    def up(self) -> None:
        """Makes all groups, or none."""
        if os.geteuid() != 0:
            raise LabError("shaped disks need root (control groups): run it with sudo, or measure with --disk none")
        if self._root is None:
            raise LabError("shaped disks need the blkio controller of cgroup v1, which is not mounted: use --disk none")
        self._device = _device(self.directory)
        REGISTER.mkdir(exist_ok=True)
        if self._file.exists():
            raise LabError(f"there are disks {self.name!r} already: `nestpipe lab down` removes them")
        about = {"hosts": self._count, "rates": self.rates, "directory": self.directory, "owner": self.owner}
        self._file.write_text(json.dumps(about))
        try:
            for group in self.groups:
                group.mkdir()
        except BaseException as error:
            self.down()
            if isinstance(error, OSError):
                raise LabError(f"cannot make control group {error.filename}: {error.strerror}") from None
            raise

    def shape(self) -> None:
        """Applies the rates.  Until then the disk has its full speed, to fill tables."""
        for group in self.groups:
            for file, limit in self._limits.items():
                try:
                    (group / file).write_text(f"{self._device} {limit}")
                except OSError as error:
                    what = f"cannot shape disk {self._device} by {group / file}"
                    raise LabError(f"{what}: {error.strerror}: measure with --disk none") from None

    def join(self, host: int) -> None:
        """Moves the calling process into the group of a host."""
        (self.groups[host] / "cgroup.procs").write_text("0")

    def down(self, kill: bool = False) -> bool:
        """Removes what `up` made.  False if processes are still in a group; `kill` ends them."""
        deadline = time.monotonic() + REMOVE_SECONDS
        left = [group for group in self.groups if group.is_dir()]
        while left:
            for group in left if kill else []:
                with contextlib.suppress(OSError):
                    for process in (group / "cgroup.procs").read_text().split():
                        os.kill(int(process), signal.SIGKILL)
            for group in left:
                with contextlib.suppress(OSError):
                    group.rmdir()
            left = [group for group in left if group.is_dir()]
            if left and time.monotonic() > deadline:
                return False
            time.sleep(0.02 if left else 0)
        self._file.unlink(missing_ok=True)
        return True

    def __enter__(self) -> Disks:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down(kill=True)  # a process that was just starting at Ctrl-C is known only here


def known_disks() -> list[Disks]:
    """All disks that were made and not yet removed."""
    found = []
    for path in sorted(REGISTER.glob("disks-np*.json")) if REGISTER.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, LabError):
            about = json.loads(path.read_text())
            name = path.stem.removeprefix("disks-")
            found.append(Disks(int(about["hosts"]), about["rates"], about["directory"], name, int(about["owner"])))
    return found


def remove_abandoned_disks() -> list[str]:
    """Removes disks whose maker has ended, for example by a crash."""
    gone = [disks for disks in known_disks() if disks.owner and not Path(f"/proc/{disks.owner}").exists()]
    return [disks.name for disks in gone if disks.down()]


def _controller() -> Path | None:
    """This process's own group in the blkio hierarchy, in which the lab makes its groups."""
    mount, own = None, "/"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup" and BLKIO in options.split(" ")[-1].split(","):
                mount = Path(before.split(" ")[4])
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if BLKIO in controllers.split(","):
                own = path
    return None if mount is None else mount / own.lstrip("/")


def _device(directory: str) -> str:
    """Major and minor number of the whole disk under a directory."""
    try:
        number = Path(directory).stat().st_dev
    except OSError as error:
        raise LabError(f"cannot shape the disk under {directory}: {error.strerror}") from None
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not entry.exists():
        raise LabError(
            f"{directory} is on no disk that can be shaped (tmpfs, overlay, network): give another disk_path"
        )
    entry = entry.resolve()
    return ((entry.parent if (entry / "partition").exists() else entry) / "dev").read_text().strip()

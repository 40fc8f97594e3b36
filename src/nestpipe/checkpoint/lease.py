"""A lease: says which process trains a run on object storage, which has no locks.

The object `.lease` names its owner, who writes it again every few seconds.  A lease whose owner is known to be dead, or that
does not change for LEASE_SECONDS, is free.  Object storage, through pyarrow, cannot write "only if nobody else has": two
processes that start within the same moment can both believe that they own it, until one reads the other's name.  An owner
looks before each commit, and each attempt has files of its own: the worst that two can do is to commit one after the other.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.files import FileError, Location

LEASE = ".lease"
BEAT_SECONDS, LEASE_SECONDS = 5.0, 20.0
"""Between two writes of a lease; after which one that does not change is free."""
SETTLE_SECONDS = 0.5
"""Between writing a lease and reading it back: time for another that saw no lease either."""


@dataclass(frozen=True)
class Owner:
    """A process, and the machine on which it may still be looked up."""

    token: str
    host: str
    machine: str
    """Of one boot, and one space of process numbers."""
    pid: int
    born: str
    beat: int = 0

    @staticmethod
    def this_process() -> Owner:
        pid = os.getpid()
        return Owner(uuid.uuid4().hex, socket.gethostname(), _machine(), pid, _born(pid))

    @staticmethod
    def parse(data: bytes) -> Owner | None:
        try:
            return Owner(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def dead(self) -> bool:
        """Known only of processes of this machine."""
        return self.machine == _machine() and self.machine != "" and _born(self.pid) != self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease:
    """Of one process, on one folder of checkpoints."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._place = folder / LEASE
        self._owner = Owner.this_process()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, seconds: float) -> None:
        """CheckpointError if another process still renews it after `seconds`."""
        until = time.monotonic() + seconds
        seen, since = self._read(), time.monotonic()
        while seen is not None and not seen.dead() and time.monotonic() - since < LEASE_SECONDS:
            time.sleep(min(0.5, seconds))
            now = self._read()
            if now != seen:
                if now is not None and time.monotonic() > until:
                    raise self._taken(now)
                seen, since = now, time.monotonic()
        self._write(0)
        time.sleep(SETTLE_SECONDS)
        self.check()
        self._thread = threading.Thread(target=self._renew, name="nestpipe-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """CheckpointError unless this process still owns it."""
        now = self._read()
        if now is None or now.token != self._owner.token:
            raise self._taken(now)

    def give_back(self) -> None:
        """Raises nothing: a lease that stays ends by itself."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(BEAT_SECONDS)
        try:
            self.check()
            self._place.remove()
        except (CheckpointError, FileError, OSError):
            pass

    def _renew(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            try:
                self.check()
                if not self._ended.is_set():
                    self._write(beat)
            except CheckpointError:
                return  # the next commit says so
            except (FileError, OSError):
                continue

    def _write(self, beat: int) -> None:
        self._place.write(json.dumps({**asdict(self._owner), "beat": beat}).encode())

    def _read(self) -> Owner | None:
        try:
            return Owner.parse(self._place.read())
        except FileNotFoundError:
            return None

    def _taken(self, by: Owner | None) -> CheckpointError:
        who = f"another process that trains this run ({by})" if by is not None else "a process that removed its lease"
        return CheckpointError(f"{self._folder} is in use by {who}: end that process first")


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When a process started, in ticks since boot; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]

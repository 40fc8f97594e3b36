"""Processes that take turns: all are alive at once, one trains at a time, and the others are stopped by a signal.

A process gets its turns through files in a folder of its own (bench/peers/turns.py) and writes a JSON report when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nestpipe.lab.ladder import BenchError

TURN_SECONDS = 300.0
"""A turn that takes longer counts as failed."""
STOP_SECONDS = 10.0
_LIBC = ctypes.CDLL(None)


class TurnTaker:
    """Processes that train together in `train`, and are stopped by a signal in between.  They live until `stop`."""

    def __init__(self, name: str, folder: Path, workers: int = 1, turn_seconds: float = TURN_SECONDS) -> None:
        """`name` is what errors call it.  Who makes it fills `_processes`; their output goes to `_log`."""
        self.name, self.folder, self.workers, self._turn_seconds = name, folder, workers, turn_seconds
        folder.mkdir()
        self._out = folder / "out.json"
        self._log = (folder / "log").open("w+")
        self._processes: list[subprocess.Popen[bytes]] = []

    def train(self, turn: int) -> None:
        """Takes one turn; returns when all workers have finished it."""
        # Before the signal: a worker that wakes after a long sleep and finds no turn takes the ladder for gone.
        (self.folder / f"turn-{turn}").touch()
        self._signal(signal.SIGCONT)
        self._wait(lambda: all((self.folder / f"done-{turn}-{rank}").exists() for rank in range(self.workers)))
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
        """Ends workers and launcher if they still run."""
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
        deadline = time.monotonic() + self._turn_seconds
        while not until():
            if any(process.poll() for process in self._processes):
                raise self._failed()
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} did not finish its turn within {self._turn_seconds:g} s")
            time.sleep(0.01)

    def _failed(self) -> BenchError:
        self._log.seek(0)
        code = next((process.returncode for process in self._processes if process.returncode), 0)
        log = self._log.read()
        with tempfile.NamedTemporaryFile("w", prefix="nestpipe-bench-", suffix=".log", delete=False) as kept:
            kept.write(log)
        return BenchError(f"{self.name} failed with exit code {code}: {cause(log)} (full log: {kept.name})")


def cause(log: str) -> str:
    """The line that explains a failed launch best: a worker's own error, what ended a worker, or the last line."""
    lines = [line.strip() for line in log.splitlines() if _WORD.search(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    lost = [line for line in errors if "PeerLost" in line]  # a consequence of another worker's error
    ends = [line for line in lines if _END.search(line)]
    return ([e for e in errors if e not in lost] or ends or lost or lines[-1:] or ["empty log"])[0]


_WORD = re.compile(r"\w")
_ERROR = re.compile(r"(\[rank\d+\]: ?)?(?!.*(ChildFailedError|Warning\b))([a-z_]\w*\.)*[A-Z]\w*(?:[a-z]\w*:\s|Error$)")
"""The last line of a Python traceback: a class, with capital and small letters, and its message."""
_END = re.compile(r"^what\(\):|: error: |exitcode\s*: -\d+|Signal \d+")


def end_with_parent() -> None:
    """Runs in a child.  It must end with its bench, or it would wait forever for a turn."""
    _LIBC.prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG

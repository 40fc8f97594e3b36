"""Runs the command line in processes of their own, with a deadline, and sees to it that none of them is left.

`Command` is a fork of a process that has torch loaded already (that of workers.py) and does what the console script would.
Workers that it launches are forks as well.  With `cold`, which is what stands before the arguments, such as MODULE, the command
and its workers are new interpreters.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import Fork

SCRIPT = str(Path(sys.executable).with_name("nestpipe"))
MODULE = [sys.executable, "-m", "nestpipe"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DEADLINE = 120.0
"""Seconds after which a command counts as hanging, however busy the machine."""


def small(*settings: str, workers: int = 1) -> list[str]:
    """Arguments of a training of the shipped dlrm that takes a second once torch is loaded."""
    sizes = ["data.samples=2000", "data.eval_samples=500", "data.features=4", "data.hot=1", "train.batch_size=100"]
    sets = [part for setting in [*sizes, *settings] for part in ("--set", setting)]
    return ["train", "dlrm", *sets, "--workers", str(workers), "--quiet"]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def summary(self) -> dict[str, Any]:
        """The one JSON object on standard output, after a run with `--json -` that ended well."""
        assert self.code == 0, self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


class Command:
    """A started command in `folder`, which is also where all of its temporary files go.

    Its processes are known by that place for temporary files, which no other command has.  Every training gets `--run RUN`.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        run: str | None = None,
        cold: Sequence[str] = (),
        cold_workers: bool = False,
        variables: Mapping[str, str] | None = None,
        torchrun: int | None = None,
    ) -> None:
        """`cold_workers`: only the workers are new interpreters.  `variables` go into the environment.  `torchrun`: on so many
        workers that torchrun starts."""
        self.temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder))
        self.run = folder / (run or self.temporary.name.replace("tmp", "run"))
        named = arguments[0] != "train" or "--run-dir" in arguments
        self.arguments = [*arguments, *([] if named else ["--run", str(self.run)])]
        self._files = [self.temporary.with_suffix(".out"), self.temporary.with_suffix(".err")]
        self._process: subprocess.Popen[bytes] | Fork
        environment = {**os.environ, "TMPDIR": str(self.temporary), **(variables or {})}
        if cold:
            with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
                self._process = subprocess.Popen(
                    [*cold, *self.arguments],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        else:
            program = ["nestpipe"] if torchrun is None else [*TORCHRUN[2:], str(torchrun), *MODULE[1:]]
            module, *flags = [*program, *self.arguments]
            self._process = Fork(module, flags, folder, *self._files, environment, cold_workers=cold_workers)
        self.pid: int = self._process.pid

    def wait(self, deadline: float = DEADLINE, litter: bool = False) -> Ended:
        """How it ended.  AssertionError if it did not in time, or left a process, or (unless `litter`) a temporary file."""
        code = self._wait_for(deadline)
        left = [pid for pid in processes() if self._is_mine(pid)]
        # torch's compiler makes its folder, the same for every process, wherever it is loaded
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        if code is None or left:
            self.end()
        out, err = (path.read_text() for path in self._files)
        assert code is not None, f"still running after {deadline:g} s: {err}"
        assert not left, f"processes left behind after exit {code}: {err}"
        assert litter or not files, f"temporary files left behind: {files}"
        return Ended(code, out, err)

    def _wait_for(self, deadline: float) -> int | None:
        try:
            return self._process.wait(deadline)
        except subprocess.TimeoutExpired:
            return None

    def _is_mine(self, pid: int) -> bool:
        """The process itself, what is in its session, and workers, which have sessions of their own."""
        try:
            state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            return False
        mine = int(session) == self.pid or variables(pid).get("TMPDIR") == str(self.temporary)
        return mine and state != "Z"

    def workers(self) -> dict[int, int]:
        """Process ids of the workers by rank."""
        ranks = {pid: variables(pid).get("RANK") for pid in processes() if self._is_mine(pid) and pid != self.pid}
        return {int(rank): pid for pid, rank in ranks.items() if rank is not None}

    def once_training(self, workers: int) -> dict[int, int]:
        """Waits until steps are being taken (needs a small train.log_every); the workers by rank."""
        until = time.monotonic() + DEADLINE
        log = self.run / "metrics.jsonl"
        while not log.exists():
            assert time.monotonic() < until and self._process.poll() is None, self._files[1].read_text()
            time.sleep(0.05)
        found = self.workers()
        assert sorted(found) == list(range(workers)), found
        return found

    def end(self) -> None:
        for pid in processes():
            if self._is_mine(pid):
                os.kill(pid, signal.SIGKILL)
        self._wait_for(10)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with; a fork has what matters of it in its command line."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for name in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
            found |= dict(part.split("=", 1) for part in text.split("\0") if "=" in part)
    return found


def nestpipe(folder: Path, *arguments: str, run: str | None = None, cold: Sequence[str] = ()) -> Ended:
    return Command(folder, arguments, run, cold).wait()


def one_line(ended: Ended) -> str:
    """What a command that failed said: one line, for a person."""
    assert ended.code != 0, ended
    assert "Traceback" not in ended.err and ended.err.startswith("nestpipe: ") and ended.err.count("\n") == 1, ended.err
    assert ended.out == ""
    return ended.err.removeprefix("nestpipe: ").strip()


def refused(ended: Ended, *words: str) -> None:
    """A failure in one line that has all of these words in it."""
    line = one_line(ended)
    assert all(word in line for word in words), line


def until(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True

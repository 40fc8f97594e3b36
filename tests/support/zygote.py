"""Workers of a launch without new interpreters: forks of a process that has torch and our kernels loaded.

A process that is about to launch workers calls `fork_workers` while it has no threads.  That forks a zygote, which waits.  When
torch's launcher then starts a worker, it gets a fork of the zygote in place of a new interpreter.  As with one, it is the
launcher's child, has its own session and environment, and `/proc/PID/cmdline` tells what it is.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def fork_workers() -> None:
    """Makes torch's launcher in this process fork its workers instead of starting interpreters; call it before threads start."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the zygote's orphans become this process's children
    ours, theirs = Pipe()
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()  # signals to the launcher's process group are not for the zygote
        _serve(theirs, launcher)
    theirs.close()

    def start(handler: SubprocessHandler, command: tuple[str, ...], environment: dict[str, str]) -> Forked:
        ours.send((command, environment))
        return Forked(ours.recv())

    SubprocessHandler._popen = start


class Forked:
    """What torch's launcher uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _serve(pipe: Connection, launcher: int) -> NoReturn:
    while True:
        try:
            command, environment = pipe.recv()
        except EOFError:
            os._exit(0)
        # Forked twice: the worker's parent ends at once, so that the launcher becomes its parent.
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            middle, worker = os.getpid(), os.fork()
            if worker:
                os.write(write, worker.to_bytes(8, "little"))
                os._exit(0)
            for descriptor in (read, write, pipe.fileno()):
                os.close(descriptor)
            while os.getppid() == middle:
                time.sleep(0.001)
            _become(command, environment)
        os.waitpid(middle, 0)
        pipe.send(int.from_bytes(os.read(read, 8), "little"))
        os.close(read)
        os.close(write)


def _become(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """This process does what the command would do in a new interpreter, and ends as that would."""
    code: object = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        python, unbuffered, option, module, *arguments = command
        assert (python, unbuffered, option) == (sys.executable, "-u", "-m"), command
        say_what_it_is([f"{name}={environment[name]}" for name in ("TMPDIR", "RANK")], ["-m", module])
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def say_what_it_is(variables: Sequence[str], arguments: Sequence[str]) -> None:
    """Writes over this process's command line, for those who read /proc; as `env VARIABLES python ARGUMENTS` would have it."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(os.fsencode(part) + b"\0" for part in ["env", *variables, sys.executable, *arguments])
    assert len(line) <= end - begin, "the command line of the fork server has no room for this"
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0

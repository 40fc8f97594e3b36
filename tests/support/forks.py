"""Programs that start without a new interpreter: forks of a process that has torch and our kernels loaded.

`Fork` is to be used as subprocess.Popen is.  Its process is a session of its own, with its own files, folder and environment, so
signals, exit codes and leftovers are as real as those of a new interpreter.

Where the program launches workers through torch's launcher, they are forks, too.  The program's process has a child for this,
the zygote, which was forked before it had threads.  A fork of the zygote takes the place of the interpreter that torch would
start: it is the launcher's child and has a session and an environment of its own.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from fork_server import Child

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Fork:
    """`python -m MODULE ARGUMENTS` as a fork that writes to the files `out` and `err`; these may be one."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        out: Path,
        err: Path,
        environment: Mapping[str, str],
        cold_workers: bool = False,
    ) -> None:
        """`cold_workers`: those that the program launches are new interpreters."""
        told = ([module, *arguments], str(folder), str(out), str(err), dict(environment), cold_workers)
        self._process = Child(_become_program, told)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.join(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._process.join(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become_program(
    command: list[str], folder: str, out: str, err: str, environment: dict[str, str], cold_workers: bool
) -> None:
    """In the fork: what ends this function ends the process, as it would end an interpreter."""
    os.setsid()
    os.chdir(folder)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate((os.devnull, out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _set_environment(environment)
    if not cold_workers:
        _fork_workers()
    _run_module(command)


def _fork_workers() -> None:
    """Makes torch's launcher in this process fork its workers; to be called before threads start."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the zygote's orphans become this process's children
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()  # what is sent to the launcher's process group is not for the zygote
        theirs.send("ready")
        _be_zygote(theirs)
    theirs.close()
    ours.recv()

    def start(handler: SubprocessHandler, command: tuple[str, ...], environment: dict[str, str]) -> _Worker:
        ours.send((command, environment))
        return _Worker(ours.recv())

    SubprocessHandler._popen = start


class _Worker:
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
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _be_zygote(pipe: Connection) -> NoReturn:
    while True:
        try:
            command, environment = pipe.recv()
        except EOFError:
            os._exit(0)
        # Forked twice: the worker's parent ends at once, and the launcher becomes its parent.
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between, worker = os.getpid(), os.fork()
            if worker:
                os.write(write, worker.to_bytes(8, "little"))
                os._exit(0)
            for descriptor in (read, write, pipe.fileno()):
                os.close(descriptor)
            while os.getppid() == between:
                time.sleep(0.001)
            _become_worker(command, environment)
        os.waitpid(between, 0)
        pipe.send(int.from_bytes(os.read(read, 8), "little"))
        os.close(read)
        os.close(write)


def _become_worker(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    code: object = 1
    try:
        os.setsid()
        _set_environment(environment)
        python, unbuffered, option, module, *arguments = command
        assert (python, unbuffered, option) == (sys.executable, "-u", "-m"), command
        _show([f"{name}={environment[name]}" for name in ("TMPDIR", "RANK") if name in environment], ["-m", module])
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        _run_module([module, *arguments])
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _run_module(command: Sequence[str]) -> None:
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _show(variables: Sequence[str], arguments: Sequence[str]) -> None:
    """Writes over this process's command line, for those who read /proc: what `env VARIABLES python ARGUMENTS` would show."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(os.fsencode(part) + b"\0" for part in ["env", *variables, sys.executable, *arguments])
    assert len(line) <= end - begin, "the command line of the fork server has no room for this"
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0

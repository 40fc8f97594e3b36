"""A process with torch and our kernels loaded that forks on demand; all test processes of one run of pytest share it.

A new interpreter takes seconds of CPU before it can do anything, a fork a few milliseconds.  The server starts when this module
is imported, so that it loads while pytest still collects, and ends with pytest.  `Child` is a process that it has forked.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_RUN = "NESTPIPE_TEST_RUN"
"""Names the process id of pytest, or of the one that has started the others (xdist)."""
_NUMBER = 8
"""Bytes of a number in a message."""


def _address() -> str:
    """A name that is free again when nobody listens, so that there are no files to remove."""
    return f"\0nestpipe-tests-{os.environ[_RUN]}"


_started: list[subprocess.Popen[bytes]] = []


def start() -> None:
    """Starts the server, unless another test process has."""
    if _RUN not in os.environ:
        os.environ[_RUN] = str(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address())
        except OSError:
            return
        listener.listen(100)
        room = " " * 2000  # forks write what they are over this command line
        _started.append(
            subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), room],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        )


class Child:
    """A process that has been forked to call `function(*args)`, with file descriptors of its own in place of `files`.

    `function` is one of a module's top level.  What it raises is printed, and makes the exit code 1.
    """

    def __init__(self, function: Callable[..., object], args: Sequence[Any] = (), files: Sequence[int] = ()) -> None:
        job = pickle.dumps((sys.path, pickle.dumps((function, tuple(args)))))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_address())
        socket.send_fds(self._server, [len(job).to_bytes(_NUMBER, "little")], files)
        self._server.sendall(job)
        self.pid = self._number()
        self.exitcode: int | None = None

    def join(self, seconds: float | None = None) -> int | None:
        """The exit code, negative for a signal; None if it still runs after so many seconds."""
        if self.exitcode is None:
            self._server.settimeout(seconds)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self.exitcode = self._number()
                self._server.close()
        return self.exitcode

    def kill(self) -> None:
        if self.join(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        data = self._server.recv(_NUMBER)
        assert data, "the fork server has ended"
        return int.from_bytes(data, "little", signed=True)


def _serve(listener: socket.socket) -> NoReturn:
    import workers_warm  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    tests_end = os.pidfd_open(int(os.environ[_RUN]))
    selector = selectors.DefaultSelector()
    for file in (listener.fileno(), tests_end):
        selector.register(file, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd == tests_end:
                os._exit(0)
            elif key.fd == listener.fileno():
                client, _ = listener.accept()
                job, files = _read(client)
                pid = os.fork()
                if pid == 0:
                    for other in (listener, selector, client, *(other for _, other in children.values())):
                        other.close()
                    _run(job, files)
                client.sendall(pid.to_bytes(_NUMBER, "little", signed=True))
                for file in files:
                    os.close(file)
                ended = os.pidfd_open(pid)
                children[ended] = pid, client
                selector.register(ended, selectors.EVENT_READ)
            else:
                pid, client = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):  # nobody may want to know
                    client.sendall(code.to_bytes(_NUMBER, "little", signed=True))
                client.close()


def _read(client: socket.socket) -> tuple[bytes, list[int]]:
    head, files, _, _ = socket.recv_fds(client, _NUMBER, 10)
    left, parts = int.from_bytes(head, "little"), []
    while left:
        parts.append(client.recv(left))
        left -= len(parts[-1])
    return b"".join(parts), files


def _run(job: bytes, files: list[int]) -> NoReturn:
    code: object = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path[:], call = pickle.loads(job)
        function, args = pickle.loads(call)
        function(*args, *files)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _serve(_listener)
else:
    start()

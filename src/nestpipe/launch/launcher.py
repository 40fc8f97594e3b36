"""Starts local workers through torch's launcher, restarts them, and explains in one line why they failed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nestpipe.errors import NestPipeError
from nestpipe.launch.failures import REPORTS, exit_code, only_terminated, read_reports, root_cause
from nestpipe.launch.signals import LAUNCHER

END_SECONDS = 3
"""What a worker has to end in after SIGTERM; longer than the grace that it gives itself."""


class LaunchError(NestPipeError, RuntimeError):
    """A worker failed, or none could be started; the message names the worker."""


def launch(
    arguments: Sequence[str],
    workers: int,
    port: int | None = None,
    max_restarts: int = 0,
    stop_seconds: float | None = None,
) -> None:
    """Runs `python -m nestpipe ARGUMENTS` in `workers` local processes and waits for them.  LaunchError if one fails.

    When one fails, all are restarted, at most `max_restarts` times.  `stop_seconds`: how long workers may take to end by
    themselves after SIGTERM; None ends them at once.
    """
    if port is not None:
        _check_free(port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _silence_torch()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port or 0}",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.2,
        run_id=f"nestpipe-{uuid.uuid4().hex}",  # the same over all restarts, and no other launch's
        logs_specs=DefaultLogsSpecs(
            os.devnull
        ),  # workers write to our terminal; torch would leave empty folders in /tmp
        # Not SIGINT, which torch would pass on: a worker that is just starting would answer it with a traceback.
        signals_to_handle="SIGHUP,SIGQUIT" if stop_seconds else "SIGTERM,SIGHUP,SIGQUIT",
        shutdown_timeout=END_SECONDS,
    )
    _end_stopped_workers_soon()
    stopping = threading.Event()
    with tempfile.TemporaryDirectory(prefix="nestpipe-") as folder:
        os.environ[REPORTS] = folder
        os.environ[LAUNCHER] = str(os.getpid())
        if stop_seconds is not None:
            signal.signal(signal.SIGTERM, functools.partial(_pass_on, stopping, stop_seconds + END_SECONDS))
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "nestpipe", *arguments)
        except ChildFailedError as error:
            reports = read_reports(Path(folder))
            if stopping.is_set() and only_terminated(error.failures, reports):
                raise LaunchError(
                    "stopped by SIGTERM with nothing new saved: no step had been taken yet, or a checkpoint takes longer than "
                    "checkpoint.stop_seconds; all workers were ended"
                ) from None
            tried = max_restarts and not stopping.is_set()  # torch gives up only when all restarts are used
            after = f"; given up after {max_restarts} restart{'s' * (max_restarts > 1)}" if tried else ""
            failed = LaunchError(root_cause(error.failures, reports) + after)
            failed.exit_code = exit_code(error.failures, reports)
            raise failed from None
        except SignalException as error:
            raise LaunchError(f"stopped by {error.sigval.name}; all workers were ended") from None
        finally:
            _end_workers()


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise LaunchError(f"port {port} cannot be used ({why}): choose another --port, or none") from None


def _silence_torch() -> None:
    """Drops what torch's launcher logs of failures and signals: we report their cause, in one line."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


def _end_stopped_workers_soon() -> None:
    """Gives workers END_SECONDS to end when another has failed.  Without it, torch waits 30 s, and has no setting for it.

    Worth changing a default of torch's: with a worker that is stopped (SIGSTOP) and --timeout 4, a run ends after 8 s, and after
    36 s without this.
    """
    PContext.close.__defaults__ = (None, END_SECONDS)


def _pass_on(stopping: threading.Event, seconds: float, number: int, frame: object) -> None:
    """Sends a signal on to all workers, which then end by themselves.  A second signal ends this process and them at once.

    So does a worker that takes longer than `seconds`, and one that is restarted meanwhile because another failed.
    """
    signal.signal(number, _give_up)
    stopping.set()
    told = set(_workers())
    for worker in told:
        with contextlib.suppress(OSError):
            os.kill(worker, number)

    def watch() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and told.issuperset(_workers()):
            time.sleep(0.2)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="nestpipe-stopping", daemon=True).start()


def _give_up(number: int, frame: object) -> None:
    raise SignalException(f"process {os.getpid()} got {number}", signal.Signals(number))


def _end_workers() -> None:
    """Ends and reaps workers that are left: a signal may arrive after torch starts a worker and before it records it."""
    for worker in _workers():
        with contextlib.suppress(OSError):
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def _workers() -> Iterator[int]:
    """Process ids of our workers, whether or not torch knows of them."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"\0nestpipe\0" in (process / "cmdline").read_bytes():
                yield int(process.name)

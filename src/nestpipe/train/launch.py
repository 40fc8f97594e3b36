"""Local workers through torch's own launcher, and one line when they fail.

Workers inherit the terminal.  What ended a worker is written to the file that torch's launcher names, so that the parent can
report the one error that started it all and not the consequences on other workers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nestpipe.comm.errors import PeerLost

QUIET = "NESTPIPE_LAUNCHED"
"""Set for workers that this module launched: their parent prints their errors."""
CONSEQUENCE = "PeerLost"


class LaunchError(RuntimeError):
    """A worker failed; the message is one line and names it."""


def launch(arguments: Sequence[str], workers: int, port: int | None = None) -> None:
    """Runs `python -m nestpipe ARGUMENTS` on `workers` local processes and waits; they join on loopback."""
    if port is not None:
        _check_free(port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[QUIET] = "1"
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port or 0}",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        run_id=f"nestpipe-{os.getpid()}",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "nestpipe", *arguments)
    except ChildFailedError as error:
        raise LaunchError(_root_cause(error.failures)) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise LaunchError(f"stopped by {error.sigval.name}; all workers were ended") from None


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used ({error.strerror}): choose another --port, or none"
            ) from None


def _root_cause(failures: dict[int, ProcessFailure]) -> str:
    """The earliest failure that is not the consequence of another worker's; a death without a word counts as a cause."""
    causes: list[tuple[float, str]] = []
    consequences: list[tuple[float, str]] = []
    for rank, failure in failures.items():
        told = _told(failure)
        # The launcher itself ends the remaining workers with SIGTERM; that is nobody's cause.
        echo = told is None and failure.exitcode == -signal.SIGTERM
        place = consequences if echo or (told and told["kind"] == CONSEQUENCE) else causes
        text = told["message"] if told else _death(rank, failure)
        place.append((told["time"] if told else failure.timestamp, text))
    return min(causes or consequences)[1]


def _told(failure: ProcessFailure) -> dict[str, Any] | None:
    data = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    return data if isinstance(data, dict) and {"kind", "message", "time"} <= set(data) else None


def _death(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"worker {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    return f"worker {rank} ended with exit code {failure.exitcode} and no word"


def report_failure(error: BaseException, message: str) -> None:
    """Called by a worker about to end: tells the launcher why, in the file it named."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    kind = CONSEQUENCE if isinstance(error, PeerLost) else type(error).__name__
    note = {"kind": kind, "message": message, "time": time.time(), "traceback": traceback.format_exc()}
    with open(path, "w") as file:  # noqa: PTH123 - torch's launcher reads it by this very path
        json.dump({"message": note}, file)

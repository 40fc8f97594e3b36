"""Local workers through torch's own launcher, and one line when they fail.

Workers inherit the terminal.  What ended a worker is written to a folder that their parent reads, so that it can report the one
error that started it all and not the consequences on other workers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nestpipe.comm.errors import PeerLost

REPORTS = "NESTPIPE_REPORTS"
"""Names the folder in which workers of this launch leave word of their end."""
GRACE_SECONDS = 1.0


class LaunchError(RuntimeError):
    """A worker failed; the message is one line and names it."""


def launch(arguments: Sequence[str], workers: int, port: int | None = None) -> None:
    """Runs `python -m nestpipe ARGUMENTS` on `workers` local processes and waits; they join on loopback."""
    if port is not None:
        _check_free(port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.disable(logging.CRITICAL)  # this process only waits; what the launcher would log, we say in one line
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
    with tempfile.TemporaryDirectory(prefix="nestpipe-") as folder:
        os.environ[REPORTS] = folder
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "nestpipe", *arguments)
        except ChildFailedError as error:
            raise LaunchError(_root_cause(error.failures, _reports(Path(folder)))) from None
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


def _root_cause(failures: dict[int, ProcessFailure], reports: dict[int, Report]) -> str:
    """The earliest failure that is not the consequence of another worker's.

    A worker that was killed cannot say where it was, so what a survivor noticed is added in brackets.
    """
    causes = [report for report in reports.values() if not report.consequence]
    noticed = [report for report in reports.values() if report.consequence]
    if causes:
        return min(causes, key=lambda report: report.time).message
    after = f" ({min(noticed, key=lambda report: report.time).message})" if noticed else ""
    # The launcher itself ends the remaining workers with SIGTERM; that is nobody's cause.
    deaths = [(f.timestamp, r, f.exitcode) for r, f in failures.items() if r not in reports]
    deaths = [death for death in deaths if death[2] != -signal.SIGTERM] or deaths
    if not deaths:
        return after.strip(" ()") or "the workers failed and gave no reason"
    _, rank, code = min(deaths)
    if code < 0:
        return f"worker {rank} was killed by {signal.Signals(-code).name}{after}"
    return f"worker {rank} ended with exit code {code} and no word{after}"


@dataclass(frozen=True)
class Report:
    """A worker's own word on why it ended."""

    message: str
    consequence: bool
    """Only because another worker had failed."""
    time: float


def report_failure(error: BaseException, message: str) -> bool:
    """Called by a worker about to end.  False where no parent of ours listens, so that the worker must speak for itself."""
    folder = os.environ.get(REPORTS)
    if not folder or "RANK" not in os.environ:
        return False
    report = Report(message, isinstance(error, PeerLost), time.time())
    with contextlib.suppress(OSError):  # the parent still sees the exit code
        temporary = Path(folder) / f".{os.environ['RANK']}"
        temporary.write_text(json.dumps(asdict(report)))
        temporary.rename(Path(folder) / f"{os.environ['RANK']}.json")
    return True


def _reports(folder: Path) -> dict[int, Report]:
    return {int(path.stem): Report(**json.loads(path.read_text())) for path in folder.glob("*.json")}


def end_on_signals() -> None:
    """Lets SIGINT and SIGTERM end this worker even while it is blocked in an exchange; call it before threads start.

    After SIGTERM, which the launcher sends when another worker has failed, there is a moment's grace: an exchange with a dead
    worker fails at once, and this one can still say what it was doing.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def watch() -> None:
        received = signal.sigwait(signals)
        if received == signal.SIGTERM:
            time.sleep(GRACE_SECONDS)
        os._exit(128 + received)

    threading.Thread(target=watch, name="nestpipe-signals", daemon=True).start()

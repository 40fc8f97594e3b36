"""Why workers ended: each leaves a report in a folder, and the launcher finds the one that explains the others.

Imports nothing heavy: a worker that fails early must not wait for torch to say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.comm.errors import PeerLost

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

REPORTS = "NESTPIPE_REPORTS"
"""The environment variable that names the folder in which workers of this launch leave their reports."""
TERMINATED = {-signal.SIGTERM, 128 + signal.SIGTERM}
"""Exit codes of a worker that ended because of SIGTERM."""


@dataclass(frozen=True)
class Report:
    """A worker's own account of why it ended."""

    message: str
    consequence: bool
    """It ended only because another worker had failed."""
    in_vain: bool
    """It waited for another worker until its timeout; that worker may still exist."""
    time: float
    """Of the monotonic clock, which all processes of a machine share."""


def report_failure(error: BaseException, message: str) -> bool:
    """Leaves this worker's report for its launcher.  False if there is no launcher of ours to read it."""
    folder = os.environ.get(REPORTS)
    if not folder or "RANK" not in os.environ:
        return False
    lost = isinstance(error, PeerLost)
    report = Report(message, lost, lost and " waited " in message, time.monotonic())
    with contextlib.suppress(OSError):  # the launcher still sees the exit code
        name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ['RANK']}"
        temporary = Path(folder) / f".{name}"
        temporary.write_text(json.dumps(asdict(report)))
        temporary.rename(Path(folder) / f"{name}.json")
    return True


def read_reports(folder: Path, start: int | None = None) -> dict[int, Report]:
    """Reports by rank, of one start of the workers (0 is the first), or of the last start that left any."""
    found = {path: tuple(map(int, path.stem.split("-"))) for path in folder.glob("*.json")}
    wanted = max((at for at, _ in found.values()), default=0) if start is None else start
    return {rank: Report(**json.loads(path.read_text())) for path, (at, rank) in found.items() if at == wanted}


def root_cause(failures: Mapping[int, ProcessFailure], reports: Mapping[int, Report]) -> str:
    """The earliest failure that is not the consequence of another worker's.

    A killed worker cannot say where it was, so what a survivor noticed follows in brackets.  The launcher has to kill a worker
    that stopped answering; then what the survivor noticed is the cause.
    """
    causes = [report for report in reports.values() if not report.consequence]
    noticed = [report for report in reports.values() if report.consequence]
    if causes:
        return min(causes, key=lambda report: report.time).message
    first = min(noticed, key=lambda report: report.time, default=None)
    after = f" ({first.message})" if first else ""
    # The launcher itself ends the remaining workers with SIGTERM, which is no cause.
    deaths = [(f.timestamp, r, f.exitcode) for r, f in failures.items() if r not in reports]
    deaths = [death for death in deaths if death[2] not in TERMINATED] or deaths
    if first and first.in_vain and all(code == -signal.SIGKILL for _, _, code in deaths):
        return first.message + "".join(f"; worker {rank} did not answer and was ended" for _, rank, _ in sorted(deaths))
    if first and not deaths:
        return first.message
    if not deaths:
        return "the workers failed and reported no reason"
    _, rank, code = min(deaths)
    if code < 0:
        return f"worker {rank} was killed by {signal.Signals(-code).name}{after}"
    return f"worker {rank} ended with exit code {code} and reported no reason{after}"


def exit_code(failures: Mapping[int, ProcessFailure], reports: Mapping[int, Report]) -> int:
    """Of the worker whose report is the cause: 2 for bad input; 1 where no worker gives a cause."""
    causes = [(report.time, rank) for rank, report in reports.items() if not report.consequence and rank in failures]
    return 2 if causes and failures[min(causes)[1]].exitcode == 2 else 1


def only_terminated(failures: Mapping[int, ProcessFailure], reports: Mapping[int, Report]) -> bool:
    """Whether SIGTERM, and what it caused on other workers, explains every failure."""
    codes = {failure.exitcode for rank, failure in failures.items() if rank not in reports}
    return codes <= TERMINATED and all(report.consequence for report in reports.values())


def as_peer_lost(error: Exception) -> Exception:
    """PeerLost, naming rank and function, for an error that torch.distributed raised because another worker is gone.

    Any other error is returned as it is.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    ours = [i for i, module in enumerate(modules) if module.startswith("nestpipe.")]
    from_torch = bool(modules) and modules[-1].startswith("torch.distributed")
    if "RANK" not in os.environ or not isinstance(error, RuntimeError) or not from_torch or not ours:
        return error
    place = f"{modules[ours[-1]].removeprefix('nestpipe.')}.{frames[ours[-1]].f_code.co_name}"
    who = f"rank {os.environ['RANK']} in {place}"
    text = " ".join(str(error).split())
    if "timed out" in text.lower() or "timeout" in text.lower():
        return PeerLost(f"{who} waited in vain for another worker; raise --timeout if it was only slow")
    # torch puts its own source line in front and advice behind
    reason = re.sub(r"^\[[^]]*\] ", "", text).split(". ")[0]
    return PeerLost(f"{who} lost another worker: {reason}")

"""Local workers through torch's own launcher, and one line when they fail.

Workers inherit the terminal.  What ended a worker is written to a folder that their parent reads, so that it can report the one
error that started it all and not the consequences on other workers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nestpipe.comm.errors import PeerLost
from nestpipe.comm.world import World
from nestpipe.launch.quick_start import leave_out_compiler
from nestpipe.launch.signals import LAUNCHER
from nestpipe.train.rundir import LAUNCH_FILE

REPORTS = "NESTPIPE_REPORTS"
"""Names the folder in which workers of this launch leave word of their end."""
START_SECONDS = 120.0
"""What all workers have to load and to meet in; on a busy machine they start further apart than they ever are in training."""
END_SECONDS = 3
"""What a worker has to end in once it is told to; longer than the grace that it gives itself."""
TOLD = {-signal.SIGTERM, 128 + signal.SIGTERM}
"""Exit codes of a worker that ended because it was told to."""


class LaunchError(RuntimeError):
    """A worker failed; the message is one line and names it."""


def launch(
    arguments: Sequence[str],
    workers: int,
    port: int | None = None,
    max_restarts: int = 0,
    orderly_seconds: float | None = None,
) -> None:
    """Runs `python -m nestpipe ARGUMENTS` on `workers` local processes and waits; they join on loopback.

    When one fails, all are started again, at most `max_restarts` times.  `orderly_seconds`: what workers have to end in by
    themselves after SIGTERM; None: they are ended at once.
    """
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
        max_restarts=max_restarts,
        monitor_interval=0.2,
        run_id=f"nestpipe-{uuid.uuid4().hex}",  # over all restarts, and of no other launch
        logs_specs=DefaultLogsSpecs(
            os.devnull
        ),  # workers write to our terminal; torch would leave empty folders in /tmp
        # Not SIGINT, which torch would pass on: a worker that is just starting would answer it with a traceback.
        signals_to_handle="SIGHUP,SIGQUIT" if orderly_seconds else "SIGTERM,SIGHUP,SIGQUIT",
        shutdown_timeout=END_SECONDS,
    )
    # When a worker fails, torch waits up to 30 s for the others, and has no setting for it.  A stopped one never ends.
    PContext.close.__defaults__ = (None, END_SECONDS)
    with tempfile.TemporaryDirectory(prefix="nestpipe-") as folder:
        os.environ[REPORTS] = folder
        os.environ[LAUNCHER] = str(os.getpid())
        if orderly_seconds is not None:
            signal.signal(signal.SIGTERM, functools.partial(_pass_on, orderly_seconds + END_SECONDS))
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "nestpipe", *arguments)
        except ChildFailedError as error:
            cause = _stopped(error.failures, _reports(Path(folder))) or _root_cause(
                error.failures, _reports(Path(folder))
            )
            raise LaunchError(cause + _after_restarts(max_restarts)) from None
        except SignalException as error:
            raise LaunchError(f"stopped by {error.sigval.name}; all workers were ended") from None
        finally:
            _end_workers()


_told_to_stop = threading.Event()


def _stopped(failures: dict[int, ProcessFailure], reports: dict[int, Report]) -> str | None:
    """What to say where nothing else went wrong than that workers were told to stop and could not save anything in time."""
    codes = {failure.exitcode for rank, failure in failures.items() if rank not in reports}
    if not _told_to_stop.is_set() or not codes <= TOLD or any(not report.consequence for report in reports.values()):
        return None
    return (
        "stopped by SIGTERM with nothing new saved: no step had been taken yet, or a checkpoint takes longer than "
        "checkpoint.stop_seconds; all workers were ended"
    )


def _after_restarts(count: int) -> str:
    """torch gives up only when all restarts are used."""
    return "" if not count or _told_to_stop.is_set() else f"; given up after {count} restart{'s' * (count > 1)}"


def _end_workers() -> None:
    """A signal may come after torch has started a worker and before it has noted it: whoever is left is ended and waited for."""
    for worker in _workers():
        with contextlib.suppress(OSError):
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def _pass_on(seconds: float, number: int, frame: object) -> None:
    """SIGTERM to all workers, who then end by themselves; a second one ends this process and them at once.

    So does a worker that is started anew in spite of it, because another ended badly, and one that takes too long.
    """
    signal.signal(number, _give_up)
    _told_to_stop.set()
    told = set(_workers())
    for worker in told:
        with contextlib.suppress(OSError):
            os.kill(worker, number)

    def see_to_it() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and told.issuperset(_workers()):
            time.sleep(0.2)
        os.kill(os.getpid(), number)

    threading.Thread(target=see_to_it, name="nestpipe-stopping", daemon=True).start()


def _give_up(number: int, frame: object) -> None:
    raise SignalException(f"process {os.getpid()} got {number}", signal.Signals(number))


def _workers() -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"\0nestpipe\0" in (process / "cmdline").read_bytes():
                yield int(process.name)


def join(timeout: float) -> World:
    """Joins the other workers of this launch, for which there is more time than `timeout`, what they later have to answer in."""
    leave_out_compiler()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        patience = timedelta(seconds=max(timeout, START_SECONDS))
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # One store over all restarts, with the addresses of workers that are no more.
            store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = os.environ.get("NESTPIPE_BACKEND", "gloo")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    return World.join(timeout)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise LaunchError(f"port {port} cannot be used ({why}): choose another --port, or none") from None


def _root_cause(failures: dict[int, ProcessFailure], reports: dict[int, Report]) -> str:
    """The earliest failure that is not the consequence of another worker's.

    A worker that was killed cannot say where it was, so what a survivor noticed is added in brackets.  One that stopped answering
    has to be killed by the launcher in the end; then what the survivor noticed is the cause.
    """
    causes = [report for report in reports.values() if not report.consequence]
    noticed = [report for report in reports.values() if report.consequence]
    if causes:
        return min(causes, key=lambda report: report.time).message
    first = min(noticed, key=lambda report: report.time, default=None)
    after = f" ({first.message})" if first else ""
    # The launcher itself ends the remaining workers with SIGTERM; that is nobody's cause.
    deaths = [(f.timestamp, r, f.exitcode) for r, f in failures.items() if r not in reports]
    deaths = [death for death in deaths if death[2] not in TOLD] or deaths
    if first and first.in_vain and all(code == -signal.SIGKILL for _, _, code in deaths):
        return first.message + "".join(f"; worker {rank} did not answer and was ended" for _, rank, _ in sorted(deaths))
    if first and not deaths:
        return first.message
    if not deaths:
        return "the workers failed and gave no reason"
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
    in_vain: bool
    """It waited for another worker until its patience ended; that one may still be there."""
    time: float
    """By the clock that all processes of a machine share and nobody sets."""


def report_failure(error: BaseException, message: str) -> bool:
    """Called by a worker about to end.  False where no parent of ours listens, so that the worker must speak for itself."""
    folder = os.environ.get(REPORTS)
    if not folder or "RANK" not in os.environ:
        return False
    lost = isinstance(error, PeerLost)
    report = Report(message, lost, lost and " waited " in message, time.monotonic())
    with contextlib.suppress(OSError):  # the parent still sees the exit code
        name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ['RANK']}"
        temporary = Path(folder) / f".{name}"
        temporary.write_text(json.dumps(asdict(report)))
        temporary.rename(Path(folder) / f"{name}.json")
    return True


def _reports(folder: Path, start: int | None = None) -> dict[int, Report]:
    """By rank; of the last start that left any, where workers were started several times."""
    found = {path: tuple(map(int, path.stem.split("-"))) for path in folder.glob("*.json")}
    wanted = max((at for at, _ in found.values()), default=0) if start is None else start
    return {rank: Report(**json.loads(path.read_text())) for path, (at, rank) in found.items() if at == wanted}


def launch_id() -> str | None:
    """A name of this launch that is the same on all machines and over all restarts; None for a process that nobody launched.

    torchrun has one, but calls all launches "none" that were not given any.  Those have one agent that starts worker 0.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name
    try:
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # no Linux
        began = "?"
    return f"{socket.gethostname()} {os.getppid()} {began}"


def restart_count() -> int:
    """How often torch has started workers of this launch again; machines that joined are not counted."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def started_again(run: Path) -> bool:
    """Whether this very launch has begun that run: then it may go on with it unasked, and nobody else may."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return launch_id() is not None and (run / LAUNCH_FILE).read_text() == launch_id()
    return False


def why_restarted() -> str:
    """For a worker that was started again: which start it is and what ended the one before, as far as anybody could say."""
    start, changed = restart_count(), "workers were lost or have joined"
    if not start:
        return changed
    folder = os.environ.get(REPORTS)
    before = _reports(Path(folder), start - 1) if folder else {}
    reports = sorted(before.values(), key=lambda report: (report.consequence, report.time))
    why = reports[0].message if reports else changed
    return f"restart {start} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')} ({why})"


def as_peer_lost(error: Exception) -> Exception:
    """What torch.distributed raises of its own, when another worker is gone: in one line, with the place."""
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

"""Which launch a worker belongs to, and whether it was started again.  Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from nestpipe.launch.failures import REPORTS, read_reports

LAUNCH_FILE = "launch"
"""In a run directory: the id of the launch that trains the run, and may resume it without --resume if it has checkpoints."""


def launch_id() -> str | None:
    """The same on all machines and over all restarts of a launch; None in a process that no launcher started.

    torchrun gives every launch the id "none" unless --rdzv-id is set.  Such a launch is identified by the agent process that
    started worker 0.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name
    try:
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        began = "?"
    return f"{socket.gethostname()} {os.getppid()} {began}"


def restart_count() -> int:
    """How often torch has restarted the workers of this launch after a failure; not when machines joined."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def started_again(run: Path) -> bool:
    """Whether this launch itself started that run: it may resume it without --resume, and no other launch may."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return launch_id() is not None and (run / LAUNCH_FILE).read_text() == launch_id()
    return False


def why_restarted() -> str:
    """For a worker that was started again: which restart this is and what ended the start before, as far as is known."""
    start, changed = restart_count(), "workers were lost or have joined"
    if not start:
        return changed
    folder = os.environ.get(REPORTS)
    before = read_reports(Path(folder), start - 1) if folder else {}
    reports = sorted(before.values(), key=lambda report: (report.consequence, report.time))
    why = reports[0].message if reports else changed
    return f"restart {start} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')} ({why})"

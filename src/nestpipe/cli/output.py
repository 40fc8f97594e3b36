"""Where a command's results go: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 240
"""Columns of a table that goes to a pipe: most rows stay on one line, so that grep finds them."""


def console(json_to: str | None = None, **options: Any) -> Console:
    """Standard output, or standard error while `--json -` takes standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, stderr=json_to == "-", **options)


def check_writable(place: str | None, flag: str = "--json") -> None:
    """ValueError if `place` cannot be a file: before hours of work, not after them.  Only worker 0 writes, so only it checks."""
    if place and place != "-" and os.environ.get("RANK", "0") == "0":
        folder = Path(place).parent
        if not folder.is_dir() or Path(place).is_dir():
            why = "it is a folder" if folder.is_dir() else f"there is no folder '{folder}'"
            raise ValueError(f"{flag} {place} cannot be written: {why}")


def write_json(place: str | None, what: dict[str, Any]) -> None:
    """Writes to the file `place`, or to standard output for "-"; does nothing without a place."""
    from nestpipe.train.rundir import plain

    if place == "-":
        print(json.dumps(plain(what), allow_nan=False))
    elif place:
        Path(place).write_text(json.dumps(plain(what), allow_nan=False, indent=2) + "\n")

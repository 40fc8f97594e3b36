"""What the worker programs of `nestpipe bench gr` share: one pinned core, one thread, a config in and a report out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nestpipe.lab.settings import PEERS


def run_worker(run: Callable[[dict[str, Any], Any], dict[str, Any]], description: str) -> None:
    """Calls `run` with the config and the turns of this process, and writes what it returns."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the report; turns are given in its folder")
    arguments = parser.parse_args()
    sys.path.insert(0, str(PEERS))
    import timed_turns  # type: ignore[import-not-found]

    config = json.loads(arguments.config.read_text())
    os.sched_setaffinity(0, {config.pop("core")})
    torch.set_num_threads(1)
    report = run(config, timed_turns.TimedTurns(arguments.out.parent, 0))
    arguments.out.write_text(json.dumps(report) + "\n")

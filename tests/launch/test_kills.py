"""A run that is killed five times at random moments, and resumed each time, leaves the bits of one that nobody touched."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from forks import Fork
from kills import kill_and_resume, s3_server


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["disk", "s3"])
def test_five_kills(tmp_path: Path, where: str) -> None:
    """The short form of bench/kills.py: all processes, one worker or the launcher alone, while starting, reading a checkpoint,
    training, writing one or removing old ones, under any schedule and tier; with checkpoints on disk and on an S3 server."""

    def start(arguments: list[str], said: Path) -> Fork:
        return Fork("nestpipe", arguments, tmp_path, Path(os.devnull), said, os.environ)

    lines: list[str] = []
    with s3_server() if where == "s3" else contextlib.nullcontext() as store:
        outcome = kill_and_resume(
            tmp_path, kills=5, seed=4, tell=lines.append, steps_a_life=6, start=start, store=store
        )
    assert outcome.good and outcome.kills == 5, (outcome, lines)

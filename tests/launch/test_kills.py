"""A run that is killed five times at random moments, and resumed each time, leaves the bits of one that nobody touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forks import Fork
from kills import kill_and_resume


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_kills(tmp_path: Path) -> None:
    """The short form of bench/kills.py: all processes, one worker or the launcher alone, while starting, reading a checkpoint,
    training, writing one or removing old ones, under any schedule and tier."""

    def start(arguments: list[str], said: Path) -> Fork:
        return Fork("nestpipe", arguments, tmp_path, Path(os.devnull), said, os.environ)

    lines: list[str] = []
    outcome = kill_and_resume(tmp_path, kills=5, seed=4, tell=lines.append, steps_a_life=6, start=start)
    assert outcome.good and outcome.kills == 5, (outcome, lines)

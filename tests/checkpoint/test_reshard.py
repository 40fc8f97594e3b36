"""Who reads which files when a checkpoint is loaded on another number of workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from nestpipe.checkpoint import load
from nestpipe.checkpoint.load import has_rows_for
from nestpipe.comm.world import World
from runs import EVERY, digest_at, small, train_run
from workers import run


@pytest.mark.parametrize("written", [1, 2, 3, 8, 48, 64])
@pytest.mark.parametrize("now", [1, 2, 3, 8, 48, 64])
def test_files_are_read_by_those_who_need_them(written: int, now: int) -> None:
    """All that there is, and hardly anything twice: from 64 workers to 48, each reads two files or three instead of 64."""
    readers = [World(rank, now, {}, 1.0) for rank in range(now)]
    read = [sum(has_rows_for(world, worker, written) for worker in range(written)) for world in readers]
    assert sum(read) == written + now - math.gcd(written, now)
    assert max(read) <= written // now + 2 and min(read) >= 1
    if written == now:
        assert read == [1] * now


def reading(world: World, settings: list[str], folder: str) -> tuple[str, set[int]]:
    """The digest of what is loaded, and whose files of rows this worker has read."""
    real, workers = load.read_rows, set()

    def read_rows(checkpoint: Any, file: Any) -> Any:
        workers.add(file.worker)
        return real(checkpoint, file)

    load.read_rows = read_rows
    try:
        return digest_at(world, "dlrm", settings, folder), workers
    finally:
        load.read_rows = real


@pytest.mark.slow
def test_three_workers_read_what_four_have_left(tmp_path: Path) -> None:
    """The same bits, though nobody has read everything."""
    settings = [*small("dlrm", EVERY), "train.steps=4"]
    left = run(4, train_run, "dlrm", settings, str(tmp_path / "run"))[0]["digest"]
    assert run(3, reading, settings, str(tmp_path / "run")) == [(left, {0, 1}), (left, {1, 2}), (left, {2, 3})]

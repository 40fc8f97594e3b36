"""Which worker reads which files when the number of workers changes."""

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
def test_a_worker_reads_only_files_that_it_needs(written: int, now: int) -> None:
    """Every file is read, and few are read twice: from 64 workers to 48, each reads two or three files instead of 64."""
    readers = [World(rank, now, {}, 1.0) for rank in range(now)]
    read = [sum(has_rows_for(world, worker, written) for worker in range(written)) for world in readers]
    assert sum(read) == written + now - math.gcd(written, now)
    assert max(read) <= written // now + 2 and min(read) >= 1
    if written == now:
        assert read == [1] * now


def reading(world: World, settings: list[str], folder: str) -> tuple[str, set[int]]:
    """The digest after loading, and the workers whose files this one has read."""
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
def test_three_workers_restore_the_checkpoint_of_four(tmp_path: Path) -> None:
    """The same bits, though no worker reads all files."""
    settings = [*small("dlrm", EVERY), "train.steps=4"]
    left = run(4, train_run, "dlrm", settings, str(tmp_path / "run"))[0]["digest"]
    assert run(3, reading, settings, str(tmp_path / "run")) == [(left, {0, 1}), (left, {1, 2}), (left, {2, 3})]

"""Bulk transfers: io_uring and the pool of threads move the same bytes and report the same failures."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nestpipe.tables.disk.preads import Preads
from nestpipe.tables.disk.uring import Ring

SECTOR = 512
SECTORS = 3000


@pytest.fixture
def memory() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, SECTORS * SECTOR), np.uint8)


@pytest.fixture(params=["registered", "unregistered", "shallow", "threads"])
def io(request: pytest.FixtureRequest, memory: np.ndarray) -> Iterator[Ring | Preads]:
    if request.param == "threads":
        made: Ring | Preads = Preads(memory)
    else:
        try:
            made = Ring(memory, 4, 3) if request.param == "shallow" else Ring(memory)
        except OSError as error:
            pytest.skip(f"no io_uring here: {error}")
        made.registered = made.registered and request.param != "unregistered"
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    yield fd
    os.close(fd)


def test_bytes_arrive_where_they_should(io: Ring | Preads, memory: np.ndarray, file: int) -> None:
    """Promise: thousands of writes and reads in any order, more than can be in flight, each move the right bytes."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (SECTORS, SECTOR), np.uint8)
    memory[:] = content.reshape(-1)
    sectors, to = rng.permutation(SECTORS), rng.permutation(SECTORS)
    lengths = np.full(SECTORS, SECTOR, np.int64)
    each = np.arange(SECTORS) * SECTOR
    np.testing.assert_array_equal(io.transfer(True, file, sectors * SECTOR, lengths, each), lengths)
    memory[:] = 0
    np.testing.assert_array_equal(io.transfer(False, file, sectors * SECTOR, lengths, to * SECTOR), lengths)
    np.testing.assert_array_equal(memory.reshape(SECTORS, SECTOR)[to], content)


def test_each_failure_has_its_own_result(io: Ring | Preads, memory: np.ndarray, file: int) -> None:
    """Promise: a read at the end is short, a bad one returns its error, and the others succeed."""
    os.truncate(file, 10 * SECTOR)
    offsets = np.array([0, 9, 10, 2, 1]) * SECTOR
    lengths = np.array([SECTOR, 2 * SECTOR, SECTOR, SECTOR, SECTOR])
    places = np.arange(5) * 2 * SECTOR
    places[3] = 1 << 50  # not in the memory
    results = io.transfer(False, file, offsets, lengths, places)
    assert results.tolist() == [SECTOR, SECTOR, 0, -errno.EFAULT, SECTOR]
    closed = np.full(2, -errno.EBADF)
    np.testing.assert_array_equal(io.transfer(False, 10_000, offsets[:2], lengths[:2], np.zeros(2, np.int64)), closed)


def test_nothing_to_move(io: Ring | Preads, file: int) -> None:
    """Promise: an empty transfer is no special case for callers."""
    none = np.empty(0, np.int64)
    assert len(io.transfer(False, file, none, none, none)) == 0

"""The log of the disk tier on its own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from nestpipe.tables.disk.file import DiskTierError
from nestpipe.tables.disk.log import DiskLog

WORDS = (6, 1)


def log_in(path: Path) -> DiskLog:
    return DiskLog(str(path), "test", "table 'a'", WORDS, lambda row: f"row {row}", segment_bytes=4096)


def write(log: DiskLog, rows: np.ndarray, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values, state = (rng.integers(0, 1 << 32, (len(rows), width), np.uint32) for width in WORDS)
    return log.append(rows, np.arange(len(rows)), values, state)


def read(log: DiskLog, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
    values, state = (np.zeros((len(rows), width), np.uint32) for width in WORDS)
    log.read(places, rows, np.arange(len(rows)), values, state)
    return values


def test_a_lost_write_is_detected(tmp_path: Path) -> None:
    """Promise: an older record of the same row in the same place is not accepted as the newer one."""
    log = log_in(tmp_path)
    rows = np.arange(log.per_segment)
    first = write(log, rows, 0)
    old = open_again(log)
    before = os.pread(old, log.file.bytes, 0)
    log.release(first)
    for seed in range(1, 100):
        places = write(log, rows, seed)
        if np.array_equal(places, first):
            break
        log.release(places)
    np.testing.assert_array_equal(places, first)
    read(log, places, rows)
    os.pwrite(old, before, 0)
    os.fsync(old)
    with pytest.raises(DiskTierError, match="checksum"):
        read(log, places, rows)
    os.close(old)


def test_an_older_record_from_another_place_is_detected(tmp_path: Path) -> None:
    """Promise: a valid record of the right row from its previous place is not accepted."""
    log = log_in(tmp_path)
    rows = np.arange(10)
    old, new = write(log, rows, 0), write(log, rows, 1)
    again = open_again(log)
    size = len(rows) * log.record_bytes
    os.pwrite(again, os.pread(again, size, int(old[0]) * log.record_bytes), int(new[0]) * log.record_bytes)
    os.fsync(again)
    read(log, old, rows)
    with pytest.raises(DiskTierError, match=r"row 0.*checksum"):
        read(log, new, rows)
    os.close(again)


def open_again(log: DiskLog) -> int:
    return os.open(f"/proc/self/fd/{log.file.fd}", os.O_RDWR)


def test_a_place_that_was_never_written_is_detected(tmp_path: Path) -> None:
    """Promise: zeros are not a valid record, not even of row 0."""
    log = log_in(tmp_path)
    write(log, np.arange(1), 0)
    with pytest.raises(DiskTierError, match="checksum"):
        read(log, np.array([5]), np.array([0]))


def test_places_may_repeat_and_come_in_any_order(tmp_path: Path) -> None:
    """Promise: a read may ask for any places, in any order, more than once."""
    log = log_in(tmp_path)
    rows = np.arange(1000)
    places = write(log, rows, 0)
    all_values = read(log, places, rows)
    some = np.random.default_rng(1).integers(0, 1000, 700)
    np.testing.assert_array_equal(read(log, places[some], rows[some]), all_values[some])

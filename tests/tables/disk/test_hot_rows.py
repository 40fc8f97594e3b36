"""Which rows stay in DRAM."""

from __future__ import annotations

import numpy as np

from nestpipe.tables.disk.hot_rows import HotRows


def test_each_slot_is_given_once() -> None:
    """Promise: the slots given to new rows are distinct and never among those to keep, full or not."""
    rng = np.random.default_rng(0)
    for capacity in (1, 2, 5, 50):
        hot = HotRows(capacity)
        holds: dict[int, int] = {}
        for _ in range(300):
            held = np.array(sorted(holds), np.int64)
            keep = held[rng.random(len(held)) < 0.5]
            away = np.setdiff1d(np.arange(3 * capacity), list(holds.values()))
            rows = away[rng.random(len(away)) < 0.4]
            places, slots, leaving = hot.choose(rows, keep)
            assert len(np.unique(slots)) == len(slots) == len(places) == len(np.unique(places))
            assert not np.isin(slots, keep).any()
            victims = slots[len(slots) - len(leaving) :]
            assert [holds[slot] for slot in victims.tolist()] == leaving.tolist()
            assert not np.isin(slots[: len(slots) - len(leaving)], held).any()
            hot.fill(slots, rows[places])
            hot.touch(keep)
            holds.update(zip(slots.tolist(), rows[places].tolist()))
            assert len(set(holds.values())) == len(holds) <= capacity
        assert hot.used == capacity


def test_hot_rows_stay_however_many_cold_ones_pass() -> None:
    """Promise: rows that every batch touches soon enter DRAM and stay, among rows that are touched once."""
    hot, where = HotRows(100), {}
    regulars = np.arange(60)
    for step in range(100):
        batch = np.concatenate([regulars, 1000 + 200 * step + np.arange(200)])
        _train(hot, where, batch)
        if step > 5:
            assert all(row in where for row in regulars.tolist())


def test_what_was_hot_long_ago_makes_room() -> None:
    """Promise: when other rows become hot, they enter DRAM."""
    hot, where = HotRows(100), {}
    for regulars in (np.arange(90), np.arange(500, 590)):
        for step in range(200):
            _train(hot, where, np.concatenate([regulars, 1000 + 50 * step + np.arange(50)]))
        assert sum(row in where for row in regulars.tolist()) == 90


def _train(hot: HotRows, where: dict[int, int], batch: np.ndarray) -> None:
    """What a store does for a batch; `where` is the slot of each row in DRAM."""
    hits = np.array([where[row] for row in batch.tolist() if row in where], np.int64)
    misses = np.array([row for row in batch.tolist() if row not in where], np.int64)
    places, slots, leaving = hot.choose(misses, hits)
    for row in leaving.tolist():
        del where[row]
    where.update(zip(misses[places].tolist(), slots.tolist()))
    hot.fill(slots, misses[places])
    hot.touch(hits)

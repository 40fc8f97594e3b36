"""Which worker owns a key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.keys import owners_of, share_of
from nestpipe.keys.mixing import hash_of, owner_from_hash


def tables_for(keys: np.ndarray, table: int = 0) -> np.ndarray:
    return np.full(len(keys), table, np.uint16)


KEYS = {
    "dense": np.arange(200_000),
    "strided": np.arange(200_000) * 1024,
    "high": np.arange(200_000) << 40,
    "negative": -np.arange(1, 200_001),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("workers", [2, 3, 7, 64])
def test_balance(kind: str, workers: int) -> None:
    """Owners are balanced whatever the keys look like: within 6 standard deviations of an even draw."""
    keys = KEYS[kind]
    counts = np.bincount(owners_of(tables_for(keys), keys, workers), minlength=workers)
    even = len(keys) / workers
    assert len(counts) == workers
    assert np.abs(counts - even).max() < 6 * np.sqrt(even)


def test_depends_on_the_pair_alone() -> None:
    """A key's owner is the same in any batch, order and company."""
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    owners = owners_of(tables_for(keys, 3), keys, 5)
    np.testing.assert_array_equal(owners_of(tables_for(keys, 3)[::-1], keys[::-1], 5), owners[::-1])
    assert [owners_of(np.array([3], np.uint16), keys[i : i + 1], 5)[0] for i in range(50)] == owners[:50].tolist()


def test_tables_are_independent() -> None:
    """The same keys in two tables do not go to the same owners more often than by chance."""
    keys = np.arange(100_000)
    same = np.mean(owners_of(tables_for(keys, 0), keys, 4) == owners_of(tables_for(keys, 1), keys, 4))
    assert abs(same - 0.25) < 0.01


def test_owner_leaves_the_index_bits_alone() -> None:
    """The keys of one owner still spread evenly over the low hash bits, which place them in that owner's index."""
    keys = np.arange(200_000)
    mine = keys[owners_of(tables_for(keys), keys, 8) == 5]
    places = np.array([int(hash_of(0, k)) & 255 for k in mine.tolist()])
    even = len(mine) / 256
    assert np.abs(np.bincount(places, minlength=256) - even).max() < 6 * np.sqrt(even)


def test_one_worker_owns_all() -> None:
    """A single worker owns every key."""
    assert not owners_of(tables_for(KEYS["high"]), KEYS["high"], 1).any()


@given(st.integers(1, 5000), st.data())
def test_shares_are_what_workers_own(workers: int, data: st.DataObject) -> None:
    """The first and the last hash of a share have its owner, those beside it do not, and shares leave no gap."""
    worker = data.draw(st.integers(0, workers - 1))
    share = share_of(worker, workers)
    owners = [int(owner_from_hash(np.uint64(high << 32), workers)) for high in (share.start, share.stop - 1)]
    assert owners == [worker, worker]
    if worker:
        assert share_of(worker - 1, workers).stop == share.start
        assert int(owner_from_hash(np.uint64((share.start << 32) - 1), workers)) == worker - 1
    assert share_of(0, workers).start == 0 and share_of(workers - 1, workers).stop == 1 << 32

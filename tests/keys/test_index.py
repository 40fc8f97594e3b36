"""HashIndex against a dict."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.keys import HashIndex
from nestpipe.keys.mixing import hash_of

LOW, HIGH = -(2**63), 2**63 - 1
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def unmix(h: int) -> int:
    """The key of table 0 whose hash is h: splitmix64's finalizer backwards."""

    def unshift(x: int, by: int) -> int:
        result = x
        for _ in range(64 // by):
            result = x ^ (result >> by)
        return result

    h = unshift(h, 31) * pow(_MUL_2, -1, 2**64) % 2**64
    h = unshift(h, 27) * pow(_MUL_1, -1, 2**64) % 2**64
    h = unshift(h, 30)
    return h - 2**64 if h >= 2**63 else h


COLLIDING = [unmix((n << 40) | place) for place in (0, 1, 1022, 1023) for n in range(12)]
"""48 keys whose homes are four neighbouring places of a table of 1024, two of them at its end: runs that wrap."""


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([k for _, k in pairs], np.int64), np.array([t for t, _ in pairs], np.uint16)


def check(index: HashIndex, expected: dict[tuple[int, int], int]) -> None:
    """The index holds just these pairs with these slots, and finds nothing else of COLLIDING."""
    assert len(index) == len(expected)
    tables, keys, slots = index.items()
    assert dict(zip(zip(tables.tolist(), keys.tolist()), slots.tolist())) == expected
    pairs = list(expected) + [(t, k) for t in (0, 1) for k in COLLIDING]
    keys, tables = arrays(pairs)
    assert index.find(keys, tables).tolist() == [expected.get(pair, -1) for pair in pairs]


def apply(index: HashIndex, expected: dict[tuple[int, int], int], action: str, pairs: list[tuple[int, int]]) -> None:
    keys, tables = arrays(pairs)
    if action == "insert":
        slots = index.insert(keys, tables).tolist()
        for pair, slot in zip(pairs, slots):
            assert expected.setdefault(pair, slot) == slot  # known keys keep their slot
        assert len(set(expected.values())) == len(expected)  # no slot is given twice
    elif action == "delete":
        freed = [expected.pop(pair) for pair in dict.fromkeys(pairs) if pair in expected]
        assert index.delete(keys, tables).tolist() == freed
    else:
        assert index.find(keys, tables).tolist() == [expected.get(pair, -1) for pair in pairs]


key = st.one_of(st.sampled_from(COLLIDING), st.integers(0, 20), st.sampled_from([LOW, LOW + 1, -1, HIGH]))
pair_lists = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 32767]), key), max_size=30)
actions = st.lists(st.tuples(st.sampled_from(["insert", "insert", "delete", "find"]), pair_lists), max_size=12)


@given(actions)
@settings(max_examples=150, deadline=None)
def test_as_a_dict(steps: list[tuple[str, list[tuple[int, int]]]]) -> None:
    """Any sequence of inserts, finds and deletes gives what a dict gives, repeated keys and extremes included."""
    index, expected = HashIndex(1000), dict[tuple[int, int], int]()
    for action, pairs in steps:
        apply(index, expected, action, pairs)
    check(index, expected)


def test_colliding_keys_collide() -> None:
    """COLLIDING is what it claims: twelve keys to each of four neighbouring homes."""
    homes = [int(hash_of(0, k)) & 1023 for k in COLLIDING]
    assert sorted(set(homes)) == [0, 1, 1022, 1023] and len(set(COLLIDING)) == 48


@pytest.mark.parametrize("seed", range(20))
def test_deletion_closes_the_run(seed: int) -> None:
    """Whatever part of a long run of collisions is deleted, the rest is still found, also across the table's end."""
    rng = np.random.default_rng(seed)
    index, expected = HashIndex(1000), dict[tuple[int, int], int]()
    for _ in range(6):
        for action in ("insert", "delete"):
            chosen = rng.permutation(len(COLLIDING))[: rng.integers(len(COLLIDING))]
            apply(index, expected, action, [(0, COLLIDING[i]) for i in chosen])
            check(index, expected)


def test_growth() -> None:
    """A table that doubles seven times keeps every slot."""
    index = HashIndex(200_000)
    keys = np.random.default_rng(0).permutation(100_000) - 50_000
    slots = np.concatenate([index.insert(part) for part in np.array_split(keys, 37)])
    np.testing.assert_array_equal(slots, np.arange(100_000))
    np.testing.assert_array_equal(index.find(keys), slots)
    assert (index.find(keys + 1_000_000) == -1).all()


def test_known_keys_do_not_grow_it() -> None:
    """Inserting keys that are there costs no memory, however many there are: 32 bytes per row hold at any moment."""
    index = HashIndex(100_000)
    keys = np.arange(12_000)
    index.insert(keys)  # 3/4 of 16384 is 12288
    before = index.nbytes()
    for _ in range(3):
        index.insert(np.tile(keys, 3))
    assert index.nbytes() == before
    for start in range(12_000, 60_000, 500):
        index.insert(np.arange(start, start + 500))
        assert index.nbytes() <= 32 * len(index)


def test_slots_are_used_again() -> None:
    """Churn takes no more slots than were ever live at once."""
    index = HashIndex(100_000)
    for t in range(30):
        index.insert(np.arange(t * 1000, t * 1000 + 3000))
        index.delete(np.arange(t * 1000, t * 1000 + 1000))
    assert index.slots_used <= 3000
    assert len(index) == 2000


def test_full_says_so() -> None:
    """More keys than the machine has room for is an error that says what to do, and known keys still work."""
    index = HashIndex(100)
    index.insert(np.arange(100))
    index.insert(np.arange(100))
    with pytest.raises(MemoryError, match="more workers"):
        index.insert(np.arange(101))
    assert index.find(np.arange(100)).tolist() == list(range(100))
    index.delete(np.arange(50))
    assert (index.insert(np.arange(1000, 1050)) < 50).all()


def test_threads() -> None:
    """Four threads that insert, find and delete at once each see their own keys whole."""
    index = HashIndex(1_000_000)

    def work(thread: int) -> bool:
        rng = np.random.default_rng(thread)
        mine = rng.permutation(20_000) * 4 + thread
        tables = np.full(500, thread % 2, np.uint16)
        slots: dict[int, int] = {}
        for part in np.split(mine, 40):
            slots.update(zip(part.tolist(), index.insert(part, tables).tolist()))
            gone = part[:100]
            index.delete(gone, tables[:100])
            for k in gone.tolist():
                del slots[k]
            assert (index.find(gone, tables[:100]) == -1).all()
        kept = np.array(list(slots), np.int64)
        return index.find(kept, np.full(len(kept), thread % 2, np.uint16)).tolist() == list(slots.values())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert len(index) == 4 * 40 * 400
    assert len(np.unique(index.items()[2])) == len(index)


def test_settle_after_look() -> None:
    """What `look` found is as good as looking again: with keys that came meanwhile, and after a deletion moved slots."""
    index = HashIndex()
    keys, tables = np.arange(10), np.zeros(10, np.uint16)
    index.insert(keys[:6])
    found = index.look(keys, tables)
    assert found.slots.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]
    index.insert(keys[7:8])
    np.testing.assert_array_equal(index.settle(keys, tables, found), index.find(keys))
    assert found.slots[7] == -1, "what was found is not written to: others may hold it"

    found = index.look(keys, tables)
    index.delete(keys[2:4])
    index.insert(np.array([100, 101]))  # take the slots of 2 and 3
    slots = index.settle(keys, tables, found)
    assert len(set(slots.tolist()) | set(index.find(np.array([100, 101])).tolist())) == 12
    np.testing.assert_array_equal(slots, index.find(keys))

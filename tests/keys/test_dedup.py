"""dedup, dedup_pairs and intersect_pairs against numpy, on keys that are dense, scattered, extreme or chosen to collide."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.keys import dedup, dedup_pairs
from nestpipe.keys.dedup import intersect_pairs

LOW, HIGH = -(2**63), 2**63 - 1
_INVERSE_OF_MULTIPLIER = pow(0x9E3779B97F4A7C15, -1, 2**64)
_TABLE_STEP = 0x9E3779B97F4A7C15
KINDS = (np.uint16, np.int64)
"""Of tables and keys."""

any_key = st.one_of(st.integers(-5, 40), st.integers(LOW, HIGH), st.sampled_from([LOW, LOW + 1, -1, 0, HIGH - 1, HIGH]))


def reference(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by sorting: np.unique, renumbered by first occurrence."""
    unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return unique[order], np.argsort(order)[inverse]


def check(keys: np.ndarray) -> None:
    unique, inverse = dedup(keys)
    expected_unique, expected_inverse = reference(keys)
    np.testing.assert_array_equal(unique, expected_unique)
    np.testing.assert_array_equal(inverse, expected_inverse)


def scrambled(keys: np.ndarray) -> np.ndarray:
    """A bijection that leaves no order: what a user's hashed ids look like."""
    x = keys.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (x ^ (x >> np.uint64(27))).view(np.int64)


def power_law(count: int, ids: int, seed: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).pareto(0.3, count), ids - 1).astype(np.int64)


def test_order_of_first_occurrence() -> None:
    """Unique keys come in order of first occurrence, and the inverse speaks of that order."""
    unique, inverse = dedup(np.array([7, 3, 7, HIGH, 3, LOW]))
    assert unique.tolist() == [7, 3, HIGH, LOW]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 3]
    assert unique.dtype == inverse.dtype == np.int64


@given(st.lists(any_key, max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_keys(keys: list[int]) -> None:
    """dedup agrees with numpy on any int64 keys, none included."""
    check(np.array(keys, np.int64))


@pytest.mark.parametrize("key", [LOW, -1, 0, 1, HIGH])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 5000])
def test_all_equal(key: int, count: int) -> None:
    """A batch of one key, as extreme as it may be, has one unique key."""
    unique, inverse = dedup(np.full(count, key))
    assert unique.tolist() == [key]
    assert inverse.shape == (count,) and not inverse.any()


@pytest.mark.parametrize("count", [127, 128, 129, 4095, 4096, 50_001])
@pytest.mark.parametrize("ids", [50, 100_000])
def test_layouts(count: int, ids: int) -> None:
    """Both ways (dense ids, hashed ids) agree with numpy, at and around every block size, whatever the offset."""
    keys = power_law(count, ids, seed=count + ids)
    for offset in (0, LOW, HIGH - ids, -ids // 2):
        check(keys + offset)
    check(scrambled(keys))
    check(np.concatenate([keys, [LOW, HIGH]]))


@pytest.mark.parametrize(
    "stride", [2**12, 2**32, 2**48, _INVERSE_OF_MULTIPLIER], ids=["2^12", "2^32", "2^48", "chosen"]
)
def test_keys_made_to_collide(stride: int) -> None:
    """Keys that agree in the bits that the first hash looks at are slower, not wrong and not quadratic."""
    with np.errstate(over="ignore"):
        keys = (np.arange(100_000, dtype=np.uint64) * np.uint64(stride)).view(np.int64)
    keys = np.concatenate([keys, keys[::-3]])
    check(keys)  # quadratic would be a minute, and the timeout


def test_dense_just_at_the_limit() -> None:
    """The widest range that counts as dense is looked up in memory that is there, and the next wider one is hashed."""
    for spread in (-1, 0, 1):
        keys = np.zeros(1000, np.int64)
        keys[1] = 16 * 1000 + spread
        check(keys)
        check(keys + LOW)


def test_threads_do_not_share_scratch() -> None:
    """Eight calls at once on different keys get what each gets alone."""
    batches = [power_law(30_000, 50_000, seed) for seed in range(24)]
    batches = [scrambled(b) if i % 2 else b for i, b in enumerate(batches)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(dedup, batches * 4))
    for keys, (unique, inverse) in zip(batches * 4, results):
        expected_unique, expected_inverse = reference(keys)
        np.testing.assert_array_equal(unique, expected_unique)
        np.testing.assert_array_equal(inverse, expected_inverse)


def test_input_is_not_written_and_results_are_owned() -> None:
    """The keys stay as they are, and a later call does not change an earlier result."""
    keys = np.array([5, 5, 9])
    unique, inverse = dedup(keys)
    dedup(np.arange(1000))
    assert keys.tolist() == [5, 5, 9] and unique.tolist() == [5, 9] and inverse.tolist() == [0, 0, 1]


def test_other_shapes() -> None:
    """Other strides and integer types are taken as keys; more than one dimension is refused by name."""
    unique, _ = dedup(np.arange(20, dtype=np.int32)[::2])
    assert unique.tolist() == list(range(0, 20, 2))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        dedup(np.zeros((2, 2), np.int64))


def check_pairs(tables: np.ndarray, keys: np.ndarray) -> None:
    seen: dict[tuple[int, int], int] = {}
    inverse = [seen.setdefault(pair, len(seen)) for pair in zip(tables.tolist(), keys.tolist())]
    unique_tables, unique_keys, got = dedup_pairs(tables, keys)
    assert list(zip(unique_tables.tolist(), unique_keys.tolist())) == list(seen)
    assert got.tolist() == inverse
    assert (unique_tables.dtype, unique_keys.dtype, got.dtype) == (tables.dtype, np.int64, np.int32)


@given(st.lists(st.tuples(st.integers(0, 3), any_key), max_size=100))
@settings(max_examples=100, deadline=None)
def test_pairs(pairs: list[tuple[int, int]]) -> None:
    """A key in two tables is two pairs; order and inverse as for dedup."""
    check_pairs(np.array([t for t, _ in pairs], np.uint16), np.array([k for _, k in pairs], np.int64))


def test_pairs_with_the_same_word() -> None:
    """Pairs of different tables that hash alike in all 64 bits are still told apart."""
    twin = (7 - _TABLE_STEP) % 2**64  # (1, twin) has the word of (0, 7)
    keys = np.array([7, twin, 7, twin, 8], np.uint64).view(np.int64)
    check_pairs(np.array([0, 1, 0, 1, 1], np.uint16), keys)


pair_sets = st.sets(st.tuples(st.sampled_from([0, 1, 32767]), any_key), max_size=60)


@given(pair_sets, pair_sets)
@settings(max_examples=100, deadline=None)
def test_intersect(a: set[tuple[int, int]], b: set[tuple[int, int]]) -> None:
    """intersect_pairs finds the places of the shared pairs on both sides, in the order of the second."""
    left, right = list(a), list(b)
    sides = (np.array([pair[i] for pair in side], kind) for side in (left, right) for i, kind in enumerate(KINDS))
    in_left, in_right = intersect_pairs(*sides)
    assert [right[i] for i in in_right] == [pair for pair in right if pair in a]
    assert [left[i] for i in in_left] == [right[i] for i in in_right]


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 3, 4095, 4096, 4097, 9000]), st.integers(1, 5000), st.integers(-1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32),
    st.sampled_from([LOW, -7000, 0, HIGH - 40_000]),
)
@settings(max_examples=80, deadline=None)
def test_runs(features: list[tuple[int, int, int]], seed: int, base: int) -> None:
    """Features whose ids lie in ranges one after another, wherever they begin, touching or overlapping by one id."""
    random = np.random.default_rng(seed)
    parts, low = [], base
    for count, ids, gap in features:
        parts.append(low + random.integers(0, ids, count))
        low += max(0, ids + gap)
    check(np.concatenate(parts))

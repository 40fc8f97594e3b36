"""plan_window against a few lines of plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestpipe.keys import owners_of
from nestpipe.keys.window import Window, plan_window

LOW, HIGH = -(2**63), 2**63 - 1
_TABLE_STEP = 0x9E3779B97F4A7C15

Segments = list[tuple[int, int, list[int]]]
"""(micro-batch, table, keys), micro-batches ascending."""


def plan(segments: Segments, micros: int, workers: int, by_micro: bool = False) -> Window:
    return plan_window(
        np.array([k for _, _, keys in segments for k in keys], np.int64),
        np.cumsum([len(keys) for _, _, keys in segments], dtype=np.int64),
        np.array([t for _, t, _ in segments], np.uint16),
        np.array([m for m, _, _ in segments], np.int32),
        micros,
        workers,
        by_micro,
    )


def owner(table: int, key: int, workers: int) -> int:
    return int(owners_of(np.array([table], np.uint16), np.array([key], np.int64), workers)[0])


def check(segments: Segments, micros: int, workers: int, by_micro: bool = False) -> None:
    window = plan(segments, micros, workers, by_micro)
    # Per micro-batch, the same key in another one is another key.
    occurrences = [(m, (t, k, m if by_micro else 0)) for m, t, keys in segments for k in keys]
    first: dict[tuple[int, int, int], int] = {}
    last: dict[tuple[int, int, int], int] = {}
    for m, pair in occurrences:
        first.setdefault(pair, m)
        last[pair] = m
    owners = {pair: owner(*pair[:2], workers) for pair in first}
    # Python's sort is stable and dicts keep the order of first occurrence: (first micro, owner, first occurrence).
    order = sorted(first, key=lambda pair: (first[pair], owners[pair]))
    place = {pair: p for p, pair in enumerate(order)}
    assert list(zip(window.tables.tolist(), window.keys.tolist())) == [pair[:2] for pair in order]
    assert window.by_micro == by_micro
    assert len(window) == len(order)
    assert window.inverse.tolist() == [place[pair] for _, pair in occurrences]
    assert window.last.tolist() == [last[pair] for pair in order]
    by_last = sorted(range(len(order)), key=lambda p: (last[order[p]], owners[order[p]]))
    assert window.last_order.tolist() == by_last
    for m in range(micros):
        for w in range(workers):
            rows = range(*window.first_range(m, w))
            assert [order[p] for p in rows] == [p for p in order if first[p] == m and owners[p] == w]
            rows = range(*window.last_range(m, w))
            assert [by_last[p] for p in rows] == [p for p in by_last if last[order[p]] == m and owners[order[p]] == w]
        assert window.arrived(m) == sum(first[pair] <= m for pair in order)
    types = [window.tables.dtype, window.keys.dtype, window.inverse.dtype, window.last.dtype, window.last_order.dtype]
    assert types == [np.uint16, np.int64, np.int32, np.int32, np.int32]


few = st.integers(-3, 6)
wide = st.integers(LOW, HIGH)
keys_lists = st.one_of(st.lists(few, max_size=30), st.lists(wide, max_size=8), st.lists(few | wide, max_size=20))


@st.composite
def windows(draw: st.DrawFn) -> tuple[Segments, int, int]:
    micros = draw(st.integers(1, 5))
    tables = draw(st.lists(st.sampled_from([0, 1, 2, 32767]), min_size=1, max_size=4))  # features may share a table
    segments = [(m, t, draw(keys_lists)) for m in range(micros) for t in tables]
    return segments, micros, draw(st.integers(1, 5))


@given(windows())
@example(([], 1, 1))
@example(([(0, 0, [])], 3, 2))
@example(([(0, 0, [LOW, HIGH]), (1, 0, [HIGH, 0])], 2, 2))
@settings(max_examples=200, deadline=None)
def test_any_window(window: tuple[Segments, int, int]) -> None:
    """Order, inverse, last uses and ranges are those of the definition, for any tables, micro-batches and workers."""
    check(*window)
    check(*window, by_micro=True)


def test_large_windows() -> None:
    """The same at a size where every block and table of the kernel is used, for dense and for hashed ids."""
    rng = np.random.default_rng(0)
    for spread in (1, 2**40 + 7):
        segments = [
            (m, t, (np.minimum(rng.pareto(0.4, 1500), 5000).astype(np.int64) * spread).tolist())
            for m in range(4)
            for t in range(3)
        ]
        check(segments, 4, 3)
        check(segments, 4, 3, by_micro=True)


def test_pairs_with_the_same_word() -> None:
    """Pairs of different tables that hash alike in all 64 bits keep a row each."""
    twin = (7 - _TABLE_STEP) % 2**64
    twin -= 2**64 if twin >= 2**63 else 0
    check([(0, 0, [7, 9, 7]), (0, 1, [twin, 9, twin]), (1, 1, [twin])], 2, 2)

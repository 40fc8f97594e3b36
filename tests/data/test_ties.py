"""The order of a user's events of one time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.introsort import introsort
from nestpipe.data.movielens import MovieLensData
from nestpipe.data.ratings import read_ratings
from nestpipe.data.ties import count_ties, shuffle_ties, sort_events, user_offsets

EVENTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), max_size=60)


def columns(events: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(events, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


@given(st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), max_size=300))
def test_introsort_sorts(values: list[int]) -> None:
    """Whatever the values, every place comes once, and the values ascend."""
    array = np.array(values, np.int64)
    order = introsort(array)
    assert sorted(order.tolist()) == list(range(len(values))) and array[order].tolist() == sorted(values)


ARRAYS = """
import numpy as np
rng = np.random.default_rng(7)
arrays = [rng.integers(0, max(2, n // d), n) for n in (*range(0, 40), 64, 257, 1000, 20000) for d in (1, 4, 16)]
arrays += [np.arange(5000), np.arange(5000)[::-1].copy(), np.zeros(3000, np.int64), np.arange(4096) % 7]
killer = np.zeros(4096, np.int64)  # the median of three is always nearly the smallest: quicksort gives way to heapsort
killer[:2048:2], killer[1:2048:2] = np.arange(1, 2049, 2), np.arange(2049, 4097, 2)
killer[2048:] = np.arange(2, 4097, 2)
arrays += [killer, killer // 3]
"""


def test_introsort_is_that_of_numpy_without_vector_instructions(tmp_path: Path) -> None:
    """Ties come in the order of numpy's portable quicksort, on any CPU; with vector instructions numpy has others."""
    features = "from numpy._core._multiarray_umath import __cpu_features__ as have, __cpu_dispatch__ as dispatch\n"
    found = subprocess.check_output(
        [sys.executable, "-c", features + "print(' '.join(f for f in dispatch if have[f]))"], text=True
    )
    script = ARRAYS + f"np.savez({str(tmp_path / 'orders.npz')!r}, *[np.argsort(a, kind='quicksort') for a in arrays])"
    subprocess.check_call([sys.executable, "-c", script], env={**os.environ, "NPY_DISABLE_CPU_FEATURES": found.strip()})
    scope: dict[str, Any] = {}
    exec(ARRAYS, scope)
    with np.load(tmp_path / "orders.npz") as orders:
        assert len(orders.files) == len(scope["arrays"]) > 100
        for array, name in zip(scope["arrays"], orders.files):
            np.testing.assert_array_equal(introsort(array), orders[name])


@given(EVENTS, st.integers(0, 3))
def test_every_order_is_by_user_and_time(events: list[tuple[int, int]], seed: int) -> None:
    """file, random and meta differ in ties only; file is stable; meta is a sort of all times, then a stable one by user."""
    user, time = columns(events)
    plain = sorted(range(len(events)), key=lambda at: events[at])
    assert sort_events(user, time, "file", seed).tolist() == plain
    by_time = introsort(time).tolist()
    assert sort_events(user, time, "meta", seed).tolist() == sorted(by_time, key=lambda at: events[at][0])
    drawn = sort_events(user, time, "random", seed)
    assert sorted(drawn.tolist()) == sorted(plain)
    assert [events[at] for at in drawn] == [events[at] for at in plain]


@given(EVENTS)
def test_ties_are_counted(events: list[tuple[int, int]]) -> None:
    """Against a count in plain Python."""
    user, time = columns(sorted(events))
    histories = [[t for u, t in sorted(events) if u == one] for one in sorted(set(user.tolist()))]
    tied = [[a == b for a, b in itertools.pairwise(history)] for history in histories]
    expected = {"events": sum(map(sum, tied)), "users": sum(map(any, tied)), "last": sum(t[-1] for t in tied if t)}
    assert count_ties(user_offsets(user), time) == expected


def test_random_ties_are_uniform_and_depend_on_seed_and_user() -> None:
    """Each of the six orders of three events is about as frequent; a user's order does not depend on other users."""
    users = np.repeat(np.arange(3000), 3)
    order = shuffle_ties(users, user_offsets(users), np.zeros(9000, np.int64), 1).reshape(-1, 3)
    _, counts = np.unique(order - 3 * np.arange(3000)[:, None], axis=0, return_counts=True)
    assert len(counts) == 6 and counts.min() > 400 and counts.max() < 600
    alone = shuffle_ties(users[300:303], np.array([0, 3]), np.zeros(3, np.int64), 1)
    assert (alone == order[100] - 300).all()
    again = shuffle_ties(users, user_offsets(users), np.zeros(9000, np.int64), 2).reshape(-1, 3)
    assert (again != order).any(axis=1).mean() > 0.7


def test_movielens_tells_its_ties(tmp_path: Path) -> None:
    """data.json has the number of ties and their order, and each order is another set of targets."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(0, 50, 2000), np.arange(2000), np.full(2000, 3), rng.integers(0, 30, 2000)])
    path = tmp_path / "u.data"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows.tolist()))
    targets = {}
    for ties in ("file", "random", "meta"):
        source = MovieLensData(str(path), ties=ties).open("eval", 1)
        (batch, _), *_ = source.read(0, source.extent, 0)
        targets[ties] = batch.sparse_features["target"].values().numpy()
        told = source.statistics
        assert told["ties"]["order"] == ties and told["lengths"]["events"] == 2000
        assert told["ties"]["events"] > 500 and 0 < told["ties"]["last"] < told["ties"]["users"] <= 50
    for one, other in (("file", "random"), ("file", "meta"), ("random", "meta")):
        assert 0.1 < (targets[one] != targets[other]).mean() < 0.9
    ratings = read_ratings(str(path), "random", 5)
    assert not np.array_equal(ratings.item, read_ratings(str(path), "random", 6).item)


@pytest.mark.parametrize("kind", ["interactions", "interactions-streamed"])
def test_event_logs_have_random_ties_too(kinds: dict[str, Any], kind: str) -> None:
    """In memory and streamed: times stay, items of one time move, and each keeps its weight and its features."""

    def weights(part: Any, b: int) -> list[float]:
        return part.weights()[part.offsets()[b] : part.offsets()[b + 1]].tolist()

    def histories(ties: str) -> dict[int, dict[str, list[Any]]]:
        source = replace(kinds[kind], ties=ties, max_length=100).open("eval", 3)
        found = {}
        for batch, _ in source.read(0, source.extent, 0):
            for b, user in enumerate(batch.extras["user"].tolist()):
                parts = {name: batch.sparse_features[name] for name in source.features}
                own = {name: part.to_dense()[b].tolist() for name, part in parts.items()}
                own["weight"] = [w for name in ("history", "target") for w in weights(parts[name], b)]
                found[user] = own
        assert source.statistics["ties"]["order"] == ties and source.statistics["ties"]["last"] >= 0
        return found

    file, drawn = histories("file"), histories("random")
    assert file.keys() == drawn.keys()
    for user in file:
        assert file[user]["time"] == drawn[user]["time"]

        def events(own: dict[str, list[Any]]) -> list[Any]:
            items = own["history"] + own["target"]
            return sorted(zip(own["time"], items, own["action"], own["place"], own["weight"]))

        assert events(file[user]) == events(drawn[user])
    moved = sum(file[user]["history"] != drawn[user]["history"] for user in file)
    assert moved > len(file) / 2 and histories("random") == drawn


def test_wrong_orders_are_refused() -> None:
    """One line that says what to change."""
    with pytest.raises(ValueError, match=r"data\.ties must be 'file', 'random' or 'meta', not 'stable'"):
        MovieLensData("u.data", ties="stable")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grouped out of core: choose 'file' or 'random', or data\.kind 'movielens'"):
        InteractionsData("log.csv", ties="meta")
    with pytest.raises(ValueError, match=r"data\.ties must be 'file' or 'random', not 'x'"):
        InteractionsData("log.csv", ties="x")  # type: ignore[arg-type]

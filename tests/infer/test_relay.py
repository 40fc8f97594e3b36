"""Relay inference: every path gives the bits of full inference, and these are what the formulas say."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.infer.contract import History
from nestpipe.infer.history import HistoryError, aligned_floats, complete_blocks
from nestpipe.infer.relay import Relay
from ranking_oracle import DrawnRows, first, oracle, ranker, some_history

KINDS = {
    "hstu": {},
    "hstu, uneven": {"dim": 14, "heads": 2, "head_dim": 7, "blocks": 3},
    "alpha": {"feed_forward": 1.5},
    "beta": {},
    "gamma": {},
    "one block": {"blocks": 1, "heads": 1},
}


@functools.cache
def relay_of(kind: str, fresh: int = 0) -> Relay:
    """`fresh`: another one, made anew from the same weights, as another process would have."""
    config = KINDS[kind]
    model = ranker(kind if kind in ("alpha", "beta", "gamma") else "hstu", **config)
    return Relay(model, DrawnRows(model.config.dim), "one")


class Prefix:
    """A user's blocks as a server keeps them: grown, moved and handed on."""

    def __init__(self, relay: Relay, anchor: int) -> None:
        self.relay, self.anchor = relay, anchor
        self.blocks: list[np.ndarray] = []

    def grow(self, window: History, most: int | None = None) -> None:
        complete = self.relay.complete_blocks(window)
        for index in range(len(self.blocks), complete if most is None else min(complete, most)):
            self.blocks.append(aligned_floats(self.relay.block_floats))
            self.relay.encode_block(window, index, self.blocks)

    def move(self) -> None:
        """Elsewhere, as to another tier and back; where they were is overwritten."""
        moved = [aligned_floats(self.relay.block_floats) for _ in self.blocks]
        for to, block in zip(moved, self.blocks):
            to[:] = block
            block[:] = np.nan
        self.blocks = moved


def follow(kind: str, length: int, steps: list[tuple[int, int, bool]], split: list[int], seed: int) -> None:
    """Walks a path to a request, and compares its bits with full inference."""
    relay, whole = relay_of(kind), some_history(length, seed)
    now = int(whole.times[-1]) + seed % 1000 if length else 7
    candidates = np.random.default_rng(seed).integers(0, 700, sum(split))
    prefix: Prefix | None = None
    for known, most, moved in sorted((min(s[0], length), s[1], s[2]) for s in steps):
        window = relay.window(first(whole, known))
        if prefix is None or prefix.anchor != window.start:
            prefix = Prefix(relay, window.start)
        prefix.grow(window, most)
        if moved:
            prefix.move()
    window = relay.window(whole)
    if prefix is None or prefix.anchor != window.start:
        prefix = Prefix(relay, window.start)
    prefix.relay = relay_of(kind, fresh=1)  # another instance takes over
    prefix.grow(window)
    request = prefix.relay.open(window, now, prefix.blocks)
    ends = np.cumsum([0, *split])
    parts = [request.score(candidates[a:b]) for a, b in itertools.pairwise(ends)]
    found = np.concatenate([np.empty((0, 2), np.float32), *parts])
    wanted = relay.rank(window, now, candidates)
    assert found.tobytes() == wanted.tobytes()


paths = {
    "kind": st.sampled_from(sorted(KINDS)),
    "length": st.one_of(st.integers(0, 400), st.sampled_from([0, 1, 63, 64, 65, 128, 129, 255, 256, 257, 320])),
    "steps": st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5), st.booleans()), max_size=4),
    "split": st.lists(st.integers(0, 70), max_size=4),
    "seed": st.integers(0, 2**20),
}


@settings(max_examples=60, deadline=None)
@given(**paths)
def test_every_path_gives_the_same_bits(kind, length, steps, split, seed) -> None:  # type: ignore[no-untyped-def]
    """Promise: full, on a cache, extended, moved, taken over, with candidates split in any way: 0 bits differ."""
    follow(kind, length, steps, split, seed)


@pytest.mark.slow
@settings(max_examples=1200, deadline=None)
@given(**paths)
def test_a_thousand_paths_give_the_same_bits(kind, length, steps, split, seed) -> None:  # type: ignore[no-untyped-def]
    """Promise: as above, over more than 1,000 cases."""
    follow(kind, length, steps, split, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 40, 64, 65, 200, 256])
def test_scores_are_what_the_formulas_say(kind: str, length: int) -> None:
    """Promise: at most 1e-5 from float64 in plain torch.  N is the constant max_length, or this would fail."""
    relay, history = relay_of(kind), some_history(length, 3)
    model = ranker(kind if kind in ("alpha", "beta", "gamma") else "hstu", **KINDS[kind])
    now = (int(history.times[-1]) if length else 0) + 12_345
    candidates = np.arange(5, 105)
    found = relay.rank(history, now, candidates)
    wanted = oracle(model, DrawnRows(model.config.dim), history, now, candidates)
    assert np.abs(found - wanted).max() <= 1e-5
    assert length == 0 or np.ptp(wanted) > 0.1  # candidates differ, or the comparison would be of little worth


def test_context_and_times_that_go_back() -> None:
    """Promise: context is added to its events, what is missing counts as 0, and a request before the last event has a score."""
    model = ranker("hstu", context=["tab"])
    relay, history = Relay(model, DrawnRows(16), "one"), some_history(150, 5)
    with_tab = replace(history, context={"tab": np.arange(150) % 7})
    now = int(history.times[-1]) - 5000
    for given_history in (history, with_tab):
        found = relay.rank(given_history, now, np.arange(9))
        wanted = oracle(model, DrawnRows(16), given_history, now, np.arange(9))
        assert np.abs(found - wanted).max() <= 1e-5
    assert not np.allclose(relay.rank(history, now, np.arange(9)), relay.rank(with_tab, now, np.arange(9)))


def test_the_last_event_is_held_back() -> None:
    """Promise (t(i+1)): a block is complete only when the event after it exists, as its last token depends on that one's time."""
    relay, history = relay_of("hstu"), some_history(65, 8)
    assert [complete_blocks(n) for n in (0, 1, 64, 65, 128, 129)] == [0, 0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="not complete"):
        relay.encode_block(first(history, 64), 0, [aligned_floats(relay.block_floats)])
    right, naive = ([aligned_floats(relay.block_floats)] for _ in range(2))
    relay.encode_block(history, 0, right)
    early = first(history, 64)
    relay._encode(early, 0, np.append(early.times, early.times[-1] + 10**6), naive)
    assert np.abs(right[0] - naive[0]).max() > 1e-4  # what a cache without the rule would keep


def test_a_window_moves_rarely() -> None:
    """Promise (sliding windows): appending events keeps the places of others, and blocks stay valid, until a stride is full."""
    relay, history = relay_of("hstu"), some_history(600, 9)
    starts = [relay.window(first(history, n)).start for n in range(600)]
    assert all(start % 64 == 0 for start in starts)
    assert all(min(n, 256 - 63) <= n - start <= 256 for n, start in enumerate(starts))
    assert sum(a != b for a, b in itertools.pairwise(starts)) == len(set(starts)) - 1 <= 600 // 64
    sliding = History(history.items[344:], history.actions[344:], history.times[344:], 344)
    assert relay.window(sliding).start == relay.window(history).start  # a client may send the last events only
    assert relay.window(sliding).items.tobytes() == relay.window(history).items.tobytes()


def test_blocks_must_be_aligned() -> None:
    """Promise (alignment): memory in which bits could differ is refused, for writing and for reading."""
    relay, history = relay_of("hstu"), some_history(100, 1)
    askew = aligned_floats(relay.block_floats + 1)[1:]
    with pytest.raises(HistoryError, match="multiple of 64 bytes"):
        relay.encode_block(history, 0, [askew])
    with pytest.raises(HistoryError, match="multiple of 64 bytes"):
        relay.open(history, 0, [askew])
    assert aligned_floats(1000).ctypes.data % 64 == 0


def test_candidates_do_not_touch_each_other() -> None:
    """Promise: one candidate with a NaN row spoils its own scores only, and place and company change no bit."""

    class WithNaN(DrawnRows):
        def read(self, table: str, keys: np.ndarray) -> np.ndarray:
            found = super().read(table, keys)
            found[np.asarray(keys) == 13] = np.nan
            return found

    model = ranker("hstu")
    relay, history = Relay(model, WithNaN(16), "one"), replace(some_history(100, 2), items=np.arange(100) + 1000)
    scores = relay.rank(history, int(history.times[-1]), np.arange(90))
    assert np.isnan(scores[13]).all() and not np.isnan(np.delete(scores, 13, 0)).any()
    backwards = relay.rank(history, int(history.times[-1]), np.arange(90)[::-1].copy())
    assert backwards[::-1].tobytes() == scores.tobytes()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"actions": np.zeros(3, np.int32)}, "history.actions"),
        ({"times": np.zeros(10)}, "history.times"),
        ({"start": -1}, "history.start"),
        ({"context": {"tab": np.zeros(2, np.int64)}}, "history.context"),
    ],
)
def test_bad_histories(broken: dict, says: str) -> None:
    """Promise: a history that is none is one line that names the part."""
    with pytest.raises(HistoryError, match=says):
        relay_of("hstu").window(replace(some_history(10, 1), **broken))

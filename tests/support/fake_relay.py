"""A ranking model in a few lines of numpy that keeps the rules of `infer/contract.py`: anchored windows, held-back events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nestpipe.infer.contract import History


class FakeRanking:
    def __init__(self, model: FakeModel, context: np.ndarray, now: int) -> None:
        self._model, self._context, self._now = model, context, now

    def score(self, candidates: np.ndarray) -> np.ndarray:
        self._model.called("score", len(candidates))
        rows = self._model.rows(candidates)
        heads = np.arange(1, len(self._model.actions) + 1, dtype=np.float64)
        return np.sin(rows[:, None] * heads + self._context.sum() + self._now % 97).astype(np.float32)


class FakeModel:
    """Every block depends on all blocks before it, on its events and on the time of the event after it."""

    def __init__(
        self,
        version: str = "1",
        block: int = 4,
        max_length: int = 32,
        stride: int = 8,
        block_floats: int = 12,
        actions: tuple[str, ...] = ("click", "like"),
        called: Callable[[str, int], None] = lambda kind, size: None,
    ) -> None:
        self.version, self.block, self.max_length, self.stride = version, block, max_length, stride
        self.block_floats, self.actions, self.called = block_floats, actions, called
        self.bad_items: set[int] = set()
        """Items whose row is NaN."""

    def window(self, history: History) -> History:
        end = history.start + len(history)
        start = max(0, -(-(end - self.max_length) // self.stride) * self.stride)
        cut = max(0, start - history.start)
        context = {name: values[cut:] for name, values in history.context.items()}
        return History(history.items[cut:], history.actions[cut:], history.times[cut:], history.start + cut, context)

    def complete_blocks(self, history: History) -> int:
        return max(0, len(history) - 1) // self.block

    def encode_block(self, history: History, index: int, blocks: Sequence[np.ndarray]) -> None:
        assert index < self.complete_blocks(history) and len(blocks) == index + 1, "a block that is not complete"
        assert all(block.ctypes.data % 64 == 0 and block.shape == (self.block_floats,) for block in blocks)
        blocks[index][:] = np.nan  # whatever was there must not matter
        self.called("block", index)
        first = index * self.block
        mine = self._events(history, first, first + self.block)
        before = sum(float(block.astype(np.float64).sum()) for block in blocks[:index])
        blocks[index][:] = np.sin(before + mine + np.arange(self.block_floats))

    def open(self, history: History, now: int, blocks: Sequence[np.ndarray]) -> FakeRanking:
        assert len(history) <= self.max_length and len(blocks) == self.complete_blocks(history)
        self.called("open", len(history))
        tail = self._events(history, len(blocks) * self.block, len(history), now)
        return FakeRanking(self, np.array([tail, *(float(block.astype(np.float64).sum()) for block in blocks)]), now)

    def rows(self, items: np.ndarray) -> np.ndarray:
        rows = np.sin(items.astype(np.float64) * 0.37 + sum(self.version.encode()))
        rows[np.isin(items, list(self.bad_items))] = np.nan
        return rows

    def _events(self, history: History, first: int, stop: int, now: int = 0) -> float:
        times = np.append(history.times, now)[first + 1 : stop + 1] - history.times[first:stop]
        return float((self.rows(history.items[first:stop]) + history.actions[first:stop] + np.sin(times)).sum())


def full_scores(model: FakeModel, history: History, now: int, candidates: np.ndarray) -> np.ndarray:
    """Full inference, without anything of serve/: what every path must equal bit for bit."""
    windowed = model.window(history)
    room = np.zeros((model.complete_blocks(windowed) + 1) * 1024, np.float32)
    first = -room.ctypes.data % 64 // 4
    blocks: list[np.ndarray] = []
    for index in range(model.complete_blocks(windowed)):
        at = first + index * (-(-model.block_floats // 16) * 16)
        blocks.append(room[at : at + model.block_floats])
        model.encode_block(windowed, index, blocks)
    return model.open(windowed, now, blocks).score(candidates)


def a_history(events: int, seed: int = 0, start: int = 0) -> History:
    """The same user's events for the same seed, however many."""
    draw = np.random.default_rng(seed)
    items, actions, gaps = draw.integers(0, 1000, 4096), draw.integers(0, 4, 4096), draw.integers(0, 9, 4096)
    cut = slice(start, events)
    return History(items[cut], actions[cut].astype(np.int32), np.cumsum(gaps)[cut], start)

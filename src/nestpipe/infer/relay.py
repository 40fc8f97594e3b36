"""A ranking model whose histories are encoded block by block, on a fixed grid: every path gives the same bits.

Bits hold because nothing that a result depends on differs between paths.  A block is computed by one kernel from the events up
to the one after it and from the blocks before it, which are copies of the same bits.  All products have the grid's shapes, and
all matrices begin at a cache line.  Candidates stand in tiles that are always full, of zeros where there are fewer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.infer import relay_kernels as kernels
from nestpipe.infer.contract import History, RowReader
from nestpipe.infer.history import BLOCK, aligned_floats, check_block, check_history, complete_blocks, windowed
from nestpipe.infer.relay_weights import pack
from nestpipe.models.ranking import RankingModel
from nestpipe.ops.attention import TWO_CHANNELS
from nestpipe.ops.event_kernels import in_order
from nestpipe.ops.event_times import THRESHOLDS
from nestpipe.ops.gemm import tile_gemm


class Relay:
    """A `RelayModel` of a ranking model as it is when this is made.  Any number of threads may call it."""

    block = BLOCK

    def __init__(self, model: RankingModel, rows: RowReader, version: str) -> None:
        self.version, self.actions, self.max_length = version, model.actions, model.config.max_length
        self._rows, self._table, self.context = rows, model.table, tuple(model.config.context)
        self._shape, self._weights = pack(model)
        self._factor = np.float32(model.config.dim**0.5)
        self._gemm = tile_gemm(torch.float32)
        if self._gemm is None:
            raise RuntimeError("relay inference needs the matrix products of torch's library: unset NESTPIPE_GEMM")
        self._layer_floats = (1 if self._shape.mode == TWO_CHANNELS else 2) * BLOCK * self._shape.inner
        self.block_floats = self._shape.layers * self._layer_floats
        self._rooms = threading.local()

    def window(self, history: History) -> History:
        return windowed(check_history(history), self.max_length)

    def complete_blocks(self, history: History) -> int:
        return complete_blocks(len(history))

    def encode_block(self, history: History, index: int, blocks: Sequence[np.ndarray]) -> None:
        if not 0 <= index < complete_blocks(len(history)):
            raise ValueError(f"block {index} of a history of {len(history)} events is not complete")
        self._encode(history, index, history.times, blocks)

    def open(self, history: History, now: int, blocks: Sequence[np.ndarray]) -> Request:
        complete = complete_blocks(len(history))
        if len(blocks) != complete:
            raise ValueError(f"a history of {len(history)} events has {complete} complete blocks, not {len(blocks)}")
        mine = list(blocks)
        times = np.append(history.times, np.int64(now))
        if len(history):
            mine.append(aligned_floats(self.block_floats))
            # Rows behind the end stand at the request's time; nobody sees them.
            self._encode(history, complete, np.append(times, np.full(BLOCK, now, np.int64)), mine)
        return Request(self, len(history), times, mine)

    def rank(self, history: History, now: int, candidates: np.ndarray) -> np.ndarray:
        """Full inference of a windowed history: every block into scratch memory, then `open`, then `score`."""
        complete = complete_blocks(len(history))
        blocks = [aligned_floats(self.block_floats) for _ in range(complete)]
        for index in range(complete):
            self.encode_block(history, index, blocks)
        return self.open(history, now, blocks).score(candidates)

    def _encode(self, history: History, index: int, times: np.ndarray, blocks: Sequence[np.ndarray]) -> None:
        """Block `index` into blocks[index]; `times` reach to the event after it."""
        for block in blocks[: index + 1]:
            check_block(block, self.block_floats)
        low, high = index * BLOCK, min(len(history), (index + 1) * BLOCK)
        room = self._room()
        x = room.tokens[:BLOCK]
        rows = self._read(self._table, history.items[low:high])
        kernels.history_tokens(rows, history.actions[low:high], low, self._factor, self._weights, x)
        for name in self.context:
            known = history.context.get(name)
            keys = np.zeros(high - low, np.int64) if known is None else np.asarray(known[low:high], np.int64)
            x[: high - low, : self._shape.dim] += self._read(name, keys)
        own = np.ascontiguousarray(times[: (index + 1) * BLOCK + 1])
        addresses = np.array([block.ctypes.data for block in blocks[: index + 1]], np.int64)
        kernels.encode(
            self._gemm,
            x,
            index,
            own,
            in_order(own),
            THRESHOLDS,
            addresses,
            blocks[index],
            self._shape,
            self._weights,
            room.parts,
        )

    def _read(self, table: str, keys: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self._rows.read(table, np.ascontiguousarray(keys, np.int64)), np.float32)

    def _room(self) -> _Room:
        """This thread's.  What it holds is written before it is read, in every call."""
        if not hasattr(self._rooms, "room"):
            self._rooms.room = _Room(self._shape, self._weights.mixed.shape[2])
        room: _Room = self._rooms.room
        return room


class _Room:
    """Scratch memory of one thread."""

    def __init__(self, shape: Any, columns: int) -> None:
        def made(*size: int) -> np.ndarray:
            return aligned_floats(int(np.prod(size))).reshape(size)

        most, deep = kernels.CHUNKS * BLOCK, shape.channels * shape.inner
        self.tokens = made(most, shape.wide)
        finishing = made(BLOCK, shape.wide), made(BLOCK, deep), made(BLOCK, shape.wide), made(BLOCK, 2 * shape.hidden)
        ends = np.zeros((BLOCK, len(THRESHOLDS) + 1), np.int64)
        self.parts = made(3, BLOCK * BLOCK), made(most, columns), made(most, deep), ends, finishing


class Request:
    """A `Ranking`: a history that is encoded to its end, at the time of a request."""

    def __init__(self, relay: Relay, length: int, times: np.ndarray, blocks: Sequence[np.ndarray]) -> None:
        self._relay, self._length, self._blocks = relay, length, list(blocks)
        for block in self._blocks:
            check_block(block, relay.block_floats)
        shape = relay._shape
        self._addresses = np.array([block.ctypes.data for block in self._blocks], np.int64)
        self._of_pairs = np.empty((shape.layers, 2, len(self._blocks) * BLOCK + 1), np.float32)
        self._shared = aligned_floats(shape.layers * 2 * shape.inner).reshape(shape.layers, 2, shape.inner)
        seen = np.append(times, times[-1])
        settings = (relay._layer_floats, shape, relay._weights, self._of_pairs, self._shared)
        kernels.open_request(relay._gemm, seen, in_order(seen), THRESHOLDS, self._addresses, *settings)

    def score(self, candidates: np.ndarray) -> np.ndarray:
        relay, keys = self._relay, np.asarray(candidates, np.int64)
        logits = np.empty((len(keys), len(relay.actions)), np.float32)
        most = kernels.CHUNKS * BLOCK
        room, found = relay._room(), np.empty((most, len(relay.actions)), np.float32)
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            chunks = -(-len(some) // BLOCK)
            x = room.tokens[: chunks * BLOCK]
            kernels.candidate_tokens(relay._read(relay._table, some), self._length, relay._factor, relay._weights, x)
            kernels.score(
                relay._gemm,
                x,
                chunks,
                self._length,
                self._addresses,
                relay._layer_floats,
                relay._shape,
                relay._weights,
                self._of_pairs,
                self._shared,
                room.parts,
                found,
            )
            logits[start : start + most] = found[: len(some)]
        return logits

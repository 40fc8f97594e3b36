"""A stand-in for a ranking model: steps take as long as they are told to, without the GIL; scores tell version and history.

Run as a program it serves itself: `python bench/stand_in_relay.py PORT BLOCK_MS OPEN_MS ARENA_MB` prints a line when it is ready.
Each `load` brings the next version.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import numba
import numpy as np

from nestpipe.infer.contract import History

BLOCK, FLOATS = 64, 64 * 128 * 2 * 4


@numba.njit(nogil=True, fastmath=False)
def _spin(rounds: int, seed: float) -> float:  # pragma: no cover
    x = seed
    for _ in range(rounds):
        x = x * 1.0000001 + 1e-9
    return x


def rounds_per_ms() -> float:
    _spin(10, 1.0)
    begun = time.perf_counter()
    _spin(20_000_000, 1.0)
    return 20_000_000 / (1e3 * (time.perf_counter() - begun))


class StandIn:
    """A `RelayModel` for figures of the server around it."""

    actions, block, block_floats, max_length = ("click", "like"), BLOCK, FLOATS, 2048

    def __init__(self, version: str, block_ms: float, open_ms: float, per_ms: float) -> None:
        self.version = version
        self._block, self._open = int(block_ms * per_ms), int(open_ms * per_ms)

    def window(self, history: History) -> History:
        end = history.start + len(history)
        start = max(history.start, -(-(end - self.max_length) // 512) * 512)
        cut = start - history.start
        return History(history.items[cut:], history.actions[cut:], history.times[cut:], start)

    def complete_blocks(self, history: History) -> int:
        return max(0, len(history) - 1) // BLOCK

    def encode_block(self, history: History, index: int, blocks: Sequence[np.ndarray]) -> None:
        _spin(self._block, 1.0)
        blocks[index].fill(np.float32(int(self.version)))

    def open(self, history: History, now: int, blocks: Sequence[np.ndarray]) -> StandInRanking:
        _spin(self._open, 1.0)
        assert all(block[0] == int(self.version) == block[-1] for block in blocks), "blocks of another version"
        return StandInRanking(int(self.version))


class StandInRanking:
    def __init__(self, version: int) -> None:
        self._version = version

    def score(self, candidates: np.ndarray) -> np.ndarray:
        return np.full((len(candidates), 2), self._version, np.float32)


class StandIns:
    """A source of the next version at every load."""

    def __init__(self, block_ms: float, open_ms: float) -> None:
        self._costs, self._next, self._per_ms = (block_ms, open_ms), 0, rounds_per_ms()

    def newest(self) -> str:
        return str(self._next)

    def open(self) -> StandIn:
        self._next += 1
        return StandIn(str(self._next), *self._costs, self._per_ms)


async def _serve(port: int, block_ms: float, open_ms: float, arena_mb: int) -> None:
    from nestpipe.config.serving import ServingConfig
    from nestpipe.serve.http.app import App
    from nestpipe.serve.http.server import listen, run
    from nestpipe.serve.instance.instance import Instance

    config = ServingConfig(arena=arena_mb * 10**6, dram=arena_mb * 10**6, rewarm_seconds=2.0)
    instance = Instance(StandIns(block_ms, open_ms), config)
    app = App("stand-in", control=True)
    app.serve(instance)
    sock = listen("127.0.0.1", port, "PORT")
    print("ready", flush=True)
    await run([(app, sock)], config, asyncio.ensure_future(asyncio.sleep(0)))
    instance.stop()
    print(f"pins {instance.compute.snapshot['pins']}", flush=True)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))

"""The thread that computes.  It alone touches the relay; others hand it calls, which run between two steps."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from nestpipe.device import compute_threads
from nestpipe.serve.instance.relay import Relay

log = logging.getLogger("nestpipe.serve")

SNAPSHOT_SECONDS = 0.1
IDLE_SECONDS = 0.5


class ComputeThread:
    """Runs steps while there are any.  Model code releases the GIL, so the event loop answers meanwhile."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._calls: queue.SimpleQueue[Callable[[Relay], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nestpipe-compute", daemon=True)
        self._shot_at = 0.0
        self.snapshot: dict[str, Any] = {}
        """Counts and fill levels, at most a moment old; replaced as a whole, so any thread may read it."""
        self._shoot()

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, call: Callable[[Relay], None]) -> None:
        """Has `call` run by the thread, in order."""
        self._calls.put(call)

    def stop(self, seconds: float = 10.0) -> None:
        """Runs what was posted before, then ends the thread."""
        self._calls.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        compute_threads.join()
        while True:
            try:
                worked = self._relay.step()
            except Exception:  # a bug of ours; whoever waits for it has a deadline, and others must not wait for ever
                log.exception("a step failed outside the model")
                worked = True
            try:
                call = self._calls.get(timeout=0 if worked else self._patience())
            except queue.Empty:
                call = _nothing
            while call is not None:
                try:
                    call(self._relay)
                except Exception:
                    log.exception("a call of the compute thread failed")
                try:
                    call = self._calls.get_nowait()
                except queue.Empty:
                    break
            if call is None:
                self._shot_at = 0.0
                self._shoot()
                return
            self._shoot()

    def _patience(self) -> float:
        wake = self._relay.wake_at
        return IDLE_SECONDS if wake is None else max(0.0, min(IDLE_SECONDS, wake - self._relay.clock()))

    def _shoot(self) -> None:
        now = time.monotonic()
        if now - self._shot_at < SNAPSHOT_SECONDS:
            return
        self._shot_at = now
        relay = self._relay
        with contextlib.suppress(RuntimeError):
            self.snapshot = {
                "version": relay.model.version,
                "versions": relay.switch.versions,
                "counts": dict(relay.counts),
                "cache": dict(relay.cache.counts),
                "arena_bytes": relay.cache.arena.used_bytes,
                "arena_limit": relay.cache.arena.slots * relay.cache.arena.slot_bytes,
                "dram_bytes": relay.cache.tier.arena.used_bytes,
                "dram_limit": relay.cache.tier.arena.slots * relay.cache.tier.arena.slot_bytes,
                "prefixes": len(relay.cache),
                "pins": relay.cache.pins,
                "holds": len(relay.holds),
                "queue": relay.scheduler.waiting,
                "ahead": relay.scheduler.waiting_ahead,
            }


def _nothing(relay: Relay) -> None:
    pass

"""Eviction state beside the rows, for checkpoints: counts of evicted keys and the clock, to and from plain values.

The names in these dictionaries are stored in checkpoints (field `life` of the manifest) and must not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nestpipe.sparse.evictor import Evictor
from nestpipe.tables.eviction.horizon import AgreedClock


def eviction_state(evictors: list[Evictor | None], clock: AgreedClock, seconds: float, before: int) -> dict[str, Any]:
    """The state of one worker after the batches before `before`; what later ones have prepared is left out."""
    groups = [
        {
            "evicted": evictor.counts.tolist(),
            "forgotten": evictor.forgotten,
            "horizons": [list(pair) for pair in evictor.horizons if pair[0] < before],
        }
        for evictor in evictors
        if evictor is not None
    ]
    return {"seconds": seconds, "clock": clock.state(before), "groups": groups} if groups else {}


def sum_over_workers(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """One state for all workers: counts are summed, the rest is worker 0's, which is the same on every worker."""
    whole = dict(workers[0])
    if whole:
        parts = zip(*(worker["groups"] for worker in workers))
        whole["groups"] = [
            {
                **same[0],
                "evicted": np.sum([part["evicted"] for part in same], axis=0).tolist(),
                "forgotten": sum(part["forgotten"] for part in same),
            }
            for same in parts
        ]
    return whole


def restore_evictors(evictors: list[Evictor | None], clock: AgreedClock, state: dict[str, Any], counts: bool) -> float:
    """Restores what `sum_over_workers` returned.  ValueError if it does not fit these tables.

    `counts`: restore counts too; true on one worker only, so that sums over workers stay right.  Returns the seconds of
    training so far.
    """
    present = [evictor for evictor in evictors if evictor is not None]
    if not present and not state:
        return 0.0
    if set(state) != {"seconds", "clock", "groups"} or not isinstance(state["groups"], list):
        raise ValueError("it must have seconds, clock and groups")
    if len(state["groups"]) != len(present):
        raise ValueError(f"it has {len(state['groups'])} groups, the model has {len(present)}")
    seconds = _number(state["seconds"])
    for evictor, part in zip(present, state["groups"]):
        if not isinstance(part, dict) or set(part) != {"evicted", "forgotten", "horizons"}:
            raise ValueError("a group must have evicted, forgotten and horizons")
        evicted = [_whole(n) for n in _list(part["evicted"])]
        if len(evicted) != len(evictor.counts):
            raise ValueError(f"it counts {len(evicted)} tables, the group has {len(evictor.counts)}")
        pairs = [tuple(_whole(n) for n in _list(pair)) for pair in _list(part["horizons"])]
        if not all(len(pair) == 2 for pair in pairs):
            raise ValueError("horizons must be pairs")
        forgotten = _whole(part["forgotten"])
        evictor.horizons[:] = [(pair[0], pair[1]) for pair in pairs]
        if counts:
            evictor.counts[:] = evicted
            evictor.forgotten = forgotten
    clock.restore(state["clock"])
    return seconds


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)  # type: ignore[arg-type]

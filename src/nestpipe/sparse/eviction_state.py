"""What lasts of admission and eviction beside rows: how many keys went, by which clock; as plain values, forth and back."""

from __future__ import annotations

from typing import Any

from nestpipe.sparse.evictor import Evictor
from nestpipe.tables.eviction.horizon import AgreedClock


def life_state(lives: list[Evictor | None], clock: AgreedClock, seconds: float, before: int) -> dict[str, Any]:
    """Of one worker, of what batches before `before` did: what was prepared of later ones does not count."""
    groups = [
        {
            "evicted": life.counts.tolist(),
            "forgotten": life.forgotten,
            "horizons": [list(pair) for pair in life.horizons if pair[0] < before],
        }
        for life in lives
        if life is not None
    ]
    return {"seconds": seconds, "clock": clock.state(before), "groups": groups} if groups else {}


def restore_lives(lives: list[Evictor | None], clock: AgreedClock, state: dict[str, Any], counts: bool) -> float:
    """Takes up the workers' merged states; ValueError unless it is of these tables.  `counts`: on one worker, to keep sums right.

    Returns the seconds of training so far.
    """
    present = [life for life in lives if life is not None]
    if not present and not state:
        return 0.0
    if set(state) != {"seconds", "clock", "groups"} or not isinstance(state["groups"], list):
        raise ValueError("it must have seconds, clock and groups")
    if len(state["groups"]) != len(present):
        raise ValueError(f"it is of {len(state['groups'])} groups, and there are {len(present)}")
    seconds = _number(state["seconds"])
    for life, part in zip(present, state["groups"]):
        if not isinstance(part, dict) or set(part) != {"evicted", "forgotten", "horizons"}:
            raise ValueError("a group has evicted, forgotten and horizons")
        evicted = [_whole(n) for n in _list(part["evicted"])]
        if len(evicted) != len(life.counts):
            raise ValueError(f"counts of {len(evicted)} tables, and there are {len(life.counts)}")
        pairs = [tuple(_whole(n) for n in _list(pair)) for pair in _list(part["horizons"])]
        if not all(len(pair) == 2 for pair in pairs):
            raise ValueError("horizons must be pairs")
        forgotten = _whole(part["forgotten"])
        life.horizons[:] = [(pair[0], pair[1]) for pair in pairs]
        if counts:
            life.counts[:] = evicted
            life.forgotten = forgotten
    clock.restore(state["clock"])
    return seconds


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no whole number from 0 up")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)  # type: ignore[arg-type]

"""What all workers must see the same, and counts of which each worker knows a part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.errors import NestPipeError


class NotConsistent(NestPipeError, ValueError):
    """Workers differ in what must be the same on all.  The message is one line, and the same on every worker."""

    exit_code = 2


def gather_counts(world: World, mine: Mapping[str, int]) -> dict[str, int]:
    """The counts of all workers in one dictionary; each name is one worker's.  All workers call it together."""
    everyone: list[Mapping[str, int]] = [mine]
    if world.size > 1:
        everyone = [{}] * world.size
        dist.all_gather_object(everyone, dict(mine), group=world.groups["metrics"])
    return {name: count for one in everyone for name, count in one.items()}


def sum_over_workers(world: World, counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by name, summed over all workers, which have the same names.  All workers call it together."""
    total = torch.tensor([*counts.values()], dtype=torch.int64)
    if world.size > 1 and counts:
        dist.all_reduce(total, group=world.groups["metrics"])
    return dict(zip(counts, total.tolist()))


def _comparable(value: object) -> object:
    """What two processes can compare: plain values and dataclasses of them; of anything else its type and plain attributes."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    attributes = getattr(value, "__dict__", {})
    plain = {name: _comparable(item) for name, item in attributes.items() if not callable(item)}
    return (type(value).__qualname__, sorted(plain.items()))


FILES = (
    "all need the same files, at the same paths; look for a machine whose disk is not the shared one, or has old copies"
)


def check_consistent(world: World, advice: str = FILES, **found: object) -> None:
    """NotConsistent, on all workers, unless each of these is the same on every one.  `advice` says what to change."""
    texts = [repr(_comparable(value)) for value in found.values()]
    mine = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") for text in texts]
    both = torch.tensor([*mine, *(-number for number in mine)])
    Exchange(world, "metrics").all_reduce(both, dist.ReduceOp.MAX)
    highest, lowest = both[: len(mine)], -both[len(mine) :]
    for name, high, low in zip(found, highest.tolist(), lowest.tolist()):
        if high != low:
            raise NotConsistent(f"workers see different {name.replace('_', ' ')}: {advice}")

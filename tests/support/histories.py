"""Times of histories, drawn."""

from __future__ import annotations

import torch

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.event_times import EventTimes


def some_events(lengths: list[int], spread: int, in_order: bool) -> EventTimes:
    """For each length the times of its events and of the one after them, within +-10^spread."""
    times = torch.randint(-(10**spread), 10**spread, (sum(lengths) + len(lengths),))
    parts = list(torch.split(times, [length + 1 for length in lengths])) if lengths else []
    values = torch.cat([torch.sort(p)[0] if in_order else p for p in parts]) if parts else times
    return EventTimes(JaggedTensor(values, lengths=torch.tensor([len(p) for p in parts], dtype=torch.int64)))

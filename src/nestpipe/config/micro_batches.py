"""`pipeline.micro_batches` as a user writes it, and its check."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

AUTO = "auto"
MAX_MICRO_BATCHES = 1 << 15
"""Exclusive: a key message has 15 bits for the micro-batch in which a row is used last."""
MicroBatches = int | str | Sequence[Sequence[int]]
"""8, "auto", or [[0, 4], [60, 8]]: 4 from batch 0, 8 from batch 60."""


def check_micro_batches(wanted: MicroBatches) -> None:
    """ValueError unless it is one of the three kinds."""
    if wanted == AUTO or _is_count(wanted):
        return
    if isinstance(wanted, list | tuple) and wanted:
        pairs = [pair for pair in wanted if isinstance(pair, list | tuple) and len(pair) == 2]
        firsts, counts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        rising = all(type(a) is int and type(b) is int and a < b for a, b in pairwise([-1, *firsts]))
        if len(pairs) == len(wanted) and rising and firsts[0] == 0 and all(map(_is_count, counts)):
            return
    raise ValueError(
        f"pipeline.micro_batches must be from 1 to {MAX_MICRO_BATCHES - 1}, 'auto', or [[first batch, micro-batches], ...] "
        f"from batch 0 on, not {wanted!r}"
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < MAX_MICRO_BATCHES

"""What a worker says of its memory, and what it gives back."""

from __future__ import annotations

import sys

import pytest

from nestpipe.train import memory
from nestpipe.train.memory import HeapTrimmer, heap_bytes, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux and glibc")


def test_holes_in_the_heap_go_back_to_the_system() -> None:
    """Promise: what was freed between blocks that stay is not resident for ever; and not before its time."""
    returns = HeapTrimmer()
    returns.maybe_trim()
    blocks = [bytearray(100_000) for _ in range(1000)]
    del blocks[::2]
    before, heap = resident_bytes(), heap_bytes()
    assert before is not None and heap is not None and heap[0] > 50e6 and heap[1] > 40e6
    returns.maybe_trim()
    assert resident_bytes() > before - 1e6  # type: ignore[operator]
    returns.SECONDS = 0.0
    returns.maybe_trim()
    assert resident_bytes() < before - 40e6  # type: ignore[operator]
    assert len(blocks) == 500 and abs(heap_bytes()[0] - heap[0]) < 1e6  # type: ignore[index]


def test_the_heap_is_trimmed_when_it_grows_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a run that stays as it is is left alone, one that grows by more than a tenth is not; nobody for ever."""
    now, resident, trims = 0.0, 1000, []
    monkeypatch.setattr(memory.time, "monotonic", lambda: now)
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident)
    trimmer = HeapTrimmer()
    monkeypatch.setattr(trimmer, "_trim", lambda pad: trims.append(now))
    for now in range(0, 300, 2):
        resident = 1200 if 50 <= now < 70 else 1000
        trimmer.maybe_trim()
    assert trims == [10, 50, 170, 290]

"""Whether launches bound a step is told from how long the host waits."""

from __future__ import annotations

from nestpipe.device.launches import launches_bound, waits_in_words


def told(agree_seconds: float) -> dict[str, object]:
    waits = {"agree": {"count": 10, "seconds": agree_seconds}, "writeback": {"count": 10, "seconds": 0.5}}
    return {"name": "cuda:0", "host_waits": waits}


def test_a_host_that_never_waits_bounds_the_step() -> None:
    """The wait in writeback does not count: another thread has it."""
    assert launches_bound(told(0.01), steps=10, step_ms=100.0)
    assert "launches bound the step" in waits_in_words(told(0.01), 10, 100.0)


def test_a_host_that_waits_keeps_the_device_busy() -> None:
    assert not launches_bound(told(0.3), steps=10, step_ms=100.0)
    said = waits_in_words(told(0.3), 10, 100.0)
    assert said == "cuda:0: the host waited 2.0 times a step (agree 1.0 (30.0 ms), writeback 1.0 (50.0 ms))"

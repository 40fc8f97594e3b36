"""Whether the host keeps a device busy: it does where it has to wait for the device at the end of a step."""

from __future__ import annotations

from typing import Any

LEAST_WAIT = 0.05
"""Of a step.  A host that waits less than that in `agree` had only just issued the work that it waits for."""


def waits_in_words(device: dict[str, Any], steps: int, step_ms: float) -> str:
    """How often the host waited for the device, by stage, and whether launches bound the step."""
    waits = device["host_waits"]
    each = ", ".join(
        f"{stage} {wait['count'] / steps:.1f} ({1e3 * wait['seconds'] / steps:.1f} ms)" for stage, wait in waits.items()
    )
    total = sum(wait["count"] for wait in waits.values()) / steps
    text = f"{device['name']}: the host waited {total:.1f} times a step ({each})"
    if launches_bound(device, steps, step_ms):
        text += "; launches bound the step: the device waits for the host, so use fewer micro-batches or larger batches"
    return text


def launches_bound(device: dict[str, Any], steps: int, step_ms: float) -> bool:
    wait = device["host_waits"].get("agree", {"seconds": 0.0})
    return 1e3 * float(wait["seconds"]) / steps < LEAST_WAIT * step_ms

"""Checks of values that several components share.  Every message names the key to change."""

from __future__ import annotations

import math
from collections.abc import Sequence


def at_least(key: str, value: float | None, low: float) -> None:
    if value is not None and not value >= low:  # not `value < low`, which lets nan through
        raise ValueError(f"{key} must be at least {low}, not {value}")


def above_zero(key: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{key} must be above 0 and finite, not {value}")


def one_of(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{key} must be one of {', '.join(known)}, not {value!r}")

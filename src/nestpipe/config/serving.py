"""What `nestpipe serve` may use and how long it waits.  Its flags are these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nestpipe.config.checks import above_zero, at_least, one_of

TierDtype = Literal["float32", "float16", "bfloat16"]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(key: str, text: str) -> int:
    """`2GB`, `512 MiB` or a plain number, in bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{key} must be a size such as 512MB, 2GB or 2GiB, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class ServingConfig:
    """One instance: memory of its two tiers, limits on requests, and patience."""

    arena: int = 2 * 10**9
    """Bytes of the arena, from which rankings read prefixes."""
    dram: int = 8 * 10**9
    """Bytes of the tier behind it, to which prefixes go that the arena has no room for; 0 = none."""
    dram_dtype: TierDtype = "float32"
    """Numbers in that tier: float32 changes no bit; float16 and bfloat16 take half the bytes and round."""
    queue: int = 1024
    """Rankings that may wait for compute; beyond it a request gets 429."""
    deadline_ms: float = 1000.0
    """Deadline of a request that names none."""
    hold_seconds: float = 2.0
    """How long a pre-inferred prefix stays pinned for a ranking that does not come."""
    score_slice: int = 1024
    """Candidates scored at once: what a ranking of very many lets others wait for."""
    max_candidates: int = 131_072
    """Of one request."""
    max_body: int = 16 * 2**20
    """Bytes of one request."""
    body_seconds: float = 10.0
    """A request must have arrived as a whole after this time, from its first byte."""
    slow_ms: float = 100.0
    """Requests slower than this are logged and kept for /debug/slow."""
    rewarm_users: int = 256
    """Recent users whose prefixes are computed under a new version before it takes over; at most half the arena."""
    rewarm_seconds: float = 10.0
    """How long a new version waits for them."""
    drain_seconds: float = 10.0
    """What running requests get after SIGTERM."""

    def __post_init__(self) -> None:
        for key in ("arena", "dram", "rewarm_users"):
            at_least(f"serving.{key}", getattr(self, key), 0)
        for key in ("queue", "score_slice", "max_candidates", "max_body"):
            at_least(f"serving.{key}", getattr(self, key), 1)
        for key in ("deadline_ms", "hold_seconds", "body_seconds", "slow_ms", "drain_seconds"):
            above_zero(f"serving.{key}", getattr(self, key))
        at_least("serving.rewarm_seconds", self.rewarm_seconds, 0)
        one_of("serving.dram_dtype", self.dram_dtype, ("float32", "float16", "bfloat16"))

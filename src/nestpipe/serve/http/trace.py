"""Trace ids as OpenTelemetry has them (W3C traceparent): a request's own is continued, one without gets one."""

from __future__ import annotations

import random
import re

# Ids need to differ, not to be secret: the system's random numbers cost a system call each.
_FORM = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def continued(header: bytes | None) -> tuple[str, bytes]:
    """The trace's id, and the traceparent of this instance's span in it."""
    found = _FORM.fullmatch(header) if header is not None else None
    valid = found is not None and found[1].strip(b"0") and found[2].strip(b"0")
    trace = found[1].decode() if found is not None and valid else f"{random.getrandbits(128) or 1:032x}"
    flags = found[3].decode() if found is not None and valid else "00"
    return trace, f"00-{trace}-{random.getrandbits(64) or 1:016x}-{flags}".encode()

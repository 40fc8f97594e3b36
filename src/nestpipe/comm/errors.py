"""Errors between workers.  Each message names the rank that noticed; the engine adds stage and batch."""

from __future__ import annotations

from nestpipe.errors import NestPipeError


class PeerLost(NestPipeError, RuntimeError):
    """Another worker died or stalled.  The cause is in that worker's own error."""

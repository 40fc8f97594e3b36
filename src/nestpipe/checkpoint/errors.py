"""Errors of checkpoints: one line each, which says what to do."""

from __future__ import annotations

from nestpipe.errors import NestPipeError

RECOVERY_HINT = "restore it from a copy, or resume from another checkpoint with --from STEP"
"""Ends the message for a damaged file."""


class CheckpointError(NestPipeError, ValueError):
    """A checkpoint cannot be used: it is damaged, or belongs to another model or run.  Nothing was restored from it."""

    exit_code = 2


class NotWritten(CheckpointError):
    """A checkpoint could not be written.  Earlier ones are untouched.  All workers raise it with the same message."""

    exit_code = 1

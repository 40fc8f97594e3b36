"""What can be wrong with a checkpoint, in one line that says what to do."""

from __future__ import annotations

from nestpipe.errors import NestPipeError


class CheckpointError(NestPipeError, ValueError):
    """A checkpoint cannot be used: what is there cannot be trusted, or is of something else; nothing of it was used."""

    exit_code = 2


class NotWritten(CheckpointError):
    """A checkpoint could not be written; the ones before are untouched.  All workers raise it, in the same words."""

    exit_code = 1

"""What can be wrong with a checkpoint, in one line that says what to do."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used: what is there cannot be trusted, or is of something else; nothing of it was used."""


class NotWritten(CheckpointError):
    """A checkpoint could not be written; the ones before are untouched.  All workers raise it, in the same words."""

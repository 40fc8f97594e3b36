"""What can be wrong with a checkpoint, in one line that says what to do."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or what is there cannot be trusted; nothing of it was used."""

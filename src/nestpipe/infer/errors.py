"""Errors of inference: one line each, which says what to do."""

from __future__ import annotations

from nestpipe.errors import NestPipeError


class RowReadError(NestPipeError, OSError):
    """Rows cannot be read: the disk failed, or the file is damaged.  Nothing of what was read is given out."""

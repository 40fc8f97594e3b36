"""Where models come from."""

from __future__ import annotations

from typing import Protocol

from nestpipe.infer.contract import RelayModel


class ModelSource(Protocol):
    """A run, or a folder of checkpoints.  Called from threads that do not compute."""

    def newest(self) -> str | None:
        """A name for the newest complete checkpoint, cheap enough to ask for every second; None where there is none."""
        ...

    def open(self) -> RelayModel:
        """The newest complete checkpoint as a model.  NestPipeError or OSError, one line, where that cannot be."""
        ...

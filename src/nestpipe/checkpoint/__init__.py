"""Checkpoints: one commit for tables, dense state, data position and random state.

This room knows nothing of pipelines.  It saves and restores any `TrainState`.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "CheckpointError": "errors",
    "CheckpointWriter": "writer",
    "Folder": "folder",
    "NotWritten": "errors",
    "TrainState": "train_state",
    "restore": "load",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Imports on first use: commands that only list a folder do not need torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)

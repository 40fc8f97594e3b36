"""Checkpoints: tables, dense state, data position and random state of one moment, committed as one."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "CheckpointError": "errors",
    "CheckpointWriter": "writer",
    "Folder": "folder",
    "NotWritten": "errors",
    "restore": "load",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Loaded when asked for: commands that only look at a folder do without torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)

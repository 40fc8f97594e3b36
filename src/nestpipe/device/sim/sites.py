"""Which line of whose code issued something: the nearest frame outside torch and outside the simulator."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = str(Path(__file__).parent)
_SKIPPED = (str(Path(torch.__file__).parent), _OURS, str(contextlib.__file__), "<")


class Site(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line}"


def site() -> Site:
    """The place in the caller's code; cheap enough for every launch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _skipped(name):
            return Site(name, frame.f_lineno)
        frame = frame.f_back
    return Site("?", 0)


@functools.cache
def _skipped(file: str) -> bool:
    return file.startswith(_SKIPPED)


@functools.cache
def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])

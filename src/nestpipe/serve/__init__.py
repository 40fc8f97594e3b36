"""Serving: cached prefixes, a scheduler with deadlines, one instance over HTTP, and its clients.  Imports no training code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nestpipe.serve.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from nestpipe.serve import client

        return getattr(client, name)
    raise AttributeError(f"module 'nestpipe.serve' has no attribute {name!r}")

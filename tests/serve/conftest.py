"""A real browser to look at pages with."""

from __future__ import annotations

from browsing import browser, look

__all__ = ["browser", "look"]

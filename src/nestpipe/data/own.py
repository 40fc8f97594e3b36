"""A user's own kind of data: a frozen dataclass whose fields are the keys of [data], with `open(split, seed) -> Source`."""

from __future__ import annotations

import inspect

from nestpipe.config.build import RecipeError
from nestpipe.config.own_class import check_keys, own_class
from nestpipe.data.source import DataError, Source

PARTS = ("extent", "piece", "features", "dense_features", "read")
"""What every source has."""


def own_data(kind: str, where: str | None = None) -> type:
    """The user's class `module:Class`, checked; `where` begins its errors.  RecipeError if it is no data for a recipe."""
    where = where or f"data.kind {kind!r}"
    cls = own_class(kind, where)
    check_keys(cls, where)
    method = getattr(cls, "open", None)
    if not callable(method):
        raise RecipeError(f"{where} has no method open: write open(self, split, seed), which returns a Source")
    try:
        inspect.signature(method).bind(None, "train", 0)
    except TypeError:
        raise RecipeError(f"{where}: open must take (self, split, seed), not {inspect.signature(method)}") from None
    return cls


def check_source(source: object, kind: str) -> Source:
    """The source that a class has opened.  DataError if something of it is missing."""
    missing = [part for part in PARTS if not hasattr(source, part)]
    if missing:
        raise DataError(
            f"data.kind {kind!r}: open returned a {type(source).__name__} without {', '.join(missing)}: a Source has "
            f"{', '.join(PARTS)}"
        )
    return source  # type: ignore[return-value]

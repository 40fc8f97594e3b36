"""What becomes of the columns of an event log.

user, item, context, candidate   integers are ids as they are (uint64 from 2^63 up wraps to a negative int64), text and
                                 binary are hashed (`hash_text`)
time                             whole numbers, in the log's own unit, or timestamps, dates included
actions, any_of, none_of         numbers or booleans; anything but 0 and null is set
weight                           numbers; finite

An event needs a user, an item and a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nestpipe.data.hash import hash_text, is_text
from nestpipe.data.source import DataError

UNITS = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
"""Parts of a second."""
MOST_ACTIONS = 62
"""Bits of the feature `action`."""


@dataclass(frozen=True)
class EventColumns:
    """Which columns of a log are read, and as what."""

    user: str
    item: str
    time: str
    actions: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    weight: str | None = None
    features: tuple[str, ...] = ()
    """Context and candidate features."""

    def names(self) -> list[str]:
        """Every column once, in the order in which they are read."""
        weight = [] if self.weight is None else [self.weight]
        flags = (*self.actions, *self.any_of, *self.none_of)
        return list(dict.fromkeys([self.user, self.item, self.time, *flags, *weight, *self.features]))

    def uses(self) -> list[tuple[str, str, str]]:
        """(column, the recipe's key that names it, what it is used as)"""
        found = [(self.user, "data.user", "id"), (self.item, "data.item", "id"), (self.time, "data.time", "time")]
        for key in ("actions", "any_of", "none_of"):
            found += [(column, f"data.{key}", "number") for column in getattr(self, key)]
        if self.weight is not None:
            found.append((self.weight, "data.weight", "number"))
        return found + [(column, "data.context or data.candidate", "id") for column in self.features]

    @property
    def filters(self) -> bool:
        return bool(self.any_of or self.none_of)


class BadEvent(Exception):
    """Row `row` of what was converted cannot be used."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


def kind_of(file: str, schema: pa.Schema, columns: EventColumns) -> dict[str, str]:
    """What each column of a file holds, in a word; DataError where one is missing or of a type that cannot be used."""
    found: dict[str, str] = {}
    for column, key, use in columns.uses():
        indices = schema.get_all_field_indices(column)
        if not indices:
            raise DataError(f"{file} has no column {column!r} ({key}); it has {', '.join(schema.names)}")
        if len(indices) > 1:
            raise DataError(f"{file} has {len(indices)} columns {column!r} ({key}): rename all but one")
        kind = schema.field(column).type
        word = _word(kind, use)
        if word is None:
            raise DataError(f"{file}: column {column!r} is {kind}, but {key} needs {_NEEDS[use]}")
        found.setdefault(f"{column} as {use}", word)
    return found


_NEEDS = {
    "id": "whole numbers or text",
    "time": "whole numbers (and data.time_unit) or timestamps",
    "number": "numbers or booleans",
}


def _word(kind: pa.DataType, use: str) -> str | None:
    if pa.types.is_dictionary(kind):
        return _word(kind.value_type, use)
    if pa.types.is_null(kind):
        return "nothing"
    if use == "id":
        return "whole numbers" if pa.types.is_integer(kind) else "text" if is_text(kind) else None
    if use == "time":
        if pa.types.is_timestamp(kind):
            return f"timestamps in {kind.unit}"
        if pa.types.is_date(kind):
            return "timestamps in s" if pa.types.is_date32(kind) else "timestamps in ms"
        return "whole numbers" if pa.types.is_integer(kind) else None
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return "numbers" if number or pa.types.is_decimal(kind) else None


def check_alike(kinds: Sequence[tuple[str, dict[str, str]]]) -> dict[str, str]:
    """What all files hold; DataError where two of them hold different things in one column."""
    agreed: dict[str, tuple[str, str]] = {}
    for file, kind in kinds:
        for use, word in kind.items():
            column = use.rsplit(" as ", 1)[0]
            if word == "nothing":
                continue
            first, other = agreed.setdefault(use, (file, word))
            if other != word:
                raise DataError(
                    f"column {column!r} holds {other} in {first} and {word} in {file}: convert one of them, "
                    "nothing is guessed"
                )
    return {use: word for use, (_, word) in agreed.items()}


def unit_of(columns: EventColumns, agreed: dict[str, str], given: str | None) -> str | None:
    """The unit of the log's times: what timestamps say, or what the recipe says; None if neither does."""
    word = agreed.get(f"{columns.time} as time", "")
    if not word.startswith("timestamps in "):
        return given
    unit = word.removeprefix("timestamps in ")
    if given not in (None, unit):
        raise DataError(
            f"data.time_unit is {given!r}, but column {columns.time!r} holds {word}: leave data.time_unit out"
        )
    return unit


def normalise(rows: pa.RecordBatch | pa.Table, columns: EventColumns, skip: bool) -> tuple[pa.Table, int]:
    """Events with the columns user, item, time, and what else is asked for; and how many rows were left out.

    BadEvent where one cannot be used, unless `skip`.  Has a column `row`, the number of each event in `rows`.
    """
    needed = [(name, rows.column(name)) for name in (columns.user, columns.item, columns.time)]
    good = np.ones(rows.num_rows, bool)
    for name, column in needed:
        missing = _missing(column)
        if missing is not None:
            if not skip:
                raise BadEvent(int(np.flatnonzero(missing)[0]), f"no value in column {name!r}")
            good &= ~missing
    weight = None if columns.weight is None else _floats(rows.column(columns.weight))
    if weight is not None and not np.isfinite(weight).all():
        if not skip:
            row = int(np.flatnonzero(~np.isfinite(weight))[0])
            raise BadEvent(row, f"the weight in column {columns.weight!r} is missing or not finite")
        good &= np.isfinite(weight)
    left_out = int(len(good) - good.sum())
    if left_out:
        keep = pa.array(good)
        rows = rows.filter(keep)
        weight = weight if weight is None else weight[good]
    found: dict[str, np.ndarray] = {
        "user": ids_of(rows.column(columns.user)),
        "item": ids_of(rows.column(columns.item)),
        "time": _times(rows.column(columns.time)),
        "row": np.flatnonzero(good),
    }
    if columns.filters:
        found["kept"] = _kept(rows, columns)
    if columns.actions:
        mask = np.zeros(rows.num_rows, np.int64)
        for bit, name in enumerate(columns.actions):
            mask |= _flags(rows.column(name)).astype(np.int64) << bit
        found["action"] = mask
    if weight is not None:
        found["weight"] = weight.astype(np.float32)
    for number, name in enumerate(columns.features):
        found[f"feature{number}"] = ids_of(rows.column(name), missing=0)
    return pa.table(found), left_out


def _missing(column: pa.Array | pa.ChunkedArray) -> np.ndarray | None:
    """Which values are null, or empty texts; None if none is."""
    missing = _numpy(column.is_null()) if column.null_count else None
    if is_text(column.type):
        length = pc.binary_length(_plain(column))
        empty = _numpy(pc.fill_null(pc.equal(length, 0), False))
        if empty.any():
            missing = empty if missing is None else missing | empty
    return missing


def _kept(rows: pa.Table, columns: EventColumns) -> np.ndarray:
    kept = np.full(rows.num_rows, not columns.any_of)
    for name in columns.any_of:
        kept |= _flags(rows.column(name))
    for name in columns.none_of:
        kept &= ~_flags(rows.column(name))
    return kept


def _numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def ids_of(column: pa.Array | pa.ChunkedArray, missing: int | None = None) -> np.ndarray:
    """int64 ids; a null is `missing`, where that is given."""
    if pa.types.is_null(column.type):
        return np.full(len(column), missing or 0, np.int64)
    if not is_text(column.type):
        column = _plain(column)
        if column.null_count:
            column = pc.fill_null(column, missing or 0)
        return _numpy(column).astype(np.int64, copy=False)  # uint64 wraps
    if not column.null_count:
        return hash_text(column)
    ids = np.full(len(column), missing or 0, np.int64)
    ids[_numpy(column.is_valid())] = hash_text(column.drop_null())
    return ids


def _times(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.cast(pa.timestamp("s"))
    column = _plain(column)
    if pa.types.is_timestamp(column.type) or pa.types.is_date64(column.type):
        column = column.cast(pa.int64())
    return _numpy(column).astype(np.int64, copy=False)


def _floats(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return _numpy(_plain(column).cast(pa.float64()))


def _flags(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    numbers = _floats(pc.fill_null(_plain(column), False if pa.types.is_boolean(column.type) else 0))
    return (numbers != 0) & ~np.isnan(numbers)

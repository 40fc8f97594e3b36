"""Histories from files of histories: those of a cache, or a user's own files that are grouped already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.interactions.columns import UNITS, BadEvent, EventColumns, ids_of, normalise
from nestpipe.data.sequence_batches import Histories
from nestpipe.data.source import DataError
from nestpipe.data.ties import shuffle_ties
from nestpipe.files.location import Location

ROWS = 1 << 14
"""Users of a file that are read at a time."""


@dataclass(frozen=True)
class Block:
    """The histories of some users: a user, a length, and the events one user after another, by column."""

    users: np.ndarray
    lengths: np.ndarray
    events: dict[str, np.ndarray]


@dataclass(frozen=True)
class Reading:
    """How events become samples."""

    unit: str
    """Of their times; batches have seconds."""
    split_time: int | None
    """In that unit: events from then on are not trained on.  None: only the last of each user is not."""
    features: tuple[str, ...] = ()
    """Names of the columns feature0, feature1, ..."""
    tie_seed: int | None = None
    """Where a user's events of one time come in a random order: its seed."""

    def histories(self, blocks: Sequence[Block]) -> Histories:
        none = np.empty(0, np.int64)
        order: np.ndarray | None = None

        def joined(name: str) -> np.ndarray:
            values = np.concatenate([block.events[name] for block in blocks]) if blocks else none
            return values if order is None else values[order]

        lengths = np.concatenate([none, *(block.lengths for block in blocks)])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        users = np.concatenate([none, *(block.users for block in blocks)])
        times = joined("time")
        if self.tie_seed is not None:
            order = shuffle_ties(np.repeat(users, lengths), offsets, times, self.tie_seed)  # times stay as they are
        cuts = None
        if self.split_time is not None:
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(times < self.split_time)])
            cuts = before[offsets[1:]] - before[offsets[:-1]]
        present = blocks[0].events if blocks else {}
        features = {name: joined(f"feature{number}") for number, name in enumerate(self.features)}
        if "action" in present:
            features = {"action": joined("action"), **features}
        return Histories(
            users,
            offsets,
            joined("item"),
            times if self.unit == "s" else times // UNITS[self.unit],
            cuts,
            features,
            joined("weight") if "weight" in present else None,
        )


def cached_blocks(files: Sequence[Path]) -> Iterator[Block]:
    """The histories of a cache, row group by row group."""
    for path in files:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                yield cached_block(file.read_row_group(number, use_threads=False))


def cached_block(rows: pa.Table | pa.RecordBatch) -> Block:
    """Of rows of a cache."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    columns = {name: rows.column(name).combine_chunks() for name in rows.schema.names}
    lists = {name: column for name, column in columns.items() if name != "user"}
    lengths = np.diff(lists["item"].offsets.to_numpy())
    events = {name: column.flatten().to_numpy(zero_copy_only=False) for name, column in lists.items()}
    return Block(columns["user"].to_numpy(), lengths.astype(np.int64), events)


def is_grouped(location: Location, item: str) -> bool:
    """Whether a Parquet file has a list of items in each row."""
    try:
        with pq.ParquetFile(location.open()) as file:
            schema = file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{location} cannot be read: {(str(error).splitlines() or ['?'])[0]}") from None
    return item in schema.names and _is_list(schema.field(item).type)


def grouped_blocks(files: Sequence[Location], columns: EventColumns) -> Iterator[Block]:
    """The histories of a user's own files, each row one user's, in their order; DataError where one cannot be used."""
    for location in files:
        first = 0
        try:
            with pq.ParquetFile(location.open(), page_checksum_verification=True) as file:
                missing = [name for name in columns.names() if name not in file.schema_arrow.names]
                if missing:
                    names = ", ".join(file.schema_arrow.names)
                    raise DataError(f"{location} has no column {missing[0]!r}; it has {names}")
                for rows in file.iter_batches(ROWS, columns=columns.names(), use_threads=False):
                    try:
                        yield _grouped_block(rows, columns)
                    except BadEvent as bad:
                        raise DataError(f"{location} row {first + bad.row} (the first is 0): {bad}") from None
                    first += rows.num_rows
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{location} cannot be read: {(str(error).splitlines() or ['?'])[0]}") from None


def _grouped_block(rows: pa.RecordBatch, columns: EventColumns) -> Block:
    lengths: np.ndarray | None = None
    flat: dict[str, pa.Array] = {}
    for name in columns.names():
        column = rows.column(name)
        if name == columns.user:
            continue
        if not _is_list(column.type):
            raise BadEvent(0, f"column {name!r} is {column.type}, but {columns.item!r} holds lists: it needs lists too")
        mine = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy().astype(np.int64)
        lengths = mine if lengths is None else lengths
        wrong = np.flatnonzero(mine != lengths)
        if len(wrong):
            row = int(wrong[0])
            raise BadEvent(row, f"{lengths[row]} entries in {columns.item!r} but {mine[row]} in {name!r}")
        flat[name] = column.flatten()
    assert lengths is not None
    of_event = np.repeat(np.arange(rows.num_rows), lengths)
    user = rows.column(columns.user)
    if user.null_count:
        raise BadEvent(int(np.flatnonzero(user.is_null().to_numpy(zero_copy_only=False))[0]), "no user")
    flat[columns.user] = user.take(pa.array(of_event))
    try:
        table, _ = normalise(pa.table(flat), columns, skip=False)
    except BadEvent as bad:
        raise BadEvent(int(of_event[bad.row]), str(bad)) from None
    events = {name: table[name].to_numpy() for name in table.schema.names if name not in ("user", "row", "kept")}
    backwards = (np.diff(events["time"]) < 0) & (of_event[1:] == of_event[:-1])
    if backwards.any():
        row = int(of_event[1:][backwards][0])
        raise BadEvent(row, f"its times in {columns.time!r} go back: sort each list by time, or give a log of events")
    return Block(ids_of(user), lengths, events)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)

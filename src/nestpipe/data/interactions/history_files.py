"""Histories as Parquet files: a row for each user, with lists of items, times and what else the log has.

Files are cut by their contents alone, so that the same histories give the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.history_lengths import describe_lengths
from nestpipe.data.ties import count_ties

GROUP_EVENTS = 1 << 18
"""A row group ends with the user in whom it reaches so many events."""
PART_GROUPS = 64
"""Row groups of a file."""


class HistoryWriter:
    """Takes events sorted by user and time, in pieces of any size, and writes histories-00000.parquet and so on."""

    def __init__(self, folder: Path, extra: list[str], last: int | None) -> None:
        self._folder, self._last = folder, last
        self._names = ["item", "time", *extra]
        kinds = {"weight": pa.float32()}
        fields = [(name, pa.list_(pa.field("element", kinds.get(name, pa.int64()), False))) for name in self._names]
        self._schema = pa.schema([("user", pa.int64()), *fields])
        self._held: list[dict[str, np.ndarray]] = []
        self._held_events = 0
        self._groups = 0
        self._writer: pq.ParquetWriter | None = None
        self._lengths: list[np.ndarray] = []
        self.ties = {"events": 0, "users": 0, "last": 0}
        """As `count_ties` counts them."""

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush(everything=True)
                if not self._groups:
                    self._write_group({name: np.empty(0, np.int64) for name in ("user", *self._names)})
        finally:
            if self._writer is not None:
                self._writer.close()

    def add(self, events: dict[str, np.ndarray]) -> None:
        self._held.append(events)
        self._held_events += len(events["user"])
        if self._held_events >= 2 * GROUP_EVENTS:
            self._flush(everything=False)

    def _flush(self, everything: bool) -> None:
        """Writes the row groups that are complete: their last user's events are all there."""
        if not self._held:
            return
        held = {name: np.concatenate([one[name] for one in self._held]) for name in self._held[0]}
        user = held["user"]
        ends = np.append(np.flatnonzero(user[1:] != user[:-1]) + 1, len(user))
        if not everything:
            ends = ends[:-1]  # more of the last user may come
        start = 0
        while True:
            after = ends[np.searchsorted(ends, start + GROUP_EVENTS) :]
            if not len(after) and not (everything and start < len(user)):
                break
            stop = int(after[0]) if len(after) else len(user)
            self._write_group({name: values[start:stop] for name, values in held.items()})
            start = stop
        self._held = [{name: values[start:] for name, values in held.items()}]
        self._held_events = len(user) - start

    def _write_group(self, events: dict[str, np.ndarray]) -> None:
        user = events["user"]
        starts = np.append(0, np.flatnonzero(user[1:] != user[:-1]) + 1) if len(user) else np.empty(0, np.int64)
        lengths = np.diff(np.append(starts, len(user)))
        if self._last is not None and len(lengths) and lengths.max() > self._last:
            from_end = np.repeat(starts + lengths, lengths) - np.arange(len(user))
            keep = from_end <= self._last
            users = user[starts]
            events = {name: values[keep] for name, values in events.items()}
            lengths = np.minimum(lengths, self._last)
            starts = np.append(0, np.cumsum(lengths)[:-1])
            user = np.repeat(users, lengths)
        ends = np.append(starts, len(user))
        for name, found in count_ties(ends, events["time"]).items():
            self.ties[name] += found
        self._lengths.append(lengths)
        offsets = pa.array(ends.astype(np.int32))
        lists = [
            pa.ListArray.from_arrays(offsets, pa.array(events[name], field.type.value_type), type=field.type)
            for name, field in zip(self._names, list(self._schema)[1:])
        ]
        table = pa.Table.from_arrays([pa.array(user[starts]), *lists], schema=self._schema)
        if self._groups % PART_GROUPS == 0:
            if self._writer is not None:
                self._writer.close()
            path = self._folder / f"histories-{self._groups // PART_GROUPS:05d}.parquet"
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=False)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=max(1, len(table)))
        self._groups += 1

    def lengths(self) -> dict[str, Any]:
        """How long histories are."""
        return describe_lengths(np.concatenate([np.empty(0, np.int64), *self._lengths]))

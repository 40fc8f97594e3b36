"""Groups an event log by user and sorts it by time, out of core: DuckDB sorts, counts and joins, in bounded memory.

In three steps: every file becomes a file of events (a step that a later process need not repeat), filters decide which
users and items stay, and one sort by (user, time, place in the log) gives histories, which are written as Parquet with a
row for each user.  The result depends on the log and the settings alone, to the byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.interactions.columns import EventColumns, check_alike, kind_of, unit_of
from nestpipe.data.interactions.event_files import EventFile
from nestpipe.data.interactions.events import Progress, check_times, read_events
from nestpipe.data.interactions.history_files import HistoryWriter
from nestpipe.data.source import DataError

BATCH = 200_000
"""Sorted events that are taken over from DuckDB at a time."""


@dataclass(frozen=True)
class Filters:
    """What stays of a log, in this order: events by their flags, no repeats, users and items that occur often enough."""

    drop_repeats: bool = False
    min_user_events: int = 1
    min_item_events: int = 1
    iterate: bool = False
    """Count again after each removal, until nothing changes (k-core).  Otherwise both counts are those before removing."""
    last: int | None = None
    """Of every user, only so many of the latest events."""


@dataclass
class Statistics:
    """What the report tells about a log."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unit: str = "s"

    def add(self, name: str, counts: tuple[int, int, int]) -> None:
        """(events, users, items) that a stage left."""
        self.stages.append(dict(zip(("name", "events", "users", "items"), (name, *counts))))


def group_events(
    files: Sequence[EventFile],
    columns: EventColumns,
    filters: Filters,
    time_unit: str | None,
    folder: Path,
    memory_bytes: int,
    progress: Progress,
) -> Statistics:
    """Writes the histories of a log into `folder`, which may hold the events of an earlier try; returns what it found."""
    statistics = Statistics()
    kinds = [(str(file.location), file.schema()) for file in files]
    agreed = check_alike([(name, kind_of(name, schema, columns)) for name, schema in kinds])
    types = {name: kinds[0][1].field(name).type for name in columns.names()}
    # An empty first file has no types: take those of the first file that has.
    for _, schema in kinds:
        types |= {name: schema.field(name).type for name, kind in types.items() if pa.types.is_null(kind)}
    unit = unit_of(columns, agreed, time_unit)
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    found = read_events(files, columns, types, events, progress)
    statistics.unit = check_times(files, found, columns.time, unit, statistics.notes)
    if left_out := sum(one["left_out"] for one in found):
        first = next(one["why"] for one in found if one["left_out"])
        rows = "1 row was" if left_out == 1 else f"{left_out:,} rows were"
        statistics.notes.append(f"{rows} left out; the first: {first}")
    _sort(found, columns, filters, folder, memory_bytes, progress, statistics)
    shutil.rmtree(events)
    return statistics


def _sort(
    found: Sequence[dict[str, Any]],
    columns: EventColumns,
    filters: Filters,
    folder: Path,
    memory_bytes: int,
    progress: Progress,
    statistics: Statistics,
) -> None:
    import duckdb

    spill = folder / "spill"
    shutil.rmtree(spill, ignore_errors=True)
    spill.mkdir()
    extra = [name for name in ("action", "weight") if getattr(columns, "actions" if name == "action" else name)]
    extra += [f"feature{number}" for number in range(len(columns.features))]
    try:
        with duckdb.connect() as connection:
            connection.execute(f"SET memory_limit = '{memory_bytes}B'")
            connection.execute(f"SET temp_directory = '{_quoted(spill)}'")
            connection.execute("SET preserve_insertion_order = false")
            connection.execute("SET enable_progress_bar = false")
            paths = ", ".join(f"'{_quoted(one['path'])}'" for one in found)
            connection.execute(f"CREATE VIEW log AS SELECT * FROM read_parquet([{paths}])")
            chosen = _filter(connection, columns, filters, progress, statistics)
            progress(0.55, "sorting")
            names = ", ".join(["user", "item", "time", *extra])
            order = f"SELECT {names} FROM {chosen} ORDER BY user, time, place"
            batches = connection.sql(order).to_arrow_reader(BATCH)
            events = sum(one["events"] for one in found) or 1
            _write(batches, extra, filters.last, folder, events, progress, statistics)
            items = _catalogue(connection, folder)
    except duckdb.Error as error:
        raise _in_words(error, folder) from None
    finally:
        shutil.rmtree(spill, ignore_errors=True)
    last = statistics.stages[-1] if statistics.stages else {}
    if last.get("events") != statistics.lengths["events"] or "items" not in last:
        name = "read" if not statistics.stages else f"last {filters.last} of each user"
        statistics.add(name, (statistics.lengths["events"], statistics.lengths["users"], items))


def _filter(connection: Any, columns: EventColumns, filters: Filters, progress: Progress, found: Statistics) -> str:
    """What to select events from.  Tells what each filter leaves; where there is none, nothing is counted."""
    counts = filters.min_user_events > 1 or filters.min_item_events > 1
    if not (columns.filters or filters.drop_repeats or counts or filters.last is not None):
        return "log"
    chosen = "log"
    found.add("read", _counts(connection, chosen))
    if columns.filters:
        progress(0.51, "filtering by flags")
        connection.execute("CREATE VIEW flagged AS SELECT * FROM log WHERE kept")
        chosen = "flagged"
        found.add(_flags_in_words(columns), _counts(connection, chosen))
    if filters.drop_repeats:
        progress(0.52, "dropping repeats")
        connection.execute(f"CREATE TABLE firsts AS SELECT min(place) AS place FROM {chosen} GROUP BY user, item, time")
        connection.execute(f"CREATE VIEW once AS SELECT * FROM {chosen} SEMI JOIN firsts USING (place)")
        chosen = "once"
        found.add("no repeats", _counts(connection, chosen))
    if counts:
        chosen = _often_enough(connection, chosen, filters, progress, found)
    return chosen


def _often_enough(connection: Any, chosen: str, filters: Filters, progress: Progress, found: Statistics) -> str:
    """Leaves users and items that occur often enough: by one count, or counted again until nothing changes."""
    limits = {"user": filters.min_user_events, "item": filters.min_item_events}
    for what, least in limits.items():
        connection.execute(
            f"CREATE TABLE good_{what} AS SELECT {what} FROM {chosen} GROUP BY {what} HAVING count(*) >= {least}"
        )
    connection.execute(
        f"CREATE VIEW often AS SELECT * FROM {chosen} SEMI JOIN good_user USING (user) SEMI JOIN good_item USING (item)"
    )
    rounds, before = 1, -1
    while filters.iterate:
        now = _counts(connection, "often")
        if now[0] == before:
            break
        before, rounds = now[0], rounds + 1
        progress(0.53, f"counting users and items, round {rounds}")
        for what, least in limits.items():
            connection.execute(
                f"CREATE TABLE next AS SELECT {what} FROM often GROUP BY {what} HAVING count(*) >= {least}"
            )
            connection.execute(f"CREATE OR REPLACE TABLE good_{what} AS SELECT * FROM next")
            connection.execute("DROP TABLE next")
    words = [f"{what}s with {least} events" for what, least in limits.items() if least > 1]
    how = f", until nothing changes ({rounds - 1} rounds)" if filters.iterate else ", counted once"
    found.add(" and ".join(words) + how, _counts(connection, "often"))
    return "often"


def _counts(connection: Any, chosen: str) -> tuple[int, int, int]:
    row = connection.execute(f"SELECT count(*), count(DISTINCT user), count(DISTINCT item) FROM {chosen}").fetchall()[0]
    return tuple(int(n) for n in row)  # type: ignore[return-value]


def _flags_in_words(columns: EventColumns) -> str:
    parts = [f"any of {', '.join(columns.any_of)}"] * bool(columns.any_of)
    parts += [f"none of {', '.join(columns.none_of)}"] * bool(columns.none_of)
    return "; ".join(parts)


def _write(
    batches: Iterator[pa.RecordBatch],
    extra: list[str],
    last: int | None,
    folder: Path,
    events: int,
    progress: Progress,
    statistics: Statistics,
) -> None:
    done = 0
    with HistoryWriter(folder, extra, last) as writer:
        for batch in batches:
            writer.add({name: batch.column(name).to_numpy() for name in batch.schema.names})
            done += batch.num_rows
            progress(0.75 + 0.23 * min(1.0, done / events), "writing histories")
    statistics.lengths, statistics.ties = writer.lengths(), writer.ties


def _catalogue(connection: Any, folder: Path) -> int:
    """Writes every item with its number of events, in order of items; returns how many there are."""
    parts = f"{_quoted(folder)}/histories-*.parquet"
    table = connection.sql(
        f"SELECT item, count(*) AS events FROM (SELECT unnest(item) AS item FROM read_parquet('{parts}')) "
        "GROUP BY item ORDER BY item"
    ).to_arrow_table()
    pq.write_table(table, folder / "catalogue.parquet", compression="zstd", use_dictionary=False)
    return len(table)


def _quoted(path: str | Path) -> str:
    return str(path).replace("'", "''")


def _in_words(error: Exception, folder: Path) -> DataError:
    text = str(error).splitlines()[0]
    if "No space left" in str(error) or "max_temp_directory_size" in str(error):
        return no_room(folder)
    if "Out of Memory" in type(error).__name__ or "Out of Memory" in text or "OutOfMemory" in type(error).__name__:
        return DataError(f"grouping the events did not fit into data.memory_gb: raise it ({text})")
    return DataError(f"grouping the events in {folder} failed: {text}")


def no_room(folder: Path) -> DataError:
    return DataError(f"no room left in {folder.parent} while grouping events: make room, or set data.cache")

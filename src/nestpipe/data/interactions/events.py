"""Step 1 of grouping: every file of a log becomes a file of events, all of the same columns, on local disk.

A file that is there is not read again: this is what a process that was killed need not repeat.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.interactions.columns import UNITS, BadEvent, EventColumns, normalise
from nestpipe.data.interactions.event_files import EventFile
from nestpipe.data.source import DataError

FILE_BITS = 40
"""An event's place in the log: the number of its file, and its row in these lower bits."""
EPOCH_LIKE = 10**8
"""Times from here on look like seconds since 1970 or a finer unit, and can be told apart by their size."""

Progress = Callable[[float, str], None]
"""Gets the fraction done, and what is being done."""


def read_events(
    files: Sequence[EventFile],
    columns: EventColumns,
    types: dict[str, pa.DataType],
    events: Path,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Makes every file one of events, as many at a time as there are cores; skips those that are there."""
    counts = [file.count() for file in files]
    total, done, lock, stop = sum(counts) or 1, [0] * len(files), threading.Lock(), threading.Event()

    def tell(number: int, now: int) -> None:
        with lock:
            done[number] = now
            share = sum(done) / total
        progress(0.5 * min(1.0, share), f"reading {len(files)} files")
        if stop.is_set():
            raise InterruptedError

    def one(number: int) -> dict[str, Any]:
        path = events / f"{number:06d}.parquet"
        about = path.with_suffix(".json")
        if not (path.exists() and about.exists()):
            _read_file(files[number], number, columns, types, path, about, lambda now: tell(number, now))
        tell(number, counts[number])
        return {**json.loads(about.read_text()), "path": path}

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [pool.submit(one, number) for number in range(len(files))]
        try:
            done_now, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            failed = next((error for job in jobs if job in done_now and (error := job.exception())), None)
            if failed is not None:
                raise failed
        except BaseException:  # an error, or Ctrl-C: what runs ends soon, the rest is not begun
            stop.set()
            for job in jobs:
                job.cancel()
            raise
        return [job.result() for job in jobs]


def _read_file(
    file: EventFile,
    number: int,
    columns: EventColumns,
    types: dict[str, pa.DataType],
    path: Path,
    about: Path,
    tell: Callable[[int], None],
) -> None:
    partial = path.with_suffix(".partial")
    writer: pq.ParquetWriter | None = None
    left_out, why, count, middle = 0, "", 0, []
    try:
        for rows, first, now in file.read(columns.names(), types):
            try:
                table, bad = normalise(rows, columns, file.skip)
            except BadEvent as error:
                raise DataError(
                    f"{file.location} row {first + error.row} (the first is 0): {error}; "
                    "data.on_error = 'skip' leaves such rows out"
                ) from None
            if bad and not why:
                why = f"{file.location}, from row {first}: no user, item, time or weight"
            left_out += bad
            place = table["row"].to_numpy() + ((number << FILE_BITS) + first)
            table = table.drop_columns("row").append_column("place", pa.array(place))
            if writer is None:
                writer = pq.ParquetWriter(partial, table.schema, compression="snappy", use_dictionary=False)
            writer.write_table(table)
            count += len(table)
            if len(table):
                middle.append(int(np.median(table["time"].to_numpy())))
            tell(now)
        if writer is None:
            empty, _ = normalise(_nothing(columns, types), columns, False)
            empty = empty.drop_columns("row").append_column("place", pa.array([], pa.int64()))
            writer = pq.ParquetWriter(partial, empty.schema)
    finally:
        if writer is not None:
            writer.close()
    left_out += file.lines.skipped
    about.write_text(
        json.dumps(
            {
                "events": count,
                "left_out": left_out,
                "why": file.lines.first or why,
                "time": int(np.median(middle)) if middle else None,
            }
        )
    )
    partial.rename(path)


def _nothing(columns: EventColumns, types: dict[str, pa.DataType]) -> pa.Table:
    return pa.table({name: pa.array([], types[name]) for name in columns.names()})


def check_times(
    files: Sequence[EventFile], found: Sequence[dict[str, Any]], column: str, unit: str | None, notes: list[str]
) -> str:
    """The unit of the times; DataError where it is not said and not seconds, or where files differ in theirs."""
    first: tuple[EventFile, int] | None = None
    for file, about in zip(files, found):
        time = about["time"]
        if time is None or abs(time) < EPOCH_LIKE:
            continue
        looks = next(name for name in ("s", "ms", "us", "ns") if abs(time) < 10**11 * UNITS[name] or name == "ns")
        if unit is None and looks != "s":
            raise DataError(
                f"{file.location}: times such as {time} in column {column!r} look like {looks}, not seconds: "
                f"set data.time_unit = {looks!r}, or 's' if they are seconds"
            )
        if unit not in (None, looks) and first is None:
            notes.append(f"times such as {time} look like {looks}, but data.time_unit is {unit!r}")
        first = first or (file, time)
        if not 1 / 100 < time / first[1] < 100:
            raise DataError(
                f"column {column!r} has times such as {first[1]} in {first[0].location} and {time} in {file.location}: "
                "they are not in one unit; convert one of them"
            )
    return unit or "s"

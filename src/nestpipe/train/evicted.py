"""Evicted keys in a run directory: small Parquet files.  Each worker writes its own, each whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nestpipe.sparse.evictor import Evicted
from nestpipe.train.rundir import RunError

FOLDER = "evicted"
_SCHEMA = pa.schema([("batch", pa.int64()), ("table", pa.dictionary(pa.int32(), pa.string())), ("key", pa.int64())])


class EvictedFiles:
    """Writes RUN/evicted/rank<R>-<number>.parquet with the columns batch (of the sweep), table and key."""

    def __init__(self, run: Path, rank: int) -> None:
        self._folder, self._rank = run / FOLDER, rank
        self._next: int | None = None
        """Number of the next file.  Looked up on first use, after worker 0 has called `rewind_to`."""

    def rewind_to(self, batch: int) -> None:
        """Drops keys evicted by this batch or later ones, because the run resumes here.  Worker 0 does it, first."""
        for path in sorted(self._folder.glob("rank*.parquet")) if self._rank == 0 else []:
            found = pq.read_table(path, schema=_SCHEMA)
            kept = found.filter(pc.less(found["batch"], batch))
            if not len(kept):
                path.unlink()
            elif len(kept) < len(found):
                _write(path, kept)

    def append(self, evicted: Sequence[Evicted]) -> None:
        """Writes one more file, durably.  Writes nothing if `evicted` is empty."""
        if not evicted:
            return
        sizes = [len(part.keys) for part in evicted]
        columns = [
            pa.array(np.repeat([part.batch for part in evicted], sizes), pa.int64()),
            pa.DictionaryArray.from_arrays(
                pa.array(np.repeat(np.arange(len(evicted), dtype=np.int32), sizes)), [part.table for part in evicted]
            ),
            pa.array(np.concatenate([part.keys for part in evicted])),
        ]
        if self._next is None:
            numbers = [path.stem.partition("-")[2] for path in self._folder.glob(f"rank{self._rank}-*.parquet")]
            self._next = max((int(number) + 1 for number in numbers if number.isdigit()), default=0)
        _write(self._folder / f"rank{self._rank}-{self._next:06d}.parquet", pa.table(columns, schema=_SCHEMA))
        self._next += 1


def _write(path: Path, table: pa.Table) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RunError(
            f"cannot write '{path}': {error.strerror or error}; choose another directory with --run"
        ) from error


def read_evicted(run: Path) -> Iterator[Evicted]:
    """The keys that all workers of a run have evicted, file by file.  RunError if `run` is not a run directory."""
    if not (run / "recipe.toml").is_file():
        raise RunError(f"'{run}' is not a run directory: it has no recipe.toml")
    for path in sorted((run / FOLDER).glob("rank*.parquet")):
        try:
            found = pq.read_table(path, schema=_SCHEMA)
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"cannot read '{path}': {reason}") from error
        tables = found["table"].combine_chunks()
        tables = tables if isinstance(tables, pa.DictionaryArray) else tables.chunk(0)
        names, numbers = tables.dictionary.to_pylist(), tables.indices.to_numpy()
        batches, keys = found["batch"].to_numpy(), found["key"].to_numpy()
        for batch, number in sorted(set(zip(batches.tolist(), numbers.tolist()))):
            mine = (batches == batch) & (numbers == number)
            yield Evicted(batch, names[number], keys[mine])

"""The row store of one worker's shard of a table group, with hot rows in DRAM and the others on a local disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from nestpipe.keys.index import Found
from nestpipe.keys.slab import Slab
from nestpipe.ops import rows_kernels as kernels
from nestpipe.tables.disk import kernels as disk_kernels
from nestpipe.tables.disk.hot_rows import HotRows
from nestpipe.tables.disk.log import SEGMENT_BYTES, DiskLog
from nestpipe.tables.eviction import kernels as eviction_kernels
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.snapshot import Values


@dataclass(frozen=True)
class DiskTier:
    """The disk tier: its directory, and the rows of each table group that stay in DRAM on each worker."""

    path: str
    dram_rows: int

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("tables.disk_path must name a directory on a local disk")
        if self.dram_rows < 1:
            raise ValueError(f"tables.dram_rows must be at least 1, not {self.dram_rows}")


def warm_up_disk(group: TableGroup, tier: DiskTier) -> None:
    """Compiles every kernel of the disk tier for the types of `group`, with a scratch file in the tier's directory."""
    store = TieredRowStore(group, 0, 0, DiskTier(tier.path, 1), segment_bytes=1)
    keys = np.arange(2 * store.disk.per_segment + 2)
    tables = np.zeros(len(keys), np.uint16)
    values = np.zeros((len(keys), group.dim), group.dtype)
    state = np.zeros((len(keys), group.state_width), group.dtype)
    for part in (keys, keys[:1], keys[-1:]):  # a write to disk, a hit, a row that leaves DRAM
        store.writeback(tables[part], part, values[part], state[part])
    store.retrieve(tables, keys, values, state)
    store.disk.clean(0, store._where.rows)
    store.remove(tables[:2], keys[:2])
    store.close()


class TieredRowStore(KeyedRows):
    """Bit-equal to `RowStore`, with at most `tier.dram_rows` rows in DRAM, plus the index and locations of all rows.

    A row is either in DRAM or on disk, never in both: only trained rows enter DRAM, so the copy on disk would be stale.
    `retrieve` and `read` change nothing.  Any thread may call.  One thread reads and one writes at a time, and neither
    waits for the other's I/O: `disk.moving` is held only while locations in memory change or are looked up.
    """

    def __init__(
        self,
        group: TableGroup,
        seed: int,
        rank: int,
        tier: DiskTier,
        io: str = "auto",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__(group, seed, None)
        self._where = Slab(np.int64, ())
        self._values = Slab(group.dtype, (group.dim,), tier.dram_rows)
        self._state = Slab(group.dtype, (group.state_width,), tier.dram_rows)
        self._hot = HotRows(tier.dram_rows)
        self._usage = Slab(group.eviction_dtype, (2,)) if group.eviction is not None else None
        """Of all rows, in DRAM: a sweep cannot read the whole disk."""
        others = f" and {len(group.tables) - 1} more" if len(group.tables) > 1 else ""
        label = f"table {group.tables[0].name!r}{others}"
        words = group.dtype.itemsize // 4
        self.disk = DiskLog(
            tier.path,
            f"rank{rank}",
            label,
            (group.dim * words, group.state_width * words),
            self._name_of,
            io,
            segment_bytes,
        )
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def retrieve(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        skip: np.ndarray | None = None,
    ) -> Found:
        found = self.index.look(keys, tables)
        wanted, missing = self._wanted(found.slots, skip)
        unwritten = self._fetch(wanted, values, state)
        if len(unwritten):  # their first writeback has begun and not ended
            missing = np.concatenate([missing, unwritten])
        self.begin(missing, tables, keys, values, state)
        return found

    def read(self, slots: np.ndarray, into: Values | None = None) -> Values:
        values, state = into or self._new(len(slots))
        self._fetch(slots, values, state)
        return values, state

    _copy = read

    def writeback(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        found: Found | None = None,
    ) -> None:
        """Stores values and state of every key (no key twice): hot rows in DRAM, the others on disk.

        After a DiskTierError the store is as it was before the call.
        """
        with self._writing:
            rows = self.index.settle(keys, tables, found)
            try:
                self._where.reserve(self.index.slots_used)
                if self._changes is not None:
                    self._changes.before_write(rows)
                self._put(rows, values, state)
                if self._usage is not None:
                    eviction_kernels.store_usage(self.group.eviction_columns(state), self._usage.rows, rows)
            except (OSError, MemoryError):
                new = self._where.rows[rows] == 0
                if self._changes is not None:
                    self._changes.flags.rows[rows[new]] = 0
                self.index.delete(keys[new], tables[new])
                raise

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        with self._writing:
            self._before_remove(tables, keys)
            rows = self.index.delete(keys, tables)
            with self.disk.moving:
                slots, places = self._locate(rows)
                self.disk.release(places[places >= 0])
                self._hot.remove(slots[slots >= 0], rows)
                self._where.rows[rows] = 0
                if self._usage is not None:
                    self._usage.rows[rows] = 0

    @property
    def usage(self) -> np.ndarray:
        assert self._usage is not None, "the tables of this group have no eviction policy"
        return self._usage.rows

    def nbytes(self) -> int:
        width = self.group.dim + self.group.state_width
        cached = self._hot.used * width * self.group.dtype.itemsize
        waiting = self.frequencies.nbytes() if self.frequencies is not None else 0
        return cached + self._bookkeeping() + self.disk.nbytes() + waiting

    def overhead_per_row(self) -> float:
        return self._bookkeeping() / max(1, len(self))

    def close(self) -> None:
        with self._writing, self._reading:
            self.disk.close()

    def _bookkeeping(self) -> int:
        per_row = 8 + (0 if self._usage is None else 2 * self._usage.rows.itemsize)
        return self.index.nbytes() + per_row * self.index.slots_used + self._hot.nbytes()

    def _fetch(self, rows: np.ndarray, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Fills values and state of all non-negative rows.  Returns the places of those that are nowhere yet."""
        with self._reading:
            with self.disk.moving:
                slots, places = self._locate(rows)
                kernels.gather(self._values.rows, slots, values)
                if state.shape[1]:
                    kernels.gather(self._state.rows, slots, state)
                self.disk.begin_read()
            try:
                cold = np.flatnonzero(places >= 0)
                if len(cold):
                    self.disk.read(places[cold], rows[cold], cold, values, state)
            finally:
                self.disk.end_read()
        return np.flatnonzero((rows >= 0) & (slots < 0) & (places < 0))

    def _put(self, rows: np.ndarray, values: np.ndarray, state: np.ndarray) -> None:
        slots, places = self._locate(rows)
        hits = np.flatnonzero(slots >= 0)
        misses = np.flatnonzero(slots < 0)
        places, taken, leaving = self._hot.choose(rows[misses], slots[hits])
        entering, bypassing = misses[places], np.delete(misses, places)

        # Write to disk first: it may fail, and nothing has changed yet.
        where = self._where.rows
        self.disk.make_room(len(bypassing) + len(leaving), where)
        bypassing_places = self.disk.append(rows[bypassing], bypassing, values, state)
        victims = taken[len(taken) - len(leaving) :]
        try:
            leaving_places = self.disk.append(leaving, victims, self._values.rows, self._state.rows)
        except OSError:
            self.disk.release(bypassing_places)
            raise

        with self.disk.moving:
            _, places = self._locate(rows)  # again, because make_room may have moved some
            self.disk.release(places[places >= 0])
            disk_kernels.set_on_disk(where, leaving, leaving_places)
            disk_kernels.set_on_disk(where, rows[bypassing], bypassing_places)
            disk_kernels.set_in_dram(where, rows[entering], taken)
            self._hot.fill(taken, rows[entering])
            self._hot.touch(slots[hits])
            slots[entering] = taken
            kept = np.concatenate([hits, entering])
            kernels.copy_rows(values, kept, self._values.rows, slots[kept])
            if state.shape[1]:
                kernels.copy_rows(state, kept, self._state.rows, slots[kept])

    def _locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slots, places = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        disk_kernels.locate(self._where.rows, rows, slots, places)
        return slots, places

    def _name_of(self, row: int) -> str:
        table = self.group.tables[self.index.slot_tables.rows[row]].name
        return f"key {self.index.slot_keys.rows[row]} of table {table!r}"

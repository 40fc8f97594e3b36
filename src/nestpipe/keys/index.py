"""A hash index from (table, key) to a slot number that grows and deletes.

Open addressing with linear probing.  An entry is 8 bytes: 24 bits of the hash, then slot + 1 (0 = empty).  A probe
reads the key itself, in `slot_keys`, only where it will almost surely match.  Deletion shifts later entries back and
leaves no tombstones, so a table that churns for days does not slow down.  The table doubles at 3/4 full: 11 to 22 bytes
per key, plus 10 for the key.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numba
import numpy as np

from nestpipe.keys.mixing import hash_of
from nestpipe.keys.prefetch import prefetch
from nestpipe.keys.slab import Slab

_SLOT_BITS = np.uint64(40)
_SLOT_MASK = np.uint64((1 << 40) - 1)
_ONE = np.uint64(1)
_EMPTY = np.uint64(0)
_BLOCK = 64


@numba.njit(nogil=True, cache=True, inline="always")
def _entry(h, slot):  # type: ignore[no-untyped-def]
    # Hash bits 40..63 go beside the slot.  The place in the table comes from the low bits, so the two are independent.
    return (h & ~_SLOT_MASK) | (np.uint64(slot) + _ONE)


@numba.njit(nogil=True, cache=True, inline="always")
def _find(entries, mask, slot_tables, slot_keys, h, table, key):  # type: ignore[no-untyped-def]
    """(place, slot) of the pair's entry, or (place of the empty entry where it would go, -1)."""
    at = h & mask
    while True:
        entry = entries[at]
        if entry == _EMPTY:
            return at, np.int64(-1)
        if (entry ^ h) & ~_SLOT_MASK == _EMPTY:
            slot = np.int64((entry & _SLOT_MASK) - _ONE)
            if slot_keys[slot] == key and slot_tables[slot] == table:
                return at, slot
        at = (at + _ONE) & mask


@numba.njit(nogil=True, cache=True)
def _fetch_ahead(entries, mask, slot_tables, slot_keys, tables, keys, start, stop, hashes):  # type: ignore[no-untyped-def]
    """Hashes a block of pairs and prefetches the lines that `_find` will read, so that their misses overlap."""
    for i in range(start, stop):
        h = hash_of(tables[i], keys[i])
        hashes[i - start] = h
        prefetch(entries, h & mask)
    for i in range(stop - start):
        entry = entries[hashes[i] & mask]
        if entry != _EMPTY:
            slot = (entry & _SLOT_MASK) - _ONE
            prefetch(slot_keys, slot)
            prefetch(slot_tables, slot)


@numba.njit(nogil=True, cache=True)
def _find_all(entries, slot_tables, slot_keys, tables, keys, slots):  # type: ignore[no-untyped-def]
    mask = np.uint64(entries.shape[0] - 1)
    hashes = np.empty(_BLOCK, np.uint64)
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _fetch_ahead(entries, mask, slot_tables, slot_keys, tables, keys, start, stop, hashes)
        for i in range(start, stop):
            _, slots[i] = _find(entries, mask, slot_tables, slot_keys, hashes[i - start], tables[i], keys[i])


@numba.njit(nogil=True, cache=True)
def _insert_all(entries, slot_tables, slot_keys, tables, keys, start, room, free, free_count, used, slots):  # type: ignore[no-untyped-def]
    """Fills the slots of the pairs from `start` on.  New pairs take slots from the free list, then from the end.  Stops
    at a new pair once `room` new ones have been taken.  Returns where it stopped and the new (free_count, used)."""
    mask = np.uint64(entries.shape[0] - 1)
    hashes = np.empty(_BLOCK, np.uint64)
    begin = block = start
    for i in range(start, keys.shape[0]):
        if i == block:
            block = min(i + _BLOCK, keys.shape[0])
            _fetch_ahead(entries, mask, slot_tables, slot_keys, tables, keys, i, block, hashes)
            begin = i
        h = hashes[i - begin]
        at, slot = _find(entries, mask, slot_tables, slot_keys, h, tables[i], keys[i])
        if slot < 0:
            if room == 0:
                return i, free_count, used
            room -= 1
            if free_count > 0:
                free_count -= 1
                slot = free[free_count]
            else:
                slot = used
                used += 1
            slot_tables[slot] = tables[i]
            slot_keys[slot] = keys[i]
            entries[at] = _entry(h, slot)
        slots[i] = slot
    return keys.shape[0], free_count, used


@numba.njit(nogil=True, cache=True)
def _delete_all(entries, slot_tables, slot_keys, tables, keys, freed):  # type: ignore[no-untyped-def]
    """Removes the pairs that exist and fills `freed` with their slots.  Returns how many."""
    mask = np.uint64(entries.shape[0] - 1)
    count = 0
    for i in range(keys.shape[0]):
        h = hash_of(tables[i], keys[i])
        hole, slot = _find(entries, mask, slot_tables, slot_keys, h, tables[i], keys[i])
        if slot < 0:
            continue
        freed[count] = slot
        count += 1
        # Close the hole: a later entry of the run moves back unless its home lies cyclically after the hole.
        at = (hole + _ONE) & mask
        while entries[at] != _EMPTY:
            moved = np.int64((entries[at] & _SLOT_MASK) - _ONE)
            home = hash_of(slot_tables[moved], slot_keys[moved]) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                entries[hole] = entries[at]
                hole = at
            at = (at + _ONE) & mask
        entries[hole] = _EMPTY
    return count


@numba.njit(nogil=True, cache=True)
def _rehash(old, new, slot_tables, slot_keys):  # type: ignore[no-untyped-def]
    mask = np.uint64(new.shape[0] - 1)
    for i in range(old.shape[0]):
        entry = old[i]
        if entry != _EMPTY:
            slot = np.int64((entry & _SLOT_MASK) - _ONE)
            at = hash_of(slot_tables[slot], slot_keys[slot]) & mask
            while new[at] != _EMPTY:
                at = (at + _ONE) & mask
            new[at] = entry


@numba.njit(nogil=True, cache=True)
def _live(entries, slots):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(entries.shape[0]):
        if entries[i] != _EMPTY:
            slots[count] = np.int64((entries[i] & _SLOT_MASK) - _ONE)
            count += 1


@dataclass(frozen=True)
class Found:
    """Slots of keys, -1 for a missing key, and the number of deletions when they were looked up."""

    slots: np.ndarray
    deletions: int


class HashIndex:
    """Maps (table, key) to a slot.  Slots are dense small numbers; a delete frees them for reuse.

    Every method takes arrays (tables uint16, keys int64) and may be called from any thread: one lock, held without the
    GIL.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        self.slot_keys = Slab(np.int64, (), max_rows)
        self.slot_tables = Slab(np.uint16, (), max_rows)
        self._entries = np.zeros(1024, np.uint64)
        self._free = np.empty(0, np.int64)
        self._free_count = 0
        self._used = 0
        self.deletions = 0
        """Grows with every `delete`: a slot found before it may belong to another key after it."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._used - self._free_count

    @property
    def slots_used(self) -> int:
        """All slots ever used lie below this number."""
        return self._used

    def find(self, keys: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
        """The slot of every key, -1 for a missing key."""
        tables = _tables(keys, tables)
        slots = np.empty(len(keys), np.int64)
        with self._lock:
            _find_all(self._entries, self.slot_tables.rows, self.slot_keys.rows, tables, keys, slots)
        return slots

    def settle(self, keys: np.ndarray, tables: np.ndarray, found: Found | None) -> np.ndarray:
        """As `insert`, after an earlier `look` at the same keys has done most of the work."""
        if found is None or found.deletions != self.deletions:
            return self.insert(keys, tables)
        slots = found.slots
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            slots = slots.copy()
            slots[missing] = self.insert(keys[missing], tables[missing])
        return slots

    def look(self, keys: np.ndarray, tables: np.ndarray) -> Found:
        """As `find`, to be kept for a later `settle`."""
        deletions = self.deletions  # Read first: a delete in between makes the find look older than it is, never newer.
        return Found(self.find(keys, tables), deletions)

    def insert(self, keys: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
        """The slot of every key.  New keys get one."""
        tables = _tables(keys, tables)
        slots = np.empty(len(keys), np.int64)
        done = 0
        with self._lock:
            while True:
                # Grow only for a new key without room: a batch of known keys never doubles a table for nothing.
                room = min(3 * len(self._entries) // 4 - len(self), self.slot_keys.max_rows - len(self))
                done, self._free_count, self._used = _insert_all(
                    self._entries,
                    self.slot_tables.rows,
                    self.slot_keys.rows,
                    tables,
                    keys,
                    done,
                    room,
                    self._free,
                    self._free_count,
                    self._used,
                    slots,
                )
                if done == len(keys):
                    return slots
                self._grow()

    def delete(self, keys: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
        """Removes the keys that exist and returns their slots, which later inserts reuse."""
        tables = _tables(keys, tables)
        freed = np.empty(len(keys), np.int64)
        with self._lock:
            count = _delete_all(self._entries, self.slot_tables.rows, self.slot_keys.rows, tables, keys, freed)
            freed = freed[:count]
            self.deletions += 1
            if self._free_count + count > len(self._free):
                self._free = np.resize(self._free, max(2 * len(self._free), self._free_count + count))
            self._free[self._free_count : self._free_count + count] = freed
            self._free_count += count
        return freed

    def items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables, keys and slots of all entries, in no particular order."""
        with self._lock:
            slots = np.empty(len(self), np.int64)
            _live(self._entries, slots)
            return self.slot_tables.rows[slots], self.slot_keys.rows[slots], slots

    def free_slots(self) -> np.ndarray:
        """Slots below `slots_used` that hold no key."""
        with self._lock:
            return self._free[: self._free_count].copy()

    def nbytes(self) -> int:
        """Bytes that hold entries and keys: the cost of a row beyond its values and optimizer state."""
        return self.heap_nbytes() + self._used * (8 + 2)

    def heap_nbytes(self) -> int:
        """The part of `nbytes` that comes from malloc: entries, which double as they fill.  Keys lie in slabs."""
        return self._entries.nbytes + self._free.nbytes

    def _grow(self) -> None:
        self.slot_keys.reserve(len(self) + 1)
        grown = np.zeros(2 * len(self._entries), np.uint64)
        _rehash(self._entries, grown, self.slot_tables.rows, self.slot_keys.rows)
        self._entries = grown


def _tables(keys: np.ndarray, tables: np.ndarray | None) -> np.ndarray:
    return np.zeros(len(keys), np.uint16) if tables is None else tables

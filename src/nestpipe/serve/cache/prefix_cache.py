"""Which prefixes are kept, in two tiers bounded in bytes.  One caller at a time; every change is complete when a call returns.

Least recently used prefixes leave first, and of a prefix its last block: what is left is always a beginning that can be
used.  Blocks that leave the arena go to the tier behind it, where the same order holds.  Pinned prefixes stay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from nestpipe.config.serving import TierDtype
from nestpipe.infer.contract import History
from nestpipe.serve.cache.arena import Arena
from nestpipe.serve.cache.prefix import Prefix, PrefixKey, shared_events
from nestpipe.serve.cache.tier import Tier


class PrefixCache:
    """Prefixes by key, at most one for each: who asks for the same key gets the same prefix."""

    def __init__(
        self, arena_bytes: int, tier_bytes: int, block: int, block_floats: int, tier_dtype: TierDtype = "float32"
    ) -> None:
        self._block = block
        self.block_floats = block_floats
        self.arena = Arena(arena_bytes, block_floats * 4)
        self.tier = Tier(tier_bytes, block_floats, tier_dtype)
        self._prefixes: OrderedDict[PrefixKey, Prefix] = OrderedDict()
        self.counts: Counter[str] = Counter()
        """Blocks that were stored, loaded and dropped since the start."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, key: PrefixKey) -> Prefix | None:
        return self._prefixes.get(key)

    def prefixes(self) -> list[Prefix]:
        """Least recently used first."""
        return list(self._prefixes.values())

    @property
    def pins(self) -> int:
        return sum(prefix.pins for prefix in self._prefixes.values())

    def claim(self, key: PrefixKey, history: History, complete: int) -> tuple[Prefix, int]:
        """The prefix of a key for a windowed history with `complete` blocks, and how many blocks the caller may share in it.

        A block holds for both histories if its events and the one after them are the same.  Blocks behind the first
        difference are dropped, unless somebody has pinned the prefix: then the caller shares those before it and has to put
        its own ones elsewhere.  The caller pins what it gets.
        """
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = Prefix(key, history)
        self._prefixes.move_to_end(key)
        same = shared_events(prefix.history, history)
        holds = max(0, (same - 1) // self._block)
        if prefix.pins == 0:
            if same < min(len(prefix.history), len(history)):
                while prefix.blocks > holds:
                    self._drop_tail(prefix)
                prefix.history = history
            elif len(history) > len(prefix.history):
                prefix.history = history
            prefix.wanted, prefix.cancelled = complete, False
            return prefix, complete
        if same < min(len(prefix.history), len(history)):
            return prefix, min(holds, complete)
        if len(history) > len(prefix.history):  # the same one, with later events
            prefix.history = history
        prefix.wanted = max(prefix.wanted, complete)
        return prefix, complete

    def promised(self) -> int:
        """Slots that pinned prefixes have or were asked to get."""
        return sum(max(len(p.slots), p.wanted) for p in self._prefixes.values() if p.pins)

    def pin(self, prefix: Prefix) -> None:
        prefix.pins += 1

    def unpin(self, prefix: Prefix) -> None:
        assert prefix.pins > 0, "a pin was given back twice"
        prefix.pins -= 1
        prefix.loading = prefix.loading and prefix.pins > 0
        if prefix.pins == 0 and (prefix.stale or prefix.blocks == 0):
            self.drop(prefix)

    def add_block(self, prefix: Prefix) -> np.ndarray | None:
        """Memory for the next block in the arena, which the caller fills at once; None where there is no room.

        Only for a pinned prefix all of whose blocks are in the arena.
        """
        assert prefix.pins and not prefix.tier_slots
        slot = self._room()
        if slot is None:
            return None
        prefix.slots.append(slot)
        return self.array(slot)

    def undo_block(self, prefix: Prefix) -> None:
        """The block that was added last could not be computed."""
        self.arena.give_back(prefix.slots.pop())

    def load_block(self, prefix: Prefix) -> bool:
        """Brings the next block back into the arena; False where there is no room."""
        assert prefix.pins and prefix.tier_slots
        prefix.loading = True
        slot = self._room()
        if slot is not None:
            self.tier.load(prefix.tier_slots.pop(0), self.array(slot))
            prefix.slots.append(slot)
            self.counts["loaded"] += 1
        prefix.loading = slot is not None and bool(prefix.tier_slots)
        return slot is not None

    def blocks(self, prefix: Prefix, count: int) -> list[np.ndarray]:
        """The first blocks of a prefix, in the arena."""
        return [self.array(slot) for slot in prefix.slots[:count]]

    def array(self, slot: int) -> np.ndarray:
        return self.arena.view(slot, np.float32)

    def retire(self, version: str) -> None:
        """Makes all prefixes of a version stale: they are freed now, or with their last pin."""
        for prefix in [p for p in self._prefixes.values() if p.key.version == version]:
            prefix.stale = True
            if prefix.pins == 0:
                self.drop(prefix)

    def drop(self, prefix: Prefix) -> None:
        assert prefix.pins == 0
        while prefix.blocks:
            self._drop_tail(prefix)
        if self._prefixes.get(prefix.key) is prefix:
            del self._prefixes[prefix.key]

    def _room(self) -> int | None:
        """A free slot of the arena, after an eviction where there is none."""
        slot = self.arena.take()
        if slot is None:
            victim = next((p for p in self._prefixes.values() if p.pins == 0 and p.slots), None)
            if victim is None:
                return None
            self._evict_tail(victim)
            slot = self.arena.take()
        return slot

    def _evict_tail(self, prefix: Prefix) -> None:
        """Moves the last block that is in the arena to the tier behind it; where there is no room, drops it and what follows."""
        slot = prefix.slots.pop()
        moved = self.tier.store(self.array(slot))
        if moved is None and self._make_tier_room(prefix):
            moved = self.tier.store(self.array(slot))
        self.arena.give_back(slot)
        if moved is not None:
            prefix.tier_slots.insert(0, moved)
            self.counts["stored"] += 1
            return
        self.counts["dropped"] += 1
        while prefix.tier_slots:
            self._drop_tail(prefix)
        if prefix.blocks == 0:
            self.drop(prefix)

    def _make_tier_room(self, keep: Prefix) -> bool:
        """Drops the last block of the least recently used prefix there; False if that would be the block that wants in."""
        victim = next((p for p in self._prefixes.values() if p is keep or (p.pins == 0 and p.tier_slots)), keep)
        if not victim.tier_slots:
            return False
        self._drop_tail(victim)
        if victim.blocks == 0 and victim is not keep:
            self.drop(victim)
        return True

    def _drop_tail(self, prefix: Prefix) -> None:
        if prefix.tier_slots:
            self.tier.arena.give_back(prefix.tier_slots.pop())
        else:
            self.arena.give_back(prefix.slots.pop())
        self.counts["dropped"] += 1

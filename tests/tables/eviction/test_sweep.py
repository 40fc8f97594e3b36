"""Eviction without a pipeline: policies, which rows a sweep chooses, and removed rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nestpipe
from nestpipe import Adam, EmbeddingBagConfig, EmbeddingConfig, EvictionPolicy
from nestpipe.keys import HashIndex
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore
from nestpipe.tables.eviction import kernels as eviction_kernels
from nestpipe.tables.eviction.frequency import FrequencyTable
from nestpipe.tables.eviction.sweep import Sweep
from nestpipe.tables.group import TableGroup, group_tables
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.store import RowStore

DIM = 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"admit_after": 0}, "admit_after must be a whole number from 1"),
        ({"ttl_steps": 0}, "ttl_steps must be"),
        ({"max_rows": -1}, "max_rows must be"),
        ({"sweep_every": 0}, "sweep_every must be"),
        ({"ttl_minutes": 0.0}, "ttl_minutes must be above 0"),
        ({"ttl_minutes": float("nan")}, "ttl_minutes must be above 0"),
        ({"ttl_horizons": ((100, 3),)}, "ttl_horizons needs ttl_minutes"),
        ({"ttl_minutes": 1.0, "ttl_horizons": ((100, 100),)}, "ttl_horizons must be pairs"),
        ({"ttl_minutes": 1.0, "ttl_horizons": ((100, 3), (100, 4))}, "ttl_horizons must be pairs"),
        ({"ttl_minutes": 1.0, "ttl_horizons": ((100, 3), (200, 2))}, "ttl_horizons must be pairs"),
        ({"ttl_minutes": 1.0, "ttl_horizons": ((100,),)}, "ttl_horizons must be pairs"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_the_field(wrong: dict[str, Any], message: str) -> None:
    """A policy is checked when it is created."""
    with pytest.raises(ValueError, match=message) as error:
        EvictionPolicy(**wrong)
    assert "\n" not in str(error.value)


def test_tables_with_different_policies_are_in_different_groups() -> None:
    """A group has one policy.  Without a policy, rows are no wider."""
    policies = [None, EvictionPolicy(), None, EvictionPolicy(ttl_steps=4), EvictionPolicy()]
    tables = [EmbeddingConfig(f"t{i}", DIM, ["f"], eviction=policy) for i, policy in enumerate(policies)]
    groups = group_tables(tables, Adam())
    assert [[t.name for t in g.tables] for g in groups] == [["t0", "t2"], ["t1", "t4"], ["t3"]]
    assert [g.state_width for g in groups] == [2 * DIM, 2 * DIM + 2, 2 * DIM + 2]


def test_old_names_still_work() -> None:
    """`TableLife` and the keyword `life` are the old spellings of `EvictionPolicy` and `eviction`."""
    policy = nestpipe.TableLife(ttl_steps=4)
    assert policy == EvictionPolicy(ttl_steps=4)
    for kind in (EmbeddingConfig, EmbeddingBagConfig):
        old, new = kind("t", DIM, ["f"], life=policy), kind("t", DIM, ["f"], eviction=policy)
        assert old == new and old.eviction == policy
        assert replace(old, name="u").eviction == policy and replace(old, eviction=None).eviction is None
        with pytest.raises(ValueError, match="pass only eviction"):
            kind("t", DIM, ["f"], eviction=policy, life=policy)
    assert EmbeddingBagConfig("t", DIM, ["f"], "float32", "uniform", 0.1, None, policy, "mean").pooling == "mean"


rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([-(2**63), -5, 0, 3, 9, 12, 2**63 - 1, *range(20, 40)]),
        st.sampled_from([1, 1, 1, 2, 3, 1022, 1023, 1024, 5000]),
        st.integers(0, 30),
        st.sampled_from(["", "", "", "", "marked", "spared", "removed"]),
    ),
    unique_by=lambda row: row[:2],
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(rows, st.integers(0, 31), st.lists(st.integers(-3, 12), min_size=3, max_size=3))
def test_a_sweep_chooses_as_a_sort_would(drawn: list[Any], horizon: int, excess: list[int]) -> None:
    """Old rows first, then those with the lowest (frequency, last batch, key); never those of the last batch."""
    before = 30
    index, usage, flags = HashIndex(), np.zeros((200, 2), np.int32), np.zeros(200, np.uint8)
    tables, keys = np.array([r[0] for r in drawn], np.uint16), np.array([r[1] for r in drawn], np.int64)
    slots = index.insert(keys, tables)
    usage[slots] = np.array([r[2:4] for r in drawn], np.int32).reshape(-1, 2)
    kinds = np.array([r[4] for r in drawn], "U9")
    gone = kinds == "removed"
    usage[index.delete(keys[gone], tables[gone])] = 0
    flags[slots[kinds == "marked"]] = eviction_kernels.MARKED

    sweep = Sweep(index, usage, flags, before, 3)
    spared = kinds == "spared"
    absent = np.array([0], np.uint16), np.array([77], np.int64)
    without = sweep.spare(np.r_[tables[spared], absent[0]].astype(np.uint16), np.r_[keys[spared], absent[1]])
    assert without.tolist() == [spared.sum()]
    left = sweep.choose_aged(horizon)
    sweep.choose_rare(np.array(excess))
    chosen = sweep.mark()

    there = [r for r in drawn if r[4] not in ("marked", "removed")]
    may = [r for r in there if r[4] != "spared" and r[3] != before]
    expected = {r[:2] for r in may if r[3] < horizon}
    assert left.tolist() == [sum(r[0] == t for r in there) - sum(k[0] == t for k in expected) for t in range(3)]
    for t in range(3):
        rest = sorted((r[2], r[3], r[1]) for r in may if r[0] == t and r[:2] not in expected)
        expected |= {(t, key) for _, _, key in rest[: max(0, excess[t])]}
    found = zip(index.slot_tables.rows[chosen].tolist(), index.slot_keys.rows[chosen].tolist())
    assert set(found) == expected and chosen.tolist() == sorted(chosen.tolist())
    assert set(np.flatnonzero(flags).tolist()) == {*chosen.tolist(), *slots[kinds == "marked"].tolist()}


def group() -> TableGroup:
    tables = [EmbeddingConfig(name, DIM, ["f"], eviction=EvictionPolicy(ttl_steps=9)) for name in ("a", "b")]
    return group_tables(tables, Adam())[0]


def drawn_operations(store: KeyedRows, seed: int) -> None:
    """Random writes, removals and reads, compared with a dict."""
    random = np.random.default_rng(seed)
    width = store.group.state_width
    expected: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    found = None
    for turn in range(60):
        pairs = [(int(k) % 2, int(k)) for k in random.choice(120, 25, replace=False)]
        tables, keys = np.array([t for t, _ in pairs], np.uint16), np.array([k for _, k in pairs], np.int64)
        values, state = np.empty((25, DIM), np.float32), np.empty((25, width), np.float32)
        found = store.retrieve(tables, keys, values, state)
        for pair, value, of_row in zip(pairs, values.tolist(), state.tolist()):
            assert (value, of_row) == expected.get(pair, (value, [0.0] * width)), "a removed row must start again"
        if turn % 3 == 1 and expected:  # between retrieve and writeback, as in a pipeline
            some = [list(expected)[i] for i in random.choice(len(expected), min(len(expected), 30), replace=False)]
            store.remove(np.array([t for t, _ in some], np.uint16), np.array([k for _, k in some], np.int64))
            for pair in some:
                del expected[pair]
        values = random.random((25, DIM)).astype(np.float32)
        state = random.random((25, width)).astype(np.float32)
        usage = store.group.eviction_columns(state)
        usage[:, 0], usage[:, 1] = 1, turn
        store.writeback(tables, keys, values, state, found)
        expected.update(zip(pairs, zip(values.tolist(), state.tolist())))
        assert len(store) == len(expected)
        present = np.flatnonzero(store.usage[: store.index.slots_used, 0])
        assert sorted(present.tolist()) == sorted(store.index.items()[2].tolist()), "a sweep must see exactly the rows"


@pytest.mark.parametrize("seed", range(3))
def test_removed_rows_are_gone_and_their_slots_are_reused(seed: int, tmp_path: Path) -> None:
    """`remove` in DRAM and on disk: other rows do not change, and a pending writeback finds its rows."""
    drawn_operations(RowStore(group(), 1), seed)
    for dram in (1, 20, 200):
        store = TieredRowStore(group(), 1, 0, DiskTier(str(tmp_path), dram), segment_bytes=1)
        drawn_operations(store, seed)
        on_disk = int((store._where.rows[: store.index.slots_used] < 0).sum())
        assert store.disk.live == on_disk and len(store) - on_disk <= dram
        assert store.index.slots_used <= 130, "slots are reused"
        store.close()


def test_a_waiting_key_costs_some_thirty_bytes() -> None:
    """A key without a row costs an index entry, a key and two small numbers."""
    frequencies = FrequencyTable()
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1_000_000)
    frequencies.put(np.zeros(len(keys), np.uint16), keys, np.ones((len(keys), 2), np.int32))
    assert len(frequencies) == len(keys) and frequencies.nbytes() / len(keys) < 36
    frequencies.remove(np.zeros(len(keys), np.uint16), keys)
    assert len(frequencies) == 0 and not frequencies.usage[: len(keys)].any()

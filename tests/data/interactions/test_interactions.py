"""Event logs as histories, against a plain Python oracle."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.data.hash import hash_text
from nestpipe.data.interactions import history_files
from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.movielens import MovieLensData
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream
from tiny import samples_of

Event = tuple[int, int, int, int, int]
"""user, item, time, click, hate"""
COLUMNS = ("user_id", "item_id", "timestamp", "click", "hate")


def write(folder: Path, files: list[list[Event]], kind: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for number, events in enumerate(files):
        columns = list(zip(*events)) if events else [[] for _ in COLUMNS]
        table = pa.table({name: pa.array(list(column), pa.int64()) for name, column in zip(COLUMNS, columns)})
        path = folder / f"{number:03d}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=3)
        else:
            pacsv.write_csv(table, path)
    return str(folder)


def oracle(files: list[list[Event]], section: dict[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """(item, time) of each user, in plain Python."""
    events = [event for file in files for event in file]
    events = [e for e in events if (e[3] or not section.get("any_of")) and not (e[4] and section.get("none_of"))]
    if section.get("drop_repeats"):
        firsts: dict[tuple[int, ...], Event] = {}
        for event in events:
            firsts.setdefault(event[:3], event)
        events = list(firsts.values())
    least_user, least_item = section.get("min_user_events", 1), section.get("min_item_events", 1)
    while True:
        users, items = Counter(e[0] for e in events), Counter(e[1] for e in events)
        kept = [e for e in events if users[e[0]] >= least_user and items[e[1]] >= least_item]
        stable, events = len(kept) == len(events), kept
        if stable or section.get("count", "once") == "once":
            break
    histories: dict[int, list[tuple[int, int]]] = {}
    for user, item, moment, *_ in sorted(events, key=lambda e: (e[0], e[2])):  # stable
        histories.setdefault(user, []).append((item, moment))
    last = section.get("last") or len(events)
    return {user: history[-last:] for user, history in histories.items()}


def histories_of(data: InteractionsData) -> dict[int, list[tuple[int, int]]]:
    h = data.open("train", 0).histories
    pairs = list(zip(h.items.tolist(), h.times.tolist()))
    return {
        int(user): pairs[start:stop] for user, (start, stop) in zip(h.users, itertools.pairwise(h.offsets.tolist()))
    }


events = st.tuples(
    st.integers(-3, 3), st.integers(0, 5), st.integers(0, 4), st.integers(0, 1), st.sampled_from([0, 0, 0, 1])
)
sections = st.fixed_dictionaries(
    {},
    optional={
        "any_of": st.just(["click"]),
        "none_of": st.just(["hate"]),
        "drop_repeats": st.booleans(),
        "min_user_events": st.integers(1, 4),
        "min_item_events": st.integers(1, 4),
        "count": st.sampled_from(["once", "until stable"]),
        "last": st.integers(3, 5),
    },
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.lists(events, max_size=30), min_size=1, max_size=4), section=sections, kind=st.booleans())
def test_histories_are_those_of_plain_python(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[Event]], section: dict[str, Any], kind: bool
) -> None:
    """Any log in any number of files, filtered any way, gives what grouping in plain Python gives, ties in file order."""
    folder = tmp_path_factory.mktemp("log")
    paths = write(folder / "log", files, "csv" if kind and all(files) else "parquet")
    data = InteractionsData(paths, cache=str(folder / "cache"), **section)
    expected = oracle(files, section)
    if not any(len(history) >= 3 for history in expected.values()):
        with pytest.raises(DataError, match="no user has the 3 events"):
            data.open("train", 0)
        return
    assert histories_of(data) == expected
    found = data.open("train", 0)
    assert found.catalogue.tolist() == sorted({item for history in expected.values() for item, _ in history})
    assert found.statistics["stages"][-1]["events"] == sum(map(len, expected.values()))
    ties = sum(a[1] == b[1] for history in expected.values() for a, b in itertools.pairwise(history))
    assert found.statistics["ties"]["events"] == ties


def test_a_movielens_log_in_any_form_is_movielens(tmp_path: Path) -> None:
    """Shuffled on disk, as CSV and as Parquet, the batches are those of data.kind 'movielens' on the same file."""
    rng = np.random.default_rng(0)
    count = 3000
    table = pa.table(
        {
            "userId": rng.integers(1, 90, count),
            "movieId": rng.integers(1, 200, count),
            "rating": rng.integers(1, 6, count).astype(np.float32),
            "timestamp": rng.integers(978_300_000, 978_300_100, count),
        }
    )
    pacsv.write_csv(table, tmp_path / "ratings.csv")
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=500)
    plain = MovieLensData(str(tmp_path / "ratings.csv"), max_length=20, negatives=4)
    for name in ("ratings.csv", "log.parquet"):
        columns = {"user": "userId", "item": "movieId"}
        log = InteractionsData(
            str(tmp_path / name), **columns, max_length=20, negatives=4, cache=str(tmp_path / "cache")
        )
        for split in ("train", "eval"):
            ours, theirs = (
                [sample for batch in Stream(kind.open(split, 3), 16) for sample in samples_of(batch)]
                for kind in (log, plain)
            )
            assert ours == theirs


def test_files_are_cut_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However events arrive, the files are the same to the byte."""
    monkeypatch.setattr(history_files, "GROUP_EVENTS", 10)
    monkeypatch.setattr(history_files, "PART_GROUPS", 2)
    rng = np.random.default_rng(1)
    user = np.sort(rng.integers(0, 30, 400))
    held = {"user": user, "item": rng.integers(0, 9, 400), "time": np.arange(400)}
    found = []
    for number, pieces in enumerate(([400], [1] * 400, [7, 93, 150, 150])):
        folder = tmp_path / str(number)
        folder.mkdir()
        start = 0
        with history_files.HistoryWriter(folder, [], None) as writer:
            for size in pieces:
                writer.add({name: values[start : start + size] for name, values in held.items()})
                start += size
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1] == found[2] and len(found[0]) > 2


def test_what_an_event_carries_is_in_the_batch(tmp_path: Path) -> None:
    """Flags as bits, context by name, and weights of history and target; text ids are hashed, times are seconds."""
    table = pa.table(
        {
            "who": ["ann", "bob", "ann", "ann", "ann"],
            "what": ["x", "x", "y", "z", "x"],
            "when": [4_000_000_999_000, 4_000_000_000_000, 4_000_000_001_000, 4_000_000_000_500, 4_000_001_000_000],
            "click": [1, 0, 0, 1, 1],
            "like": [True, False, True, None, False],
            "w": [0.5, 1.0, 2.0, 3.0, 4.0],
            "city": ["a", "b", "b", "a", None],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    data = InteractionsData(
        str(tmp_path / "log.parquet"),
        user="who",
        item="what",
        time="when",
        time_unit="ms",
        actions=["click", "like"],
        weight="w",
        context=["city"],
        negatives=2,
        cache=str(tmp_path / "cache"),
    )
    (batch, _) = next(iter(data.open("train", 0).read(0, 1, 0)))
    features = batch.sparse_features
    z, y, x = hash_text(["z", "y", "x"]).tolist()
    a, b = hash_text(["a", "b"]).tolist()
    assert features["history"].values().tolist() == [z, y] and features["target"].values().tolist() == [y, x]
    assert features["time"].values().tolist() == [4_000_000_000, 4_000_000_001, 4_000_000_999]
    assert features["action"].values().tolist() == [1, 2, 3]
    assert features["city"].values().tolist() == [a, b, a]
    weights = features.weights().tolist()
    assert weights[:4] == [3.0, 2.0, 2.0, 0.5] and set(weights[4:]) == {1.0}
    assert batch.extras["user"].tolist() == hash_text(["ann"]).tolist()
    (held_out, _) = next(iter(data.open("eval", 0).read(0, 1, 0)))
    assert held_out.sparse_features["target"].values().tolist() == [x]
    assert held_out.sparse_features["city"].values().tolist() == [a, b, a, 0]


def test_a_split_by_time(tmp_path: Path) -> None:
    """Train sees nothing from split_time on, and the first event from then on is held out."""
    log = [[(1, item, item, 0, 0) for item in range(10)], [(2, item, 3 * item, 0, 0) for item in range(3)]]
    data = InteractionsData(
        write(tmp_path / "log", log, "parquet"), split="time", split_time=6, negatives=0, cache=str(tmp_path / "cache")
    )
    train = [batch for batch, _ in data.open("train", 0).read(0, 2, 0)]
    targets = [batch.sparse_features["target"].values().tolist() for batch in train]
    assert sorted(itertools.chain(*targets)) == [1, 1, 2, 3, 4, 5]  # user 1: 1 to 5; user 2: 1
    held_out = data.open("eval", 0)
    (batch, _) = next(iter(held_out.read(0, held_out.extent, 0)))
    assert batch.sparse_features["target"].values().tolist() == [6, 2]


def test_grouped_files_need_no_grouping(tmp_path: Path) -> None:
    """Lists of items and times, a row for each user, load as they are; filters are refused."""
    table = pa.table(
        {
            "user_id": ["u", "v", "w"],
            "item_id": pa.array([[5, 3, 3, 9], [], [7, 8, 9]], pa.list_(pa.int32())),
            "timestamp": pa.array([[1, 1, 2, 3], None, [4, 5, 6]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "grouped.parquet")
    data = InteractionsData(str(tmp_path / "grouped.parquet"), cache=str(tmp_path / "no cache"))
    data.prepare(lambda done, what: None)
    h = data.open("train", 0).histories
    assert h.items.tolist() == [5, 3, 3, 9, 7, 8, 9] and h.offsets.tolist() == [0, 4, 4, 7]
    assert h.users.tolist() == hash_text(["u", "v", "w"]).tolist()
    assert not (tmp_path / "no cache").exists()
    with pytest.raises(DataError, match=r"data\.last works on events"):
        InteractionsData(str(tmp_path / "grouped.parquet"), last=3).open("train", 0)
    late = table.set_column(2, "timestamp", pa.array([[1, 2, 1, 3], [], [4, 5, 6]], pa.list_(pa.int64())))
    pq.write_table(late, tmp_path / "late.parquet")
    with pytest.raises(DataError, match=r"late.parquet row 0 .*go back"):
        InteractionsData(str(tmp_path / "late.parquet")).open("train", 0)


@pytest.mark.slow
def test_one_user_with_a_million_events(tmp_path: Path) -> None:
    """A history of any length is one row, and a batch has its latest events."""
    count = 1_000_000
    table = pa.table(
        {
            "user_id": np.append(np.zeros(count, np.int64), [1, 1, 1]),
            "item_id": np.arange(count + 3) % 999,
            "timestamp": np.arange(count + 3)[::-1],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    data = InteractionsData(
        str(tmp_path / "log.parquet"), max_length=5, negatives=0, cache=str(tmp_path / "cache"), memory_gb=0.3
    )
    source = data.open("eval", 0)
    assert source.statistics["lengths"]["most"] == count and source.extent == 2
    (batch, _) = next(iter(source.read(0, 1, 0)))
    assert batch.sparse_features["history"].values().tolist() == [5, 4, 3, 2, 1]


SCRIPT = """
import os, sys
from nestpipe.data.interactions.data import InteractionsData
InteractionsData(sys.argv[1], cache=sys.argv[2]).prepare(lambda done, what: os.write(1, f"{done} {what}\\n".encode()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("until", [0.1, 0.3, 0.5, 0.55, 0.8])
def test_a_killed_process_leaves_nothing_wrong(tmp_path: Path, until: float) -> None:
    """SIGKILL at any moment, then run again: the cache is the same to the byte as without the kill."""
    rng = np.random.default_rng(5)
    log = tmp_path / "log"
    log.mkdir()
    for number in range(12):
        columns = {name: rng.integers(0, 5000, 60_000) for name in ("user_id", "item_id", "timestamp")}
        pq.write_table(pa.table(columns), log / f"{number}.parquet")
    whole = InteractionsData(str(log), cache=str(tmp_path / "whole"))
    whole.prepare(lambda done, what: None)
    command = [sys.executable, "-c", SCRIPT, str(log), str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if float(line.split()[0]) >= until:
                break
        os.kill(process.pid, signal.SIGKILL)
    InteractionsData(str(log), cache=str(tmp_path / "killed")).prepare(lambda done, what: None)
    (one,), (other,) = ([p for p in (tmp_path / name).iterdir() if p.is_dir()] for name in ("whole", "killed"))
    assert one.name == other.name and not list((tmp_path / "killed").glob(".writing*"))
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


@pytest.mark.slow
def test_two_processes_prepare_once(tmp_path: Path) -> None:
    """A process that finds another at work waits for it, and both have the same histories."""
    log = write(tmp_path / "log", [[(u, i, i, 0, 0) for u in range(50) for i in range(9)]] * 5, "csv")
    command = [sys.executable, "-c", SCRIPT, log, str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_streamed_histories_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read block by block, an epoch has the same samples as in memory, another order each, and held-out ones as they are."""
    monkeypatch.setattr(history_files, "GROUP_EVENTS", 40)
    monkeypatch.setattr(history_files, "PART_GROUPS", 3)
    rng = np.random.default_rng(8)
    log = [[(int(u), int(i), int(t), 0, 0) for u, i, t in rng.integers(0, 60, (900, 3))]]
    paths = write(tmp_path / "log", log, "parquet")
    section = {"negatives": 2, "max_length": 9, "cache": str(tmp_path / "cache")}
    whole, streamed = InteractionsData(paths, **section), InteractionsData(paths, shuffle=16, **section)
    for split in ("train", "eval"):
        expected, found = (kind.open(split, 3) for kind in (whole, streamed))
        assert found.features == expected.features and np.array_equal(found.catalogue, expected.catalogue)
        epochs = [
            [sample for batch in Stream(source, 7, epochs=2) for sample in samples_of(batch)]
            for source in (expected, found)
        ]
        assert sorted(epochs[0]) == sorted(epochs[1])
        if split == "eval":
            assert epochs[0] == epochs[1]

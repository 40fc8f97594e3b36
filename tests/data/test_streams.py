"""Every kind of data, dealt to workers, cut into batches and resumed."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data.batch import Batch
from nestpipe.data.kinds import KINDS
from nestpipe.data.source import Source, shard, split_interval
from nestpipe.data.stream import Position, Stream
from nestpipe.files import Location
from tiny import KIND_NAMES, SAMPLES, samples_of

EVERY_KIND = pytest.mark.parametrize("kind", KIND_NAMES)


def read_all(source: Source, batch_size: int, **options: Any) -> list[bytes]:
    return [sample for batch in Stream(source, batch_size, **options) for sample in samples_of(batch)]


@given(st.integers(0, 5000), st.integers(1, 700), st.integers(1, 9))
def test_shards_are_a_partition(extent: int, piece: int, workers: int) -> None:
    """Every unit belongs to exactly one worker, and shares differ by at most one unit."""
    shards = [shard(extent, piece, workers, rank) for rank in range(workers)]
    units = sorted(itertools.chain(*shards))
    assert [start for start, _ in units] == [0, *(stop for _, stop in units)][: len(units)]
    assert sum(stop - start for start, stop in units) == extent
    shares = [sum(stop - start for start, stop in one) for one in shards]
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 1000), st.floats(0, 0.999))
def test_splits_are_a_partition(extent: int, fraction: float) -> None:
    """Train and eval share no unit and leave none out."""
    train, held_out = split_interval(extent, "train", fraction), split_interval(extent, "eval", fraction)
    assert train[0] == 0 and train[1] == held_out[0] and held_out[1] == extent


def test_kinds_cover_the_recipes() -> None:
    """Every kind that a recipe can name is tested here."""
    assert {name.split("-")[0] for name in KIND_NAMES} == set(KINDS)


@pytest.mark.slow
@EVERY_KIND
@pytest.mark.parametrize("split", ["train", "eval"])
def test_workers_together_read_everything_once(kinds: dict[str, Any], kind: str, split: str) -> None:
    """Whatever the number of workers and the batch size, no sample is lost, doubled or changed."""
    source = kinds[kind].open(split, 5)
    whole = Counter(read_all(source, 1000))
    assert whole.total() == sum(len(chunk) for chunk, _ in source.read(0, source.extent, 0))
    for workers in range(1, 6):
        dealt = [read_all(source, 7 + workers, rank=rank, workers=workers) for rank in range(workers)]
        assert Counter(itertools.chain(*dealt)) == whole


def test_splits_hold_what_the_files_hold(kinds: dict[str, Any]) -> None:
    """Files that are split by a fraction lose no sample between train and eval."""
    for kind in ["criteo", "parquet"]:
        train, held_out = (len(read_all(kinds[kind].open(split, 0), 50)) for split in ["train", "eval"])
        assert train + held_out == SAMPLES and held_out > 0


@EVERY_KIND
def test_every_chunk_says_where_to_go_on(kinds: dict[str, Any], kind: str) -> None:
    """Reading from the end of any sample gives exactly the samples after it, and any cut of the units loses none."""
    source = kinds[kind].open("train", 5)
    ends = [int(end) for _, chunk_ends in source.read(0, source.extent, 3) for end in chunk_ends]
    whole = [sample for chunk, _ in source.read(0, source.extent, 3) for sample in samples_of(chunk)]
    for place in range(0, len(ends), max(1, len(ends) // 25)):
        cut = ends[place] - (kind == "criteo")  # a byte before: still inside the line, which begins earlier
        before = [s for chunk, _ in source.read(0, cut, 3) for s in samples_of(chunk)]
        after = [s for chunk, _ in source.read(cut, source.extent, 3) for s in samples_of(chunk)]
        assert before == whole[: place + 1] and after == whole[place + 1 :]


@pytest.mark.slow
@EVERY_KIND
@pytest.mark.parametrize("batch_size", [1, 16, 1000])
def test_resume_gives_the_same_rest(kinds: dict[str, Any], kind: str, batch_size: int) -> None:
    """From the position after any batch come exactly the batches that were to come, over the end of an epoch too."""
    source = kinds[kind].open("train", 5)
    options: dict[str, Any] = {"rank": 1, "workers": 3, "epochs": 2}
    stream = Stream(source, batch_size, **options)
    batches: list[list[bytes]] = []
    positions = [stream.position]
    for batch in stream:
        batches.append(samples_of(batch))
        positions.append(stream.position)
    assert {position.epoch for position in positions} == {0, 1}
    step = max(1, len(positions) // 12)
    for done in [*range(0, len(positions), step), len(positions) - 1]:
        again = Position(**positions[done].as_dict())
        rest = [samples_of(batch) for batch in Stream(source, batch_size, position=again, **options)]
        assert rest == batches[done:]


@EVERY_KIND
def test_batches_do_not_change_samples(kinds: dict[str, Any], kind: str) -> None:
    """One worker reads the same samples in the same order whatever the batch size, also after opening anew."""
    first = read_all(kinds[kind].open("train", 5), 1000, epochs=2)
    assert first == read_all(kinds[kind].open("train", 5), 3, epochs=2)
    assert len(set(first)) > len(first) // 3


def test_batches_have_the_size_asked_for(kinds: dict[str, Any]) -> None:
    """Only the last batch of an epoch may be short; no batch is empty."""
    sizes = [len(batch) for batch in Stream(kinds["parquet"].open("train", 0), 16, epochs=2)]
    assert sizes == [16] * 6 + [14] + [16] * 6 + [14]


def test_an_epoch_without_samples_ends_the_stream(tmp_path: Any) -> None:
    """A worker whose bytes begin no line stops instead of going round for ever."""
    from nestpipe.data.criteo import CriteoSource

    (tmp_path / "one").write_text("\t".join(["1"] + ["2"] * 39))
    source = CriteoSource([Location(str(tmp_path / "one"))])
    assert len(list(Stream(source, 4, rank=0, workers=2, epochs=3))) == 3
    assert list(Stream(source, 4, rank=1, workers=2, epochs=None)) == []


def test_a_reader_that_fails_raises_in_the_consumer(kinds: dict[str, Any]) -> None:
    """What goes wrong while reading ahead is raised by `next`, and the stream has then ended."""

    class Broken:
        extent, piece, features = 10, 10, ["a"]

        def read(self, start: int, stop: int, epoch: int) -> Any:
            yield from kinds["clicks"].open("train", 0).read(0, 4, 0)
            raise RuntimeError("torn")

    stream = Stream(Broken(), 2)
    assert len(next(stream)) == 2 and len(next(stream)) == 2
    with pytest.raises(RuntimeError, match="torn"):
        next(stream)
    assert list(stream) == []


def test_close_ends_reading_ahead(kinds: dict[str, Any]) -> None:
    """A closed stream hands out nothing more and leaves no thread behind."""
    stream = Stream(kinds["clicks"].open("train", 0), 2, epochs=None)
    next(stream)
    stream.close()
    assert stream._thread is not None and not stream._thread.is_alive() and list(stream) == []


class Stuck:
    """A source whose disk has stopped answering for a while."""

    features: ClassVar[list[str]] = ["f"]
    dense_features = 0
    extent = piece = 10

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        time.sleep(0.5)
        yield from ()


def test_closing_wakes_whoever_waits_for_a_batch() -> None:
    """Promise: a lane that reads ahead does not wait for ever for a stream that is closed under it."""
    stream = Stream(Stuck(), 4)
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(next(stream, None)), daemon=True)
    waiting.start()
    time.sleep(0.1)
    stream.close()
    waiting.join(5)
    assert got == [None]

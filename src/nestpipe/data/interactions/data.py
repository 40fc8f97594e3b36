"""`data.kind = "interactions"`: a log of events as sequences of users."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from nestpipe.data.balance.keys import BalanceKeys
from nestpipe.data.checks import check_number, check_split, check_text, check_texts, check_whole
from nestpipe.data.interactions.cache import Preparation, Prepared
from nestpipe.data.interactions.columns import MOST_ACTIONS, UNITS, EventColumns
from nestpipe.data.interactions.event_files import EventFile
from nestpipe.data.interactions.events import Progress
from nestpipe.data.interactions.grouping import Filters
from nestpipe.data.interactions.histories import Block, Reading, cached_blocks, grouped_blocks, is_grouped
from nestpipe.data.interactions.streamed import StreamedSequences
from nestpipe.data.negatives import DrawnFor, Negatives, Sampling
from nestpipe.data.paths import NoSuchFiles, find_files
from nestpipe.data.ranking_batches import RankingSource
from nestpipe.data.sequence_batches import FEATURES, LEAST, SequenceSource
from nestpipe.data.source import DataError
from nestpipe.data.ties import TIES, Ties
from nestpipe.files.location import Location

PATTERNS = ("*.parquet", "*.pq", "*.csv", "*.tsv", "*.csv.gz", "*.tsv.gz")
"""What a folder of a log is searched for."""


@dataclass(frozen=True)
class InteractionsData(BalanceKeys):
    """Events of users in Parquet or CSV files, in any order; batches as in `sequence_batches`.

    Events are grouped by user and sorted by time once, out of core, into a cache.  Events of one time are in the order of
    the files, or as `ties` says.  Parquet files whose item column holds lists are taken as grouped already: a row is a user.
    """

    paths: str | Sequence[str] = ()
    """Files, globs or folders: Parquet, or CSV with a header (also .tsv, .gz)."""
    user: str = "user_id"
    """Column of the user: whole numbers or text."""
    item: str = "item_id"
    """Column of the item: whole numbers or text."""
    time: str = "timestamp"
    """Column of the time: whole numbers, in `time_unit`, or timestamps."""
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of times that are whole numbers.  None: seconds, and an error where they look like another unit."""
    any_of: Sequence[str] = ()
    """Keep an event only if one of these columns is set (not 0)."""
    none_of: Sequence[str] = ()
    """Drop an event if one of these columns is set."""
    actions: Sequence[str] = ()
    """Columns of flags that make the feature `action`: the first is its lowest bit."""
    weight: str | None = None
    """Column of the event's weight: the weight of `history` and `target` in a batch."""
    context: Sequence[str] = ()
    """Columns of what else is known of an event, as features of their own names.  A null is 0."""
    candidate: Sequence[str] = ()
    """Columns of what is known of an event's item, as features of their own names.  A null is 0."""
    drop_repeats: bool = False
    """Keep only the first of events that have one user, item and time."""
    min_user_events: int = 1
    """Drop users with fewer events."""
    min_item_events: int = 1
    """Drop items with fewer events."""
    count: Literal["once", "until stable"] = "once"
    """How the two minima are counted: once, before anything is dropped; or again after each removal (k-core)."""
    last: int | None = None
    """Keep only so many of each user's latest events."""
    ties: Ties = "file"
    """The order of a user's events of one time: as in the files, or random (drawn from the seed)."""
    split: Literal["last", "time"] = "last"
    """Evaluate on each user's last event, or on the first one from `split_time` on."""
    split_time: int | None = None
    """For split = "time", in the log's own unit: train on events before it."""
    max_length: int = 200
    """The longest history in a batch."""
    candidates: int = 0
    """For model.task = "ranking": events that a request asks about, those after its history; the last so many of each user
    are held out.  0: samples of next items."""
    negatives: int = 128
    """Draws from the catalogue for each target, or of a pool."""
    negatives_from: DrawnFor = "each"
    """each: negatives are drawn for each target.  pool: once for a whole batch of all workers, for all its targets."""
    sampling: Sampling = "uniform"
    """Negatives by uniform, log-uniform (over popularity ranks), popularity, or in-batch (targets of the batch; for a
    pool)."""
    shuffle: int | None = None
    """None: every worker has all histories in memory, and trains them in a new order of all users in every epoch.  N: they
    are read from the cache in blocks of N users, which are shuffled, for histories that are larger than memory."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a row without a user, item or time, or a CSV line that cannot be read: fail, or leave it out and
    tell how many."""
    delimiter: str | None = None
    """Of CSV files.  None: a tab for .tsv, a comma for others."""
    text_ids: bool = False
    """CSV: users, items and features are text, even if they look like numbers."""
    cache: str = "~/.cache/nestpipe"
    """Folder for grouped events.  Its folders may be removed: they are made again."""
    memory_gb: float = 1.5
    """Memory for grouping, and for histories in each worker."""

    def __post_init__(self) -> None:
        check_texts("paths", self.paths, "logs/*.parquet")
        for name in ("user", "item", "time"):
            check_text(name, getattr(self, name), f"{name}_id")
        for name in ("any_of", "none_of", "actions", "context", "candidate"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"data.{name} must be a list of columns, not {value!r}")
            check_texts(name, value, "is_click", empty=True)
        if self.time_unit not in (None, *UNITS):
            raise ValueError(f"data.time_unit must be one of {', '.join(UNITS)}, not {self.time_unit!r}")
        if len(self.actions) > MOST_ACTIONS:
            raise ValueError(f"data.actions can have {MOST_ACTIONS} columns, not {len(self.actions)}")
        taken = [name for name in (*self.context, *self.candidate) if name in (*FEATURES, "action")]
        if taken:
            raise ValueError(f"data.context: {taken[0]!r} is the name of a feature of every batch: rename the column")
        if len({*self.context, *self.candidate}) < len(self.context) + len(self.candidate):
            raise ValueError("data.context and data.candidate name a column twice")
        for name in ("min_user_events", "min_item_events", "max_length"):
            check_whole(name, getattr(self, name))
        if self.last is not None:
            check_whole("last", self.last, LEAST)
        check_whole("candidates", self.candidates, 0)
        if self.candidates and not self.actions:
            raise ValueError("data.candidates needs data.actions, the columns that are to be predicted")
        if self.candidates and len(self.actions) > 31:
            raise ValueError(f"data.actions can have 31 columns with data.candidates, not {len(self.actions)}")
        if self.candidates and self.shuffle is not None:
            raise ValueError("data.candidates needs all histories in memory: leave data.shuffle out")
        self._negatives()
        if self.sampling == "in-batch" and self.shuffle is not None:
            raise ValueError(
                "data.sampling = 'in-batch' needs all histories in memory: leave data.shuffle out, or set data.sampling = "
                "'popularity', whose draws are distributed like the targets of batches"
            )
        if self.ties not in TIES:
            raise ValueError(f"data.ties must be 'file' or 'random', not {self.ties!r}")
        if self.ties == "meta":
            raise ValueError(
                "data.ties = 'meta' sorts the whole log in memory, and event logs are grouped out of core: choose 'file' or "
                "'random', or data.kind 'movielens'"
            )
        if (self.split == "time") != (self.split_time is not None):
            raise ValueError("data.split_time goes with data.split = 'time': set both or neither")
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ValueError(f"data.delimiter must be one character, not {self.delimiter!r}")
        if self.shuffle is not None:
            check_whole("shuffle", self.shuffle)
        check_text("cache", self.cache, "~/.cache/nestpipe")
        check_number("memory_gb", self.memory_gb, 0.1)
        streamed = "needs the lengths of all histories in memory: leave out data.shuffle, or data.balance"
        self.check_balance(None if self.shuffle is None else streamed)

    def prepare(self, progress: Progress) -> None:
        """Groups the log, if that is still to be done.  `progress` gets the fraction done, and what is being done."""
        files = self._files()
        if not self._grouped(files):
            self._preparation(files).make(progress)

    def open(self, split: str, seed: int) -> SequenceSource | StreamedSequences | RankingSource:
        check_split(split)
        files = self._files()
        if self._grouped(files):
            if self.shuffle is not None:
                raise DataError(f"data.shuffle needs a log of events, but {files[0]} is grouped already: leave it out")
            return self._source(list(grouped_blocks(files, self._columns())), None, split, seed, {})
        prepared = self._preparation(files).make(lambda done, what: None)
        counted = pq.read_table(prepared.path / "catalogue.parquet", columns=["item", "events"])
        catalogue, events = (counted[name].to_numpy() for name in ("item", "events"))
        if self.shuffle is not None:
            return self._streamed(prepared, catalogue, events, split, seed)
        self._check_size(prepared)
        blocks, digest = list(cached_blocks(prepared.files())), prepared.path.name
        return self._source(blocks, catalogue, split, seed, prepared.statistics, digest)

    def _negatives(self) -> Negatives:
        return Negatives(self.negatives, self.negatives_from, self.sampling)

    def _streamed(
        self, prepared: Prepared, catalogue: np.ndarray, events: np.ndarray, split: str, seed: int
    ) -> StreamedSequences:
        assert self.shuffle is not None
        reading = self._reading(prepared.statistics["unit"], seed)
        settings = (self.max_length, self._negatives(), self.shuffle, events)
        source = StreamedSequences(prepared.files(), reading, catalogue, split, seed, *settings)
        source.statistics, source.digest = self._told(prepared.statistics), prepared.path.name
        return source

    def _source(
        self,
        blocks: list[Block],
        catalogue: np.ndarray | None,
        split: str,
        seed: int,
        statistics: dict[str, Any],
        digest: str | None = None,
    ) -> SequenceSource | RankingSource:
        unit = statistics.get("unit") or self.time_unit or "s"
        histories = self._reading(unit, seed).histories(blocks)
        if not len(histories.long_enough()):
            if self.split == "time" and len(histories.times):
                begin, end = (int(at) * UNITS[unit] for at in (histories.times.min(), histories.times.max()))
                raise DataError(
                    f"data.split_time: no user has two events before {self.split_time}; the log has times from {begin} to "
                    f"{end} ({unit})"
                )
            after = " after its filters" if len(statistics.get("stages", [])) > 1 else ""
            raise DataError(f"data.paths: no user has the {LEAST} events{after} that a sequence needs")
        items = np.unique(histories.items) if catalogue is None else catalogue
        source: SequenceSource | RankingSource
        if self.candidates:
            asked = (self.max_length, self.candidates, tuple(self.actions))
            source = RankingSource(histories, items, split, seed, *asked)
        else:
            source = SequenceSource(histories, items, split, seed, self.max_length, self._negatives())
        source.statistics = self._told(statistics)
        source.digest = digest
        return source

    def _reading(self, unit: str, seed: int) -> Reading:
        features = (*self.context, *self.candidate)
        return Reading(unit, self.split_time, features, seed if self.ties == "random" else None)

    def _told(self, statistics: dict[str, Any]) -> dict[str, Any]:
        """With the order of ties, which the cache does not know: it keeps that of the files."""
        return (
            {**statistics, "ties": {**statistics["ties"], "order": self.ties}} if "ties" in statistics else statistics
        )

    def _check_size(self, prepared: Prepared) -> None:
        wide = 2 + bool(self.actions) + len(self.context) + len(self.candidate) + 0.5 * (self.weight is not None)
        needed = 8 * wide * prepared.statistics["lengths"]["events"]
        if needed > self.memory_gb * 1e9:
            raise DataError(
                f"the histories take {needed / 1e9:.1f} GB in every worker: set data.shuffle = 10000 to read "
                "them block by block, or raise data.memory_gb"
            )

    def _files(self) -> list[Location]:
        """A folder stands for all its Parquet and CSV files.  The cache is no log."""
        found: dict[Location, None] = {}
        for name in [self.paths] if isinstance(self.paths, str) else self.paths:
            found.update(dict.fromkeys(self._files_of(name)))
        kinds = {EventFile(file).is_parquet for file in found}
        if len(kinds) > 1:
            one, other = (next(f for f in found if EventFile(f).is_parquet is kind) for kind in (True, False))
            raise DataError(
                f"data.paths has Parquet ({one}) and CSV ({other}): name files of one kind, such as log/*.csv"
            )
        return list(found)

    def _files_of(self, name: str) -> list[Location]:
        found: set[Location] = set()
        for pattern in PATTERNS:
            with contextlib.suppress(NoSuchFiles):
                found.update(find_files("paths", name, pattern))
        mine = [file for file in found if file.remote or self._cache() not in Path(file.name).parents]
        if not mine:
            raise DataError(f"data.paths: folder {name} has no file that ends in {', '.join(p[1:] for p in PATTERNS)}")
        return sorted(mine)

    def _cache(self) -> Path:
        return Path(os.environ.get("NESTPIPE_CACHE", self.cache)).expanduser()

    def _grouped(self, files: list[Location]) -> bool:
        if not EventFile(files[0]).is_parquet or not is_grouped(files[0], self.item):
            return False
        changing = {
            "any_of": bool(self.any_of),
            "none_of": bool(self.none_of),
            "drop_repeats": self.drop_repeats,
            "min_user_events": self.min_user_events > 1,
            "min_item_events": self.min_item_events > 1,
            "last": self.last is not None,
        }
        for name, is_set in changing.items():
            if is_set:
                raise DataError(f"data.{name} works on events, but {files[0]} has lists of them: leave it out")
        return True

    def _columns(self) -> EventColumns:
        return EventColumns(
            self.user,
            self.item,
            self.time,
            tuple(self.actions),
            tuple(self.any_of),
            tuple(self.none_of),
            self.weight,
            (*self.context, *self.candidate),
        )

    def _preparation(self, files: list[Location]) -> Preparation:
        ids = (self.user, self.item, *self.context, *self.candidate)
        numbers = (*self.actions, *self.any_of, *self.none_of, *([] if self.weight is None else [self.weight]))
        skip = self.on_error == "skip"
        events = [EventFile(file, self.delimiter, skip, ids, numbers, self.time, self.text_ids) for file in files]
        filters = Filters(
            self.drop_repeats, self.min_user_events, self.min_item_events, self.count == "until stable", self.last
        )
        return Preparation(events, self._columns(), filters, self.time_unit, self._cache(), int(self.memory_gb * 1e9))

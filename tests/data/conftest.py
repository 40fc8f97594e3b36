"""One small data section of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nestpipe.data.clicks import ClicksData
from nestpipe.data.criteo import CriteoData
from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.long_histories import LongHistoriesData
from nestpipe.data.movielens import MovieLensData
from nestpipe.data.parquet import ParquetData
from nestpipe.data.sequences import SequencesData
from tiny import SAMPLES, write_criteo, write_events, write_parquet, write_ratings


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One small data section of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    ratings = str(write_ratings(folder / "u.data"))
    events = str(write_events(folder / "events"))
    mapped = {"user": "user", "tags": "tags", "city": "city"}
    rows = str(write_parquet(folder / "rows"))
    parquet = ParquetData(rows, mapped, label="clicked", dense=["price"], eval_fraction=0.2)
    return {
        "clicks": ClicksData(features=3, ids=[50, 9, 1], hot=[1, 3, 1], dense=2, samples=SAMPLES, eval_samples=40),
        "sequences": SequencesData(users=SAMPLES, items=40, groups=4, max_length=9, mean_length=8, negatives=3),
        "histories": LongHistoriesData(
            users=SAMPLES, items=40, groups=4, median_length=8, max_length=9, negatives=3, eval_users=SAMPLES
        ),
        "movielens-clicks": MovieLensData(ratings, task="clicks"),
        "movielens-sequences": MovieLensData(ratings, max_length=7, negatives=3),
        "interactions": InteractionsData(
            events,
            actions=["click", "like"],
            weight="weight",
            context=["place"],
            max_length=7,
            negatives=3,
            cache=str(folder / "cache"),
        ),
        "interactions-streamed": InteractionsData(
            events,
            actions=["click", "like"],
            weight="weight",
            context=["place"],
            max_length=7,
            negatives=3,
            shuffle=20,
            cache=str(folder / "cache"),
        ),
        "criteo": CriteoData([str(p) for p in write_criteo(folder)]),
        "parquet": parquet,
        "parquet-shuffled": replace(parquet, shuffle=23),
    }

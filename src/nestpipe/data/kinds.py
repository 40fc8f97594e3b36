"""The kinds of data that a recipe's [data] section can name."""

from __future__ import annotations

from nestpipe.config.own_class import Kinds
from nestpipe.data.clicks import ClicksData
from nestpipe.data.criteo import CriteoData
from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.long_histories import LongHistoriesData
from nestpipe.data.movielens import MovieLensData
from nestpipe.data.own import own_data
from nestpipe.data.parquet import ParquetData
from nestpipe.data.sequences import SequencesData

BUILT_IN: dict[str, type] = {
    "clicks": ClicksData,
    "sequences": SequencesData,
    "histories": LongHistoriesData,
    "movielens": MovieLensData,
    "interactions": InteractionsData,
    "criteo": CriteoData,
    "parquet": ParquetData,
}

KINDS = Kinds(BUILT_IN, own=own_data)
"""Each is a frozen dataclass whose fields are the keys of the section, with `open(split, seed) -> Source`."""

"""The kinds of model that a recipe's [model] section can name, and how to make each for a data source."""

from __future__ import annotations

from torch import nn

from nestpipe.data.source import Source
from nestpipe.models.dlrm import DLRM, DLRMConfig
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.models.timed import Timed, TimedConfig
from nestpipe.tables.config import TableDefaults

KINDS: dict[str, type] = {"dlrm": DLRMConfig, "hstu": HSTUConfig, "timed": TimedConfig}
"""A frozen dataclass for each kind.  Its fields are the keys of the section."""


def make_model(config: object, source: Source, tables: TableDefaults) -> nn.Module:
    """The model of a config, with tables for the features of the source."""
    sequences = hasattr(source, "catalogue")
    if isinstance(config, HSTUConfig):
        if not sequences:
            raise ValueError(
                "model.kind 'hstu' needs sequences: data.kind 'sequences', or 'movielens' with data.task 'sequences'"
            )
        return HSTU(config, tables)
    if sequences:
        raise ValueError(
            "sequences need model.kind 'hstu'; for other models choose a data.kind (or data.task) of clicks"
        )
    if isinstance(config, DLRMConfig):
        return DLRM(config, source.features, source.dense_features, tables)
    assert isinstance(config, TimedConfig), config
    return Timed(config, source.features, tables)

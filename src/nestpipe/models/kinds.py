"""The kinds of model that a recipe's [model] section can name, and how to make each for a data source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from nestpipe.config.own_class import Kinds, is_own
from nestpipe.data.negatives import Sampler
from nestpipe.data.source import Source
from nestpipe.models.contract import config_of, construct, own_model
from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi, FuXiRanking
from nestpipe.models.hstu import HSTU, HSTURanking
from nestpipe.models.next_item import POOL_AND_SHARING, NextItemModel
from nestpipe.models.ranking import RankingModel
from nestpipe.models.sasrec import SASRec
from nestpipe.models.timed import Timed
from nestpipe.tables.config import TableDefaults

MODELS: dict[str, type[nn.Module]] = {"dlrm": DLRM, "hstu": HSTU, "fuxi": FuXi, "sasrec": SASRec, "timed": Timed}
RANKING: dict[str, type[RankingModel]] = {"hstu": HSTURanking, "fuxi": FuXiRanking}
"""Of model.task = "ranking"."""

KINDS = Kinds(
    {kind: config_of(model, kind) for kind, model in MODELS.items()},
    own=lambda kind: config_of(own_model(kind), f"model.kind {kind!r}"),
)
"""A frozen dataclass for each kind.  Its fields are the keys of the section."""


def make_model(kind: str, config: object, source: Source, tables: TableDefaults) -> nn.Module:
    """The model of a kind and its config, with tables for the features of the source."""
    where = f"model.kind {kind!r}"
    if is_own(kind):
        return construct(own_model(kind), where, config, source, tables)
    sequences = hasattr(source, "catalogue")
    next_item = issubclass(MODELS[kind], NextItemModel)
    if next_item and not sequences:
        raise ValueError(
            f"{where} needs sequences: data.kind 'interactions', 'sequences' or 'histories', or 'movielens' with data.task "
            "'sequences'"
        )
    if not next_item and sequences:
        names = ", ".join(repr(name) for name, model in MODELS.items() if issubclass(model, NextItemModel))
        raise ValueError(
            f"sequences need model.kind {names} or a class of your own; for other models choose a data.kind (or data.task) "
            "of clicks"
        )
    longest = getattr(source, "longest", 0)
    if next_item and longest > config.max_length:  # type: ignore[attr-defined]
        raise ValueError(
            f"batches have histories of {longest} items: raise model.max_length ({config.max_length}), "  # type: ignore[attr-defined]
            "or lower data.max_length"
        )
    if next_item and config.task == "ranking":  # type: ignore[attr-defined]
        return _ranking_model(kind, config, source, tables)
    if next_item and "candidate" in source.features:
        raise ValueError(
            "data.candidates makes samples for ranking: set model.task = 'ranking', or data.candidates = 0"
        )
    model = construct(MODELS[kind], where, config, source, tables)
    if isinstance(model, NextItemModel):
        _fit_negatives(model, source)
    return model


def make_ranking_model(kind: str, config: Any, actions: Sequence[str], tables: TableDefaults) -> RankingModel:
    """The ranking model of a kind and its config, for these actions (`data.actions`); needs no data."""
    made: Any = RANKING[kind]
    model: RankingModel = made(config, actions, tables)
    return model


def _ranking_model(kind: str, config: Any, source: Source, tables: TableDefaults) -> RankingModel:
    if "candidate" not in source.features:
        raise ValueError("model.task = 'ranking' needs data with candidates: set data.candidates, such as 8")
    if missing := [name for name in config.context if name not in source.features]:
        raise ValueError(f"model.context: the data has no feature {missing[0]!r}: name it in data.context too")
    if source.max_length != config.max_length:  # type: ignore[attr-defined]
        raise ValueError(
            f"ranking needs one window for training and serving: set data.max_length and model.max_length to the same, not "
            f"{source.max_length} and {config.max_length}"  # type: ignore[attr-defined]
        )
    return make_ranking_model(kind, config, source.actions, tables)  # type: ignore[attr-defined]


def _fit_negatives(model: NextItemModel, source: Source) -> None:
    """Tells the model how the data draws negatives.  ValueError if they do not go together."""
    if getattr(source, "pool", None) is not None and model.config.sharing != "none":
        raise ValueError(POOL_AND_SHARING)
    if model.chances is not None:
        sampler = getattr(source, "sampler", None)
        if not isinstance(sampler, Sampler):
            raise ValueError("model.logq needs data that knows the chances of its negatives: set model.logq = false")
        model.chances.set(sampler.items, sampler.log_chances())

"""The kinds of model that a recipe's [model] section can name, and how to make each for a data source."""

from __future__ import annotations

from torch import nn

from nestpipe.config.own_class import Kinds, is_own
from nestpipe.data.negatives import Sampler
from nestpipe.data.source import Source
from nestpipe.models.contract import config_of, construct, own_model
from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU
from nestpipe.models.next_item import POOL_AND_SHARING, NextItemModel
from nestpipe.models.sasrec import SASRec
from nestpipe.models.timed import Timed
from nestpipe.tables.config import TableDefaults

MODELS: dict[str, type[nn.Module]] = {"dlrm": DLRM, "hstu": HSTU, "fuxi": FuXi, "sasrec": SASRec, "timed": Timed}

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
    model = construct(MODELS[kind], where, config, source, tables)
    if isinstance(model, NextItemModel):
        _fit_negatives(model, source)
    return model


def _fit_negatives(model: NextItemModel, source: Source) -> None:
    """Tells the model how the data draws negatives.  ValueError if they do not go together."""
    if getattr(source, "pool", None) is not None and model.config.sharing != "none":
        raise ValueError(POOL_AND_SHARING)
    if model.chances is not None:
        sampler = getattr(source, "sampler", None)
        if not isinstance(sampler, Sampler):
            raise ValueError("model.logq needs data that knows the chances of its negatives: set model.logq = false")
        model.chances.set(sampler.items, sampler.log_chances())

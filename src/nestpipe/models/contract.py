"""How a recipe makes a model: what the constructor of a model class may take.  Built-in models and a user's own follow it.

The class is any `nn.Module`.  Its constructor takes, by these names, what it needs of

  config          a frozen dataclass, by its annotation (`config: RankerConfig`): its fields are the keys of [model]
  features        names of the sparse features, in the order of every batch
  dense_features  columns of `batch.dense`; 0 where there are none
  source          the training data itself (`Source`); sequences have `source.catalogue`, all items
  tables          `TableDefaults`: makes table configs with the recipe's dtype, first values and eviction

A class that takes no `config` has no keys.
"""

from __future__ import annotations

import inspect
from collections import ChainMap
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from nestpipe.config.build import RecipeError
from nestpipe.config.own_class import check_keys, own_class
from nestpipe.data.source import Source
from nestpipe.tables.config import TableDefaults

OFFERED = ("config", "features", "dense_features", "source", "tables")
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class NoKeys:
    """The [model] section of a class that takes no config."""


def own_model(kind: str, where: str | None = None) -> type[nn.Module]:
    """The user's class `module:Class`, checked; `where` begins its errors.  RecipeError if it is no model for a recipe."""
    where = where or f"model.kind {kind!r}"
    cls = own_class(kind, where)
    if not issubclass(cls, nn.Module):
        raise RecipeError(f"{where} is the class {cls.__name__}, which is not a torch.nn.Module")
    for name, parameter in _parameters(cls).items():
        if parameter.default is parameter.empty and (name not in OFFERED or parameter.kind not in KEYWORDS):
            raise RecipeError(
                f"{where}: its __init__ needs {name!r}, which a recipe does not give: it may take {', '.join(OFFERED)} "
                "by name, and others with a default"
            )
    check_keys(config_of(cls, where), f"{where}: its config")
    return cls


def config_of(cls: type[nn.Module], where: str) -> type:
    """The dataclass of a model's keys: the type of the constructor's `config`; `NoKeys` if it takes none."""
    parameter = _parameters(cls).get("config")
    if parameter is None:
        return NoKeys
    found = parameter.annotation
    if found is parameter.empty:
        raise RecipeError(f"{where}: its __init__ takes config without a type: write config: and a frozen dataclass")
    if isinstance(found, str):  # from __future__ import annotations
        try:
            scope = inspect.unwrap(cls.__init__).__globals__
            found = eval(found, scope, ChainMap(*(dict(vars(base)) for base in cls.__mro__)))
        except Exception as error:
            raise RecipeError(f"{where}: the type of its config cannot be read ({error})") from error
    if not isinstance(found, type):
        raise RecipeError(f"{where}: the type of its config is {found}: it must be a frozen dataclass")
    return found


def construct(cls: type[nn.Module], where: str, config: object, source: Source, tables: TableDefaults) -> nn.Module:
    """The model, from those of the offered arguments that it takes."""
    taken = _parameters(cls)
    if "tables" not in taken and (changed := _changed(tables)):
        raise ValueError(
            f"{where} does not take tables, so {' and '.join(changed)} would change nothing: let its __init__ take tables "
            "and make table configs with tables.bag or tables.sequence"
        )
    offered: dict[str, Any] = {
        "config": config,
        "features": source.features,
        "dense_features": source.dense_features,
        "source": source,
        "tables": tables,
    }
    return cls(**{name: value for name, value in offered.items() if name in taken})


def _parameters(cls: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """What the constructor takes, without self, *args and **kwargs."""
    found = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {p.name: p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _changed(tables: TableDefaults) -> list[str]:
    """Keys of [tables] that only a model that takes `tables` can obey, where they are not the default."""
    usual, eviction = TableDefaults(), "the eviction policy in [tables]"
    changed = [f.name for f in fields(tables) if getattr(tables, f.name) != getattr(usual, f.name)]
    return [eviction if name == "eviction" else f"tables.{name}" for name in changed]

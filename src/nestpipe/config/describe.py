"""Every key of a recipe with its type, default and help, for `nestpipe recipe` and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import get_args, get_type_hints

from nestpipe.config.recipe import SECTIONS
from nestpipe.config.wording import field_help, show, wording


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe, in words."""

    key: str
    type: str
    default: str
    help: str
    kind: str | None = None
    """The kind of data or model that has this key; None for a key of every recipe."""


def describe(data_kinds: Mapping[str, type] = {}, model_kinds: Mapping[str, type] = {}) -> list[RecipeKey]:
    """All recipe keys with type, default and help, in the order in which a recipe is written."""
    keys = [RecipeKey("name", wording(str), "the file's name", "Name of the run.")]
    for section, kinds in (("data", data_kinds), ("model", model_kinds)):
        choice = f"one of {', '.join(map(show, kinds))}" if kinds else wording(str)
        keys.append(RecipeKey(f"{section}.kind", choice, "required", f"Which kind of {section}."))
        for kind, cls in kinds.items():
            keys += _keys_of(cls, section, kind)
    for section, cls in SECTIONS.items():
        keys += _keys_of(cls, section, None)
    return keys


def _keys_of(cls: type, where: str, kind: str | None) -> list[RecipeKey]:
    hints, helps, keys = get_type_hints(cls), field_help(cls), []
    for one in fields(cls):
        if not one.init:
            continue
        hint = hints[one.name]
        if one.default_factory is not MISSING:
            default = show(one.default_factory())
        else:
            default = "required" if one.default is MISSING else show(one.default)
        inner = [h for h in (hint, *get_args(hint)) if is_dataclass(h) and isinstance(h, type)]
        if inner:
            keys += _keys_of(inner[0], f"{where}.{one.name}", kind)
        else:
            keys.append(RecipeKey(f"{where}.{one.name}", wording(hint), default, helps.get(one.name, ""), kind))
    return keys

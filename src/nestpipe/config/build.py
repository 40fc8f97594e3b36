"""A frozen dataclass from what TOML gives, checked against its type hints.  Every error names the key to change."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from nestpipe.config.wording import show, wording

T = TypeVar("T")
log = logging.getLogger(__name__)


class RecipeError(ValueError):
    """The recipe cannot be run; the message is one line and names the key to change."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def build(cls: type[T], values: object, where: str) -> T:
    """A dataclass from a table, checked against its type hints; `where` is the table's place in the recipe.

    The class's own ValueError keeps its message.  For an optional field the string "none" is None, which TOML lacks.
    """
    if not isinstance(values, dict):
        raise RecipeError(f"{where} must be a table, not {show(values)}")
    values = _current_names(cls, values, where)
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]  # T is a dataclass
    for key in values:
        if key not in known:
            hint = nearest(key, known, prefix=f"{where}.") or f"{where} has {', '.join(known) or 'no keys'}"
            raise RecipeError(f"unknown key '{where}.{key}': {hint}")
    for key, f in known.items():
        if key not in values and f.default is MISSING and f.default_factory is MISSING:
            raise RecipeError(f"{where}.{key} is missing: it must be {wording(hints[key])}")
    converted = {key: convert(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**converted)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _current_names(cls: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Keys under their old spellings (`RENAMED` of the class) get today's, with a one-line hint."""
    renamed: Mapping[str, str] = getattr(cls, "RENAMED", {})
    found: dict[str, Any] = {}
    for key, value in values.items():
        current = renamed.get(key, key)
        if current != key:
            if current in values:
                raise RecipeError(f"{where}.{key} is the old name of {where}.{current}: leave it out")
            if (where, key) not in _hinted:
                _hinted.add((where, key))
                log.warning("%s.%s is now called %s.%s; the old name still works", where, key, where, current)
        found[current] = value
    return found


_hinted: set[tuple[str, str]] = set()
"""Old spellings that were hinted at in this process: once is enough."""


def convert(hint: Any, value: Any, where: str) -> Any:
    """The value as the hint wants it.  Nothing is guessed: the only change of type is from int to float."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where)
    if origin in (Union, UnionType):
        return _convert_union(hint, value, where)
    if origin is Literal:
        if any(type(choice) is type(value) and choice == value for choice in args):
            return value
    elif origin in (list, Sequence, tuple) and isinstance(value, list):
        items = list(args) if origin is tuple and args[-1] is not ... else [args[0]] * len(value)
        if len(items) == len(value):
            return (tuple if origin is tuple else list)(
                convert(item, v, f"{where}[{i}]") for i, (item, v) in enumerate(zip(items, value))
            )
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: convert(args[1], v, f"{where}.{key}") for key, v in value.items()}
    elif hint is float:
        if type(value) in (int, float) and value == value:  # nan is not a setting
            return float(value)
    elif type(value) is hint:  # not isinstance: true is not the number 1
        return value
    names = [choice for choice in args if isinstance(choice, str)] if isinstance(value, str) else []
    near = nearest(value, names) if names else ""
    raise RecipeError(f"{where} must be {wording(hint)}, not {show(value)}{near and '; ' + near}")


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    if NoneType in get_args(hint) and value == "none":
        return None
    for member in get_args(hint):
        try:
            return convert(member, value, where)
        except RecipeError as error:
            if not str(error).startswith(f"{where} must be "):
                raise  # the shape fits this member and something inside does not: say what
    raise RecipeError(f"{where} must be {wording(hint)}, not {show(value)}")


def nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name.lower(), list(valid), n=1)
    return f"did you mean '{prefix}{near[0]}'?" if near else ""

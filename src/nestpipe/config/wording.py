"""Types and values of recipe keys, in words for people."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


def show(value: Any) -> str:
    """A value as a reader of TOML knows it, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def wording(hint: Any) -> str:
    """What a field of this type must be: "a whole number", "a list of numbers", "one of 'a', 'b'"."""
    singular = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", NoneType: "none"}
    plural = {int: "whole numbers", float: "numbers", str: "strings"}
    origin, args = get_origin(hint), get_args(hint)
    if hint in singular:
        return singular[hint]
    if is_dataclass(hint):
        return "a table"
    if origin in (Union, UnionType):
        return " or ".join(wording(arg) for arg in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(show(arg) for arg in args)
    if origin in (list, Sequence, tuple):
        count = f"{len(args)} " if origin is tuple and args[-1] is not ... else ""
        return f"a list of {count}{plural[args[0]]}" if args[0] in plural else f"a list ({wording(args[0])} each)"
    if origin in (dict, Mapping):
        return f"a table ({wording(args[1])} each)"
    raise TypeError(f"a recipe field cannot have the type {hint}")


def field_help(cls: type) -> dict[str, str]:
    """The string literal under each field of a class, bases included; nothing for a class without source."""
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for item, below in pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(below, ast.Expr):
                text = below.value.value if isinstance(below.value, ast.Constant) else None
                if isinstance(text, str):
                    helps[item.target.id] = " ".join(text.split())
    own = {f.name for f in fields(cls)} if is_dataclass(cls) else set(helps)
    return {name: text for name, text in helps.items() if name in own}

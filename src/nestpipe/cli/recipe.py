"""`nestpipe recipe`: lists the keys that a recipe may have."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import console

if TYPE_CHECKING:
    from nestpipe.config.describe import RecipeKey

DESCRIPTION = """\
Lists every key of a recipe with its type, default and meaning.  The keys of `data` and `model` depend on their kind.
"""
EPILOG = """\
examples:
  nestpipe recipe                 all keys
  nestpipe recipe tables          the keys of one section
  nestpipe recipe parquet         the keys of one kind of data or model
  nestpipe recipe ranker:Ranker   the keys of your own class of data or model, in ranker.py
  nestpipe recipe | grep lr       in a pipe, each key is on one line
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "recipe", help="list every key that a recipe may have", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "kind", nargs="?", help="only keys of this section or kind, such as tables, parquet or module:Class"
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from rich.table import Table

    from nestpipe.config.describe import describe
    from nestpipe.config.own_class import is_own
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.models.kinds import KINDS as MODELS

    table = Table(title="Keys of a recipe" + (f" ({args.kind})" if args.kind else ""), box=None, pad_edge=False)
    for column in ("key", "of kind", "must be", "default", "what it does"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    if is_own(args.kind):
        keys = own_keys(args.kind)
        if not keys:
            print(f"{args.kind} has no keys")
            return 0
    else:
        keys = describe(DATA, MODELS)
    for key in keys:
        if args.kind in (None, key.kind, key.key.split(".")[0]):
            table.add_row(key.key, key.kind or "", key.type, key.default, key.help)
    if not table.row_count:
        known = dict.fromkeys([*(key.key.split(".")[0] for key in keys if "." in key.key), *DATA, *MODELS])
        raise ValueError(f"there is no section or kind {args.kind!r}; choose one of {', '.join(known)}")
    console().print(table)
    return 0


def own_keys(kind: str) -> list[RecipeKey]:
    """The keys of a user's class of model or of data."""
    from torch import nn

    from nestpipe.config.build import RecipeError
    from nestpipe.config.describe import describe
    from nestpipe.config.own_class import own_class
    from nestpipe.data.own import own_data
    from nestpipe.models.contract import config_of, own_model

    cls = own_class(kind, repr(kind))
    if not issubclass(cls, nn.Module) and not hasattr(cls, "open"):
        raise RecipeError(
            f"{kind!r} is neither a model (a torch.nn.Module) nor data (a frozen dataclass with a method open)"
        )
    if issubclass(cls, nn.Module):
        found = describe({}, {kind: config_of(own_model(kind, repr(kind)), repr(kind))})
    else:
        found = describe({kind: own_data(kind, repr(kind))}, {})
    return [key for key in found if key.kind == kind]

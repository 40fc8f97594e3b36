"""Every error that a user can act on says its own exit code; the command line prints it as one line."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import nestpipe
from nestpipe.checkpoint.errors import CheckpointError, NotWritten
from nestpipe.cli import ending, recipe
from nestpipe.cli.main import main
from nestpipe.comm.errors import PeerLost
from nestpipe.config.build import RecipeError
from nestpipe.errors import NestPipeError
from nestpipe.files import FileError
from nestpipe.pipeline import NotFinite
from nestpipe.sparse.buffers import BufferLimit
from nestpipe.tables.disk.file import DiskTierError

INTERNAL = {"BadEvent", "BadRow", "_OtherVersion", "Refused", "Left"}
"""Caught in the module, or by the server, that raises them."""


def own_errors() -> Iterator[type[Exception]]:
    for module in pkgutil.walk_packages(nestpipe.__path__, "nestpipe."):
        needs_triton = module.name.endswith("_triton") or module.name == "nestpipe.ops.triton_math"
        if module.name != "nestpipe.__main__" and not needs_triton:
            for found in vars(importlib.import_module(module.name)).values():
                if isinstance(found, type) and issubclass(found, Exception) and found.__module__ == module.name:
                    yield found


def test_all_own_errors_have_one_base() -> None:
    """Promise: whoever catches NestPipeError misses none of ours; a ValueError is bad input, exit code 2."""
    found = [error for error in own_errors() if error.__name__ not in INTERNAL]
    assert len(found) > 15
    for error in found:
        assert issubclass(error, NestPipeError), error
        bad_input = issubclass(error, ValueError | MemoryError) or error is FileError  # a file that a user named
        assert error.exit_code == (2 if bad_input and error is not NotWritten else 1)


def noted(error: Exception) -> Exception:
    error.add_note("rank 0, load of batch 3")
    return error


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (RecipeError("tables.lr must be above 0"), "tables.lr must be above 0", 2),
        (CheckpointError("damaged\nbadly"), "damaged badly", 2),
        (NotWritten("no space"), "no space", 1),
        (PeerLost("rank 0 lost rank 1"), "rank 0 lost rank 1", 1),
        (noted(BufferLimit("too large")), "too large (rank 0, load of batch 3)", 2),
        (noted(DiskTierError("full")), "full (rank 0, load of batch 3)", 1),
        (noted(NotFinite("batch 3: the loss")), "batch 3: the loss", 1),
        (noted(ValueError("--steps")), "--steps (rank 0, load of batch 3)", 2),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'", 2),
        (noted(OSError(28, "No space left", "x")), "x: No space left (rank 0, load of batch 3)", 1),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    error: Exception,
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: argparse.Namespace, arguments: list[str]) -> int:
        raise error

    def add(commands: Any) -> None:
        commands.add_parser("recipe").set_defaults(command=run)

    monkeypatch.setattr(recipe, "add", add)
    assert main(["recipe"]) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"nestpipe: {line}\n")


def test_a_bug_keeps_its_traceback() -> None:
    """KeyError and the like are ours to mend: no line hides where they come from."""
    assert ending.describe(KeyError("x")) == (None, 1)
    with pytest.raises(KeyError):
        ending.fail(KeyError("x"))

"""Rooms: imports point down.  Reads the imports of every module, those inside functions and for type checkers included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "nestpipe"

ROOMS = (
    ("errors", "version"),
    ("config",),
    ("files",),
    ("schedule",),
    ("keys",),
    ("device",),
    ("comm",),
    ("data",),
    ("ops",),
    ("tables",),
    ("nn",),
    ("models",),
    ("checkpoint",),
    ("infer",),
    ("infer",),
    ("engine",),
    ("sparse",),
    ("dense",),
    ("pipeline",),
    ("launch",),
    ("train",),
    ("sim",),
    ("report",),
    ("serve",),
    ("lab",),
    ("cli",),
)
"""Lowest first.  A room may import itself and the rooms above it in this list.  `nestpipe/__init__.py` names public classes
lazily, and `__main__` runs the command line: these two are no room."""

LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
TRAINING = ("engine", "sparse", "dense", "pipeline", "launch", "train", "sim")
"""What a server never imports."""
WITHOUT_TORCH = ("config", "schedule", "sim")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports; `from a import b` is a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def upward(room: str, source: str) -> list[str]:
    """Imports of a module of `room` that point up, or at no room that there is."""
    found = []
    for line, name in imports(source):
        parts = name.split(".")
        if parts[0] == "nestpipe" and len(parts) > 1 and LEVEL.get(parts[1], 99) > LEVEL[room]:
            found.append(f"line {line}: {room}/ must not import {name}")
    return found


def modules() -> list[tuple[str, Path]]:
    """(room, file) of every module."""
    files = [
        path for path in sorted(SOURCE.rglob("*.py")) if path not in (SOURCE / "__init__.py", SOURCE / "__main__.py")
    ]
    return [(path.relative_to(SOURCE).parts[0].removesuffix(".py"), path) for path in files]


def test_every_module_is_in_a_room() -> None:
    assert {room for room, _ in modules()} == set(LEVEL)


def test_imports_point_down() -> None:
    """Promise: no module imports a room below it in the list; there are no exceptions."""
    found = [
        f"{path.relative_to(SOURCE)} {what}" for room, path in modules() for what in upward(room, path.read_text())
    ]
    assert not found, "\n".join(found)


def test_an_upward_import_is_found() -> None:
    """The test above is able to fail, wherever the import stands."""
    assert upward("models", "from nestpipe.engine.interpreter import Engine")
    assert upward("checkpoint", "def f():\n    from nestpipe.pipeline import TrainPipeline")
    assert upward("schedule", "import nestpipe.keys.dedup")
    assert upward("nn", "if TYPE_CHECKING:\n    from nestpipe.sparse import stages")
    assert upward("cli", "import nestpipe.no_such_room")
    assert not upward("pipeline", "import torch\nfrom nestpipe.sparse.stages import SparseStages\nimport nestpipe.keys")


def test_a_server_imports_no_training_code() -> None:
    """Promise: infer/ and serve/ need nothing that trains."""
    found = [
        f"{path.relative_to(SOURCE)} line {line}: {name}"
        for room, path in modules()
        if room in ("infer", "serve")
        for line, name in imports(path.read_text())
        if name.startswith(tuple(f"nestpipe.{training}" for training in TRAINING))
    ]
    assert not found, "\n".join(found)


def test_schedules_and_configs_need_no_torch() -> None:
    """Promise: a schedule is printed, checked, drawn and simulated without torch or numba."""
    heavy = re.compile(r"(torch|numba)(\.|$)")
    found = [
        f"{path.relative_to(SOURCE)} line {line}: {name}"
        for room, path in modules()
        if room in WITHOUT_TORCH
        for line, name in imports(path.read_text())
        if heavy.match(name)
    ]
    assert not found, "\n".join(found)


def test_nobody_reaches_through_the_pipeline() -> None:
    """Promise: code outside pipeline/ uses the pipeline's methods, not its parts."""
    through = re.compile(r"pipeline\.(sparse|engine|dense|_\w+)\b(?! import)")
    found = [
        f"{path.relative_to(SOURCE)} line {number}: {line.strip()}"
        for room, path in modules()
        if room != "pipeline"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if through.search(line) and "nestpipe." not in line
    ]
    assert not found, "\n".join(found)

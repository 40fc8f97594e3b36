"""From what a recipe names to the files that are read: paths, globs and folders."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from nestpipe.data.source import DataError


def find_files(field: str, names: str | Sequence[str], pattern: str) -> list[Path]:
    """The files of `names` in their order, each glob and folder sorted; DataError where one stands for no file.

    A folder stands for what matches `pattern` in it, at any depth, except names that begin with "_" or ".": those are
    markers that other tools leave there.
    """
    found: dict[Path, None] = {}
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob(pattern) if p.is_file())
            files = [p for p in inside if not any(part[0] in "_." for part in p.relative_to(path).parts)]
            if not files:
                raise DataError(f"data.{field}: folder {name} has no {pattern} file")
        elif path.exists():
            files = [path]
        elif glob.has_magic(name):
            matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
            files = sorted(p for p in map(Path, matches) if p.is_file())
            if not files:
                raise DataError(f"data.{field}: no file matches {name}")
        else:
            raise DataError(f"data.{field}: no such file: {name}")
        found.update(dict.fromkeys(files))
    return list(found)
